#include "data/preparer.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

#include "data/threads.h"

namespace lockstep {
namespace {

// The modes of a thread that has just begun, but for gradients. Without workers data sets run in
// the caller's thread, whose modes must not decide what is in a batch.
class PlainModes {
  const c10::InferenceMode no_inference_{false};
  const c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  const at::NoGradGuard no_grad_;  // after the first, which switches gradients on
};

}  // namespace

Preparer::Preparer(int threads, int ahead, Drawing draw, Making make)
    : ahead_(static_cast<std::size_t>(ahead)), make_(std::move(make)), draw_(std::move(draw)) {
  try {
    start_threads(workers_, static_cast<std::size_t>(threads), [this](std::size_t) { work(); });
  } catch (...) {
    stop();
    throw;
  }
}

Preparer::~Preparer() { stop(); }

void Preparer::stop() {
  {
    const MutexLock lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

std::optional<Preparer::Drawn> Preparer::draw() {
  try {
    const PlainModes modes;
    auto drawn = draw_();
    if (!drawn) return std::nullopt;
    return std::move(*drawn);
  } catch (...) {
    return std::current_exception();
  }
}

Preparer::Prepared Preparer::prepare(Drawn drawn) const {
  if (const auto* const error = std::get_if<std::exception_ptr>(&drawn)) {
    return {.result = *error, .is_drawn = false};
  }
  auto& draw = std::get<detail::Draw>(drawn);
  const std::size_t num_samples = draw.info.indices.size();
  try {
    const PlainModes modes;
    return {.result = make_(std::move(draw)), .num_samples = num_samples};
  } catch (...) {
    return {.result = std::current_exception(), .num_samples = num_samples};
  }
}

// False: there is nothing more to draw.
bool Preparer::wait_for_room() {
  const MutexLock lock(mutex_);
  while (!is_stopping_ && !total_ && next_number_ >= next_taken_ + ahead_) changed_.wait(mutex_);
  return !is_stopping_ && !total_;
}

void Preparer::work() {
  while (true) {
    std::optional<Drawn> drawn;
    std::size_t number = 0;
    {
      // Batches can be taken while one is drawn: reading may be slow.
      const MutexLock turn(turn_);
      if (!wait_for_room()) return;
      drawn = draw();
      const MutexLock lock(mutex_);
      number = drawn ? next_number_++ : next_number_;
      if (!drawn || std::holds_alternative<std::exception_ptr>(*drawn)) total_ = next_number_;
      changed_.notify_all();
    }
    if (!drawn) return;
    Prepared prepared = prepare(std::move(*drawn));
    const MutexLock lock(mutex_);
    ready_.emplace(number, std::move(prepared));
    changed_.notify_all();
  }
}

std::optional<Preparer::Prepared> Preparer::take() {
  if (workers_.empty()) {
    const MutexLock turn(turn_);
    auto drawn = draw();
    if (!drawn) return std::nullopt;
    return prepare(std::move(*drawn));
  }
  const MutexLock lock(mutex_);
  // A worker is always on its way to the next one: what it waits for is the data set's own.
  while (!ready_.contains(next_taken_) && total_ != next_taken_) changed_.wait(mutex_);
  if (total_ == next_taken_) return std::nullopt;
  Prepared prepared = std::move(ready_.extract(next_taken_).mapped());
  ++next_taken_;
  changed_.notify_all();
  return prepared;
}

}  // namespace lockstep
