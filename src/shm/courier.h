// Courier: brings what the board publishes from host to host, by a store.
//
// A rank that is stuck puts its state down and adds one to a counter; rank 0 reads the states once
// all ranks of other hosts are in there. The store is slow, so what rank 0 reads may be old: it
// proposes a verdict, and each of them agrees if its state is still the same. With all agreed, all
// states were valid when the proposal was made (board.h), and rank 0 concludes it.
// A thread of its own talks to the store, which may not answer: nobody waits for it. It is started
// when there is first something to tell.
// Threading: any thread may call.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lockstep::shm {

struct CourierStore {
  std::chrono::milliseconds period = std::chrono::milliseconds(200);  // how often one looks into it
  std::function<void(const std::string& key, const std::string& value)> set = {};
  std::function<std::string(const std::string& key)> get = {};  // empty if it is not there
  std::function<std::int64_t(const std::string& key, std::int64_t value)> add = {};
};

class Courier {
 public:
  // `others` are the ranks of hosts other than rank 0's; used by rank 0.
  Courier(int rank, std::vector<int> others, CourierStore store);
  ~Courier();
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  // This rank's state; empty: it is not stuck.
  void post(const std::string& state);

  // Rank 0: the states of the others, in their order; none unless all are stuck.
  std::vector<std::string> states() const;
  void propose(const std::string& verdict);
  bool have_all_agreed() const;  // to the last proposal
  void conclude();               // it is the verdict: tells the others
  bool have_all_heard() const;   // of that

  // The others: the last verdict, or nothing.
  std::string verdict() const;

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state) noexcept;

  const std::shared_ptr<State> state_;  // shared with the thread, which may outlive the courier
};

// The generation of a rank's state, and the one that a verdict is about; 0 if there is none.
std::uint64_t generation_of(const std::string& state);
std::uint64_t generation_in(const std::string& verdict, int rank);

}  // namespace lockstep::shm
