#include "launch/doctor.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "support/fake_system.h"

namespace lockstep::test {
namespace {

Finding find(const std::vector<Finding>& findings, const std::string& subject) {
  const auto found = std::ranges::find(findings, subject, &Finding::subject);
  if (found == findings.end()) throw std::runtime_error("nothing is said of " + subject);
  return *found;
}

TEST(Doctor, SeesWhatIsWrongAndSaysWhatToDo) {
  FakeSystem system;
  system.write("/proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 8388608 kB");
  system.write("/proc/self/cgroup", "0::/pod");
  system.write("/sys/fs/cgroup/pod/cpu.max", "50000 100000");
  system.write("/sys/fs/cgroup/pod/memory.max", "300000000");
  system.write("/sys/fs/cgroup/pod/memory.current", "100000000");
  system.write("/sys/kernel/mm/transparent_hugepage/shmem_enabled",
               "always within_size advise [never] deny force");
  system.write("/sys/devices/system/cpu/online", "0-1023");
  const auto findings = examine_machine(system.root());
  EXPECT_EQ(find(findings, "cores").kind, Finding::Kind::kNote);
  EXPECT_NE(find(findings, "cores").text.find("of the machine's 1024"), std::string::npos);
  EXPECT_EQ(find(findings, "cpu quota").text, "0.5 cores' worth of time");
  EXPECT_EQ(find(findings, "cpu quota").kind, Finding::Kind::kNote);
  EXPECT_EQ(find(findings, "memory").kind, Finding::Kind::kProblem);
  EXPECT_EQ(find(findings, "memory").text,
            "0.2 GiB for processes and shared segments (the cgroup's limit)");
  EXPECT_EQ(find(findings, "huge pages").kind, Finding::Kind::kNote);
  for (const Finding& finding : findings) {
    EXPECT_EQ(finding.kind == Finding::Kind::kFine, finding.remedy.empty()) << finding.subject;
  }
  const std::string text = to_text(findings);
  EXPECT_NE(text.find("PROBLEM  memory"), std::string::npos) << text;
}

TEST(Doctor, IsContentWithAGoodMachine) {
  FakeSystem system;
  system.write("/proc/meminfo", "MemAvailable: 8388608 kB");
  system.write("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] never");
  const auto findings = examine_machine(system.root());
  EXPECT_EQ(find(findings, "memory").text, "8.0 GiB for processes and shared segments");
  for (const char* subject : {"cores", "cpu quota", "memory", "huge pages", "shared memory"}) {
    EXPECT_EQ(find(findings, subject).kind, Finding::Kind::kFine) << subject;
  }
}

}  // namespace
}  // namespace lockstep::test
