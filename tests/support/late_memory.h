// Memory of the late device (late_device.h).
//
// One memory file is mapped twice: where tensors say that they are, it can neither be read nor
// written, so that a host that takes a device's pointer for its own faults; the shadow, elsewhere,
// is what the threads of streams work on. What is freed is overwritten, in the order of the stream
// that it was allocated on: an operation of another stream that still reads it, without
// record_stream, gets wrong numbers.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace lockstep::test::late {

c10::Allocator& device_memory();
// The same memory, where it can be used. Only tasks of streams may.
void* shadow_of(const void* pointer);
void record_stream(const c10::DataPtr& memory, c10::StreamId stream);

// Memory of the host that copies may read and write late.
c10::Allocator& pinned_memory();
bool is_pinned(const void* pointer);

}  // namespace lockstep::test::late
