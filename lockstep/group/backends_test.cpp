// Back ends per device type, the fake one, and those a program registers.
#include "lockstep/group/backends.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/fake_engine.h"
#include "lockstep/engine/plugin.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/group_testing.h"
#include "lockstep/group/internal/backend_parts.h"
#include "lockstep/rendezvous/rendezvous.h"
#include "lockstep/store/hash_store.h"

namespace lockstep {
namespace {

using namespace testing;

at::Tensor meta(std::int64_t numel) {
  return at::empty({numel}, at::TensorOptions().device(at::kMeta));
}

TEST(Backends, ADeviceTypeHasADefault) {
  EXPECT_EQ(get_default_backend_for_device("cpu"), "host");
  EXPECT_EQ(get_default_backend_for_device("cuda:1"), "nccl");
  EXPECT_EQ(get_default_backend_for_device("xpu"), "xccl");
  EXPECT_EQ(get_default_backend_for_device("mps"), "gloo");
  const auto failure = caught([] { get_default_backend_for_device("toaster"); });
  EXPECT_EQ(failure.kind, ErrorKind::kUsage);
  EXPECT_TRUE(says(failure, "toaster")) << failure.message;
}

TEST(Backends, AreChosenByTheHostsOfTheRanks) {
  const auto one = internal::choose_default_backend({{"a"}, {"a"}, {"a"}});
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0].engine->name(), "host");
  if (internal::find_engine("hierarchical") != nullptr) {
    const auto several = internal::choose_default_backend({{"a"}, {"b"}, {"a"}, {"c"}});
    ASSERT_EQ(several.size(), 1u);
    EXPECT_EQ(several[0].engine->name(), "hierarchical");
    return;
  }
  const auto failure = caught([] { internal::choose_default_backend({{"a"}, {"b"}, {"a"}, {"c"}}); });
  EXPECT_EQ(failure.kind, ErrorKind::kUnsupported);
  EXPECT_TRUE(says(failure, "ranks 1 3")) << failure.message;
}

// The name of the engine for CUDA tensors; "" when there is none.
std::string gpu_engine(const std::vector<internal::RankPlace>& places) {
  for (const auto& part : internal::choose_default_backend(places)) {
    if (part.devices == std::vector<std::string>{"cuda"}) return part.engine->name();
  }
  return "";
}

TEST(Backends, AreChosenByTheGpusOfTheRanks) {
  if (internal::find_engine("nccl") == nullptr || internal::find_engine("cuda_ipc") == nullptr)
    GTEST_SKIP() << "the GPU engines were not built";
  const std::vector<std::string> both{"nccl", "cuda_ipc"}, ipc{"cuda_ipc"};
  EXPECT_EQ(gpu_engine({{"a", "gpu0", both}, {"a", "gpu0", both}}), "cuda_ipc") << "they share a GPU";
  EXPECT_EQ(gpu_engine({{"a", "gpu0", both}, {"a", "gpu1", both}}), "nccl") << "one each";
  EXPECT_EQ(gpu_engine({{"a", "gpu0", both}, {"a", "gpu1", ipc}}), "cuda_ipc") << "one rank has no NCCL";
  EXPECT_EQ(gpu_engine({{"a", "gpu0", both}, {"a"}}), "") << "one rank has no GPU";
  if (internal::find_engine("hierarchical") == nullptr) return;
  EXPECT_EQ(gpu_engine({{"a", "gpu0", both}, {"b", "gpu0", both}}), "nccl") << "equal names on two hosts";
  EXPECT_EQ(gpu_engine({{"a", "gpu0", ipc}, {"b", "gpu1", ipc}}), "") << "nothing crosses hosts";
}

