#include "world/host_memory.h"

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/cause.h"
#include "shm/segment.h"
#include "world/exchange.h"

namespace lockstep {
namespace {

constexpr const char* kOperation = "shared memory";

// What a storage owns.
struct Owned {
  shm::Segment segment;
  MemoryUse use;
};

void release(void* owned) { delete static_cast<Owned*>(owned); }

// The first rank makes it, and the others find it by its name; it stays in its hands meanwhile.
shm::Segment make_segment(const World& host, std::size_t bytes) {
  std::optional<shm::Segment> segment;
  do_together(host, kOperation, [&] {
    if (host.rank() == 0) segment.emplace(shm::Segment::create(bytes));
  });
  shm::SegmentName name{};
  if (segment) name = segment->name();
  const std::string shared =
      share_text(host, std::string(reinterpret_cast<const char*>(&name), sizeof name), 0);
  std::memcpy(&name, shared.data(), sizeof name);
  do_together(host, kOperation, [&] {
    if (!segment) segment.emplace(shm::Segment::attach(name));
  });
  return std::move(*segment);
}

}  // namespace

at::Tensor allocate_on_host(const World& host, std::int64_t num_elements, at::ScalarType type,
                            MemoryUse use) {
  const std::size_t bytes =
      static_cast<std::size_t>(std::max<std::int64_t>(num_elements, 1)) * c10::elementSize(type);
  auto owned = std::make_unique<Owned>(Owned{make_segment(host, bytes), std::move(use)});
  void* const data = owned->segment.data();
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                             at::DataPtr(data, owned.release(), &release, at::kCPU));
  return at::empty({0}, type).set_(storage, 0, {num_elements}, {1});
}

const MemoryUse* use_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const at::DataPtr& memory = tensor.storage().data_ptr();
  return memory.get_deleter() == &release ? &static_cast<Owned*>(memory.get_context())->use
                                          : nullptr;
}

}  // namespace lockstep
