// What LibTorch asks of a device: its guard (streams and events), its hooks, its allocator.

#include "support/late_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "support/late_memory.h"

namespace lockstep::test::late {
namespace {

using EventMark = std::shared_ptr<Mark>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream_of(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device(), id);
  }
  static EventMark& mark_of(void* event) { return *static_cast<EventMark*>(event); }

  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream_of(stream_from_pool());
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return stream_of(stream_from_pool());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(exchange_stream(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return mark(stream.id())->is_reached();
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream.id()); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_stream(memory, stream.id());
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventMark;
    mark_of(*event) = mark(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) late::block(stream.id(), mark_of(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || mark_of(event)->is_reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize(*mark_of(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<EventMark*>(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(mark_of(to)->time() - mark_of(from)->time())
        .count();
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  at::Device getDeviceFromPtr(void*) const override { return device(); }
  // Of the CPU's kind. Operators do not draw from it.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = at::detail::createCPUGenerator(1);
    return generator;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

[[maybe_unused]] const bool is_registered = [] {
  c10::register_privateuse1_backend("late");
  c10::SetAllocator(c10::kPrivateUse1, &device_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

at::Device device() { return {at::kPrivateUse1, 0}; }

}  // namespace lockstep::test::late
