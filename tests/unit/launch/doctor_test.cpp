#include "launch/doctor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>

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

// A machine with so many devices, and libraries that say so.
class DoctorOfGpus : public testing::Test {
 protected:
  std::vector<Finding> examine(int num_devices, const char* driver_says,
                               bool has_libraries = true) {
    for (int device = 0; device < num_devices; ++device) {
      system_.write("/dev/nvidia" + std::to_string(device), "");
    }
    const std::string folder = system_.root() + "/usr/lib";
    std::filesystem::create_directories(folder);
    for (const char* name : {"/libcuda.so.1", "/libnccl.so.2"}) {
      std::filesystem::remove(folder + name);
      if (has_libraries) std::filesystem::create_symlink(LOCKSTEP_FAKE_CUDA, folder + name);
    }
    ::setenv("FAKE_CUDA", driver_says, 1);
    return examine_machine(system_.root());
  }

 private:
  FakeSystem system_;
};

TEST_F(DoctorOfGpus, NamesDriverNcclAndPeersThatCannotReachEachOther) {
  const auto findings = examine(3, "3");
  EXPECT_EQ(find(findings, "GPU driver").text, "for CUDA 13.1: Model 0, Model 1, Model 2");
  EXPECT_EQ(find(findings, "NCCL").text, "2.29.7");
  EXPECT_EQ(find(findings, "peer access").text, "not between 0 and 1");
  EXPECT_EQ(find(findings, "peer access").kind, Finding::Kind::kNote);
}

TEST_F(DoctorOfGpus, OneHasNoPeers) {
  const auto findings = examine(1, "1");
  EXPECT_EQ(find(findings, "GPU driver").kind, Finding::Kind::kFine);
  EXPECT_THROW(find(findings, "peer access"), std::runtime_error);
}

TEST_F(DoctorOfGpus, ADriverThatIsMissingOrFailsIsAProblem) {
  const Finding missing = find(examine(1, "1", false), "GPU driver");
  EXPECT_EQ(missing.kind, Finding::Kind::kProblem);
  EXPECT_NE(missing.text.find("libcuda.so.1"), std::string::npos) << missing.text;
  const Finding failed = find(examine(1, "-1"), "GPU driver");
  EXPECT_EQ(failed.kind, Finding::Kind::kProblem);
  EXPECT_EQ(failed.text, "cuInit() failed with 999");
}

TEST_F(DoctorOfGpus, WithoutDevicesNothingIsSaidOfDrivers) {
  EXPECT_THROW(find(examine(0, "2"), "GPU driver"), std::runtime_error);
}

}  // namespace
}  // namespace lockstep::test
