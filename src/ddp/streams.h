// Streams of any device, through LibTorch's device-generic interfaces. In main memory there are
// none: then nothing here does anything.
//
// What is queued in one stream is not ordered against another one's unless an event says so, and
// the host waits for none of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>
#include <vector>

namespace lockstep {

bool has_streams(const at::Device& device);

// Of this thread; none in main memory.
std::optional<c10::Stream> current_stream(const at::Device& device);

// What is queued in `then` from now on begins after what is in `first` so far.
void order_streams(const c10::Stream& first, const c10::Stream& then);

// The memory is not used for anything else before the current stream is done with it, even if it
// belongs to another.
void keep_for_current_stream(const at::Tensor& tensor);

// The streams that have written to a piece of memory, such as a bucket: hooks of one backward may
// run in several.
class WriterStreams {
 public:
  // The current stream has made the memory ready, behind all that wrote there; others write after
  // that.
  void begin(const at::Device& device) {
    note(device);  // behind the stream that made it ready last, if nobody has written since
    order_before_current(device);
    made_ready_in_ = current_stream(device);
  }
  // The current stream is about to write.
  void note(const at::Device& device);
  // The current stream goes on after all of them.
  void order_before_current(const at::Device& device);

 private:
  std::optional<c10::Stream> made_ready_in_;
  std::vector<c10::Stream> streams_;
};

// A stream in which all that belongs together is queued, whatever thread and stream it is called
// in. Made when it is first used.
class OwnStream {
 public:
  // While it lives, the current one.
  std::optional<c10::StreamGuard> enter(const at::Device& device);
  // The current stream goes on after what is in it.
  void order_before_current(const at::Device& device) const;

 private:
  std::vector<c10::Stream> streams_;  // one for each device
};

}  // namespace lockstep
