// Preparer: batches of one epoch, made by threads and handed out in order.
//
// Batches have numbers in the order of draws. A worker draws in its turn, makes the batch beside
// the others, and puts it down under its number; the caller takes batches in the order of numbers.
// Threading: take() belongs to one thread; `draw` is called by one thread at a time, `make` by
// several at once.
#pragma once

#include <lockstep/loader_source.h>

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <variant>
#include <vector>

#include "base/mutex.h"

namespace lockstep {

class Preparer {
 public:
  using Drawing = std::function<std::optional<detail::Draw>()>;
  using Making = std::function<std::shared_ptr<void>(detail::Draw)>;

  struct Prepared {
    std::variant<std::shared_ptr<void>, std::exception_ptr> result;
    std::size_t num_samples = 0;
    bool is_drawn = true;  // false: drawing has failed, and nothing comes after it
  };

  // Without threads a batch is made when it is taken. Throws: SystemError if a thread cannot be
  // started.
  Preparer(int threads, int ahead, Drawing draw, Making make);
  ~Preparer();
  Preparer(const Preparer&) = delete;
  Preparer& operator=(const Preparer&) = delete;

  // Nothing at the end.
  std::optional<Prepared> take();

 private:
  // A batch that is drawn, or the error.
  using Drawn = std::variant<detail::Draw, std::exception_ptr>;

  void stop();
  void work();
  bool wait_for_room();
  std::optional<Drawn> draw() LOCKSTEP_REQUIRES(turn_);
  Prepared prepare(Drawn drawn) const;

  // Constant after construction.
  const std::size_t ahead_;
  const Making make_;
  std::vector<std::thread> workers_;

  Mutex turn_;  // to draw, which may take time; before mutex_
  Drawing draw_ LOCKSTEP_GUARDED_BY(turn_);

  Mutex mutex_;
  Condition changed_;
  std::map<std::size_t, Prepared> ready_ LOCKSTEP_GUARDED_BY(mutex_);
  std::size_t next_number_ LOCKSTEP_GUARDED_BY(mutex_) = 0;       // to be drawn
  std::size_t next_taken_ LOCKSTEP_GUARDED_BY(mutex_) = 0;        // to be handed out
  std::optional<std::size_t> total_ LOCKSTEP_GUARDED_BY(mutex_);  // batches, once that is known
  bool is_stopping_ LOCKSTEP_GUARDED_BY(mutex_) = false;
};

}  // namespace lockstep
