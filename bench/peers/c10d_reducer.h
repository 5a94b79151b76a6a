// The peer that a C++ program could build without lockstep: LibTorch's own c10d::Reducer on Gloo,
// driven as Python's DistributedDataParallel drives it.
#pragma once

#include <lockstep/world.h>

#include <memory>
#include <vector>

namespace c10d {
class Reducer;
}

namespace lockstep::bench {

class C10dReducer {
 public:
  // Collective. Gives every rank rank 0's parameters.
  C10dReducer(const World& gloo, const std::vector<at::Tensor>& parameters,
              bool gradient_as_bucket_view);
  ~C10dReducer();

  void before_forward();
  void before_backward();

 private:
  std::unique_ptr<c10d::Reducer> reducer_;
};

}  // namespace lockstep::bench
