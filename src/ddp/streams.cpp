#include "ddp/streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace lockstep {

bool has_streams(const at::Device& device) { return !device.is_cpu() && !device.is_meta(); }

std::optional<c10::Stream> current_stream(const at::Device& device) {
  if (!has_streams(device)) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void order_streams(const c10::Stream& first, const c10::Stream& then) {
  if (first == then) return;
  c10::Event event(first.device_type());
  event.record(first);
  event.block(then);
}

void keep_for_current_stream(const at::Tensor& tensor) {
  if (!has_streams(tensor.device())) return;
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(tensor.device()));
}

void WriterStreams::note(const at::Device& device) {
  const auto stream = current_stream(device);
  if (!stream || std::ranges::find(streams_, *stream) != streams_.end()) return;
  if (made_ready_in_) order_streams(*made_ready_in_, *stream);
  streams_.push_back(*stream);
}

void WriterStreams::order_before_current(const at::Device& device) {
  const auto streams = std::exchange(streams_, {});
  made_ready_in_.reset();
  for (const c10::Stream& stream : streams) order_streams(stream, *current_stream(device));
}

std::optional<c10::StreamGuard> OwnStream::enter(const at::Device& device) {
  if (!has_streams(device)) return std::nullopt;
  auto found = std::ranges::find(streams_, device, &c10::Stream::device);
  if (found == streams_.end()) {
    streams_.push_back(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
    found = streams_.end() - 1;
  }
  return std::optional<c10::StreamGuard>(std::in_place, *found);
}

void OwnStream::order_before_current(const at::Device& device) const {
  const auto found = std::ranges::find(streams_, device, &c10::Stream::device);
  if (found != streams_.end()) order_streams(*found, *current_stream(device));
}

}  // namespace lockstep
