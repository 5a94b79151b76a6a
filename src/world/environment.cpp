#include "world/environment.h"

#include <lockstep/error.h>

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/notice.h"
#include "base/text.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw UsageError({.operation = "join"}, message);
}

// "RANK=1, MASTER_ADDR=10.0.0.1": those of `names` that are set.
std::string found(const Environment& environment, const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    if (const auto value = environment.get(name)) {
      text += text::format("{}{}={}", text.empty() ? "" : ", ", name, *value);
    }
  }
  return text.empty() ? "none of them" : text;
}

struct Names {
  std::string launcher;
  std::string rank;
  std::string size;
  std::string local_rank;
  std::string local_size;
};

const std::array<Names, 3> kForeignLaunchers = {
    Names{"OpenMPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
          "OMPI_COMM_WORLD_LOCAL_SIZE"},
    Names{"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    Names{"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""},
};

// Both of rank and size, or an error that shows what is there.
void read_rank_and_size(const Environment& environment, const Names& names, Placement& placement) {
  const auto rank = environment.get_int(names.rank);
  const auto size = environment.get_int(names.size, 1);
  if (!rank || !size) {
    refuse(
        text::format("{} is not set, but {} is: half of what {} sets.\n"
                     "Start the program with a launcher, set both, or unset both to run alone.",
                     rank ? names.size : names.rank, found(environment, {names.rank, names.size}),
                     names.launcher));
  }
  if (*rank >= *size) {
    refuse(
        text::format("{}={} is out of range: {}={}, so ranks are 0 to {}.\n"
                     "Give each process its own rank below the size.",
                     names.rank, *rank, names.size, *size, *size - 1));
  }
  placement.rank = *rank;
  placement.size = *size;
  placement.launcher = names.launcher;
  placement.local_rank = environment.get_int(names.local_rank);
}

// MASTER_ADDR and MASTER_PORT, if they are there.
std::optional<TcpAddress> read_master(const Environment& environment) {
  const auto host = environment.get("MASTER_ADDR");
  const auto port = environment.get_int("MASTER_PORT", 1);
  if (!host && !port) return std::nullopt;
  if (!host || !port) {
    refuse(text::format(
        "{} is not set, but {} is.\n"
        "Set both to an address and a free port of rank 0's host.",
        host ? "MASTER_PORT" : "MASTER_ADDR", found(environment, {"MASTER_ADDR", "MASTER_PORT"})));
  }
  if (*port > 65535) refuse(text::format("MASTER_PORT is {}.\nSet it to 1 to 65535.", *port));
  return TcpAddress{*host, *port, environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"};
}

// The first name of a Slurm list of hosts: "gpu[003-007,12],login" gives "gpu003".
std::string first_host(const std::string& list) {
  const std::size_t bracket = list.find('[');
  const std::size_t comma = list.find(',');
  if (bracket == std::string::npos || comma < bracket) return list.substr(0, comma);
  const std::size_t end = list.find_first_of(",-]", bracket);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1);
}

// Slurm names the hosts, but no port: one is derived from the job's and the step's number, so that
// all tasks know it and two jobs on one host rarely share it. (MASTER_PORT settles a conflict.)
std::optional<TcpAddress> slurm_master(const Environment& environment) {
  const auto hosts = environment.get("SLURM_STEP_NODELIST");
  const auto job = environment.get_int("SLURM_JOB_ID");
  if (!hosts || !job) return std::nullopt;
  const int step = environment.get_int("SLURM_STEP_ID").value_or(0);
  constexpr int kFirstPort = 20000;  // below Linux's ephemeral ports, which begin at 32768
  constexpr int kPorts = 12000;
  const std::int64_t mixed = *job + std::int64_t{step} * 7919;
  return TcpAddress{first_host(*hosts), kFirstPort + static_cast<int>(mixed % kPorts), false};
}

bool is_one_host(const Environment& environment, const Names& names, int size) {
  if (const auto local_size = environment.get_int(names.local_size, 1)) return *local_size == size;
  return environment.has("SLURM_STEP_ID") && environment.get_int("SLURM_STEP_NUM_NODES", 1) == 1;
}

StorePlace foreign_store(const Environment& environment, const Names& names, int size) {
  if (size == 1) return InProcess{};
  if (const auto master = read_master(environment)) return *master;
  if (is_one_host(environment, names, size)) return LauncherFile{names.rank};
  if (const auto master = slurm_master(environment); master && names.launcher != "OpenMPI") {
    return *master;
  }
  refuse(
      text::format("{} started {} ranks on several hosts, and MASTER_ADDR and MASTER_PORT are not "
                   "set.\nSet them to rank 0's host and a free port there (mpirun: -x MASTER_ADDR "
                   "-x MASTER_PORT).",
                   names.launcher, size));
}

Placement read_torchrun(const Environment& environment) {
  Placement placement;
  read_rank_and_size(environment, {"torchrun or lockstep", "RANK", "WORLD_SIZE", "LOCAL_RANK", ""},
                     placement);
  placement.generation = environment.get_int("TORCHELASTIC_RESTART_COUNT").value_or(0);
  if (const auto store = environment.get("LOCKSTEP_STORE")) {
    const std::size_t colon = store->find(':');
    const std::string kind = store->substr(0, colon);
    if (colon == std::string::npos || (kind != "fd" && kind != "launcher")) {
      refuse(text::format(
          "LOCKSTEP_STORE is '{}'.\nUnset it; lockstep sets it to fd:N or launcher:N.", *store));
    }
    const int fd = parse_int("LOCKSTEP_STORE", store->substr(colon + 1), 0);
    placement.launcher = "lockstep";
    if (kind == "fd") {
      placement.store = InheritedFd{fd};
    } else {
      placement.store = LauncherSocket{fd, environment.get("MASTER_ADDR").value_or("")};
      placement.notice_fd = environment.get_int(kNoticeVariable);
      placement.is_newcomer = placement.notice_fd && environment.has("LOCKSTEP_NEWCOMER");
    }
  } else if (placement.size == 1) {
    placement.store = InProcess{};
  } else if (const auto master = read_master(environment)) {
    placement.launcher = "torchrun";
    placement.store = *master;
  } else {
    refuse(
        text::format("{} are set, but MASTER_ADDR and MASTER_PORT are not.\nStart the program with "
                     "a launcher, or set both to an address and a free port of rank 0's host.",
                     found(environment, {"RANK", "WORLD_SIZE"})));
  }
  return placement;
}

}  // namespace

Placement read_placement(const Environment& environment) {
  if (environment.has("RANK") || environment.has("WORLD_SIZE")) return read_torchrun(environment);
  for (const Names& names : kForeignLaunchers) {
    // In a Slurm allocation these are set for every command; only srun makes a step.
    if (names.launcher == "Slurm" && !environment.has("SLURM_STEP_ID")) continue;
    if (!environment.has(names.rank) && !environment.has(names.size)) continue;
    Placement placement;
    read_rank_and_size(environment, names, placement);
    placement.store = foreign_store(environment, names, placement.size);
    return placement;
  }
  const std::vector<std::string> leftovers = {"LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
                                              "LOCKSTEP_STORE"};
  for (const std::string& name : leftovers) {
    if (environment.has(name)) {
      refuse(
          text::format("RANK and WORLD_SIZE are not set, but {} is: half of what a launcher sets.\n"
                       "Start the program with a launcher, or unset it to run alone.",
                       found(environment, leftovers)));
    }
  }
  return {};
}

}  // namespace lockstep
