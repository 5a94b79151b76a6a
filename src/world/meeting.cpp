#include "world/meeting.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/error.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <thread>

#include "base/posix.h"
#include "base/process.h"
#include "world/hosts.h"
#include "world/translate.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

// What a rank tells the others about itself.
struct Record {
  Member member;  // local_rank is -1 if the launcher does not say it
  int size = 0;
  std::string engine;
  std::string build;  // lockstep, LibTorch and the engines in this program
};

Json to_json(const Record& record) {
  const Member& member = record.member;
  return {{"rank", member.rank},
          {"host", member.host},
          {"host_id", member.host_id},
          {"network_id", member.network_id},
          {"pid", member.pid},
          {"start", member.start_time},
          {"local_rank", member.local_rank},
          {"num_gpus", member.num_gpus},
          {"size", record.size},
          {"engine", record.engine},
          {"build", record.build}};
}

Record record_from(const std::string& text) {
  const Json json = Json::parse(text);
  Record record;
  record.member = {.rank = json.at("rank"),
                   .host = json.at("host"),
                   .host_id = json.at("host_id"),
                   .network_id = json.at("network_id"),
                   .pid = json.at("pid"),
                   .start_time = json.at("start"),
                   .local_rank = json.at("local_rank"),
                   .num_gpus = json.at("num_gpus")};
  record.size = json.at("size");
  record.engine = json.at("engine");
  record.build = json.at("build");
  return record;
}

std::string this_build() {
  std::string text =
      fmt::format("lockstep {}, LibTorch {}, engines", LOCKSTEP_VERSION, TORCH_VERSION);
  for (const EngineInfo& info : engines()) {
    if (info.unavailable.empty()) text += " " + info.name;
  }
  return text;
}

class Participant {
 public:
  Participant(const OpenStore& open, const Placement& placement, const std::string& engine,
              std::chrono::milliseconds timeout)
      : open_(open), timeout_(timeout), deadline_(Clock::now() + timeout) {
    const ProcessId process = this_process();
    self_.member = {.rank = placement.rank,
                    .host = host_name(),
                    .host_id = this_host_id(),
                    .network_id = this_network_id(),
                    .pid = process.pid,
                    .start_time = process.start_time,
                    .local_rank = placement.local_rank.value_or(-1),
                    .num_gpus = std::max<int>(torch::cuda::device_count(), 0)};
    self_.size = placement.size;
    self_.engine = engine;
    self_.build = this_build();
    generation_ = fmt::format("lockstep/{}", placement.generation);
  }

  Meeting run() {
    take_rank();
    agree_on_size();
    store().set(key("member", rank()), to_json(self_).dump());
    if (rank() == 0) decide();
    Meeting meeting;
    meeting.members = read_verdict();
    meeting.key_prefix = prefix_;
    return meeting;
  }

 private:
  int rank() const { return self_.member.rank; }
  c10d::Store& store() { return *open_.store; }
  std::string key(const std::string& name) const { return prefix_ + "/" + name; }
  std::string key(const std::string& name, int rank) const {
    return fmt::format("{}/{}/{}", prefix_, name, rank);
  }
  double seconds() const { return static_cast<double>(timeout_.count()) / 1000.0; }

