// Groups beside each other in one process: each rank has two, and whoever waits in one moves the
// other on (also under TSan).

#include "shm/neighbours.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "unit/shm/thread_ranks.h"

namespace lockstep::shm {
namespace {

using collective::Request;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

Operation all_reduce(std::vector<float>& data) {
  Operation operation;
  operation.kind = Kind::kAllReduce;
  operation.type = DataType::kF32;
  operation.reduction = Reduction::kSum;
  operation.count = data.size();
  operation.input.base = operation.output.base = reinterpret_cast<std::byte*>(data.data());
  return operation;
}

Message message(bool is_send, std::vector<float>& data, int peer, int tag = 0) {
  return {.is_send = is_send,
          .memory = reinterpret_cast<std::byte*>(data.data()),
          .bytes = data.size() * sizeof(float),
          .peer = peer,
          .tag = tag};
}

// Runs `body` on two ranks that have two groups each.
void run_pairs(const std::function<void(Group&, Group&)>& body) {
  ThreadExchange exchange(2);
  run_threads(2, [&](Group& one) {
    const auto two = std::make_shared<Group>(
        GroupOptions{.rank = one.rank(), .size = 2, .timeout = std::chrono::seconds(20)},
        exchange.for_rank(one.rank()));
    body(one, *two);
    two->leave();
    exchange.for_rank(one.rank())("left");
  });
  EXPECT_EQ(neighbours::num_busy(), 0);
}

constexpr std::size_t kMuch = 300000;  // more than there is room for at once

TEST(Neighbours, WaitsMayBeCrossed) {
  run_pairs([](Group& one, Group& two) {
    for (int i = 0; i < 10; ++i) {
      std::vector<float> a(kMuch, 1);
      std::vector<float> b(kMuch, 2);
      const auto first = one.start(all_reduce(a));
      const auto second = two.start(all_reduce(b));
      EXPECT_GE(neighbours::num_busy(), 1);
      if (one.rank() == 0) {
        one.wait(*first);
        two.wait(*second);
      } else {
        while (!two.poll(*second)) std::this_thread::yield();
        one.wait(*first);
      }
      EXPECT_EQ(a[kMuch - 1], 2);
      EXPECT_EQ(b[kMuch - 1], 4);
    }
  });
}

TEST(Neighbours, TwoThreadsOfARankWaitInBoth) {
  run_pairs([](Group& one, Group& two) {
    const auto work = [](Group& group) {
      for (int i = 0; i < 20; ++i) {
        std::vector<float> data(i % 2 == 0 ? kMuch : 10, 1);
        group.wait(*group.start(all_reduce(data)));
        EXPECT_EQ(data[9], 2);
      }
    };
    std::jthread other([&] { work(two); });
    work(one);
  });
}

// Whoever waits in the other hears nothing of it.
TEST(Neighbours, AFailureIsThatOfItsGroupAlone) {
  run_pairs([](Group& one, Group& two) {
    std::vector<float> wrong(one.rank() == 0 ? 3 : 5);
    std::vector<float> right(kMuch, 1);
    const auto failed = two.start(all_reduce(wrong));
    for (int i = 0; i < 5; ++i) one.wait(*one.start(all_reduce(right)));
    EXPECT_EQ(right[7], 32);
    EXPECT_THROW(two.wait(*failed), MismatchError);
    one.wait(*one.start(Operation{}));
  });
}

TEST(Neighbours, OneMayLeaveWhileTheOtherIsWaitedFor) {
  run_pairs([](Group& one, Group& two) {
    std::vector<float> data(kMuch, 1);
    const auto open = two.start(message(false, data, 1 - one.rank(), 9));
    const auto barrier = one.start(Operation{});
    std::jthread leaves([&] { two.leave(); });
    one.wait(*barrier);
    EXPECT_THROW(two.wait(*open), Error);
  });
}

// Of two receives that belong together both are taken back, or none.
TEST(Neighbours, ReceivesAreTakenBackTogether) {
  run_pairs([](Group& one, Group& two) {
    const int peer = 1 - one.rank();
    std::vector<float> header(2, 1);
    std::vector<float> bytes(7, 2);
    const auto barrier = [&] { one.wait(*one.start(Operation{})); };
    if (one.rank() == 0) {
      std::vector<float> first(2);
      std::vector<float> second(7);
      const auto started = [&] {
        return std::vector<std::shared_ptr<Request>>{two.start(message(false, first, peer)),
                                                     two.start(message(false, second, peer))};
      };
      const auto cancel = [&](const auto& requests) {
        const Request* both[] = {requests[0].get(), requests[1].get()};
        return two.cancel(both);
      };
      EXPECT_TRUE(cancel(started()));
      const auto requests = started();
      barrier();  // not before this
      barrier();  // the header is sent
      two.wait(*requests[0]);
      EXPECT_FALSE(cancel(requests));
      barrier();
      two.wait(*requests[1]);
      EXPECT_EQ(first, header);
      EXPECT_EQ(second, bytes);
    } else {
      barrier();
      two.wait(*two.start(message(true, header, peer)));
      barrier();
      barrier();
      two.wait(*two.start(message(true, bytes, peer)));
    }
    barrier();
  });
}

// A receive that stays open costs the waits beside it next to nothing.
TEST(Neighbours, LooksBecomeRareWhileNothingMoves) {
  run_pairs([](Group& one, Group& two) {
    std::vector<float> room(1);
    const auto open = two.start(message(false, room, 1 - one.rank(), 5));
    one.wait(*one.start(Operation{}));
    neighbours::Looks looks;
    const auto start = Clock::now();
    EXPECT_LE(looks.next(nullptr), start);
    int num_looks = 0;
    for (auto now = start; one.rank() == 0 && now < start + milliseconds(100);
         now += std::chrono::microseconds(10)) {
      num_looks += now >= looks.next(nullptr) ? 1 : 0;
      looks.look(nullptr, true, now);
    }
    one.wait(*one.start(Operation{}));
    if (one.rank() == 0) {
      EXPECT_GT(num_looks, 20);
      EXPECT_LT(num_looks, 60);
    }
    std::vector<float> data(1, 3);
    two.wait(*two.start(message(true, data, 1 - one.rank(), 5)));
    two.wait(*open);
    EXPECT_EQ(room[0], 3);
    one.wait(*one.start(Operation{}));
  });
}

// A child that waits leaves the memory of its parent's groups alone.
TEST(Neighbours, AForkedChildHasNone) {
  std::atomic<bool> is_receiving{false};
  run_pairs([&](Group& one, Group& two) {
    constexpr std::size_t kCount = 1 << 20;
    if (one.rank() == 1) {
      std::vector<float> room(kCount);
      const auto received = two.start(message(false, room, 0));
      is_receiving = true;
      is_receiving.notify_all();
      one.wait(*one.start(Operation{}));
      two.wait(*received);
      EXPECT_EQ(room[kCount - 1], 7);
      return;
    }
    const auto alone = std::make_shared<Group>(
        GroupOptions{}, [](const std::string& mine) { return std::vector<std::string>{mine}; });
    std::vector<float> data(kCount, 7);
    is_receiving.wait(false);
    const auto sent = two.start(message(true, data, 1));
    const pid_t child = ::fork();
    if (child == 0) {
      bool is_well = neighbours::num_busy() == 0 && !two.move_on(true);
      std::vector<float> room(1);
      const auto open = alone->start(message(false, room, 0, 3));
      for (int i = 0; i < 10; ++i) alone->poll(*open);
      neighbours::move_on_all_but(nullptr, true);
      is_well &= neighbours::num_busy() == 1;
      two.leave();
      ::_exit(is_well ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    one.wait(*one.start(Operation{}));
    two.wait(*sent);
  });
}

}  // namespace
}  // namespace lockstep::shm
