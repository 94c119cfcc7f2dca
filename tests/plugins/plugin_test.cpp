// Plug-ins compiled as C: loaded, run by several ranks over a real store, and refused in plain words when
// broken.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/base/error.h"
#include "lockstep/base/path_testing.h"
#include "lockstep/engine/loader.h"
#include "lockstep/group/detail/engine_host.h"
#include "lockstep/store/hash_store.h"
#include "lockstep/store/prefix_store.h"

namespace lockstep {
namespace {

std::string path_of(const std::string& plugin) {
  return path_testing::from_program(PLUGIN_DIR) + "/" + plugin + ".so";
}

std::string refusal(const std::string& path) {
  try {
    comm::load_engine(path);
  } catch (const DistBackendError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    return error.what();
  }
  return "loaded";
}

TEST(Plugins, AreRejectedWithAReasonWhenBroken) {
  EXPECT_NE(refusal(path_of("broken_no_symbol")).find("exports no lockstep_engine_v1"), std::string::npos);
  EXPECT_NE(refusal(path_of("broken_null")).find("returned null"), std::string::npos);
  EXPECT_NE(refusal(path_of("broken_version")).find("version 42"), std::string::npos);
  EXPECT_NE(refusal(path_of("broken_short")).find("struct_size"), std::string::npos);
  EXPECT_NE(refusal(path_of("broken_holes")).find("no capabilities"), std::string::npos);
  EXPECT_NE(refusal("/nowhere/engine.so").find("/nowhere/engine.so"), std::string::npos);
}

// A folder of plug-ins that LOCKSTEP_ENGINE_PATH names.
class PluginFolder {
 public:
  PluginFolder()
      : path_(std::filesystem::temp_directory_path() / ("lockstep-plugins-" + base::random_hex(8))) {
    std::filesystem::create_directory(path_);
    ::setenv("LOCKSTEP_ENGINE_PATH", ("/nowhere:" + path_.string()).c_str(), 1);
  }
  ~PluginFolder() {
    ::unsetenv("LOCKSTEP_ENGINE_PATH");
    std::filesystem::remove_all(path_);
  }
  std::filesystem::path add(const std::string& plugin, const std::string& name) {
    std::filesystem::copy_file(path_of(plugin), path_ / name);
    return path_ / name;
  }

 private:
  const std::filesystem::path path_;
};

TEST(Plugins, AreFoundByTheirNameInTheFoldersOfTheEnvironment) {
  PluginFolder folder;
  comm::EngineRegistry registry;
  EXPECT_EQ(registry.find_or_load("kv"), nullptr);
  const auto path = folder.add("kv_engine", "lockstep_kv.so");
  const comm::Engine* engine = registry.find_or_load("KV");
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->origin(), path.string());
  EXPECT_EQ(registry.find_or_load("kv"), engine);
  EXPECT_EQ(registry.find_or_load("../kv"), nullptr);
}

TEST(Plugins, FoundByNameAreRefusedWhenOthersMayWriteThemOrTheirNameIsAnother) {
  PluginFolder folder;
  comm::EngineRegistry registry;
  const auto refused = [&](const std::string& name) -> std::string {
    try {
      registry.find_or_load(name);
    } catch (const DistBackendError& error) {
      return error.what();
    }
    return "loaded";
  };
  folder.add("kv_engine", "lockstep_other.so");
  EXPECT_NE(refused("other").find("calls itself \"kv\""), std::string::npos) << refused("other");
  ::chmod(folder.add("kv_engine", "lockstep_kv.so").c_str(), 0666);
  EXPECT_NE(refused("kv").find("belong to this user"), std::string::npos) << refused("kv");
}

// One rank's end of a communicator of the C engine, over a store shared by threads.
class KvRank {
 public:
  KvRank(const comm::Engine& engine, Store& store, int rank, int size, Deadline deadline)
      : group_("group", store.clone()),
        host_(internal::EngineHost::Stores::clone(group_, store, store), "failed") {
    comm_ = comm::Communicator::create(engine, {.struct_size = sizeof(lockstep_comm_config),
                                                .host = host_.table(),
                                                .rank = rank,
                                                .size = size,
                                                .name = "test",
                                                .deadline_ns = deadline.monotonic_ns()});
  }
  comm::Communicator& comm() { return *comm_; }
  const lockstep_host* host() { return host_.table(); }

