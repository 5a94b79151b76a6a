#include "launch/hello.h"

#include <lockstep/error.h>

#include <algorithm>
#include <array>

#include "archive/file.h"
#include "base/posix.h"
#include "base/text.h"

namespace lockstep {
namespace {

std::string hash_of_program(const std::string& path) try {
  return FileReader(path).hash();
} catch (const Error&) {
  return {};
}

std::string named(const std::string& job_id) {
  return job_id.empty() ? "no job id" : text::format("the job id '{}'", job_id);
}

}  // namespace

Hello hello_of(const RunOptions& options) {
  return {.host_rank = options.host_rank,
          .num_hosts = options.num_hosts,
          .num_ranks = options.num_ranks,
          .host = host_name(),
          .job_id = options.job_id,
          .program = options.command.front(),
          .program_hash = hash_of_program(options.program_path),
          .arguments = {options.command.begin() + 1, options.command.end()},
          .is_elastic = options.is_elastic};
}

std::string scheduler_job_id(const Environment& environment) {
  // The second variable counts the jobs of an array that share the first.
  struct Names {
    const char* job;
    const char* index;
  };
  constexpr std::array<Names, 5> kSchedulers = {{{"SLURM_JOB_ID", ""},
                                                 {"PBS_JOBID", ""},
                                                 {"LSB_JOBID", "LSB_JOBINDEX"},
                                                 {"FLUX_JOB_ID", ""},
                                                 {"JOB_ID", "SGE_TASK_ID"}}};
  for (const Names& names : kSchedulers) {
    const auto job = environment.get(names.job);
    const auto index = environment.get(names.index);
    // JOB_ID alone may be anybody's.
    if (!job || (std::string_view(names.job) == "JOB_ID" && !index)) continue;
    return index ? *job + "." + *index : *job;
  }
  return {};
}

std::string find_conflict(const Hello& first, const Hello& host, bool may_programs_differ) {
  if (host.job_id != first.job_id) {
    return text::format(
        "host {} has {}, host {} has {}: give each job a port of its own (--master), and all hosts "
        "of one the same --job-id",
        host.host_rank, named(host.job_id), first.host_rank, named(first.job_id));
  }
  if (host.num_hosts != first.num_hosts) {
    return text::format(
        "host {} was started with --hosts {}, host {} with --hosts {}: give all the same number",
        host.host_rank, host.num_hosts, first.host_rank, first.num_hosts);
  }
  if (host.is_elastic != first.is_elastic) {
    return text::format("host {} was started {} --elastic, host {} {} it: start all alike",
                        host.host_rank, host.is_elastic ? "with" : "without", first.host_rank,
                        first.is_elastic ? "with" : "without");
  }
  const int lowest = first.host_rank == 0 ? 1 : 0;
  if (host.host_rank < lowest || host.host_rank >= first.num_hosts) {
    return text::format("--host-rank {} is not in {} to {}", host.host_rank, lowest,
                        first.num_hosts - 1);
  }
  const bool is_known = !host.program_hash.empty() && !first.program_hash.empty();
  if (is_known && host.program_hash != first.program_hash && !may_programs_differ) {
    return text::format(
        "the program '{}' of host {} ({}) is not the program '{}' of host {} ({}): copy the same "
        "file to all hosts, or start host {} with --any-program if they are meant to differ",
        host.program, host.host_rank, host.program_hash.substr(0, 8), first.program,
        first.host_rank, first.program_hash.substr(0, 8), first.host_rank);
  }
  return {};
}

std::string compare_arguments(const Hello& first, const Hello& host) {
  const auto differ = std::ranges::mismatch(first.arguments, host.arguments);
  if (differ.in1 == first.arguments.end() && differ.in2 == host.arguments.end()) return {};
  const auto shown = [](const auto& at, const std::vector<std::string>& all) {
    return at == all.end() ? "nothing" : text::format("'{}'", at->substr(0, 100));
  };
  return text::format("argument {} of its program is {}, that of host {}'s is {}",
                      differ.in1 - first.arguments.begin() + 1, shown(differ.in2, host.arguments),
                      first.host_rank, shown(differ.in1, first.arguments));
}

}  // namespace lockstep
