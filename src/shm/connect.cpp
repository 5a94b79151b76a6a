#include "shm/connect.h"

#include <lockstep/error.h>
#include <sched.h>

#include <algorithm>
#include <new>
#include <sstream>

#include "base/text.h"

namespace lockstep::shm {
namespace {

// The cores that this process may use, as a text of one character each.
std::string allowed_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  std::string text;
  if (::sched_getaffinity(0, sizeof cores, &cores) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core) text += CPU_ISSET(core, &cores) ? '1' : '0';
    text.erase(text.find_last_of('1') + 1);
  }
  return text.empty() ? "1" : text;
}

// Adds the cores of `more` to `all`.
void unite(std::string& all, const std::string& more) {
  if (all.size() < more.size()) all.resize(more.size(), '0');
  for (std::size_t i = 0; i < more.size(); ++i) {
    if (more[i] == '1') all[i] = '1';
  }
}

// What a rank tells the others: who it is, what it was built as, and where its memory is.
struct Introduction {
  std::uint32_t version = 0;
  std::size_t control_bytes = 0;
  SegmentName segment;
  std::string cores;
};

std::string to_text(const Segment& segment) {
  const SegmentName name = segment.name();
  return text::format("{} {} {} {} {} {} {} {}", kShmVersion, sizeof(Control), name.owner.pid,
                      name.owner.start_time, name.fd, name.bytes, name.address, allowed_cores());
}

// Version 0 if the text is no introduction.
Introduction read(const std::string& text) {
  Introduction its;
  std::istringstream fields(text);
  fields >> its.version >> its.control_bytes >> its.segment.owner.pid >>
      its.segment.owner.start_time >> its.segment.fd >> its.segment.bytes >> its.segment.address >>
      its.cores;
  if (!fields) its.version = 0;
  return its;
}

Segment make_segment(int num_ranks) {
  Segment segment = Segment::create(segment_bytes(num_ranks));
  auto* control = new (segment.data()) Control;
  for (int peer = 0; peer < num_ranks; ++peer) {
    new (segment.data() + kChannelsOffset + static_cast<std::size_t>(peer) * sizeof(Channel))
        Channel;
  }
  control->magic = kShmMagic;
  control->version = kShmVersion;
  return segment;
}

}  // namespace

Peers connect(const GroupOptions& options, const Exchange& exchange) {
  if (options.size < 1 || options.size > collective::kMaxRanks || options.rank < 0 ||
      options.rank >= options.size) {
    throw UsageError({.rank = options.rank, .operation = "shared memory"},
                     text::format("Invalid rank {} for a world of size {}: the engine \"shm\" "
                                  "connects 1 to {} ranks.\nUse fewer ranks on this host, or the "
                                  "engine \"gloo\".",
                                  options.rank, options.size, collective::kMaxRanks));
  }
  Peers peers;
  peers.rank = options.rank;
  peers.size = options.size;
  peers.global_ranks = options.global_ranks;
  Segment mine = make_segment(options.size);
  const std::vector<std::string> all = exchange(to_text(mine));
  std::string all_cores;
  for (int peer = 0; peer < options.size; ++peer) {
    const Introduction its = read(all[static_cast<std::size_t>(peer)]);
    if (its.version != kShmVersion || its.control_bytes != sizeof(Control)) {
      throw MismatchError({.rank = peers.my_global_rank(),
                           .peer = peers.global_rank(peer),
                           .operation = "shared memory"},
                          text::format("Rank {} was built with another version of lockstep: its "
                                       "shared memory is version {} with {} bytes, here it is {} "
                                       "with {}.\nStart the same program on all ranks.",
                                       peers.global_rank(peer), its.version, its.control_bytes,
                                       kShmVersion, sizeof(Control)));
    }
    unite(all_cores, its.cores);
    peers.processes.push_back(its.segment.owner);
    peers.segments.push_back(peer == options.rank
                                 ? std::move(mine)  // NOLINT(bugprone-use-after-move): once
                                 : Segment::attach(its.segment));
    peers.controls.push_back(reinterpret_cast<Control*>(peers.segments.back().data()));
  }
  peers.has_core_for_each = std::ranges::count(all_cores, '1') >= options.size;
  exchange("attached");  // nobody goes away before all have attached
  return peers;
}

}  // namespace lockstep::shm
