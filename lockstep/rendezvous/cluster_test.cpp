// Detection over made-up environments, one row per launcher and per mistake.
#include <gtest/gtest.h>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/rendezvous/clean_environment.h"
#include "lockstep/rendezvous/internal/detect.h"
#include "lockstep/rendezvous/internal/nodelist.h"
#include "lockstep/rendezvous/rendezvous.h"

namespace lockstep {
namespace {

using internal::port_of_job;

struct Row {
  const char* name;
  Variables variables;
  Cluster expected;
};

class DetectCluster : public testing::TestWithParam<Row> {};

const Row kRows[] = {
    {"Nothing", {}, {}},
    {"AnAddressOnly", {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}}, {"none", {}, {}, {}, {}, {}, {}, "a", 1}},
    {"Torchrun",
     {{"RANK", "5"},
      {"WORLD_SIZE", "8"},
      {"LOCAL_RANK", "1"},
      {"LOCAL_WORLD_SIZE", "4"},
      {"GROUP_RANK", "1"},
      {"GROUP_WORLD_SIZE", "2"},
      {"MASTER_ADDR", "node1"},
      {"MASTER_PORT", "29500"},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"}},
     {"torchrun", 5, 8, 1, 4, 1, 2, "node1", 29500, true}},
    {"TorchrunBeforeAllOthers",
     {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}},
     {"torchrun", 1, 2}},
    {"PetWithOneRankPerHost",
     {{"PET_NNODES", "4"}, {"PET_NODE_RANK", "3"}, {"PET_MASTER_ADDR", "m"}, {"PET_MASTER_PORT", "7"}},
     {"PET", 3, 4, 0, 1, 3, 4, "m", 7}},
    {"PetWithSeveral",
     {{"PET_NNODES", "2"},
      {"PET_NODE_RANK", "1"},
      {"PET_NPROC_PER_NODE", "4"},
      {"LOCAL_RANK", "2"},
      {"MASTER_ADDR", "m"}},
     {"PET", 6, 8, 2, 4, 1, 2, "m"}},
    {"PetOfOneHost", {{"PET_NNODES", "1"}}, {"PET", 0, 1, 0, 1, 0, 1}},
    {"OpenMpiOnOneHost",
     {{"OMPI_COMM_WORLD_RANK", "1"},
      {"OMPI_COMM_WORLD_SIZE", "2"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
      {"OMPI_MCA_ess_base_jobid", "77"},
      {"PMIX_NAMESPACE", "ns77"},
      {"PMIX_RANK", "1"}},
     {"Open MPI", 1, 2, 1, 2, {}, {}, "127.0.0.1", port_of_job("PMIX_NAMESPACE=ns77")}},
    {"OpenMpiAcrossHosts",
     {{"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
     {"Open MPI", 3, 4, {}, 2}},
    {"OpenMpiWithAnAddress",
     {{"OMPI_COMM_WORLD_RANK", "3"},
      {"OMPI_COMM_WORLD_SIZE", "4"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
      {"MASTER_ADDR", "node1"},
      {"MASTER_PORT", "1234"}},
     {"Open MPI", 3, 4, {}, 2, {}, {}, "node1", 1234}},
    {"OpenMpiInsideASlurmJob",
     {{"OMPI_COMM_WORLD_RANK", "3"},
      {"OMPI_COMM_WORLD_SIZE", "4"},
      {"SLURM_PROCID", "0"},
      {"SLURM_NTASKS", "2"}},
     {"Open MPI", 3, 4}},
    {"PmiOnOneHost",
     {{"PMI_RANK", "0"},
      {"PMI_SIZE", "3"},
      {"MPI_LOCALRANKID", "0"},
      {"MPI_LOCALNRANKS", "3"},
      {"MASTER_PORT", "9"}},
     {"PMI", 0, 3, 0, 3, {}, {}, "127.0.0.1", 9}},
    {"PmiInsideASlurmJob",
     {{"PMI_RANK", "2"},
      {"PMI_SIZE", "3"},
      {"MPI_LOCALRANKID", "2"},
      {"SLURM_PROCID", "0"},
      {"SLURM_NTASKS", "3"}},
     {"PMI", 2, 3, 2}},
    {"Pmix",
     {{"PMIX_RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}, {"PMIX_NAMESPACE", "n"}},
     {"PMIx", 1, 2, {}, 2, {}, {}, "127.0.0.1", port_of_job("PMIX_NAMESPACE=n")}},
    {"SlurmAcrossHosts",
     {{"SLURM_PROCID", "5"},
      {"SLURM_NTASKS", "8"},
      {"SLURM_LOCALID", "1"},
      {"SLURM_NODEID", "1"},
      {"SLURM_NTASKS_PER_NODE", "4"},
      {"SLURM_STEP_NUM_NODES", "2"},
      {"SLURM_STEP_NODELIST", "node[003-004]"},
      {"SLURM_NODELIST", "node[001-009]"},
      {"SLURM_JOB_ID", "4711"},
      {"SLURM_STEP_ID", "0"}},
     {"Slurm", 5, 8, 1, 4, 1, 2, "node003", port_of_job("SLURM_JOB_ID=4711.0")}},
    {"SlurmOnOneHost",
     {{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_STEP_NODELIST", "gpu1"}, {"SLURM_JOB_ID", "12"}},
     {"Slurm", 1, 2, {}, 2, {}, 1, "127.0.0.1", port_of_job("SLURM_JOB_ID=12.")}},
    {"SrunWithPmix",
     {{"SLURM_PROCID", "1"},
      {"SLURM_NTASKS", "2"},
      {"SLURM_STEP_NODELIST", "a,b"},
      {"PMIX_RANK", "1"},
      {"PMI_RANK", "1"},
      {"PMI_SIZE", "2"},
      {"MASTER_PORT", "80"}},
     {"Slurm", 1, 2, {}, {}, {}, 2, "a", 80}},
    {"SallocShellIsNoTask", {{"SLURM_NTASKS", "2"}, {"SLURM_JOB_ID", "1"}}, {}},
};

INSTANTIATE_TEST_SUITE_P(Environments, DetectCluster, testing::ValuesIn(kRows),
                         [](const auto& test) { return test.param.name; });

TEST_P(DetectCluster, FindsThePlaceAndWhoSaidSo) {
  const CleanEnvironment environment(GetParam().variables);
  const Cluster found = detect_cluster();
  const Cluster& expected = GetParam().expected;
  EXPECT_EQ(found.source, expected.source);
  EXPECT_EQ(found.rank, expected.rank);
  EXPECT_EQ(found.world_size, expected.world_size);
  EXPECT_EQ(found.local_rank, expected.local_rank);
  EXPECT_EQ(found.local_world_size, expected.local_world_size);
  EXPECT_EQ(found.node_rank, expected.node_rank);
  EXPECT_EQ(found.n_nodes, expected.n_nodes);
  EXPECT_EQ(found.master_addr, expected.master_addr);
  EXPECT_EQ(found.master_port, expected.master_port);
  EXPECT_EQ(found.agent_store, expected.agent_store);
}

struct Mistake {
  const char* name;
  Variables variables;
  std::vector<std::string> words;
};

class DetectMistake : public testing::TestWithParam<Mistake> {};

const Mistake kMistakes[] = {
    {"RankAlone", {{"RANK", "1"}}, {"WORLD_SIZE is not set", "RANK=1"}},
    {"WorldSizeAlone", {{"WORLD_SIZE", "2"}}, {"RANK is not set", "WORLD_SIZE=2"}},
    {"NotANumber", {{"RANK", "first"}, {"WORLD_SIZE", "2"}}, {"RANK", "\"first\""}},
    {"NegativeRank", {{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, {"RANK", "\"-1\""}},
    {"EmptyWorld", {{"RANK", "0"}, {"WORLD_SIZE", "0"}}, {"WORLD_SIZE", "from 1"}},
    {"RankBeyondTheWorld", {{"RANK", "2"}, {"WORLD_SIZE", "2"}}, {"RANK is 2", "0 to 1"}},
    {"PortBeyondTheRange",
     {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "65536"}},
     {"MASTER_PORT", "0 to 65535"}},
    {"PetWithoutNodeRank", {{"PET_NNODES", "2"}}, {"PET_NODE_RANK is not set"}},
    {"PetWithoutNodes", {{"PET_NODE_RANK", "0"}}, {"PET_NNODES is not set"}},
    {"PetElasticRange", {{"PET_NNODES", "1:4"}, {"PET_NODE_RANK", "0"}}, {"PET_NNODES", "\"1:4\""}},
    {"PetWithoutLocalRank", {{"PET_NNODES", "1"}, {"PET_NPROC_PER_NODE", "4"}}, {"LOCAL_RANK is not set"}},
    {"OpenMpiWithoutSize", {{"OMPI_COMM_WORLD_RANK", "0"}}, {"OMPI_COMM_WORLD_SIZE is not set"}},
    {"PmiWithoutRank", {{"PMI_SIZE", "2"}}, {"PMI_RANK is not set"}},
    {"PmixTellsNoSize", {{"PMIX_RANK", "0"}}, {"WORLD_SIZE is not set", "PMIX_RANK=0"}},
    {"SlurmWithoutSize", {{"SLURM_PROCID", "0"}}, {"SLURM_NTASKS is not set"}},
    {"SlurmWithABadList",
     {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_STEP_NODELIST", "node[1-"}},
     {"node[1-"}},
};

INSTANTIATE_TEST_SUITE_P(Environments, DetectMistake, testing::ValuesIn(kMistakes),
                         [](const auto& test) { return test.param.name; });

TEST_P(DetectMistake, NamesTheVariable) {
  const CleanEnvironment environment(GetParam().variables);
  try {
    detect_cluster();
    FAIL() << "raised nothing";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    for (const auto& word : GetParam().words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  }
}

std::string logged;

TEST(DetectClusterLog, SaysAtInfoWhatWasFoundAndWhere) {
  const CleanEnvironment environment(
      {{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_STEP_NODELIST", "n[4-5]"}});
  logged.clear();
  set_log_level(LogLevel::kInfo);
  set_log_sink([](LogLevel level, std::string_view text) {
    if (level == LogLevel::kInfo) logged += base::cat(text, '\n');
  });
  const Cluster cluster = detect_cluster();
  set_log_sink(nullptr);
  set_log_level(LogLevel::kWarn);
  for (const std::string word : {"Slurm", "rank 1 of 2", "SLURM_PROCID", "SLURM_NTASKS", "n4"}) {
    EXPECT_NE(logged.find(word), std::string::npos) << word << " is not in: " << logged;
  }
  EXPECT_NE(cluster.details.find("SLURM_PROCID"), std::string::npos);
}

TEST(PortOfJob, IsStableAndOutsideTheEphemeralRange) {
  EXPECT_EQ(port_of_job("a"), port_of_job("a"));
  EXPECT_NE(port_of_job("SLURM_JOB_ID=1.0"), port_of_job("SLURM_JOB_ID=1.1"));
  for (int i = 0; i < 1000; ++i) {
    const int port = port_of_job(std::to_string(i));
    EXPECT_TRUE(port >= 20000 && port < 32768) << port;
  }
}

using Hosts = std::vector<std::string>;

TEST(Nodelist, ExpandsWhatSlurmWrites) {
  using internal::expand_nodelist;
  EXPECT_EQ(expand_nodelist("gpu1"), (Hosts{"gpu1"}));
  EXPECT_EQ(expand_nodelist("node[003-005,9],gpu1"),
            (Hosts{"node003", "node004", "node005", "node9", "gpu1"}));
  EXPECT_EQ(expand_nodelist("a,b"), (Hosts{"a", "b"}));
  EXPECT_EQ(expand_nodelist("r[1-2]n[08-09]"), (Hosts{"r1n08", "r1n09", "r2n08", "r2n09"}));
  EXPECT_EQ(expand_nodelist("n[98-101]-ib"), (Hosts{"n98-ib", "n99-ib", "n100-ib", "n101-ib"}));
  EXPECT_EQ(expand_nodelist("[1-2]"), (Hosts{"1", "2"}));
}

TEST(Nodelist, RefusesWhatItCannotRead) {
  for (const std::string text :
       {"", ",", "a,", "n[", "n[]", "n[1", "n1]", "n[1-]", "n[-2]", "n[2-1]", "n[x]", "n[1-2", "n[[1]]",
        "n[1-99999999]", "n[1-9999999999]", "n[1-2000]m[1-2000]", "a,,b"}) {
    EXPECT_THROW(internal::expand_nodelist(text), Error) << text;
  }
}

}  // namespace
}  // namespace lockstep
