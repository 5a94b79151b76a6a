// lockstep: the program. `lockstep run` starts a job; see `lockstep --help`.

#include <fcntl.h>
#include <lockstep/error.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/printable.h"
#include "base/text.h"
#include "launch/args.h"
#include "launch/control.h"
#include "launch/doctor.h"
#include "launch/guard.h"
#include "launch/inspect.h"
#include "launch/run.h"
#include "launch/tls.h"
#include "launch/top.h"
#include "launch/verify.h"

namespace {

// Exit code 1 says that two runs differ, so that errors have another one.
int verify_runs(const std::string& left, const std::string& right) try {
  const lockstep::Report report = lockstep::verify(left, right);
  lockstep::text::print("{}", report.text);
  return report.code;
} catch (const lockstep::Error& error) {
  lockstep::text::print(stderr, "lockstep: {}\n", lockstep::printable_lines(error.message()));
  return 2;
} catch (const std::exception& error) {
  lockstep::text::print(stderr, "lockstep: {}\n", lockstep::printable_lines(error.what()));
  return 2;
}

}  // namespace

int main(int argc, char** argv) try {
  using namespace lockstep;  // NOLINT: a program
  // A standard stream that is closed would be taken by the next descriptor that is opened.
  for (int fd = 0; fd < 3; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) (void)::open("/dev/null", O_RDWR);
  }
  const Invocation invocation = parse_arguments({argv + 1, argv + argc});
  switch (invocation.verb) {
    case Invocation::Verb::kPrint:
      text::print("{}", invocation.text);
      return 0;
    case Invocation::Verb::kDoctor: {
      const auto findings = examine_machine("");
      text::print("{}", to_text(findings));
      return std::ranges::any_of(
                 findings,
                 [](const Finding& finding) { return finding.kind == Finding::Kind::kProblem; })
                 ? 1
                 : 0;
    }
    case Invocation::Verb::kInspect: {
      const auto& paths = invocation.paths;
      const Report report = paths.size() == 1 ? inspect(paths[0]) : diff(paths[0], paths[1]);
      text::print("{}", report.text);
      return report.code;
    }
    case Invocation::Verb::kVerify:
      return verify_runs(invocation.paths[0], invocation.paths[1]);
    case Invocation::Verb::kScale: {
      Json request = Json::object();
      if (invocation.ranks) request["ranks"] = *invocation.ranks;
      if (invocation.leave) request["leave"] = *invocation.leave;
      text::print("{}\n", ask_job(invocation.job, request).get<std::string>());
      return 0;
    }
    case Invocation::Verb::kTop:
      return run_top(invocation.job, invocation.every_s);
    case Invocation::Verb::kJobs:
      return print_jobs();
    case Invocation::Verb::kSecret:
      if (invocation.paths.empty()) {
        text::print("{}\n", make_secret());
      } else {
        write_secret(invocation.paths[0]);
      }
      return 0;
    case Invocation::Verb::kRun: {
      if (invocation.run.is_dry) {
        text::print("{}", describe_run(invocation.run));
        return 0;
      }
      const int code = run_guarded([&] { return run(invocation.run); }, invocation.run.stop_grace);
      if (code > 128) remove_dead_jobs();  // by a signal
      return code;
    }
  }
  return 0;
} catch (const lockstep::BadArguments& error) {
  lockstep::text::print(stderr, "lockstep: {} (lockstep --help shows examples)\n", error.what());
  return 2;
} catch (const lockstep::Error& error) {
  lockstep::text::print(stderr, "lockstep: {}\n", lockstep::printable_lines(error.message()));
  return 1;
} catch (const std::exception& error) {  // such as no memory
  lockstep::text::print(stderr, "lockstep: {}\n", lockstep::printable_lines(error.what()));
  return 1;
}
