// How many trips between hosts an operation takes, counted: a network whose clock stands still but
// for the trips of messages.

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "engine/hierarchical/hierarchy.h"
#include "unit/shm/thread_ranks.h"

namespace lockstep {
namespace {

using collective::DataType;
using collective::Kind;
using collective::Operation;
using collective::Reduction;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A message and when, in trips, each side asked for it. It leaves when the sender knows that the
// receiver waits, as Gloo does it.
struct Trip {
  at::Tensor from;
  at::Tensor to;
  int sent = 0;
  int expected = 0;

  bool is_there() const { return from.defined() && to.defined(); }
  int leaves() const { return std::max(sent, expected + 1); }
};

struct Network {
  std::mutex mutex;
  std::condition_variable changed;
  struct Way {
    std::vector<std::shared_ptr<Trip>> trips;
    std::size_t num_sent = 0;
    std::size_t num_expected = 0;

    std::shared_ptr<Trip> at(std::size_t number) {
      if (trips.size() == number) trips.push_back(std::make_shared<Trip>());
      return trips[number];
    }
  };
  std::map<std::tuple<int, int, int>, Way> ways;  // by sender, receiver, tag
};

class CountedWork : public c10d::Work {
 public:
  CountedWork(Network& network, std::shared_ptr<Trip> trip, std::atomic<int>& clock, bool is_send)
      : network_(network), trip_(std::move(trip)), clock_(clock), is_send_(is_send) {}

  bool wait(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(network_.mutex);
    if (!network_.changed.wait_for(lock, timeout, [&] { return trip_->is_there(); })) {
      throw std::runtime_error("Timed out");
    }
    clock_ = std::max(clock_.load(), trip_->leaves() + (is_send_ ? 0 : 1));
    return true;
  }
  void abort() override {}

 private:
  Network& network_;
  const std::shared_ptr<Trip> trip_;
  std::atomic<int>& clock_;
  const bool is_send_;
};

class CountedEngine : public c10d::Backend {
 public:
  CountedEngine(Network& network, int rank, int size)
      : c10d::Backend(rank, size), network_(network) {}
  const std::string getBackendName() const override { return "counted"; }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    const std::lock_guard lock(network_.mutex);
    Network::Way& way = network_.ways[{rank_, peer, tag}];
    const auto trip = way.at(way.num_sent++);
    trip->from = tensors[0];
    trip->sent = clock;
    return post(trip, true);
  }

  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    if (has_lost_peers) throw std::runtime_error("Connection closed by peer");
    const std::lock_guard lock(network_.mutex);
    Network::Way& way = network_.ways[{peer, rank_, tag}];
    const auto trip = way.at(way.num_expected++);
    trip->to = tensors[0];
    trip->expected = clock;
    return post(trip, false);
  }

  std::atomic<int> clock{0};
  std::atomic<bool> has_lost_peers{false};

 private:
  WorkPtr post(const std::shared_ptr<Trip>& trip, bool is_send) {
    if (trip->is_there()) {
      EXPECT_EQ(trip->from.numel(), trip->to.numel());
      trip->to.copy_(trip->from);
      network_.changed.notify_all();
    }
    return c10::make_intrusive<CountedWork>(network_, trip, clock, is_send);
  }

  Network& network_;
};

