#include "shm/connect.h"

#include <lockstep/error.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <optional>
#include <sstream>

#include "base/cause.h"
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

// What a rank tells the others before it takes memory: what it was built as, and what it may use.
struct Introduction {
  std::uint32_t version = 0;
  std::size_t control_bytes = 0;
  std::string cores;
  std::vector<Limit> core_limits;
  std::vector<Limit> memory_limits;
};

std::string to_text(const std::vector<Limit>& limits) {
  std::string text = std::to_string(limits.size());
  for (const Limit& one : limits) text += text::format(" {} {:.3f}", one.group, one.amount);
  return text;
}

std::vector<Limit> read_limits(std::istream& fields) {
  std::size_t count = 0;
  fields >> count;
  std::vector<Limit> limits;
  for (Limit one; limits.size() < count && fields >> one.group >> one.amount;) {
    limits.push_back(one);
  }
  return limits;
}

std::string introduce(const std::string& system_root) {
  return text::format("{} {} {} {} {}", kShmVersion, sizeof(Control), allowed_cores(),
                      to_text(core_limits(system_root)), to_text(memory_limits_here(system_root)));
}

// Version 0 if the text is no introduction.
Introduction read(const std::string& text) {
  Introduction its;
  std::istringstream fields(text);
  fields >> its.version >> its.control_bytes >> its.cores;
  its.core_limits = read_limits(fields);
  its.memory_limits = read_limits(fields);
  if (!fields) its.version = 0;
  return its;
}

// The first limit that the ranks under it exceed together, if each of them takes `each`.
std::optional<Limit> exceeded(const std::vector<Introduction>& all,
                              std::vector<Limit> Introduction::*limits, double each) {
  for (const Introduction& its : all) {
    for (const Limit& limit : its.*limits) {
      const auto is_under = [&](const Introduction& other) {
        return std::ranges::find(other.*limits, limit.group, &Limit::group) !=
               (other.*limits).end();
      };
      const auto num_ranks = std::ranges::count_if(all, is_under);
      if (static_cast<double>(num_ranks) * each > limit.amount) return limit;
    }
  }
  return std::nullopt;
}

Segment make_segment(const GroupOptions& options) {
  Segment segment = Segment::create(
      kSegmentBytes, {.system_root = options.system_root,
                      .reserved_bytes = channel_offset(options.size) - kSegmentBytes});
  auto* control = new (segment.data()) Control;
  control->magic = kShmMagic;
  control->version = kShmVersion;
  return segment;
}

std::string to_text(const SegmentName& name) {
  return text::format("{} {} {} {} {} {}", name.owner.pid, name.owner.start_time, name.fd,
                      name.inode, name.bytes, name.address);
}

SegmentName read_name(const std::string& text) {
  SegmentName name;
  std::istringstream(text) >> name.owner.pid >> name.owner.start_time >> name.fd >> name.inode >>
      name.bytes >> name.address;
  return name;
}

}  // namespace

std::vector<std::string> do_together(const Peers& peers, const Exchange& exchange,
                                     const std::function<std::string()>& step) {
  constexpr char kDone = '+';
  constexpr char kFailed = '-';
  std::string mine;
  try {
    mine = kDone + step();
  } catch (...) {
    mine = kFailed + to_text(cause_of(std::current_exception(), peers.my_global_rank()));
  }
  std::vector<std::string> all = exchange(mine);
  for (std::string& text : all) {
    if (text.starts_with(kFailed)) {
      throw_cause(cause_from(text.substr(1)),
                  {.rank = peers.my_global_rank(), .operation = "shared memory"});
    }
    text.erase(0, 1);
  }
  return all;
}

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
  peers.system_root = options.system_root;
  std::vector<Introduction> all;
  std::string all_cores;
  for (const std::string& text : exchange(introduce(options.system_root))) {
    const int peer = static_cast<int>(all.size());
    const Introduction& its = all.emplace_back(read(text));
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
    std::vector<std::uint64_t>& groups = peers.memory_groups.emplace_back();
    for (const Limit& limit : its.memory_limits) groups.push_back(limit.group);
  }
  peers.has_core_for_each = std::ranges::count(all_cores, '1') >= options.size &&
                            !exceeded(all, &Introduction::core_limits, 1);
  // Nobody has taken anything yet: all ranks compare the same numbers.
  if (const auto limit = exceeded(all, &Introduction::memory_limits, kSegmentBytes)) {
    throw_no_room(kSegmentBytes * all.size(),
                  text::format("{} for the {} ranks of this host", text_of(*limit), all.size()),
                  ENOMEM, peers.my_global_rank());
  }

  std::optional<Segment> mine;
  const auto names = do_together(peers, exchange, [&] {
    mine.emplace(make_segment(options));
    return to_text(mine->name());
  });
  // Nobody goes away before all have attached.
  do_together(peers, exchange, [&] {
    for (int peer = 0; peer < options.size; ++peer) {
      const SegmentName name = read_name(names[static_cast<std::size_t>(peer)]);
      peers.processes.push_back(name.owner);
      peers.segments.push_back(peer == options.rank
                                   ? std::move(*mine)  // NOLINT(bugprone-use-after-move): once
                                   : Segment::attach(name));
      peers.controls.push_back(reinterpret_cast<Control*>(peers.segments.back().data()));
    }
    return std::string();
  });
  return peers;
}

}  // namespace lockstep::shm
