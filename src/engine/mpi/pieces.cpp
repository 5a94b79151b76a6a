// How the thread of an MpiRunner runs one operation: pieces, headers, the reduction, the waiting.

#include <lockstep/error.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/log.h"
#include "base/text.h"
#include "collective/reduce.h"
#include "engine/mpi/runner.h"

namespace lockstep {
namespace {

using collective::Operation;

constexpr int kHeaderTag = 0;
constexpr int kDataTag = 1;

// While waiting: how often to look at the processes of this host, and into the store.
constexpr auto kLookAtProcesses = std::chrono::milliseconds(50);
constexpr auto kLookIntoStore = std::chrono::milliseconds(500);
constexpr auto kFirstWarning = std::chrono::seconds(10);

constexpr std::size_t kHeaderBytes = offsetof(MpiHeader, payload);

bool is_small(Span span) { return span.bytes <= MpiPlan::kSmallBytes; }

bool is_same_operation(const MpiHeader& a, const MpiHeader& b) {
  return a.signature == b.signature && a.number == b.number && a.first == b.first;
}

}  // namespace

void MpiRunner::run(const OperationPtr& request) {
  const Operation& operation = request->operation;
  ++number_;
  traffic_->present = request;
  const std::size_t per_piece = operation.kind == collective::Kind::kAllToAll
                                    ? operation.count
                                    : MpiPlan::elements_per_piece(operation, size_);
  std::size_t first = 0;
  do {
    const std::size_t count = std::min(per_piece, operation.count - first);
    run_piece(operation, first, count);
    first += count;
  } while (first < operation.count);
  traffic_->present = nullptr;
}

void MpiRunner::run_piece(const Operation& operation, std::size_t first, std::size_t count) {
  MpiPlan plan(operation, rank_, size_, first, count);
  plan.use_scratch(traffic_->scratch(plan.scratch_bytes()));
  for (int peer = 0; peer < size_; ++peer) {
    MpiHeader& header = traffic_->header_to(peer);
    header.signature = operation.signature();
    header.number = number_;
    header.first = first;
    header.bytes = plan.gives(peer).bytes;
    header.factor = operation.factor;
  }
  exchange(operation, plan);
  if (plan.reduces() && count != 0) reduce(operation, plan);
  if (!plan.has_second_exchange()) return;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    traffic_->receive(plan.takes_slice(peer), peer, kDataTag);
    traffic_->send(plan.gives_slice(peer), peer, kDataTag);
  }
  finish_transfers(operation);
}

// Headers first, with the bytes where they are few; the rest once all headers have come.
void MpiRunner::exchange(const Operation& operation, const MpiPlan& plan) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const auto bytes_of = [](MpiHeader& header) { return reinterpret_cast<std::byte*>(&header); };
    traffic_->receive({bytes_of(traffic_->header_from(peer)), sizeof(MpiHeader)}, peer, kHeaderTag);
    MpiHeader& header = traffic_->header_to(peer);
    const Span given = plan.gives(peer);
    const std::size_t payload = is_small(given) ? given.bytes : 0;
    if (payload != 0) std::memcpy(header.payload, given.data, payload);
    traffic_->send({bytes_of(header), kHeaderBytes + payload}, peer, kHeaderTag);
  }
  finish_transfers(operation);
  compare(operation, plan);
  for (int peer = 0; peer < size_; ++peer) {
    const Span taken = plan.takes(peer);
    const Span given = plan.gives(peer);
    if (peer == rank_) {
      if (taken.bytes != 0 && taken.data != given.data) {
        std::memmove(taken.data, given.data, taken.bytes);
      }
      continue;
    }
    if (!is_small(taken)) {
      traffic_->receive(taken, peer, kDataTag);
    } else if (taken.bytes != 0) {
      std::memcpy(taken.data, traffic_->header_from(peer).payload, taken.bytes);
    }
    if (!is_small(given)) traffic_->send(given, peer, kDataTag);
  }
  finish_transfers(operation);
}

