#include "world/rendezvous.h"

#include <lockstep/error.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <thread>

#include "base/cause.h"
#include "base/json.h"
#include "base/posix.h"
#include "base/process.h"
#include "base/text.h"
#include "world/device.h"
#include "world/hosts.h"
#include "world/translate.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// What a rank tells the others about itself.
struct Record {
  Member member;  // local_rank is -1 if the launcher does not say it
  int size = 0;
  std::string launcher;
  std::string engine;
  int num_logical = 0;
  int num_threads = 0;
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
          {"device_type", member.device_type},
          {"num_devices", member.num_devices},
          {"visible_devices", member.visible_devices},
          {"page_fd", member.page_fd},
          {"page_inode", member.page_inode},
          {"page_address", member.page_address},
          {"size", record.size},
          {"launcher", record.launcher},
          {"engine", record.engine},
          {"num_logical", record.num_logical},
          {"num_threads", record.num_threads},
          {"build", record.build}};
}

Record record_from(const Json& json) {
  Record record;
  record.member = {.rank = json.at("rank"),
                   .host = json.at("host"),
                   .host_id = json.at("host_id"),
                   .network_id = json.at("network_id"),
                   .pid = json.at("pid"),
                   .start_time = json.at("start"),
                   .local_rank = json.at("local_rank"),
                   .num_gpus = json.at("num_gpus"),
                   .device_type = json.at("device_type"),
                   .num_devices = json.at("num_devices"),
                   .visible_devices = json.at("visible_devices"),
                   .page_fd = json.at("page_fd"),
                   .page_inode = json.at("page_inode"),
                   .page_address = json.at("page_address")};
  record.size = json.at("size");
  record.launcher = json.at("launcher");
  record.engine = json.at("engine");
  record.num_logical = json.value("num_logical", 0);
  record.num_threads = json.value("num_threads", 0);
  record.build = json.at("build");
  return record;
}

std::string this_build() {
  std::string text =
      text::format("lockstep {}, LibTorch {}, engines", LOCKSTEP_VERSION, TORCH_VERSION);
  for (const EngineInfo& info : engines()) {
    if (info.unavailable.empty()) text += " " + info.name;
  }
  return text;
}

class Participant {
 public:
  Participant(const OpenStore& open, const Placement& placement, const std::string& engine,
              const shm::SegmentName& page, std::chrono::milliseconds timeout)
      : open_(open), timeout_(timeout), deadline_(Clock::now() + timeout) {
    const ProcessId process = this_process();
    self_.member = {.rank = placement.rank,
                    .host = host_name(),
                    .host_id = this_host_id(),
                    .network_id = this_network_id(),
                    .pid = process.pid,
                    .start_time = process.start_time,
                    .local_rank = placement.local_rank.value_or(-1),
                    .num_gpus = std::max<int>(torch::cuda::device_count(), 0),
                    .page_fd = page.fd,
                    .page_inode = page.inode,
                    .page_address = page.address};
    look_at_devices(self_.member);
    self_.size = placement.size;
    self_.launcher = placement.launcher;
    self_.engine = engine;
    self_.num_logical = placement.num_logical;
    self_.num_threads = placement.num_threads;
    self_.build = this_build();
    generation_ = text::format("lockstep/{}", placement.generation);
  }

  Rendezvous run() {
    take_rank();
    agree_on_size();
    store().set(key("member", rank()), to_json(self_).dump());
    if (rank() == 0) decide();
    return read_verdict();
  }

 private:
  int rank() const { return self_.member.rank; }
  c10d::Store& store() { return *open_.store; }
  std::string key(const std::string& name) const { return prefix_ + "/" + name; }
  std::string key(const std::string& name, int rank) const {
    return text::format("{}/{}/{}", prefix_, name, rank);
  }
  double seconds() const { return static_cast<double>(timeout_.count()) / 1000.0; }

  // False if `key` is not there by `deadline`, or `must_end` says so. Polls: a store cannot wait
  // for one of two keys.
  bool wait_for(
      const std::string& key, Clock::time_point deadline,
      const std::function<bool()>& must_end = [] { return false; }) {
    const auto began = Clock::now();
    while (!store().check({key})) {
      if (must_end() || Clock::now() >= deadline) return false;
      std::this_thread::sleep_for(pause_after(Clock::now() - began));
    }
    return true;
  }