  // False if `key` is not there by `deadline`. Polls: a store cannot wait for one of two keys.
  bool wait_for(
      const std::string& key, Clock::time_point deadline,
      const std::function<void()>& look_around = [] {}) {
    auto pause = std::chrono::milliseconds(1);
    while (!store().check({key})) {
      look_around();
      if (Clock::now() >= deadline) return false;
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::milliseconds(50));
    }
    return true;
  }

  // The n-th join of this rank meets the n-th of the others. The earlier ones must have been by
  // this same process, which joins again; otherwise two processes have one rank.
  void take_rank() {
    const std::string taken = fmt::format("{}/taken/{}", generation_, rank());
    const std::int64_t instance = store().add(taken, 1);
    store().set(fmt::format("{}/{}", taken, instance), to_json(self_).dump());
    prefix_ = fmt::format("{}/{}", generation_, instance);
    if (instance == 1) return;
    const std::string earlier = fmt::format("{}/{}", taken, instance - 1);
    if (!wait_for(earlier, deadline_)) return;
    const Record other = record_from(store().get_to_str(earlier));
    const bool is_this_process = other.member.host_id == self_.member.host_id &&
                                 other.member.pid == self_.member.pid &&
                                 other.member.start_time == self_.member.start_time;
    if (is_this_process) return;
    prefix_ = fmt::format("{}/{}", generation_, instance - 1);  // where the other one waits
    fail(ErrorKind::kMismatch, other.member.rank,
         fmt::format("Two processes have rank {}: pid {} on host {}, and pid {} on host {}.\n"
                     "Give each process a rank of its own.",
                     rank(), other.member.pid, other.member.host, self_.member.pid,
                     self_.member.host));
  }

  void agree_on_size() {
    const std::string first = store().compareSet(key("size"), "", to_json(self_).dump());
    const Record other = record_from(first);
    if (other.size == self_.size) return;
    fail(ErrorKind::kMismatch, other.member.rank,
         fmt::format("The size of the world is {} for rank {}, but {} for {}.\n"
                     "Start all ranks with the same size.",
                     self_.size, rank(), other.size, describe(other.member)));
  }

  // Tells all ranks, and throws.
  [[noreturn]] void fail(ErrorKind kind, int peer, const std::string& message) {
    store().compareSet(key("complaint"), "", failure(kind, rank(), peer, message).dump());
    throw_error(kind, {.rank = rank(), .peer = peer, .operation = "join"}, message);
  }

  static Json failure(ErrorKind kind, int from, int peer, const std::string& message) {
    return {{"kind", static_cast<int>(kind)}, {"from", from}, {"peer", peer}, {"message", message}};
  }

  // Rank 0: waits for all records, compares them, and publishes what comes of it.
  void decide() {
    std::map<int, Record> records;
    Json verdict;
    const auto look_around = [&] {
      if (store().check({key("complaint")})) {
        verdict = Json::parse(store().get_to_str(key("complaint")));
      }
      for (const auto& [_, record] : records) {
        if (!seems_alive(record.member, self_.member.host_id)) {
          verdict = failure(ErrorKind::kPeerLost, 0, record.member.rank,
                            fmt::format("{} ended while the others were still joining.\n"
                                        "Look at its last lines.",
                                        describe(record.member)));
        }
      }
    };
    for (int peer = 0; peer < self_.size && verdict.is_null(); ++peer) {
      // A found contradiction ends the waiting as a passed deadline does.
      if (wait_for_record(peer, verdict, look_around)) {
        records[peer] = record_from(store().get_to_str(key("member", peer)));
      }
    }
    if (verdict.is_null()) look_around();  // once more, now that all are here
    if (verdict.is_null() && static_cast<int>(records.size()) < self_.size) {
      verdict = not_all_came();
    }
    for (const auto& [_, record] : records) {
      if (verdict.is_null()) verdict = compare(record);
    }
    if (verdict.is_null()) {
      verdict = {{"members", Json::array()}};
      for (const auto& [_, record] : records) verdict["members"].push_back(to_json(record));
    }
    open_.remove_name();
    store().set(key("verdict"), verdict.dump());
  }

  bool wait_for_record(int peer, const Json& verdict, const std::function<void()>& look_around) {
    struct Stop {};
    try {
      return wait_for(key("member", peer), deadline_, [&] {
        look_around();
        if (!verdict.is_null()) throw Stop();
      });
    } catch (const Stop&) {
      return false;
    }
  }

  Json not_all_came() {
    std::vector<int> came;
    std::vector<int> missing;
    for (int peer = 0; peer < self_.size; ++peer) {
      (store().check({key("member", peer)}) ? came : missing).push_back(peer);
    }
    return failure(
        ErrorKind::kTimeout, 0, missing.empty() ? -1 : missing.front(),
        fmt::format("After {:.1f} s, {} of {} ranks have come ({}); missing: rank {}.\n"
                    "They meet at {}: check that the missing ranks were started with the same "
                    "place, or raise JoinOptions::join_timeout.",
                    seconds(), came.size(), self_.size, fmt::join(came, ", "),
                    fmt::join(missing, ", "), open_.place));
  }

  Json compare(const Record& other) {
    const auto differ = [&](const char* what, const std::string& mine, const std::string& theirs) {
      return failure(
          ErrorKind::kMismatch, 0, other.member.rank,
          fmt::format("Rank 0 has {} '{}', {} has '{}'.\nStart the same program with the "
                      "same options on all ranks.",
                      what, mine, describe(other.member), theirs));
    };
    if (other.engine != self_.engine) return differ("the engine", self_.engine, other.engine);
    if (other.build != self_.build) return differ("the build", self_.build, other.build);
    return {};
  }

  std::vector<Member> read_verdict() {
    const auto rank0_key = key("member", 0);
    const bool is_there = wait_for(key("verdict"), deadline_ + kVerdictGrace, [&] {
      if (store().check({key("complaint")})) throw_failure(store().get_to_str(key("complaint")));
      if (rank() == 0 || !store().check({rank0_key})) return;
      const Record rank0 = record_from(store().get_to_str(rank0_key));
      if (!seems_alive(rank0.member, self_.member.host_id) && !store().check({key("verdict")})) {
        throw PeerLostError({.rank = rank(), .peer = 0, .operation = "join"},
                            fmt::format("{} ended while the others were still joining.\n"
                                        "Look at its last lines.",
                                        describe(rank0.member)));
      }
    });
    if (!is_there) {
      const Json late = not_all_came();
      fail(ErrorKind::kTimeout, late.at("peer"), late.at("message"));
    }
    const std::string text = store().get_to_str(key("verdict"));
    const Json verdict = Json::parse(text);
    if (verdict.contains("message")) throw_failure(text);
    std::vector<Member> members;
    for (const Json& json : verdict.at("members"))
      members.push_back(record_from(json.dump()).member);
    number_locally(members);
    return members;
  }

  [[noreturn]] void throw_failure(const std::string& text) {
    const Json json = Json::parse(text);
    const int from = json.at("from");
    const std::string message = json.at("message");
    throw_error(static_cast<ErrorKind>(json.at("kind").get<int>()),
                {.rank = rank(), .peer = json.at("peer"), .operation = "join"},
                from == rank() ? message : fmt::format("Because rank {}: {}", from, message));
  }

  // The launcher's numbers are kept for a host if they are 0 to n - 1, each once; else its ranks
  // are numbered in their order.
  static void number_locally(std::vector<Member>& members) {
    std::map<std::string, std::vector<Member*>> hosts;
    for (Member& member : members) hosts[member.host_id].push_back(&member);
    for (auto& [_, locals] : hosts) {
      std::set<int> numbers;
      for (const Member* member : locals) numbers.insert(member->local_rank);
      const auto count = static_cast<int>(locals.size());
      if (static_cast<int>(numbers.size()) == count && *numbers.begin() == 0 &&
          *numbers.rbegin() == count - 1) {
        continue;
      }
      for (int i = 0; i < count; ++i) locals[static_cast<std::size_t>(i)]->local_rank = i;
    }
  }

  // Rank 0's verdict on a passed deadline takes a moment to arrive.
  static constexpr auto kVerdictGrace = std::chrono::seconds(1);

  const OpenStore& open_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point deadline_;
  Record self_;
  std::string generation_;
  std::string prefix_;
};

}  // namespace

Meeting meet(const OpenStore& open, const Placement& placement, const std::string& engine,
             std::chrono::milliseconds timeout) {
  Participant participant(open, placement, engine, timeout);
  try {
    return participant.run();
  } catch (const Error&) {
    open.remove_name();  // the next attempt meets afresh
    throw;
  } catch (const std::exception& error) {
    throw StoreLost({.rank = placement.rank, .peer = 0, .operation = "join"},
                    fmt::format("The store at {} failed while the ranks were joining: {}\n"
                                "Look for a rank that failed first, rank 0 above all.",
                                open.place, first_line(error.what())));
  }
}

}  // namespace lockstep