TEST(Backends, TheCpuIsServedBesideAGpuEngineThatWasNamedAlone) {
  if (internal::find_engine("cuda_ipc") == nullptr) GTEST_SKIP() << "the GPU engines were not built";
  const auto alone = internal::parse_backend("cuda_ipc");
  EXPECT_TRUE(internal::lacks_host_memory(alone));
  EXPECT_FALSE(internal::lacks_host_memory(internal::parse_backend("cpu:host,cuda:cuda_ipc")));
  EXPECT_FALSE(internal::lacks_host_memory(internal::parse_backend("host")));
  EXPECT_FALSE(internal::lacks_host_memory({}));
  const auto parts = internal::with_host_memory(internal::parse_backend("host"), alone);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].engine->name(), "host");
  EXPECT_EQ(parts[0].devices, std::vector<std::string>{"cpu"});
  EXPECT_EQ(parts[1].engine->name(), "cuda_ipc");
}

TEST(Backends, WhereARankIsSurvivesTheStore) {
  const internal::RankPlace place{"host of mine", "gpu0", {"nccl", "cuda_ipc"}};
  const auto back = internal::from_line(internal::to_line(place));
  EXPECT_EQ(back.host, place.host);
  EXPECT_EQ(back.gpu, place.gpu);
  EXPECT_EQ(back.gpu_engines, place.gpu_engines);
  const auto bare = internal::from_line(internal::to_line({"host"}));
  EXPECT_EQ(bare.host, "host");
  EXPECT_EQ(bare.gpu, "");
  EXPECT_TRUE(bare.gpu_engines.empty());
}

TEST(Backends, OneGroupMayHoldOnePerDeviceType) {
  run_threads(3,
              [](int rank) {
                EXPECT_EQ(get_backend(), "cpu:host,meta:fake");
                EXPECT_EQ(get_backend_config(), "cpu:host,meta:fake");
                auto tensor = at::full({4}, static_cast<float>(rank));
                all_reduce(tensor);
                EXPECT_EQ(tensor[0].item<float>(), 3);
                all_reduce(meta(4));
                all_reduce(meta(4), {.async_op = true}).wait();
                barrier();
                EXPECT_EQ(default_group()->sequence_number(), 4u);
                // A sub-group takes them over, or has its own.
                EXPECT_EQ(get_backend_config(new_group()), "cpu:host,meta:fake");
                const auto plain = new_group({.backend = "host"});
                EXPECT_EQ(get_backend_config(plain), "cpu:host");
                const auto failure = caught([&] { all_reduce(meta(1), {.group = plain}); });
                EXPECT_EQ(failure.kind, ErrorKind::kUnsupported);
                EXPECT_TRUE(says(failure, "meta") && says(failure, "cpu:host")) << failure.message;
              },
              {.timeout = kPatience, .backend = "cpu:host,meta:fake"});
}

TEST(Backends, DeviceTypesOfOneNameShareACommunicator) {
  const auto parts = internal::parse_backend("CPU:fake,meta:Fake");
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0].devices, (std::vector<std::string>{"cpu", "meta"}));
  init_process_group({.backend = "cpu:fake,meta:fake", .world_size = 4});
  EXPECT_EQ(get_backend(), "fake");
  EXPECT_EQ(get_backend_config(), "cpu:fake,meta:fake");
  destroy_process_group();
}

TEST(FakeBackend, StandsForAWorldOfAnySizeInOneProcess) {
  for (const int rank : {0, 999}) {
    init_process_group({.backend = "fake", .world_size = 1000, .rank = rank});
    EXPECT_EQ(get_rank(), rank);
    EXPECT_EQ(get_world_size(), 1000);
    const auto before = at::arange(6, at::kFloat);
    auto tensor = before.clone();
    all_reduce(tensor);
    broadcast(tensor, {.src = 17, .async_op = true}).wait();
    EXPECT_TRUE(at::equal(tensor, before));
    barrier();
    monitored_barrier();
    const auto group = new_group({0, 5, 999});
    EXPECT_EQ(get_rank(group), rank == 0 ? 0 : 2);
    all_reduce(tensor, {.group = group});
    EXPECT_EQ(new_subgroups(10).mine->size(), 10);
    default_group()->abort("enough");
    EXPECT_EQ(caught([] { barrier(); }).kind, ErrorKind::kAborted);
    destroy_process_group();
  }
}