// Two hosts of two ranks each: the trips between hosts that ten of an operation take, on the rank
// that sees most of them.
int trips_of_ten(const std::function<void(Hierarchy&)>& run,
                 const std::function<void(Hierarchy&, CountedEngine&)>& after = {}) {
  constexpr int kSize = 4;
  Network network;
  std::vector<Member> members;
  for (int rank = 0; rank < kSize; ++rank) {
    members.push_back({.rank = rank, .host_id = rank < 2 ? "a" : "b"});
  }
  shm::ThreadExchange world(kSize);
  shm::ThreadExchange host_a(2);
  shm::ThreadExchange host_b(2);
  std::atomic<int> most{0};
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < kSize; ++rank) {
    threads.emplace_back([&, rank] {
      EngineContext context;
      context.rank = rank;
      context.members = members;
      context.timeout = std::chrono::seconds(30);
      const auto local =
          std::make_shared<shm::Group>(shm::GroupOptions{.rank = rank % 2, .size = 2},
                                       (rank < 2 ? host_a : host_b).for_rank(rank % 2));
      const auto engine = c10::make_intrusive<CountedEngine>(network, rank, kSize);
      const auto sync = [&] { world.for_rank(rank)(""); };
      {
        Hierarchy hierarchy(context, local, engine);
        sync();
        engine->clock = 100;  // whatever connecting has taken
        sync();
        for (int i = 0; i < 10; ++i) run(hierarchy);
        const int trips = engine->clock - 100;
        for (int before = most; trips > before && !most.compare_exchange_weak(before, trips);) {
        }
        sync();
        if (after) after(hierarchy, *engine);
        sync();
      }
      sync();  // threads share one mapping: nobody unmaps it before
    });
  }
  threads.clear();
  return most;
}

void run_one(Hierarchy& hierarchy, Operation operation) {
  hierarchy.wait(*hierarchy.start(std::move(operation)));
}

TEST(Latency, AnAllReduceOfANumberIsOneTrip) {
  EXPECT_EQ(trips_of_ten([](Hierarchy& hierarchy) {
              std::int64_t number = 1 + hierarchy.rank();
              Operation operation;
              operation.kind = Kind::kAllReduce;
              operation.type = DataType::kI64;
              operation.reduction = Reduction::kSum;
              operation.count = 1;
              operation.input.base = operation.output.base = reinterpret_cast<std::byte*>(&number);
              run_one(hierarchy, operation);
              EXPECT_EQ(number, 10);
            }),
            10);
}

TEST(Latency, ABroadcastOfANumberIsOneTrip) {
  EXPECT_EQ(trips_of_ten([](Hierarchy& hierarchy) {
              std::int64_t number = hierarchy.rank();
              Operation operation;
              operation.kind = Kind::kBroadcast;
              operation.type = DataType::kI64;
              operation.root = 3;
              operation.count = 1;
              auto& side = hierarchy.rank() == 3 ? operation.input : operation.output;
              side.base = reinterpret_cast<std::byte*>(&number);
              run_one(hierarchy, operation);
              EXPECT_EQ(number, 3);
            }),
            10);
}

TEST(Latency, AnAllGatherOfNumbersIsOneTrip) {
  EXPECT_EQ(trips_of_ten([](Hierarchy& hierarchy) {
              std::int64_t number = 7 * hierarchy.rank();
              std::array<std::int64_t, 4> all{};
              Operation operation;
              operation.kind = Kind::kAllGather;
              operation.type = DataType::kI64;
              operation.count = 1;
              operation.input.base = reinterpret_cast<std::byte*>(&number);
              operation.output = {.base = reinterpret_cast<std::byte*>(all.data()), .stride = 8};
              run_one(hierarchy, operation);
              EXPECT_EQ(all, (std::array<std::int64_t, 4>{0, 7, 14, 21}));
            }),
            10);
}

// One that has ended its last operation may leave, while another prepares for those that could
// follow.
TEST(Latency, ALeaderMayLeaveAfterItsLastOperation) {
  const auto run = [](Hierarchy& hierarchy) { run_one(hierarchy, Operation{}); };
  trips_of_ten(run, [&](Hierarchy& hierarchy, CountedEngine& engine) {
    engine.has_lost_peers = true;
    run(hierarchy);
    const auto go_on = [&] {
      for (int i = 0; i < 10; ++i) run(hierarchy);
    };
    EXPECT_THROW(go_on(), PeerLostError);
  });
}

TEST(Latency, ABarrierIsOneTrip) {
  EXPECT_EQ(trips_of_ten([](Hierarchy& hierarchy) { run_one(hierarchy, Operation{}); }), 10);
}

}  // namespace
}  // namespace lockstep