  // The n-th join of this rank meets the n-th of the others. The earlier ones must have been by
  // this same process, which joins again; otherwise two processes have one rank.
  void take_rank() {
    const std::string taken = text::format("{}/taken/{}", generation_, rank());
    const std::int64_t instance = store().add(taken, 1);
    store().set(text::format("{}/{}", taken, instance), to_json(self_).dump());
    prefix_ = text::format("{}/{}", generation_, instance);
    if (instance == 1) return;
    const std::string earlier = text::format("{}/{}", taken, instance - 1);
    if (!wait_for(earlier, deadline_)) return;
    const Record other = record_from(Json::parse(store().get_to_str(earlier)));
    const bool is_this_process = are_on_one_host(other.member, self_.member) &&
                                 other.member.pid == self_.member.pid &&
                                 other.member.start_time == self_.member.start_time;
    if (is_this_process) return;
    prefix_ = text::format("{}/{}", generation_, instance - 1);  // where the other one waits
    fail({.kind = ErrorKind::kMismatch,
          .peer = other.member.rank,
          .message = text::format(
              "Two processes have rank {}: pid {} on host {}, and pid {} on host {}.\n"
              "Give each process a rank of its own.",
              rank(), other.member.pid, other.member.host, self_.member.pid, self_.member.host)});
  }

  void agree_on_size() {
    const std::string first = store().compareSet(key("size"), "", to_json(self_).dump());
    const Record other = record_from(Json::parse(first));
    if (other.size == self_.size) return;
    fail({.kind = ErrorKind::kMismatch,
          .peer = other.member.rank,
          .message = text::format("The size of the world is {} for rank {}, but {} for {}.\n"
                                  "Start all ranks with the same size.",
                                  self_.size, rank(), other.size, describe(other.member))});
  }

  // Tells all ranks, and throws.
  [[noreturn]] void fail(Cause cause) {
    cause.rank = rank();
    store().compareSet(key("complaint"), "", to_text(cause));
    throw_cause(cause, place());
  }

  ErrorPlace place() const { return {.rank = rank(), .operation = "join"}; }

  // Rank 0: waits for all records, compares them, and publishes what comes of it.
  void decide() {
    std::map<int, Record> records;
    std::optional<Cause> problem;
    const auto find_problem = [&] {
      for (const auto& [_, record] : records) {
        if (!seems_alive(record.member, self_.member)) problem = ended_early(record.member);
      }
      // After that: a rank that complains and ends has said why.
      if (store().check({key("complaint")})) {
        problem = cause_from(store().get_to_str(key("complaint")));
      }
      return problem.has_value();
    };
    for (int peer = 0; peer < self_.size && !problem; ++peer) {
      if (wait_for(key("member", peer), deadline_, find_problem)) {
        records[peer] = record_from(Json::parse(store().get_to_str(key("member", peer))));
      }
    }
    if (!problem) find_problem();  // once more, now that all are here
    if (!problem && static_cast<int>(records.size()) < self_.size) problem = not_all_came();
    for (const auto& [_, record] : records) {
      if (!problem) problem = compare(record);
    }
    open_.remove_name();
    if (problem) {
      if (problem->rank < 0) problem->rank = 0;
      return store().set(key("failure"), to_text(*problem));
    }
    Json members = Json::array();
    for (const auto& [_, record] : records) members.push_back(to_json(record));
    store().set(key("members"), members.dump());
  }

  static Cause ended_early(const Member& member) {
    return {.kind = ErrorKind::kPeerLost,
            .peer = member.rank,
            .message = text::format("{} ended while the others were still joining.\n"
                                    "Look at its last lines.",
                                    describe(member))};
  }

