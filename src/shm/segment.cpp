#include "shm/segment.h"

#include <fcntl.h>
#include <lockstep/error.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "base/text.h"

namespace lockstep::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// MADV_POPULATE_WRITE, which older headers do not have: pages become resident, and an error says
// that there is no room.
constexpr int kPopulateWrite = 23;
constexpr std::size_t kPage = 4096;

// Taken in steps, so that what is taken is not counted as claimed for long.
constexpr std::size_t kStepBytes = 64 << 20;

void check_file_size(std::size_t bytes) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) {
    throw_no_room(bytes, text::format("the limit on file sizes is {} (ulimit -f)", limit.rlim_cur),
                  EFBIG);
  }
}

std::byte* map(int fd, std::size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    rlimit limit{};
    ::getrlimit(RLIMIT_AS, &limit);
    throw_no_room(
        bytes,
        limit.rlim_cur == RLIM_INFINITY
            ? text::format("mapping them failed: {}", std::strerror(errno))
            : text::format("the limit on address space is {} (ulimit -v)", limit.rlim_cur),
        errno);
  }
  ::madvise(data, bytes, MADV_HUGEPAGE);  // where the system gives them; else nothing happens
  return static_cast<std::byte*>(data);
}

}  // namespace

void throw_no_room(std::size_t bytes, const std::string& reason, int code, int rank) {
  throw SystemError({.rank = rank, .operation = "shared memory"}, code,
                    text::format("{} bytes of shared memory are needed, but {}.\nGive the job more "
                                 "memory, use fewer ranks, or choose the engine \"gloo\".",
                                 bytes, reason));
}

std::string text_of(const Limit& limit) {
  return limit.group == kMachine
             ? text::format("the machine has only {:.0f} available", limit.amount)
             : text::format("the memory cgroup has only {:.0f} left", limit.amount);
}

std::vector<Limit> memory_limits_here(const std::string& system_root) {
  std::vector<Limit> limits = memory_limits(system_root);
  const std::string text = read_small_file(system_root + "/proc/meminfo");
  constexpr std::string_view kName = "MemAvailable:";
  if (const std::size_t at = text.find(kName); at != std::string::npos) {
    limits.push_back({kMachine, std::strtod(text.c_str() + at + kName.size(), nullptr) * 1024});
  }
  return limits;
}

void Segment::check_room(std::size_t bytes, const SegmentOptions& options) {
  // The kernel would answer a larger demand by killing a process: ask before. Claims first, then
  // limits: what another rank takes in between counts twice, rather than not at all.
  std::map<std::uint64_t, double> claims;
  if (options.claimed_by_others) claims = options.claimed_by_others();
  for (const Limit& limit : memory_limits_here(options.system_root)) {
    const double others = claims[limit.group];
    if (static_cast<double>(bytes) + others <= limit.amount) continue;
    std::string reason = text_of(limit);
    if (others > 0) reason += text::format(", and other ranks are about to take {:.0f}", others);
    throw_no_room(bytes, reason, ENOMEM);
  }
}

// The kernel knows the request since Linux 5.14.
bool Segment::can_take_attached() {
  void* const page =
      ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return false;
  const bool is_known = ::madvise(page, kPage, kPopulateWrite) == 0;
  ::munmap(page, kPage);
  return is_known;
}

Segment Segment::create(std::size_t bytes, const SegmentOptions& options) {
  check_room(bytes, options);
  const std::size_t all_bytes = bytes + options.reserved_bytes;
  check_file_size(all_bytes);
  Fd fd(::memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_errno("cannot make a memory file", "Raise the limit on open files (ulimit -n).");
  if (::ftruncate(fd.get(), static_cast<off_t>(all_bytes)) != 0) {
    throw_no_room(all_bytes, text::format("the memory file cannot grow: {}", std::strerror(errno)),
                  errno);
  }
  std::byte* data = map(fd.get(), all_bytes);
  Segment segment(std::move(fd), data, all_bytes, true);
  segment.make_resident(0, bytes, options);
  if (::fcntl(segment.fd_.get(), F_ADD_SEALS, kSeals) != 0) {
    throw_errno("cannot seal a memory file",
                "This kernel is too old for lockstep's engine \"shm\".");
  }
  return segment;
}

void Segment::take(std::size_t offset, std::size_t bytes, const SegmentOptions& options) const {
  check_room(bytes, options);
  make_resident(offset, bytes, options);
}

// Now, not at the first touch: a machine without room says so here.
void Segment::make_resident(std::size_t offset, std::size_t bytes,
                            const SegmentOptions& options) const {
  const std::size_t end = offset + bytes;
  for (std::size_t at = offset; at < end; at += kStepBytes) {
    const std::size_t step = std::min(kStepBytes, end - at);
    const int result =
        fd_ ? ::fallocate(fd_.get(), 0, static_cast<off_t>(at), static_cast<off_t>(step))
            : ::madvise(data_ + at, step, kPopulateWrite);
    if (result != 0) {
      throw_no_room(bytes, text::format("the system does not give them: {}", std::strerror(errno)),
                    errno);
    }
    if (options.on_taken) options.on_taken(step);
  }
  for (std::size_t at = offset; at < end; at += kPage) {
    static_cast<volatile std::byte*>(data_)[at] = std::byte{0};  // into this process's page table
  }
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
      status.st_ino != name.inode || ::fcntl(fd.get(), F_GET_SEALS) != kSeals ||
      find_process(name.owner.pid) != name.owner) {
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
  return {this_process(), fd_.get(), inode_of(fd_.get()), bytes_,
          reinterpret_cast<std::uint64_t>(data_)};
}

}  // namespace lockstep::shm
