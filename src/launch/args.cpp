#include "launch/args.h"

#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <sstream>

#include "base/env.h"
#include "base/text.h"
#include "launch/etcd.h"
#include "launch/hello.h"
#include "launch/takeover.h"

namespace lockstep {
namespace {

constexpr const char* kExamples = R"(Examples:
  lockstep run -n 4 -- ./train --epochs 3        4 ranks on this host, each with its share of cores
  lockstep run -- ./train                        a rank for each core (or GPU)
  lockstep run -n 2 --max-restarts 3 -- ./train  after a failure, all ranks start again
  lockstep run -n 4 --elastic -- ./train         a lost rank is replaced, the others go on
  lockstep run -n 8 --only-rank 0 --log-dir logs -- ./train
  lockstep run -n 4 --hosts 2 --host-rank 0 --master 10.0.0.1:29500 \
      --secret-file ~/.lockstep-secret -- ./train        on each of 2 hosts
  lockstep run --hash-every 100 --hash-log a.jsonl -- ./train      for lockstep verify a.jsonl b.jsonl
)";

// What is written after "run", before "--".
struct Typed {
  std::string ranks = "auto";
  std::string bind = "core";
  int only_rank = -1;
  double stop_grace = 10;
  double join_timeout = 300;
  int lost_after = 8;
  std::optional<std::string> job_id = std::nullopt;
  std::string master = {};
  std::string hosts = "1";
  bool is_diff = false;
};

std::unique_ptr<CLI::App> make_app(Invocation& invocation, Typed& typed) {
  RunOptions& run = invocation.run;
  auto app = std::make_unique<CLI::App>("Distributed data parallel training in C++.", "lockstep");
  app->footer(kExamples);
  app->set_version_flag("--version", std::string("lockstep " LOCKSTEP_VERSION));
  app->require_subcommand(0, 1);

  CLI::App* const start = app->add_subcommand("run",
                                              "Start a program on several ranks, watch and stop "
                                              "it:\nlockstep run [OPTIONS] -- PROGRAM [ARGUMENTS]");
  start->footer(kExamples);
  start->add_option("-n,--ranks", typed.ranks, "Ranks on this host, or auto: one per core or GPU")
      ->capture_default_str();
  start->add_option("--bind", typed.bind, "Bind ranks to their cores, to whole NUMA nodes, or not")
      ->check(CLI::IsMember({"none", "core", "numa"}))
      ->capture_default_str();
  start->add_option("--only-rank", typed.only_rank, "Show the output of this rank only")
      ->check(CLI::NonNegativeNumber);
  start->add_option("--log-dir", run.output.log_dir, "Also write rank-N.log for each rank here");
  start->add_option("--max-restarts", run.max_restarts, "Start all again after a failure, so often")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  start
      ->add_option("--stop-grace", typed.stop_grace,
                   "Seconds between the signal to stop and SIGKILL")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  start->add_flag(
      "--elastic", run.is_elastic,
      "Ranks that are lost do not end the job: the others go on, and they are replaced");
  start->add_option("--min-ranks", run.min_ranks, "Elastic: with fewer ranks the job ends")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  start
      ->add_option("--max-replacements", run.max_replacements,
                   "Elastic: how often a rank is replaced that fails soon each time")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  start
      ->add_option("--no-replace", run.fatal_codes,
                   "Elastic: exit codes after which a rank is not replaced")
      ->delimiter(',')
      ->capture_default_str();
  start
      ->add_option("--logical-ranks", run.num_logical,
                   "Logical ranks (docs/reproducibility.md); elastic: by default as many as ranks")
      ->check(CLI::PositiveNumber);
  start
      ->add_option("--hosts", typed.hosts,
                   "On how many hosts lockstep run is started; elastic: FEWEST:MOST")
      ->capture_default_str();
  start->add_option("--host-rank", run.host_rank, "Which of them this is, from 0")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  start->add_option(
      "--master", typed.master,
      "HOST:PORT of host 0, where it listens; with --coordinator: of this host, where "
      "it listens if it is elected");
  start->add_option("--coordinator", run.coordinator,
                    "Elastic: etcd://HOST:PORT[,HOST:PORT...], where the hosts elect one that "
                    "coordinates; if it is lost, another takes over (else host 0 coordinates)");
  start->add_option("--secret-file", run.secret_file,
                    "A secret that all hosts share, mode 0600 (else the variable LOCKSTEP_SECRET)");
  start->add_option("--job-id", typed.job_id,
                    "What all hosts of this job, and of no other, have in common; by default the "
                    "scheduler's number of the job");
  start->add_flag("--any-program", run.may_programs_differ,
                  "On host 0: the hosts' programs may be different files");
  start->add_option("--join-timeout", typed.join_timeout, "Seconds to wait for all hosts")
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str();
  start
      ->add_option("--lost-after", typed.lost_after,
                   "Seconds of silence after which another host is lost")
      ->check(CLI::Range(4, 86400))  // pings come each second
      ->capture_default_str();
  CLI::Option* const hash_every =
      start
          ->add_option("--hash-every", run.hash_every,
                       "Write a hash of the parameters every N steps, for lockstep verify")
          ->check(CLI::PositiveNumber);
  start
      ->add_option("--hash-log", run.hash_log,
                   "The file for them; by default lockstep-hashes.jsonl. It is continued")
      ->needs(hash_every);
  start->add_flag("--dry-run", run.is_dry, "Print what would be started, and start nothing");
  start->add_flag("-v,--verbose", run.is_verbose, "Say what is started");

  app->add_subcommand("doctor", "Say what this machine offers, and what is wrong with it.");
  CLI::App* const look = app->add_subcommand(
      "inspect", "Say what is in a checkpoint or a .safetensors file, and whether it is whole.");
  look->add_option("path", invocation.paths, "A checkpoint, a folder of them, or a file")
      ->required()
      ->expected(1, 2);
  look->add_flag("--diff", typed.is_diff, "Compare two; exit code 1 if they differ");
  app->add_subcommand(
         "verify",
         "Say whether two runs are the same to the bit, and if not, the first step and "
         "tensor that differ;\nexit code 1 if they differ, 2 if they cannot be compared.")
      ->add_option("path", invocation.paths,
                   "Two logs of lockstep run --hash-every, or two checkpoints or folders of them")
      ->required()
      ->expected(2);
  CLI::App* const scale = app->add_subcommand(
      "scale",
      "Change the number of ranks of a running elastic job, at the end of a step;\nwithout options "
      "say what it has.");
  scale
      ->add_option("job", invocation.job,
                   "Its --job-id, or the process id of its launcher on the first host")
      ->required();
  CLI::Option* const ranks =
      scale->add_option("-n,--ranks", invocation.ranks, "Ranks that it is to have, on all hosts")
          ->check(CLI::PositiveNumber);
  scale
      ->add_option("--leave", invocation.leave,
                   "A rank that is to leave, by the number that the job's output shows")
      ->check(CLI::NonNegativeNumber)
      ->excludes(ranks);
  CLI::App* const top = app->add_subcommand(
      "top", "Show what the ranks of a running job do; without a terminal, once.");
  top->add_option(
      "job", invocation.job,
      "Its --job-id, or the process id of its launcher; not needed if there is one job");
  top->add_option("--every", invocation.every_s, "Seconds between two looks")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  app->add_subcommand("jobs", "List the running jobs of this user on this host.");
  app->add_subcommand("secret", "Make a secret for the launchers of several hosts.")
      ->add_option("file", invocation.paths, "A new file for it; without it, it is printed")
      ->expected(0, 1);
  app->add_subcommand("completion",
                      "Print what makes bash complete: source <(lockstep completion)");
  return app;
}

std::string completion(const CLI::App& app) {
  std::string cases;
  std::vector<std::string> verbs;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    std::vector<std::string> words;
    for (const CLI::Option* option : verb->get_options()) {
      for (const std::string& name : option->get_lnames()) words.push_back("--" + name);
    }
    verbs.push_back(verb->get_name());
    cases += text::format("    {}) words=\"{}\" ;;\n", verb->get_name(), text::join(words, " "));
  }
  return text::format(R"(_lockstep() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words i
  for ((i = 1; i < COMP_CWORD; i++)); do  # behind -- a program follows
    if [[ ${{COMP_WORDS[i]}} == -- ]]; then _command_offset $((i + 1)); return; fi
  done
  case $before in
    --bind) COMPREPLY=($(compgen -W "none core numa" -- "$word")); return ;;
    --log-dir) COMPREPLY=($(compgen -d -- "$word")); return ;;
    --secret-file | --hash-log) COMPREPLY=($(compgen -f -- "$word")); return ;;
  esac
  case ${{COMP_WORDS[1]}} in
{}    *) words="{} --help --version" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -F _lockstep lockstep
)",
                      cases, text::join(verbs, " "));
}

