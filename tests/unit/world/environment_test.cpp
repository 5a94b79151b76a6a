// Every launcher's variables, as recorded from it, and what is wrong with half of them.

#include "world/environment.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>

namespace lockstep {
namespace {

std::string refusal(const Environment& environment) {
  try {
    const Placement placement = read_placement(environment);
    return "accepted as rank " + std::to_string(placement.rank);
  } catch (const UsageError& error) {
    return error.message();
  }
}

void expect_tcp(const Placement& placement, const std::string& host, int port) {
  const auto* tcp = std::get_if<TcpAddress>(&placement.store);
  ASSERT_NE(tcp, nullptr);
  EXPECT_EQ(tcp->host, host);
  EXPECT_EQ(tcp->port, port);
}

TEST(Placement, AloneWithoutVariables) {
  const Placement placement = read_placement({});
  EXPECT_EQ(placement.rank, 0);
  EXPECT_EQ(placement.size, 1);
  EXPECT_TRUE(std::holds_alternative<InProcess>(placement.store));
}

TEST(Placement, Lockstep) {
  const Placement placement = read_placement(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"LOCKSTEP_STORE", "fd:7"}});
  EXPECT_EQ(placement.launcher, "lockstep");
  EXPECT_EQ(std::get<InheritedFd>(placement.store).fd, 7);
  EXPECT_EQ(placement.local_rank, 1);
}

TEST(Placement, LockstepOnSeveralHosts) {
  const Placement placement = read_placement({{"RANK", "5"},
                                              {"WORLD_SIZE", "8"},
                                              {"LOCAL_RANK", "1"},
                                              {"MASTER_ADDR", "10.0.0.1"},
                                              {"MASTER_PORT", "29501"},
                                              {"TORCHELASTIC_RESTART_COUNT", "2"},
                                              {"LOCKSTEP_STORE", "launcher:9"}});
  EXPECT_EQ(placement.launcher, "lockstep");
  EXPECT_EQ(std::get<LauncherSocket>(placement.store).fd, 9);
  EXPECT_EQ(std::get<LauncherSocket>(placement.store).master_address, "10.0.0.1");
  EXPECT_EQ(placement.generation, 2);
}

