// Segment: memory shared between the ranks of a host, on a memory file that has no name.
//
// Invariant: the memory is there in full once the segment exists (no SIGBUS later), but for what is
// reserved to be taken later; its size cannot change (sealed). A peer attaches through
// /proc/PID/fd, which the kernel grants to processes of the same user only; a segment disappears
// with the last process that maps it. Threading: constant after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/cgroup.h"
#include "base/posix.h"
#include "base/process.h"

namespace lockstep::shm {

// How a peer finds a segment.
struct SegmentName {
  ProcessId owner;
  int fd = -1;
  std::uint64_t inode = 0;  // the owner uses the number of a closed descriptor again, this one not
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;  // in the owner, for ranks that are threads of one process
};

// What this process may still take: of its cgroups, and of the machine (group kMachine).
constexpr std::uint64_t kMachine = 0;
std::vector<Limit> memory_limits_here(const std::string& system_root);
std::string text_of(const Limit& limit);

// Throws SystemError.
[[noreturn]] void throw_no_room(std::size_t bytes, const std::string& reason, int code,
                                int rank = -1);

struct SegmentOptions {
  std::string system_root = {};    // stands before /proc and /sys: tests have their own
  std::size_t reserved_bytes = 0;  // more behind the memory, for take()
  // Bytes that other ranks are about to take under the limits of groups.
  std::function<std::map<std::uint64_t, double>()> claimed_by_others = {};
  std::function<void(std::size_t bytes)> on_taken = {};  // called as memory is taken
};

class Segment {
 public:
  // Makes one; all of it is zero and, but for what is reserved, resident.
  // Throws SystemError that says how many bytes are needed and how many there are.
  static Segment create(std::size_t bytes, const SegmentOptions& options = {});
  // Throws SystemError if it cannot be opened, MismatchError if it is not the one that was named.
  static Segment attach(const SegmentName& name);

  // Makes reserved memory resident, near the core that calls; nobody may touch it before. The owner
  // can, and if can_take_attached() others, too. As create().
  void take(std::size_t offset, std::size_t bytes, const SegmentOptions& options) const;
  static bool can_take_attached();
  // As create() does, before it takes anything.
  static void check_room(std::size_t bytes, const SegmentOptions& options = {});

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  SegmentName name() const;

 private:
  Segment(Fd fd, std::byte* data, std::size_t bytes, bool is_mapped)
      : fd_(std::move(fd)), data_(data), bytes_(bytes), is_mapped_(is_mapped) {}

  void make_resident(std::size_t offset, std::size_t bytes, const SegmentOptions& options) const;

  Fd fd_;  // of the owner only
  std::byte* data_;
  std::size_t bytes_;
  bool is_mapped_;
};

}  // namespace lockstep::shm