int parse_ranks(const std::string& text) {
  if (text == "auto") return ranks_for(this_machine());
  int ranks = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), ranks);
  if (read.ec != std::errc() || read.ptr != text.data() + text.size() || ranks < 1) {
    throw BadArguments(text::format("-n is '{}': give a number of ranks from 1, or auto", text));
  }
  return ranks;
}

void parse_master(const std::string& text, RunOptions& run) {
  const std::size_t colon = text.rfind(':');
  int port = 0;
  if (colon != std::string::npos) {
    const char* const end = text.data() + text.size();
    if (std::from_chars(text.data() + colon + 1, end, port).ptr != end) port = 0;
  }
  // The next port is given to programs that open a store of their own.
  if (colon == std::string::npos || colon == 0 || port < 1 || port > 65534) {
    throw BadArguments(text::format(
        "--master is '{}': give HOST:PORT, the address of host 0 and a free port there", text));
  }
  run.master_host = text.substr(0, colon);
  if (run.master_host.front() == '[' && run.master_host.back() == ']') {  // an IPv6 address
    run.master_host = run.master_host.substr(1, run.master_host.size() - 2);
  }
  run.master_port = port;
}

// Its path. Before anything starts: a typing error is not a failed job.
std::string find_program(const std::string& program) {
  std::vector<std::string> places = {program};
  if (program.find('/') == std::string::npos) {
    places.clear();
    const char* const path = std::getenv("PATH");
    std::istringstream folders(path != nullptr ? path : "/usr/bin:/bin");
    for (std::string folder; std::getline(folders, folder, ':');) {
      places.push_back((folder.empty() ? "." : folder) + "/" + program);
    }
  }
  std::string problem = "there is no such program";
  for (const std::string& place : places) {
    struct stat status {};
    if (::stat(place.c_str(), &status) != 0) continue;
    if (S_ISDIR(status.st_mode)) {
      problem = "it is a folder";
    } else if (::access(place.c_str(), X_OK) != 0) {
      problem = "it may not be executed (chmod +x)";
    } else {
      return place;
    }
  }
  throw BadArguments(text::format("cannot start '{}': {}", program, problem));
}