TEST(Placement, Torchrun) {
  const Placement placement = read_placement({{"RANK", "3"},
                                              {"WORLD_SIZE", "4"},
                                              {"LOCAL_RANK", "1"},
                                              {"LOCAL_WORLD_SIZE", "2"},
                                              {"MASTER_ADDR", "10.0.0.1"},
                                              {"MASTER_PORT", "29501"},
                                              {"TORCHELASTIC_RESTART_COUNT", "2"},
                                              {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  EXPECT_EQ(placement.launcher, "torchrun");
  EXPECT_EQ(placement.rank, 3);
  EXPECT_EQ(placement.generation, 2);
  expect_tcp(placement, "10.0.0.1", 29501);
  EXPECT_TRUE(std::get<TcpAddress>(placement.store).is_served_by_launcher);
}

TEST(Placement, OpenMpiOnOneHost) {
  const Placement placement = read_placement({{"OMPI_COMM_WORLD_RANK", "1"},
                                              {"OMPI_COMM_WORLD_SIZE", "2"},
                                              {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_EQ(placement.launcher, "OpenMPI");
  EXPECT_EQ(placement.rank, 1);
  EXPECT_EQ(std::get<LauncherFile>(placement.store).rank_variable, "OMPI_COMM_WORLD_RANK");
}

TEST(Placement, OpenMpiOnSeveralHostsNeedsAnAddress) {
  EXPECT_NE(refusal({{"OMPI_COMM_WORLD_RANK", "1"},
                     {"OMPI_COMM_WORLD_SIZE", "4"},
                     {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}})
                .find("-x MASTER_ADDR"),
            std::string::npos);
  expect_tcp(read_placement({{"OMPI_COMM_WORLD_RANK", "1"},
                             {"OMPI_COMM_WORLD_SIZE", "4"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                             {"MASTER_ADDR", "a1"},
                             {"MASTER_PORT", "4000"}}),
             "a1", 4000);
}

TEST(Placement, HydraOfMpichAndIntelMpi) {
  const Placement placement = read_placement({{"PMI_RANK", "2"},
                                              {"PMI_SIZE", "3"},
                                              {"PMI_FD", "6"},
                                              {"MPI_LOCALRANKID", "2"},
                                              {"MPI_LOCALNRANKS", "3"}});
  EXPECT_EQ(placement.launcher, "PMI");
  EXPECT_EQ(placement.rank, 2);
  EXPECT_EQ(placement.local_rank, 2);
  EXPECT_TRUE(std::holds_alternative<LauncherFile>(placement.store));
}

TEST(Placement, SlurmOnSeveralHosts) {
  const Placement placement = read_placement({{"SLURM_PROCID", "5"},
                                              {"SLURM_STEP_NUM_TASKS", "8"},
                                              {"SLURM_LOCALID", "1"},
                                              {"SLURM_STEP_ID", "0"},
                                              {"SLURM_STEP_NUM_NODES", "2"},
                                              {"SLURM_JOB_ID", "12345"},
                                              {"SLURM_STEP_NODELIST", "gpu[003-004]"}});
  EXPECT_EQ(placement.launcher, "Slurm");
  EXPECT_EQ(placement.rank, 5);
  expect_tcp(placement, "gpu003", 20000 + 345);
}

TEST(Placement, SlurmNamesItsFirstHostInManyWays) {
  const std::pair<const char*, const char*> cases[] = {{"a", "a"},        {"a,b", "a"},
                                                       {"n[1,3]", "n1"},  {"n[07]", "n07"},
                                                       {"x,n[1-2]", "x"}, {"n[1-2],m[3-4]", "n1"}};
  for (const auto& [list, first] : cases) {
    expect_tcp(read_placement({{"SLURM_PROCID", "0"},
                               {"SLURM_STEP_NUM_TASKS", "2"},
                               {"SLURM_STEP_ID", "0"},
                               {"SLURM_STEP_NUM_NODES", "2"},
                               {"SLURM_JOB_ID", "0"},
                               {"SLURM_STEP_NODELIST", list}}),
               first, 20000);
  }
}

TEST(Placement, SlurmOnOneHostNeedsNoPort) {
  EXPECT_TRUE(std::holds_alternative<LauncherFile>(read_placement({{"SLURM_PROCID", "0"},
                                                                   {"SLURM_STEP_NUM_TASKS", "2"},
                                                                   {"SLURM_STEP_ID", "3"},
                                                                   {"SLURM_STEP_NUM_NODES", "1"}})
                                                       .store));
}

TEST(Placement, InAnAllocationWithoutSrunItIsAlone) {
  EXPECT_EQ(
      read_placement({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "1"}}).size,
      1);
}

TEST(Placement, NearerLaunchersComeFirst) {
  const Environment both = {{"SLURM_PROCID", "0"},         {"SLURM_STEP_NUM_TASKS", "1"},
                            {"SLURM_STEP_ID", "0"},        {"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  EXPECT_EQ(read_placement(both).launcher, "OpenMPI");
}

TEST(Placement, HalfASetNamesWhatIsThereAndWhatIsNot) {
  EXPECT_EQ(refusal({{"RANK", "1"}}),
            "WORLD_SIZE is not set, but RANK=1 is: half of what torchrun or lockstep sets.\n"
            "Start the program with a launcher, set both, or unset both to run alone.");
  EXPECT_NE(refusal({{"WORLD_SIZE", "2"}}).find("RANK is not set, but WORLD_SIZE=2 is"),
            std::string::npos);
  EXPECT_NE(refusal({{"PMI_SIZE", "2"}}).find("PMI_RANK is not set, but PMI_SIZE=2 is"),
            std::string::npos);
  EXPECT_NE(refusal({{"MASTER_ADDR", "h"}}).find("not set, but MASTER_ADDR=h is"),
            std::string::npos);
  EXPECT_NE(refusal({{"LOCAL_RANK", "0"}}).find("not set, but LOCAL_RANK=0 is"), std::string::npos);
  EXPECT_NE(
      refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}}).find("MASTER_ADDR and MASTER_PORT are not"),
      std::string::npos);
  EXPECT_NE(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}})
                .find("MASTER_PORT is not set, but MASTER_ADDR=h is"),
            std::string::npos);
}

TEST(Placement, ValuesThatCannotBe) {
  EXPECT_NE(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}}).find("RANK=2 is out of range"),
            std::string::npos);
  EXPECT_NE(refusal({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}).find("RANK is '-1'"), std::string::npos);
  EXPECT_NE(refusal({{"RANK", "0"}, {"WORLD_SIZE", "0"}}).find("WORLD_SIZE is '0'"),
            std::string::npos);
  EXPECT_NE(
      refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "70000"}})
          .find("MASTER_PORT is 70000"),
      std::string::npos);
  EXPECT_NE(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCKSTEP_STORE", "/tmp/x"}})
                .find("LOCKSTEP_STORE is '/tmp/x'"),
            std::string::npos);
}

}  // namespace
}  // namespace lockstep