// Adds over the store, one float per rank; records what it got.
class StoreBackend final : public Backend {
 public:
  explicit StoreBackend(const BackendOptions& options) : options_(options) { ++alive; }
  ~StoreBackend() override { --alive; }

  void run(const lockstep_op& op) override {
    if (op.kind == LOCKSTEP_BARRIER)
      base::raise(ErrorKind::kUnsupported, "the store back end has no barrier");
    if (op.kind == LOCKSTEP_BROADCAST) throw std::runtime_error("the store fell over");
    const int round = round_++;
    const auto* mine = static_cast<const std::uint8_t*>(op.send);
    options_.store->set(base::cat(round, "/", options_.rank), {mine, op.count * sizeof(float)});
    std::vector<float> sum(op.count), part(op.count);
    for (int rank = 0; rank < options_.size; ++rank) {
      const auto bytes = options_.store->get(base::cat(round, "/", rank));
      std::memcpy(part.data(), bytes.data(), bytes.size());
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    std::memcpy(op.recv, sum.data(), sum.size() * sizeof(float));
  }
  void abort(const std::string&) override { ++aborted; }
  int rank() const { return options_.rank; }

  static inline std::atomic<int> alive{0}, aborted{0};

 private:
  const BackendOptions options_;
  int round_ = 0;
};

TEST(RegisterBackend, MakesACppClassABackEndOfGroups) {
  register_backend("Store_Sum", [](const BackendOptions& options) {
    EXPECT_EQ(options.size, static_cast<int>(options.global_ranks.size()));
    EXPECT_EQ(options.timeout, kPatience);
    if (options.name == "1") {
      EXPECT_EQ(options.global_ranks, (std::vector<int>{0, 2}));
    }
    return std::make_unique<StoreBackend>(options);
  });
  EXPECT_TRUE(is_backend_available("store_sum"));
  for (const int n : {1, 2, 3}) {
    run_threads(n,
                [n](int rank) {
                  EXPECT_EQ(get_backend(), "store_sum");
                  auto a = at::full({3}, static_cast<float>(rank)), b = at::ones({2});
                  const auto first = all_reduce(a, {.async_op = true}),
                             second = all_reduce(b, {.async_op = true});
                  second.wait();
                  first.wait();
                  all_reduce(b);
                  EXPECT_EQ(a[0].item<float>(), static_cast<float>(n * (n - 1) / 2));
                  EXPECT_EQ(b[1].item<float>(), static_cast<float>(n * n));
                  EXPECT_TRUE(says(caught([] { barrier(); }), "has no barrier"));
                  all_reduce(b);  // a refusal breaks nothing
                  const auto mine = std::dynamic_pointer_cast<StoreBackend>(get_backend_impl());
                  ASSERT_NE(mine, nullptr);
                  EXPECT_EQ(mine->rank(), rank);
                  refused([] { get_backend_impl({}, "meta"); }, "no back end for meta");
                  if (n < 3) return;
                  const auto group = new_group({0, 2});
                  if (rank == 1) return;
                  auto c = at::ones({1});
                  all_reduce(c, {.group = group});
                  EXPECT_EQ(c.item<float>(), 2);
                },
                {.timeout = kPatience, .backend = "store_sum"});
  }
  EXPECT_EQ(StoreBackend::alive, 0);
  EXPECT_EQ(StoreBackend::aborted, 0);
}

TEST(GetBackendImpl, IsForBackEndsThatAreClasses) {
  run_threads(2, [](int) { EXPECT_EQ(caught([] { get_backend_impl(); }).kind, ErrorKind::kUnsupported); });
  run_threads(1, [](int) { EXPECT_EQ(caught([] { get_backend_impl(); }).kind, ErrorKind::kUnsupported); });
}

// Notes by when operations must be over. Does them for a group of one.
class NotingBackend final : public Backend {
 public:
  explicit NotingBackend(int rank) : rank_(rank) {}
  void run(const lockstep_op& op) override {
    const bool uneven = op.kind == LOCKSTEP_ALL_GATHER_V;
    if (op.recv != nullptr && op.recv != op.send)
      std::memcpy(op.recv, op.send, (uneven ? op.recv_counts[0] : op.count) * comm::size_of(op.dtype));
    const std::lock_guard lock(mutex);
    deadlines[rank_].push_back(op.deadline_ns);
  }
  void abort(const std::string&) override {}

