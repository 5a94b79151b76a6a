#include "shm/segment.h"

#include <fcntl.h>
#include <lockstep/error.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>

#include "base/cgroup.h"
#include "base/text.h"

namespace lockstep::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::uint64_t available_memory() {
  const std::string text = read_small_file("/proc/meminfo");
  const std::size_t at = text.find("MemAvailable:");
  if (at == std::string::npos) return std::numeric_limits<std::uint64_t>::max();
  return std::strtoull(text.c_str() + at + std::strlen("MemAvailable:"), nullptr, 10) * 1024;
}

[[noreturn]] void refuse(std::size_t bytes, const std::string& reason, int code) {
  throw SystemError({.operation = "shared memory"}, code,
                    text::format("{} bytes of shared memory are needed, but {}.\nGive the job more "
                                 "memory, use fewer ranks, or choose the engine \"gloo\".",
                                 bytes, reason));
}

void check_room(std::size_t bytes) {
  // The kernel would answer a larger demand by killing a process of the cgroup: ask before.
  if (const std::uint64_t left = memory_left_in_cgroup(""); left < bytes) {
    refuse(bytes, text::format("the memory cgroup has only {} left", left), ENOMEM);
  }
  if (const std::uint64_t left = available_memory(); left < bytes) {
    refuse(bytes, text::format("the machine has only {} available", left), ENOMEM);
  }
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) {
    refuse(bytes, text::format("the limit on file sizes is {} (ulimit -f)", limit.rlim_cur), EFBIG);
  }
}

std::byte* map(int fd, std::size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    rlimit limit{};
    ::getrlimit(RLIMIT_AS, &limit);
    refuse(bytes,
           limit.rlim_cur == RLIM_INFINITY
               ? text::format("mapping them failed: {}", std::strerror(errno))
               : text::format("the limit on address space is {} (ulimit -v)", limit.rlim_cur),
           errno);
  }
  ::madvise(data, bytes, MADV_HUGEPAGE);  // where the system gives them; else nothing happens
  return static_cast<std::byte*>(data);
}

}  // namespace

Segment Segment::create(std::size_t bytes) {
  check_room(bytes);
  Fd fd(::memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_errno("cannot make a memory file", "Raise the limit on open files (ulimit -n).");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    refuse(bytes, text::format("the memory file cannot grow: {}", std::strerror(errno)), errno);
  }
  std::byte* data = map(fd.get(), bytes);
  Segment segment(std::move(fd), data, bytes, true);
  // Now, not at the first touch: a machine without room says so here.
  if (::fallocate(segment.fd_.get(), 0, 0, static_cast<off_t>(bytes)) != 0) {
    refuse(bytes, text::format("the system does not give them: {}", std::strerror(errno)), errno);
  }
  if (::fcntl(segment.fd_.get(), F_ADD_SEALS, kSeals) != 0) {
    throw_errno("cannot seal a memory file",
                "This kernel is too old for lockstep's engine \"shm\".");
  }
  for (std::size_t at = 0; at < bytes; at += 4096) {
    static_cast<volatile std::byte*>(data)[at] = std::byte{0};  // into this process's page table
  }
  return segment;
}

Segment Segment::attach(const SegmentName& name) {
  if (name.owner == this_process()) {
    return Segment(Fd(), reinterpret_cast<std::byte*>(name.address), name.bytes, false);
  }
  const std::string path = text::format("/proc/{}/fd/{}", name.owner.pid, name.fd);
  const Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) {
    throw_errno(text::format("cannot open the shared memory of process {}", name.owner.pid),
                "Run all ranks as the same user, and check that the rank is still running.");
  }
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0 || static_cast<std::uint64_t>(status.st_size) != name.bytes ||
      ::fcntl(fd.get(), F_GET_SEALS) != kSeals || find_process(name.owner.pid) != name.owner) {
    throw MismatchError({.operation = "shared memory"},
                        text::format("Descriptor {} of process {} is not the shared memory of {} "
                                     "bytes that it announced.\nStart the job again.",
                                     name.fd, name.owner.pid, name.bytes));
  }
  return Segment(Fd(), map(fd.get(), name.bytes), name.bytes, true);
}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      is_mapped_(std::exchange(other.is_mapped_, false)) {}

Segment::~Segment() {
  if (is_mapped_ && data_ != nullptr) ::munmap(data_, bytes_);
}

SegmentName Segment::name() const {
  return {this_process(), fd_.get(), bytes_, reinterpret_cast<std::uint64_t>(data_)};
}

}  // namespace lockstep::shm
