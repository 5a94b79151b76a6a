#include "support/late_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "support/late_streams.h"

namespace lockstep::test::late {
namespace {

constexpr std::size_t kBytes = std::size_t{8}
                               << 30;  // of addresses; memory is taken when it is written
constexpr std::size_t kSmallest = 512;
constexpr int kPoison = 0x7f;  // a large number of every type

struct Block {
  std::size_t offset = 0;
  std::size_t bytes = 0;
  c10::StreamId stream = 0;
  std::vector<c10::StreamId> also_used_on = {};
};

// Blocks are of powers of two, and stay so.
class Arena {
 public:
  static Arena& of_process() {
    static auto* const arena = new Arena;  // in a rank, which shares it with nobody
    return *arena;
  }

  Block* take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const std::size_t size = std::bit_ceil(std::max(bytes, kSmallest));
    auto* const block = new Block{.bytes = size, .stream = current_stream()};
    std::vector<std::size_t>& free = free_[size];
    if (free.empty()) {
      TORCH_CHECK(used_ + size <= kBytes, "The late device has no memory left.");
      block->offset = used_;
      used_ += size;
      std::memset(shadow_ + block->offset, kPoison, size);
    } else {
      block->offset = free.back();
      free.pop_back();
    }
    return block;
  }

  void give_back(Block* block) {
    std::memset(shadow_ + block->offset, kPoison, block->bytes);
    const std::lock_guard lock(mutex_);
    free_[block->bytes].push_back(block->offset);
    delete block;
  }

  void record(Block& block, c10::StreamId stream) {
    const std::lock_guard lock(mutex_);
    if (stream == block.stream || std::ranges::count(block.also_used_on, stream) != 0) return;
    block.also_used_on.push_back(stream);
  }

  void* address(const Block& block) const { return device_ + block.offset; }

  void* shadow(const void* pointer) const {
    const auto* const byte = static_cast<const std::byte*>(pointer);
    TORCH_CHECK(byte >= device_ && byte < device_ + kBytes,
                "This is no memory of the late device.");
    return shadow_ + (byte - device_);
  }

 private:
  Arena() {
    const int fd = ::memfd_create("late_device", MFD_CLOEXEC);
    TORCH_CHECK(fd >= 0 && ::ftruncate(fd, kBytes) == 0, "memfd_create failed");
    device_ = map(fd, PROT_NONE);
    shadow_ = map(fd, PROT_READ | PROT_WRITE);
    ::close(fd);
  }

  static std::byte* map(int fd, int protection) {
    void* const address = ::mmap(nullptr, kBytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
    TORCH_CHECK(address != MAP_FAILED, "mmap failed");
    return static_cast<std::byte*>(address);
  }

  std::byte* device_ = nullptr;
  std::byte* shadow_ = nullptr;
  std::mutex mutex_;
  std::size_t used_ = 0;
  std::map<std::size_t, std::vector<std::size_t>> free_;  // offsets, by size
};

// The last stream that uses the block gives it back.
void release(void* context) {
  auto* const block = static_cast<Block*>(context);
  const auto left = std::make_shared<std::atomic<std::size_t>>(1 + block->also_used_on.size());
  const auto is_done = [left, block] {
    if (--*left == 0) Arena::of_process().give_back(block);
  };
  const std::vector<c10::StreamId> others = block->also_used_on;  // the block may go meanwhile
  enqueue(block->stream, is_done, When::kAtOnce);
  for (const c10::StreamId stream : others) enqueue(stream, is_done, When::kAtOnce);
}

class DeviceMemory : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device(c10::kPrivateUse1, 0);
    if (bytes == 0) return {nullptr, device};
    Block* const block = Arena::of_process().take(bytes);
    return {Arena::of_process().address(*block), block, &release, device};
  }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    enqueue(current_stream(), [=] { std::memcpy(shadow_of(target), shadow_of(source), bytes); });
  }
};

class PinnedMemory : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    const std::lock_guard lock(mutex_);
    sizes_[static_cast<std::byte*>(memory)] = bytes;
    return {memory, memory, &release, c10::kCPU};
  }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool has(const void* pointer) const {
    const auto* const byte = static_cast<const std::byte*>(pointer);
    const std::lock_guard lock(mutex_);
    auto after = sizes_.upper_bound(byte);
    if (after == sizes_.begin()) return false;
    --after;
    return byte < after->first + after->second;
  }
  static PinnedMemory& of_process() {
    static auto* const memory = new PinnedMemory;
    return *memory;
  }

 private:
  static void release(void* pointer) {
    PinnedMemory& memory = of_process();
    const std::lock_guard lock(memory.mutex_);
    memory.sizes_.erase(static_cast<std::byte*>(pointer));
    std::free(pointer);
  }

  mutable std::mutex mutex_;
  std::map<const std::byte*, std::size_t> sizes_;
};

}  // namespace

c10::Allocator& device_memory() {
  static auto* const memory = new DeviceMemory;
  return *memory;
}

void* shadow_of(const void* pointer) { return Arena::of_process().shadow(pointer); }

void record_stream(const c10::DataPtr& memory, c10::StreamId stream) {
  if (memory.get_deleter() == &release) {
    Arena::of_process().record(*static_cast<Block*>(memory.get_context()), stream);
  }
}

c10::Allocator& pinned_memory() { return PinnedMemory::of_process(); }
bool is_pinned(const void* pointer) { return PinnedMemory::of_process().has(pointer); }

}  // namespace lockstep::test::late