 private:
  PrefixStore group_;
  internal::EngineHost host_;
  std::shared_ptr<comm::Communicator> comm_;
};

Deadline soon() {
  return Deadline::after(std::chrono::seconds(30));
}

void run_ranks(int size, const std::function<void(KvRank&, int)>& body) {
  static comm::EngineRegistry registry;
  const comm::Engine* engine = registry.find("kv");
  if (engine == nullptr) engine = &registry.add(comm::load_engine(path_of("kv_engine")));
  HashStore store;
  std::vector<base::Thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back("rank", [&, rank] {
      KvRank mine(*engine, store, rank, size, soon());
      body(mine, rank);
    });
  }
}

lockstep_op op_of(lockstep_op_kind kind, const void* send, void* recv, std::uint64_t count) {
  return {.struct_size = sizeof(lockstep_op),
          .kind = kind,
          .dtype = LOCKSTEP_F32,
          .reduce = LOCKSTEP_SUM,
          .root = 0,
          .send = send,
          .recv = recv,
          .count = count,
          .deadline_ns = soon().monotonic_ns(),
          .where = nullptr};
}

TEST(Plugins, RunEveryCollectiveAcrossRanks) {
  constexpr int kSize = 3;
  run_ranks(kSize, [](KvRank& mine, int rank) {
    char error[comm::kErrorCapacity];
    const float own[] = {1.0f + static_cast<float>(rank), 10};
    float sum[2] = {own[0], own[1]};
    ASSERT_EQ(mine.comm().run(op_of(LOCKSTEP_ALL_REDUCE, sum, sum, 2), error), LOCKSTEP_OK) << error;
    EXPECT_EQ(sum[0], 6);
    EXPECT_EQ(sum[1], 30);
    float all[2 * kSize] = {};
    ASSERT_EQ(mine.comm().run(op_of(LOCKSTEP_ALL_GATHER, own, all, 2), error), LOCKSTEP_OK) << error;
    for (int r = 0; r < kSize; ++r) EXPECT_EQ(all[2 * r], 1.0f + static_cast<float>(r));
    float part = 0;
    const float parts[kSize] = {0, 1, 2};
    ASSERT_EQ(mine.comm().run(op_of(LOCKSTEP_REDUCE_SCATTER, parts, &part, 1), error), LOCKSTEP_OK) << error;
    EXPECT_EQ(part, 3.0f * static_cast<float>(rank));
    float value = own[0];
    ASSERT_EQ(mine.comm().run(op_of(LOCKSTEP_BROADCAST, &value, &value, 1), error), LOCKSTEP_OK) << error;
    EXPECT_EQ(value, 1);
    EXPECT_EQ(mine.comm().run(op_of(LOCKSTEP_BARRIER, nullptr, nullptr, 0), error), LOCKSTEP_OK) << error;
  });
}

TEST(Plugins, AnOperationThatNoOtherRankJoinsTimesOutAndNamesTheMissing) {
  run_ranks(2, [](KvRank& mine, int rank) {
    if (rank != 0) return;
    auto op = op_of(LOCKSTEP_BARRIER, nullptr, nullptr, 0);
    op.deadline_ns = Deadline::after(Milliseconds(20)).monotonic_ns();
    char error[comm::kErrorCapacity];
    EXPECT_EQ(mine.comm().run(op, error), LOCKSTEP_TIMEOUT);
    EXPECT_STREQ(error, "timed out waiting for rank 1");
  });
}

TEST(Plugins, AnAbortEndsAPostedOperation) {
  run_ranks(2, [](KvRank& mine, int rank) {
    if (rank != 0) return;
    comm::OpHandle handle;
    ASSERT_EQ(mine.comm().post(op_of(LOCKSTEP_BARRIER, nullptr, nullptr, 0), handle), LOCKSTEP_OK);
    EXPECT_EQ(handle.test(), LOCKSTEP_PENDING);
    mine.comm().abort("enough");
    EXPECT_EQ(handle.wait(Deadline::never()), LOCKSTEP_ABORTED);
    EXPECT_EQ(handle.last_error(), "enough");
  });
}

TEST(EngineHost, GetWaitsForTheKeyUntilTheDeadline) {
  HashStore store;
  internal::EngineHost host(internal::EngineHost::Stores::clone(store, store, store), "failed");
  const lockstep_host* table = host.table();
  char value[4];
  size_t length = 0;
  const auto get = [&](const char* key, Deadline deadline) {
    return table->kv_get(table->context, key, value, sizeof value, &length, deadline.monotonic_ns());
  };
  EXPECT_EQ(get("k", Deadline::now()), LOCKSTEP_TIMEOUT);
  EXPECT_EQ(get("k", Deadline::after(Milliseconds(5))), LOCKSTEP_TIMEOUT);
  base::Thread later("later", [&] { table->kv_set(table->context, "k", "abcdef", 6); });
  EXPECT_EQ(get("k", Deadline::never()), LOCKSTEP_OK);
  EXPECT_EQ(length, 6u);  // the full length, though only 4 bytes fit
  EXPECT_EQ(std::memcmp(value, "abcd", 4), 0);
  // A deadline that has passed still looks once.
  EXPECT_EQ(get("k", Deadline::now()), LOCKSTEP_OK);
}