  Cause not_all_came() {
    std::vector<int> came;
    std::vector<int> missing;
    for (int peer = 0; peer < self_.size; ++peer) {
      (store().check({key("member", peer)}) ? came : missing).push_back(peer);
    }
    return {.kind = ErrorKind::kTimeout,
            .peer = missing.empty() ? -1 : missing.front(),
            .message = text::format(
                "After {:.1f} s, {} of {} ranks have come ({}); missing: rank {}.\n"
                "The rendezvous is at {}: check that the missing ranks were started with the same "
                "place, or raise JoinOptions::join_timeout.",
                seconds(), came.size(), self_.size, text::join(came, ", "),
                text::join(missing, ", "), open_.place)};
  }

  std::optional<Cause> compare(const Record& other) const {
    const auto differ = [&](const char* what, const std::string& mine, const std::string& theirs) {
      return Cause{
          .kind = ErrorKind::kMismatch,
          .peer = other.member.rank,
          .message = text::format("Rank 0 has {} '{}', {} has '{}'.\nStart the same program with "
                                  "the same options on all ranks.",
                                  what, mine, describe(other.member), theirs)};
    };
    if (other.engine != self_.engine) return differ("the engine", self_.engine, other.engine);
    if (other.num_logical != self_.num_logical) {
      return differ("a number of logical ranks of", std::to_string(self_.num_logical),
                    std::to_string(other.num_logical));
    }
    if (other.num_threads != self_.num_threads) {
      return differ("a number of threads of", std::to_string(self_.num_threads),
                    std::to_string(other.num_threads));
    }
    if (other.build != self_.build) return differ("the build", self_.build, other.build);
    return std::nullopt;
  }

  // What rank 0 has decided.
  Rendezvous read_verdict() {
    const auto rank0_key = key("member", 0);
    const bool is_there = wait_for(key("members"), deadline_ + kVerdictGrace, [&] {
      for (const char* const one : {"failure", "complaint"}) {
        if (store().check({key(one)})) {
          throw_cause(cause_from(store().get_to_str(key(one))), place());
        }
      }
      if (rank() == 0 || !store().check({rank0_key})) return false;
      const Member rank0 = record_from(Json::parse(store().get_to_str(rank0_key))).member;
      if (!seems_alive(rank0, self_.member) && !store().check({key("members")}) &&
          !store().check({key("failure")})) {
        Cause cause = ended_early(rank0);
        cause.rank = rank();
        throw_cause(cause, place());
      }
      return false;
    });
    if (!is_there) fail(not_all_came());
    Rendezvous result{.members = {}, .launcher = self_.launcher, .key_prefix = prefix_};
    for (const Json& json : Json::parse(store().get_to_str(key("members")))) {
      const Record record = record_from(json);
      result.members.push_back(record.member);
      if (record.launcher != self_.launcher) result.launcher = "several launchers";
    }
    number_locally(result.members);
    number_devices(result.members);
    return result;
  }

  // The launcher's numbers are kept for a host if they are 0 to n - 1, each once; else its ranks
  // are numbered in their order.
  static void number_locally(std::vector<Member>& members) {
    for (const std::vector<int>& here : Hosts(members).ranks) {
      std::set<int> numbers;
      const auto local_rank = [&](int rank) -> int& {
        return members[static_cast<std::size_t>(rank)].local_rank;
      };
      for (const int rank : here) numbers.insert(local_rank(rank));
      const auto count = static_cast<int>(here.size());
      if (static_cast<int>(numbers.size()) == count && *numbers.begin() == 0 &&
          *numbers.rbegin() == count - 1) {
        continue;
      }
      for (int i = 0; i < count; ++i) local_rank(here[static_cast<std::size_t>(i)]) = i;
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

Rendezvous hold_rendezvous(const OpenStore& open, const Placement& placement,
                           const std::string& engine, const shm::SegmentName& page,
                           std::chrono::milliseconds timeout) {
  Participant participant(open, placement, engine, page, timeout);
  try {
    return participant.run();
  } catch (const Error&) {
    open.remove_name();  // the next attempt begins anew
    throw;
  } catch (const std::exception& error) {
    throw StoreLost({.rank = placement.rank, .peer = 0, .operation = "join"},
                    text::format("The store at {} failed while the ranks were joining: {}\n"
                                 "Look for a rank that failed first, rank 0 above all.",
                                 open.place, first_line(error.what())));
  }
}

}  // namespace lockstep
