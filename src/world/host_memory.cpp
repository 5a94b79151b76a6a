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
// Each rank makes its part of it resident, which the kernel then takes from the NUMA node that the
// rank runs on: the first n-th for the first rank, and so on, as ranks share out work on it
// (shm/claims.h).
shm::Segment make_segment(const World& host, std::size_t bytes) {
  std::optional<shm::Segment> segment;
  struct Made {
    shm::SegmentName name = {};
    bool is_shared_out = false;
  } made;
  do_together(host, kOperation, [&] {
    if (host.rank() != 0) return;
    made.is_shared_out = shm::Segment::can_take_attached();
    shm::Segment::check_room(bytes);
    segment.emplace(made.is_shared_out ? shm::Segment::create(0, {.reserved_bytes = bytes})
                                       : shm::Segment::create(bytes));
    made.name = segment->name();
  });
  const std::string shared =
      share_text(host, std::string(reinterpret_cast<const char*>(&made), sizeof made), 0);
  std::memcpy(&made, shared.data(), sizeof made);
  do_together(host, kOperation, [&] {
    if (!segment) segment.emplace(shm::Segment::attach(made.name));
  });
  if (!made.is_shared_out) return std::move(*segment);
  const auto first_of = [&](int rank) {
    constexpr std::size_t kHugePage = 2 << 20;
    if (rank == host.size()) return bytes;
    const auto all = static_cast<std::size_t>(host.size());
    return bytes * static_cast<std::size_t>(rank) / all / kHugePage * kHugePage;
  };
  do_together(host, kOperation, [&] {
    const std::size_t first = first_of(host.rank());
    segment->take(first, first_of(host.rank() + 1) - first, {});
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