TEST(EngineHost, AGetEndsWhenARankHasGivenUp) {
  HashStore store;
  internal::EngineHost host(internal::EngineHost::Stores::clone(store, store, store), "failed");
  base::Thread later("later", [&] { store.set("failed", "1 out of memory"); });
  size_t length = 0;
  EXPECT_EQ(host.table()->kv_get(host.table()->context, "never", nullptr, 0, &length, LOCKSTEP_NEVER),
            LOCKSTEP_PEER_LOST);
}

// What the launcher and spawn set for the ranks they start.
struct UnderALauncher {
  UnderALauncher() { ::setenv("LOCKSTEP_LAUNCHER", "1", 1); }
  ~UnderALauncher() { ::unsetenv("LOCKSTEP_LAUNCHER"); }
};

TEST(EngineHost, WithoutALauncherNoRankWaitsForAnExitCause) {
  ::unsetenv("LOCKSTEP_LAUNCHER");
  HashStore root;
  internal::EngineHost host(internal::EngineHost::Stores::clone(root, root, root), "failed");
  const auto soon = Deadline::after(Milliseconds(50));
  size_t length = 0;
  EXPECT_EQ(host.table()->kv_get(host.table()->context, "/lockstep/exit/0", nullptr, 0, &length,
                                 soon.monotonic_ns()),
            LOCKSTEP_UNSUPPORTED);
}

TEST(EngineHost, NobodyWaitsForWordsOfHowARankEndedThatTheLauncherDoesNotKnow) {
  const UnderALauncher launched;
  HashStore root;
  root.set("lockstep/exit/-1", "nobody");
  internal::EngineHost host(internal::EngineHost::Stores::clone(root, root, root), "failed", {0, -1});
  const lockstep_host* table = host.table();
  size_t length = 0;
  EXPECT_EQ(table->kv_get(table->context, "/lockstep/exit/1", nullptr, 0, &length, 0), LOCKSTEP_UNSUPPORTED);
  EXPECT_EQ(table->kv_get(table->context, "/lockstep/exit/0", nullptr, 0, &length, 0), LOCKSTEP_TIMEOUT);
}

TEST(EngineHost, KeysWithASlashAddressTheWholeStore) {
  const UnderALauncher launched;
  HashStore root;
  PrefixStore group("group", root.clone());
  internal::EngineHost host(internal::EngineHost::Stores::clone(group, root, root), "failed");
  const lockstep_host* table = host.table();
  root.set("lockstep/exit/3", "killed by SIGKILL");
  char value[64] = "";
  size_t length = 0;
  EXPECT_EQ(table->kv_get(table->context, "lockstep/exit/3", value, sizeof value, &length, 0),
            LOCKSTEP_TIMEOUT);
  EXPECT_EQ(table->kv_get(table->context, "/lockstep/exit/3", value, sizeof value, &length, 0), LOCKSTEP_OK);
  EXPECT_STREQ(value, "killed by SIGKILL");
}

TEST(EngineHost, AsksTheLauncherAboutRanksByTheNumbersItGaveThem) {
  const UnderALauncher launched;
  HashStore root;
  internal::EngineHost host(internal::EngineHost::Stores::clone(root, root, root), "failed", {2, 5});
  const lockstep_host* table = host.table();
  root.set("lockstep/exit/5", "exited with code 7");
  root.set("lockstep/exit/9", "another job's");
  char value[64] = "";
  size_t length = 0;
  EXPECT_EQ(table->kv_get(table->context, "/lockstep/exit/0", value, sizeof value, &length, 0),
            LOCKSTEP_TIMEOUT);
  EXPECT_EQ(table->kv_get(table->context, "/lockstep/exit/1", value, sizeof value, &length, 0), LOCKSTEP_OK);
  EXPECT_STREQ(value, "exited with code 7");
  EXPECT_EQ(table->kv_get(table->context, "/lockstep/exit/9", value, sizeof value, &length, 0), LOCKSTEP_OK);
}

}  // namespace
}  // namespace lockstep