  static inline std::mutex mutex;
  static inline std::map<int, std::vector<std::int64_t>> deadlines;  // by rank; guarded by mutex

 private:
  const int rank_;
};

TEST(Deadlines, AreOneForAllPartsOfACall) {
  register_backend("noting", [](const BackendOptions& o) { return std::make_unique<NotingBackend>(o.rank); });
  run_threads(1, [](int) { all_reduce(at::ones({3}).to_sparse()); },
              {.timeout = kPatience, .backend = "noting"});
  auto& noted = NotingBackend::deadlines;
  ASSERT_EQ(noted[0].size(), 3u);  // sizes, then indices and values
  EXPECT_LE(noted[0][1], noted[0][0]);
  EXPECT_LE(noted[0][2], noted[0][0]);

  noted.clear();
  Deadline late = Deadline::never();
  set_debug_level(DebugLevel::kDetail);
  run_threads(2,
              [&](int rank) {
                if (rank == 0) {  // comes when rank 1 waits for it in the comparison
                  const std::vector<std::string> come{"pg_wrapper:0/0/word/1"};
                  default_group()->store()->wait(come);
                  late = Deadline::after(kPatience);
                }
                barrier();
              },
              {.timeout = kPatience, .backend = "noting"});
  set_debug_level(DebugLevel::kOff);
  ASSERT_EQ(noted[1].size(), 1u);
  EXPECT_LE(noted[1][0], late.monotonic_ns());
}

// Notes by when the group must have formed.
std::int64_t join_deadline = 0;
lockstep_status create_noting(const lockstep_comm_config* config, lockstep_comm** out, char* error,
                              std::size_t capacity) {
  join_deadline = config->deadline_ns;
  return comm::fake_engine()->comm_create(config, out, error, capacity);
}

TEST(Deadlines, OfEnteringTheWorldBeginBeforeTheRanksMeet) {
  static lockstep_engine table = *comm::fake_engine();
  table.name = "punctual";
  table.comm_create = create_noting;
  register_backend(&table);
  Deadline late = Deadline::never();
  register_rendezvous_handler("noting", [&](const RendezvousOptions&) {
    late = Deadline::after(kPatience);
    return RendezvousResult{.store = std::make_shared<HashStore>(), .rank = 0, .world_size = 1};
  });
  init_process_group({.backend = "punctual", .init_method = "noting://here", .timeout = kPatience});
  destroy_process_group();
  EXPECT_GT(join_deadline, 0);
  EXPECT_LE(join_deadline, late.monotonic_ns());
}

// An engine whose operations are over at once, and which says so only later and on a thread of its own.
lockstep_op late_op{};
std::atomic<std::thread::id> ended_on;
lockstep_status post_quietly(lockstep_comm* comm, const lockstep_op* op, lockstep_handle** out) {
  late_op = *op;
  lockstep_op silent = *op;
  silent.done = nullptr;
  return comm::fake_engine()->post(comm, &silent, out);
}
void destroy_noting(lockstep_comm* comm, const char* cause) {
  comm::fake_engine()->comm_destroy(comm, cause);
  ended_on = std::this_thread::get_id();
}

TEST(Communicators, DoNotEndOnTheEnginesThreadThatDropsTheirLastOwner) {
  static lockstep_engine table = *comm::fake_engine();
  table.name = "late";
  table.post = post_quietly;
  table.comm_destroy = destroy_noting;
  register_backend(&table);
  register_rendezvous_handler("late", [&](const RendezvousOptions&) {
    return RendezvousResult{.store = std::make_shared<HashStore>(), .rank = 0, .world_size = 1};
  });
  init_process_group({.backend = "late", .init_method = "late://here", .timeout = kPatience});
  std::array<float, 4> memory{};
  auto tensor = at::from_blob(memory.data(), {4}, [group = default_group()](void*) {});
  all_reduce(tensor, {.async_op = true}).wait();
  // Over for the caller, who drops everything; the engine's thread has yet to say so, and holds the last of
  // it.
  tensor = at::Tensor();
  destroy_process_group();
  EXPECT_EQ(ended_on.load(), std::thread::id());
  std::thread engine([] { late_op.done(late_op.done_context); });
  const auto engine_thread = engine.get_id();
  engine.join();
  const Deadline patience = Deadline::after(kPatience);
  while (ended_on.load() == std::thread::id() && !patience.expired()) std::this_thread::yield();
  EXPECT_NE(ended_on.load(), std::thread::id()) << "the communicator never ended";
  EXPECT_NE(ended_on.load(), engine_thread);
}

TEST(RegisterBackend, WhatItThrowsBreaksTheGroup) {
  run_threads(2,
              [](int) {
                const auto failure = caught([] { broadcast(at::ones({1}), {.src = 0}); });
                EXPECT_TRUE(says(failure, "the store fell over")) << failure.message;
                EXPECT_TRUE(says(caught([] { all_reduce(at::ones({1})); }), "the store fell over"));
              },
              {.timeout = kPatience, .backend = "store_sum"});
  EXPECT_EQ(StoreBackend::alive, 0);
  EXPECT_EQ(StoreBackend::aborted, 2);
}

TEST(RegisterBackend, AFactoryThatFailsIsAnErrorThereAndTheWorldGoesOn) {
  register_backend("shy", [](const BackendOptions& options) -> std::unique_ptr<Backend> {
    if (options.rank == 1) base::raise(ErrorKind::kResource, "no room on rank 1");
    return nullptr;
  });
  run_threads(2, [](int rank) {
    const auto failure = caught([] { new_group({.backend = "shy"}); });
    const bool told = failure.kind == ErrorKind::kPeerLost;  // the other was first
    EXPECT_TRUE(told || failure.kind == (rank == 1 ? ErrorKind::kResource : ErrorKind::kInternal))
        << failure.message;
    EXPECT_TRUE(says(failure, "no room on rank 1") || says(failure, "returned null")) << failure.message;
    auto tensor = at::ones({1});
    all_reduce(tensor);
    EXPECT_EQ(tensor.item<float>(), 2);
  });
}

TEST(RegisterBackend, TakesAReadyTableAndDeviceTypesOfItsOwn) {
  static lockstep_engine table = *comm::fake_engine();
  table.name = "Toy";
  register_backend(&table, {.devices = {"ipu", "meta"}});
  EXPECT_EQ(get_default_backend_for_device("ipu"), "toy");
  EXPECT_EQ(get_default_backend_for_device("meta"), "fake");
  run_threads(2,
              [](int) {
                all_reduce(meta(3));
                EXPECT_EQ(get_backend_config(), "ipu:Toy,meta:Toy");
                EXPECT_EQ(caught([] { all_reduce(at::ones({1})); }).kind, ErrorKind::kUnsupported);
              },
              {.timeout = kPatience, .backend = "toy"});
}

TEST(RegisterBackend, RefusesBadNamesAndDevices) {
  const BackendFactory factory = [](const BackendOptions& o) { return std::make_unique<StoreBackend>(o); };
  refused([&] { register_backend("", factory); }, "not a valid name");
  refused([&] { register_backend("a:b", factory); }, "not a valid name");
  refused([&] { register_backend("HOST", factory); }, "loaded already");
  refused([&] { register_backend("empty", nullptr); }, "no factory");
  refused([&] { register_backend("nowhere", factory, {.devices = {}}); }, "no device type");
  refused([&] { register_backend("baked", factory, {.devices = {"oven"}}); }, "oven");
  EXPECT_EQ(caught([] { register_backend(nullptr); }).kind, ErrorKind::kUnsupported);
  EXPECT_FALSE(is_backend_available("baked"));
}

}  // namespace
}  // namespace lockstep
