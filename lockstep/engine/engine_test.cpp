// The C++ view of the ABI over a table whose entries the test bends: what a plug-in may leave out, what is
// refused, and how its statuses become errors.
#include "lockstep/engine/engine.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "lockstep/engine/loader.h"

struct lockstep_comm {};
struct lockstep_handle {};

namespace lockstep::comm {
namespace {

// What the fake engine answers, and what it saw. One test at a time.
struct Script {
  lockstep_status create = LOCKSTEP_OK, post = LOCKSTEP_OK, test = LOCKSTEP_OK, wait = LOCKSTEP_OK;
  lockstep_status failure = LOCKSTEP_OK;
  std::int64_t lost_pid = 77;
  const char* words = "";
  bool null_handle = false;
  int released = 0;
  std::vector<std::string> calls;
};
Script script;
lockstep_comm the_comm;
lockstep_handle the_handle;

void say(char* to, size_t capacity, const char* words) {
  std::snprintf(to, capacity, "%s", words);
}

lockstep_engine full_table() {
  return {
      .struct_size = sizeof(lockstep_engine),
      .abi_version = LOCKSTEP_ENGINE_ABI_VERSION,
      .name = "Scripted",
      .capabilities =
          [](lockstep_capabilities* out) {
            out->op_kinds = 1u << LOCKSTEP_BARRIER;
            out->reduce[LOCKSTEP_F32] = 1u << LOCKSTEP_SUM;
            return LOCKSTEP_OK;
          },
      .comm_create =
          [](const lockstep_comm_config*, lockstep_comm** out, char* error, size_t capacity) {
            *out = script.create == LOCKSTEP_OK ? &the_comm : nullptr;
            say(error, capacity, script.words);
            return script.create;
          },
      .comm_destroy =
          [](lockstep_comm*, const char* cause) {
            script.calls.push_back(cause ? std::string("destroy ") + cause : "destroy");
          },
      .comm_abort = [](lockstep_comm*,
                       const char* reason) { script.calls.push_back(std::string("abort ") + reason); },
      .comm_failure =
          [](lockstep_comm*, char* error, size_t capacity, int32_t* rank, int64_t* pid, char* cause,
             size_t cause_capacity) {
            *rank = 3;
            *pid = script.lost_pid;
            say(error, capacity, "the first failure");
            say(cause, cause_capacity, "killed by SIGKILL");
            return script.failure;
          },
      .alloc = nullptr,
      .free = nullptr,
      .post =
          [](lockstep_comm*, const lockstep_op*, lockstep_handle** out) {
            *out = script.null_handle ? nullptr : &the_handle;
            return script.post;
          },
      .test = [](lockstep_handle*) { return script.test; },
      .wait = [](lockstep_handle*, int64_t) { return script.wait; },
      .release = [](lockstep_handle*) { ++script.released; },
      .last_error = [](lockstep_handle*, char* error,
                       size_t capacity) { say(error, capacity, "words of the handle"); },
      .run = nullptr,
      .comm_leave =
          [](lockstep_comm*, const char* cause) {
            script.calls.push_back(cause ? std::string("leave ") + cause : "leave");
          },
  };
}

class EngineTest : public ::testing::Test {
 protected:
  void SetUp() override { script = Script{}; }
  std::shared_ptr<Communicator> join(const Engine& engine) {
    return Communicator::create(
        engine, {.struct_size = sizeof(lockstep_comm_config), .rank = 0, .size = 2, .name = "g"});
  }
  lockstep_engine table_ = full_table();
};

Failure refusal(const lockstep_engine* table) {
  try {
    Engine(table, "here.so");
  } catch (const Error& error) {
    return error.failure();
  }
  return {};
}

TEST_F(EngineTest, RefusesATableBuiltForAnotherVersion) {
  table_.abi_version = 9;
  const auto failure = refusal(&table_);
  EXPECT_EQ(failure.kind, ErrorKind::kUnsupported);
  EXPECT_NE(failure.message.find("here.so"), std::string::npos);
  EXPECT_NE(failure.message.find("version 9"), std::string::npos);
}

TEST_F(EngineTest, RefusesATableThatEndsTooEarly) {
  table_.struct_size = offsetof(lockstep_engine, run) - 1;
  EXPECT_NE(refusal(&table_).message.find("struct_size"), std::string::npos);
  table_.struct_size = 3;
  EXPECT_EQ(refusal(&table_).kind, ErrorKind::kUnsupported);
}

TEST_F(EngineTest, RefusesATableWithAHoleAndNamesIt) {
  table_.wait = nullptr;
  EXPECT_NE(refusal(&table_).message.find("no wait"), std::string::npos);
}

TEST_F(EngineTest, ReadsNothingBeyondTheTablesOwnSize) {
  table_.run = [](lockstep_comm*, const lockstep_op*, char*, size_t) { return LOCKSTEP_INTERNAL; };
  table_.struct_size = offsetof(lockstep_engine, run);
  const Engine engine(&table_, "short.so");
  EXPECT_EQ(engine.table().run, nullptr);
  EXPECT_EQ(engine.table().comm_leave, nullptr);
}

TEST_F(EngineTest, ReportsItsCapabilities) {
  const Engine engine(&table_, "x");
  EXPECT_TRUE(engine.offers(LOCKSTEP_BARRIER));
  EXPECT_FALSE(engine.offers(LOCKSTEP_BROADCAST));
  EXPECT_TRUE(engine.reduces(LOCKSTEP_F32, LOCKSTEP_SUM));
  EXPECT_FALSE(engine.reduces(LOCKSTEP_F32, LOCKSTEP_MAX));
}

TEST_F(EngineTest, AFailedCreationCarriesTheEnginesMessageAndKind) {
  script.create = LOCKSTEP_TIMEOUT;
  script.words = "rank 1 never came";
  const Engine engine(&table_, "x");
  try {
    join(engine);
    FAIL();
  } catch (const DistBackendError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
    EXPECT_NE(std::string(error.what()).find("rank 1 never came"), std::string::npos);
  }
}

TEST_F(EngineTest, RunFallsBackToPostAndWaitAndReleasesTheHandle) {
  const Engine engine(&table_, "x");
  const auto comm = join(engine);
  char error[kErrorCapacity];
  EXPECT_EQ(comm->run({}, error), LOCKSTEP_OK);
  EXPECT_EQ(script.released, 1);
  script.wait = LOCKSTEP_ABORTED;
  EXPECT_EQ(comm->run({}, error), LOCKSTEP_ABORTED);
  EXPECT_STREQ(error, "words of the handle");
  EXPECT_EQ(script.released, 2);
}

// The entries that a table of before there were devices does not have.
lockstep_engine device_table() {
  lockstep_engine table = full_table();
  table.capabilities = [](lockstep_capabilities* out) {
    out->device_kinds = 1u << LOCKSTEP_CUDA;
    return LOCKSTEP_OK;
  };
  table.stream_wait = [](lockstep_handle*, void* stream) {
    script.calls.push_back(stream == &script ? "stream_wait" : "another stream");
    return script.wait;
  };
  return table;
}

TEST_F(EngineTest, RunOnDeviceMemoryOrdersTheStreamAndDoesNotWait) {
  table_ = device_table();
  table_.wait = [](lockstep_handle*, int64_t) { return LOCKSTEP_INTERNAL; };
  const Engine engine(&table_, "x");
  EXPECT_TRUE(engine.takes(LOCKSTEP_CUDA));
  EXPECT_FALSE(engine.takes(LOCKSTEP_HOST_MEMORY));
  const auto comm = join(engine);
  char error[kErrorCapacity];
  const lockstep_op op{.device_kind = LOCKSTEP_CUDA, .stream = &script};
  EXPECT_EQ(comm->run(op, error), LOCKSTEP_OK);
  EXPECT_EQ(script.calls, std::vector<std::string>{"stream_wait"});
  EXPECT_EQ(script.released, 1);
  script.wait = LOCKSTEP_PEER_LOST;
  EXPECT_EQ(comm->run(op, error), LOCKSTEP_PEER_LOST);
  EXPECT_STREQ(error, "words of the handle");
}

TEST_F(EngineTest, RefusesAnEngineForDeviceMemoryThatCannotOrderAStream) {
  table_ = device_table();
  table_.stream_wait = nullptr;
  EXPECT_NE(refusal(&table_).message.find("stream_wait"), std::string::npos);
}

TEST_F(EngineTest, APostThatGivesNoHandleIsAnErrorEvenWhenItSaysOk) {
  const Engine engine(&table_, "x");
  const auto comm = join(engine);
  script.null_handle = true;
  OpHandle handle;
  EXPECT_EQ(comm->post({}, handle), LOCKSTEP_INTERNAL);
  EXPECT_FALSE(handle);
}

TEST_F(EngineTest, AWaitThatTimesOutIsPendingUnlessTheOperationItselfTimedOut) {
  const Engine engine(&table_, "x");
  const auto comm = join(engine);
  OpHandle handle;
  ASSERT_EQ(comm->post({}, handle), LOCKSTEP_OK);
  script.wait = LOCKSTEP_TIMEOUT;
  script.test = LOCKSTEP_PENDING;
  EXPECT_EQ(handle.wait(Deadline::now()), LOCKSTEP_PENDING);
  script.test = LOCKSTEP_TIMEOUT;
  EXPECT_EQ(handle.wait(Deadline::now()), LOCKSTEP_TIMEOUT);
}

TEST_F(EngineTest, ALostPeerIsNamed) {
  const Engine engine(&table_, "x");
  const auto comm = join(engine);
  script.failure = LOCKSTEP_PEER_LOST;
  const Failure failure = comm->failure(LOCKSTEP_PEER_LOST, "");
  EXPECT_EQ(failure.kind, ErrorKind::kPeerLost);
  EXPECT_EQ(failure.message, "the first failure");
  ASSERT_TRUE(failure.peer);
  EXPECT_EQ(failure.peer->rank, 3);
  EXPECT_EQ(failure.peer->pid, 77);
  EXPECT_EQ(failure.peer->cause, "killed by SIGKILL");
}

TEST_F(EngineTest, ALostPeerWhosePidTheEngineDoesNotKnowHasNone) {
  const Engine engine(&table_, "x");
  const auto comm = join(engine);
  script.failure = LOCKSTEP_PEER_LOST;
  script.lost_pid = -1;
  const Failure failure = comm->failure(LOCKSTEP_PEER_LOST, "");
  ASSERT_TRUE(failure.peer);
  EXPECT_EQ(failure.peer->rank, 3);
  EXPECT_EQ(failure.peer->pid, std::nullopt);
}

TEST_F(EngineTest, LeavesOnceAndDestroysWhenTheLastOwnerGoes) {
  const Engine engine(&table_, "x");
  auto comm = join(engine);
  comm->leave("rank 0 threw");
  comm->leave("");
  EXPECT_EQ(script.calls, std::vector<std::string>{"leave rank 0 threw"});
  comm.reset();
  EXPECT_EQ(script.calls.back(), "destroy");
}

TEST_F(EngineTest, AnEngineThatCannotLeaveEarlyIsAbortedWhenThereIsACause) {
  table_.comm_leave = nullptr;
  const Engine engine(&table_, "x");
  auto comm = join(engine);
  comm->leave("out of data");
  comm.reset();
  EXPECT_EQ(script.calls, (std::vector<std::string>{"abort out of data", "destroy out of data"}));
}

TEST_F(EngineTest, AnEngineWithoutMemoryRaises) {
  const Engine engine(&table_, "x");
  const auto comm = join(engine);
  EXPECT_FALSE(comm->has_memory());
  EXPECT_THROW(comm->alloc(8), DistBackendError);
}

TEST_F(EngineTest, EveryErrorKindKeepsItsMeaningAcrossTheLine) {
  for (int k = 0; k <= static_cast<int>(ErrorKind::kInternal); ++k) {
    const auto kind = static_cast<ErrorKind>(k);
    EXPECT_EQ(kind_of(status_of(kind)), kind);
  }
}

TEST_F(EngineTest, TheRegistryFindsByNameInAnyCaseAndRefusesASecondOfTheSameName) {
  EngineRegistry registry;
  const Engine& engine = registry.add(Engine(&table_, "first.so"));
  EXPECT_EQ(registry.find("SCRIPTED"), &engine);
  EXPECT_EQ(registry.find("gloo"), nullptr);
  try {
    registry.add(Engine(&table_, "second.so"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_NE(std::string(error.what()).find("first.so"), std::string::npos);
  }
  EXPECT_EQ(registry.names(), std::vector<std::string>{"Scripted"});
}

}  // namespace
}  // namespace lockstep::comm