void MpiRunner::compare(const Operation& operation, const MpiPlan& plan) {
  traffic_->header_from(rank_) = traffic_->header_to(rank_);
  // All ranks name the same two: the first and the first that differs from it.
  const MpiHeader& first = traffic_->header_from(0);
  for (int peer = 1; peer < size_; ++peer) {
    const MpiHeader& header = traffic_->header_from(peer);
    if (is_same_operation(first, header)) continue;
    collective::throw_mismatch(notices_.global_rank(rank_), number_, notices_.global_rank(0),
                               first.signature, notices_.global_rank(peer), header.signature);
  }
  for (int peer = 0; peer < size_; ++peer) {
    const std::size_t given = traffic_->header_from(peer).bytes;
    const std::size_t taken = plan.takes(peer).bytes;
    if (given == taken || peer == rank_) continue;
    throw MismatchError(
        {.rank = notices_.global_rank(rank_),
         .peer = notices_.global_rank(peer),
         .operation = name_of(operation.kind)},
        text::format("Rank {} sends {} bytes, but rank {} has room for {}.\n"
                     "Make the splits of both sides equal.",
                     notices_.global_rank(peer), given, notices_.global_rank(rank_), taken));
  }
}

void MpiRunner::reduce(const Operation& operation, const MpiPlan& plan) {
  std::vector<const void*> inputs;
  std::vector<double> factors;
  for (int peer = 0; peer < size_; ++peer) {
    inputs.push_back(plan.takes(peer).data);
    factors.push_back(traffic_->header_from(peer).factor);
  }
  const Span result = plan.reduced();
  void* const output = result.data;
  collective::ReduceJob job;
  job.type = operation.type;
  job.reduction = operation.reduction;
  job.num_inputs = size_;
  job.inputs = inputs.data();
  job.factors = factors.data();
  job.num_outputs = 1;
  job.outputs = &output;
  job.count = result.bytes / collective::size_of(operation.type);
  job.average_over = operation.average_over;
  collective::reduce(job, collective::best_simd());
}

// Waits until no message of this operation is left.
void MpiRunner::finish_transfers(const Operation& operation) {
  const auto start = Clock::now();
  auto next_processes = start + kLookAtProcesses;
  auto next_store = start + kLookIntoStore;
  bool has_warned = false;
  while (true) {
    post_messages();
    const bool is_done = traffic_->move();
    deliver_messages();
    if (is_done) return;
    if (is_over_) throw Ended();
    const auto now = Clock::now();
    if (now >= next_processes) {
      notices_.check_processes(traffic_->missing(), operation.activity());
      next_processes = now + kLookAtProcesses;
    }
    if (now >= next_store) {
      notices_.check_store(traffic_->missing(), number_, operation.activity());
      next_store = now + kLookIntoStore;
    }
    if (now - start >= operation.timeout_or(timeout_)) time_out(operation);
    if (now - start >= kFirstWarning && !has_warned) {
      has_warned = true;
      Log(notices_.global_rank(rank_))
          .warning("{} has been waiting for other ranks for {} s", operation.text(),
                   kFirstWarning.count());
    }
    mpi::sleep(mpi::pause_after(now - start));
  }
}

void MpiRunner::time_out(const Operation& operation) {
  std::vector<int> missing = traffic_->missing();
  for (int& peer : missing) peer = notices_.global_rank(peer);
  throw TimeoutError(
      {.rank = notices_.global_rank(rank_),
       .peer = missing.front(),
       .operation = name_of(operation.kind)},
      text::format(
          "{} waited {:.1f} s for rank {}.\nCheck what it is doing, make the same calls in "
          "the same order on all ranks, or raise JoinOptions::timeout.",
          operation.text(), std::chrono::duration<double>(operation.timeout_or(timeout_)).count(),
          text::join(missing, ", ")));
}

}  // namespace lockstep
