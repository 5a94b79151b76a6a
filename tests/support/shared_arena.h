// SharedArena: memory that all ranks of a world, on one host, map: on each at its own address.
#pragma once

#include <ATen/ATen.h>
#include <lockstep/lockstep.h>

#include <optional>
#include <utility>

#include "shm/segment.h"

namespace lockstep::test {

class SharedArena {
 public:
  // Collective.
  SharedArena(const World& world, std::size_t bytes) : segment_(map_on_all(world, bytes)) {}

  // A tensor at its beginning, which must not outlive it.
  at::Tensor tensor(std::int64_t length, at::ScalarType type) const {
    return at::from_blob(segment_.data(), {length}, type);
  }

 private:
  static shm::Segment map_on_all(const World& world, std::size_t bytes) {
    std::optional<shm::Segment> own;
    shm::SegmentName name;
    if (world.rank() == 0) {
      own.emplace(shm::Segment::create(bytes));
      name = own->name();
    }
    world.broadcast(at::from_blob(&name, {sizeof name}, at::kByte));
    shm::Segment segment = own ? std::move(*own) : shm::Segment::attach(name);
    world.barrier();  // rank 0 has it open until all have it
    return segment;
  }

  const shm::Segment segment_;
};

}  // namespace lockstep::test
