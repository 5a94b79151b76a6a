#include "data/lanes.h"

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "base/text.h"
#include "data/threads.h"

namespace lockstep {
namespace {

using detail::kPlaceBits;
static_assert(sizeof(std::size_t) == 8);

// Records are handed over in blocks, since that takes a lock and may wake a thread: many that are
// read quickly, one that is not.
constexpr std::size_t kMaxBlock = 256;
constexpr auto kBlockTime = std::chrono::milliseconds(1);

}  // namespace

ShardLanes::ShardLanes(const detail::LoaderSource& source, const std::vector<std::size_t>& shards,
                       std::size_t num_lanes, int threads, std::size_t room, int rank)
    : source_(source),
      room_(std::max<std::size_t>(1, room / num_lanes)),
      rank_(rank),
      lanes_(std::min(num_lanes, shards.size())),
      queues_(lanes_.size()) {
  for (std::size_t i = 0; i < shards.size(); ++i) {
    lanes_[i % lanes_.size()].shards.push_back(shards[i]);
  }
  for (std::size_t i = 0; i < lanes_.size(); ++i) turns_.push_back(i);
  num_threads_ = std::min(lanes_.size(), static_cast<std::size_t>(threads));
  if (num_threads_ < 2) {  // the loader's own thread reads as fast
    num_threads_ = 0;
    return;
  }
  try {
    start_threads(threads_, num_threads_, [this](std::size_t thread) { work(thread); });
  } catch (...) {
    stop();
    throw;
  }
}

ShardLanes::~ShardLanes() { stop(); }

void ShardLanes::stop() {
  {
    const MutexLock lock(mutex_);
    is_stopping_ = true;
  }
  has_room_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

std::optional<NumberedRecord> ShardLanes::next() {
  while (!turns_.empty()) {
    const std::size_t lane = turns_[turn_];
    auto one = num_threads_ == 0 ? read(lanes_[lane]) : take(lane);
    if (one) {
      turn_ = (turn_ + 1) % turns_.size();
      return one;
    }
    turns_.erase(turns_.begin() + static_cast<std::ptrdiff_t>(turn_));
    if (turn_ == turns_.size()) turn_ = 0;
  }
  return std::nullopt;
}

std::optional<NumberedRecord> ShardLanes::read(Lane& lane) const {
  while (lane.reader || lane.num_opened < lane.shards.size()) {
    const std::size_t shard = lane.shards[lane.reader ? lane.num_opened - 1 : lane.num_opened];
    try {
      if (!lane.reader) {
        lane.reader = source_.open(shard);
        ++lane.num_opened;
        lane.place = 0;
      }
      std::any record = lane.reader();
      if (record.has_value()) {
        return NumberedRecord{shard << kPlaceBits | lane.place++, std::move(record)};
      }
      lane.reader = nullptr;
    } catch (const Error&) {
      throw;  // says itself which file it is
    } catch (const std::exception& error) {
      const std::string text = error.what();
      throw UsageError(
          {.rank = rank_, .operation = "Loader"},
          text::format("Record {} of {} cannot be read: {}\nFix the shard, or leave it out.",
                       lane.place, source_.shard_name(shard), text.substr(0, text.find('\n'))));
    }
  }
  return std::nullopt;
}

std::optional<NumberedRecord> ShardLanes::take(std::size_t lane) {
  const MutexLock lock(mutex_);
  Queue& queue = queues_[lane];
  while (queue.items.empty() && !queue.is_over) has_more_.wait(mutex_);
  if (queue.items.empty()) return std::nullopt;
  Item item = std::move(queue.items.front());
  queue.items.pop_front();
  if (queue.items.size() == room_in(queue) / 2) has_room_.notify_all();
  if (const auto* const error = std::get_if<std::exception_ptr>(&item)) {
    turns_.clear();
    std::rethrow_exception(*error);
  }
  return std::get<NumberedRecord>(std::move(item));
}

// What is read in a moment needs little memory, and there should be more of it.
std::size_t ShardLanes::room_in(const Queue& queue) const {
  return std::max(room_, 2 * queue.last_block);
}

// The thread's lane that has the fewest records; nothing if there is nothing more to read.
std::optional<std::size_t> ShardLanes::wait_for_room(std::size_t thread) {
  const MutexLock lock(mutex_);
  while (!is_stopping_) {
    std::optional<std::size_t> best;
    bool is_over = true;
    for (std::size_t i = thread; i < queues_.size(); i += num_threads_) {
      const Queue& queue = queues_[i];
      is_over = is_over && queue.is_over;
      if (queue.is_over || queue.items.size() > room_in(queue) / 2) continue;
      if (!best || queue.items.size() < queues_[*best].items.size()) best = i;
    }
    if (best || is_over) return best;
    has_room_.wait(mutex_);
  }
  return std::nullopt;
}

// False at the end of the lane.
bool ShardLanes::read_block(std::size_t lane, std::vector<Item>& block) {
  const auto end = std::chrono::steady_clock::now() + kBlockTime;
  try {
    do {
      auto one = read(lanes_[lane]);
      if (!one) return false;
      block.emplace_back(std::move(*one));
    } while (block.size() < kMaxBlock && std::chrono::steady_clock::now() < end);
  } catch (...) {
    block.emplace_back(std::current_exception());
    return false;
  }
  return true;
}

void ShardLanes::work(std::size_t thread) {
  const at::NoGradGuard no_grad;  // the other modes of a new thread are plain
  while (const auto lane = wait_for_room(thread)) {
    std::vector<Item> block;
    const bool goes_on = read_block(*lane, block);
    const MutexLock lock(mutex_);
    Queue& queue = queues_[*lane];
    std::ranges::move(block, std::back_inserter(queue.items));
    queue.last_block = block.size();
    queue.is_over = !goes_on;
    has_more_.notify_all();
  }
}

}  // namespace lockstep