// For this user alone, if it is not there yet.
std::error_code make_log_folder(std::filesystem::path folder) {
  if (!folder.has_filename()) folder = folder.parent_path();  // "logs/"
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::absolute(folder).parent_path(), error);
  if (!error && ::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    error.assign(errno, std::generic_category());
  }
  return error;
}

// "4", or "2:4".
void parse_hosts(const std::string& text, RunOptions& run) {
  const auto number = [&](std::string_view part) {
    int value = 0;
    const auto read = std::from_chars(part.data(), part.data() + part.size(), value);
    const bool is_whole = read.ec == std::errc() && read.ptr == part.data() + part.size();
    if (!is_whole || value < 1) {
      throw BadArguments(text::format(
          "--hosts is '{}': give a number from 1, or, with --elastic, FEWEST:MOST", text));
    }
    return value;
  };
  const std::size_t colon = text.find(':');
  const std::string_view all = text;
  run.min_hosts = number(all.substr(0, colon));
  run.num_hosts = colon == std::string::npos ? run.min_hosts : number(all.substr(colon + 1));
  if (colon != std::string::npos && !run.is_elastic) {
    throw BadArguments(text::format("--hosts is '{}': a range needs --elastic", text));
  }
  if (run.min_hosts > run.num_hosts) {
    throw BadArguments(text::format("--hosts is '{}': the fewest are more than the most", text));
  }
}

void check_coordinator(const RunOptions& run) {
  if (!run.is_elastic) throw BadArguments("--coordinator needs --elastic");
  if (run.num_hosts == 1) throw BadArguments("--coordinator needs --hosts, more than one");
  if (run.job_id.empty()) {
    throw BadArguments(
        "--coordinator needs --job-id, the same on all hosts of this job and no other's: it keeps "
        "jobs apart in etcd");
  }
  try {
    const Etcd etcd(run.coordinator, kLeaseTtl);
  } catch (const UsageError& error) {
    throw BadArguments("--coordinator: " + error.message());
  }
}

void complete_run(const Typed& typed, RunOptions& run) {
  if (run.command.empty()) throw BadArguments("there is no program behind --");
  parse_hosts(typed.hosts, run);
  run.num_ranks = parse_ranks(typed.ranks);
  run.bind = typed.bind == "none" ? Bind::kNone : typed.bind == "numa" ? Bind::kNuma : Bind::kCore;
  run.stop_grace = std::chrono::milliseconds(static_cast<int>(typed.stop_grace * 1000));
  run.join_timeout = std::chrono::milliseconds(static_cast<int>(typed.join_timeout * 1000));
  run.lost_after = std::chrono::seconds(typed.lost_after);
  run.job_id = typed.job_id ? *typed.job_id : scheduler_job_id(Environment::of_process());
  if (!run.coordinator.empty()) check_coordinator(run);
  run.output.has_colour = std::getenv("NO_COLOR") == nullptr;
  if (typed.only_rank >= 0) {
    run.output.only_rank = typed.only_rank;
    if (run.num_hosts == 1 && typed.only_rank >= run.num_ranks) {
      throw BadArguments(text::format("--only-rank is {}, but ranks are 0 to {}", typed.only_rank,
                                      run.num_ranks - 1));
    }
  }
  if (run.host_rank >= run.num_hosts) {
    throw BadArguments(text::format("--host-rank is {}, but with --hosts {} it is 0 to {}",
                                    run.host_rank, run.num_hosts, run.num_hosts - 1));
  }
  if (run.num_hosts > 1) {
    if (typed.master.empty() && !run.coordinator.empty()) {
      throw BadArguments("--coordinator needs --master HOST:PORT, an address of this host");
    }
    if (typed.master.empty()) {
      throw BadArguments("--hosts needs --master HOST:PORT, an address of host 0");
    }
    parse_master(typed.master, run);
  }
  if (run.hash_every > 0) {  // a program may change its folder
    run.hash_log =
        std::filesystem::absolute(run.hash_log.empty() ? "lockstep-hashes.jsonl" : run.hash_log);
  }
  run.program_path = find_program(run.command.front());
  if (!run.output.log_dir.empty()) {
    const std::error_code error = make_log_folder(run.output.log_dir);
    if (error || ::access(run.output.log_dir.c_str(), W_OK) != 0) {
      throw BadArguments(text::format("--log-dir is '{}', and no file can be made there: {}",
                                      run.output.log_dir,
                                      error ? error.message() : std::strerror(errno)));
    }
  }
}

}  // namespace

Invocation parse_arguments(const std::vector<std::string>& arguments) {
  Invocation invocation;
  Typed typed;
  const auto app = make_app(invocation, typed);
  const auto dashes = std::ranges::find(arguments, "--");
  std::vector<std::string> ours(arguments.begin(), dashes);
  const bool is_run = !ours.empty() && ours.front() == "run";
  if (dashes != arguments.end()) invocation.run.command.assign(dashes + 1, arguments.end());
  std::ranges::reverse(ours);  // as CLI11 takes them
  try {
    app->parse(ours);
  } catch (const CLI::Success& help) {  // --help or --version
    std::ostringstream text;
    app->exit(help, text, text);
    invocation.text = text.str();
    return invocation;
  } catch (const CLI::ExtrasError& error) {
    if (is_run && dashes == arguments.end()) {
      throw BadArguments(
          "there is no -- before the program: lockstep run [OPTIONS] -- PROGRAM [ARGUMENTS]");
    }
    throw BadArguments(error.what());
  } catch (const CLI::ParseError& error) {
    throw BadArguments(error.what());
  }
  if (app->got_subcommand("run")) {
    if (dashes == arguments.end()) {
      throw BadArguments(
          "there is no -- before the program: lockstep run [OPTIONS] -- PROGRAM [ARGUMENTS]");
    }
    invocation.verb = Invocation::Verb::kRun;
    complete_run(typed, invocation.run);
  } else if (app->got_subcommand("doctor")) {
    invocation.verb = Invocation::Verb::kDoctor;
  } else if (app->got_subcommand("inspect")) {
    if (typed.is_diff != (invocation.paths.size() == 2)) {
      throw BadArguments("inspect takes one path, or --diff and two");
    }
    invocation.verb = Invocation::Verb::kInspect;
  } else if (app->got_subcommand("verify")) {
    invocation.verb = Invocation::Verb::kVerify;
  } else if (app->got_subcommand("scale")) {
    invocation.verb = Invocation::Verb::kScale;
  } else if (app->got_subcommand("top")) {
    invocation.verb = Invocation::Verb::kTop;
  } else if (app->got_subcommand("jobs")) {
    invocation.verb = Invocation::Verb::kJobs;
  } else if (app->got_subcommand("secret")) {
    invocation.verb = Invocation::Verb::kSecret;
  } else if (app->got_subcommand("completion")) {
    invocation.text = completion(*app);
  } else {
    throw BadArguments(
        "say what to do: run, top, jobs, scale, inspect, verify, doctor, secret or completion");
  }
  return invocation;
}

}  // namespace lockstep
