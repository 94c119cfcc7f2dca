// The exported functions of the fake NCCL.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "engines/cuda/driver.h"
#include "tests/fake_cuda/fake_cuda.h"
#include "tests/fake_nccl/fake_nccl.h"
#include "tests/fake_nccl/world.h"

namespace lockstep::fake_nccl {
namespace {

using namespace nccl_plugin;

int number_in_environment(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

// The library's state.
struct Fake {
  static Fake& get() {
    static auto& fake = *new Fake;
    return fake;
  }
  const int version = number_in_environment("FAKE_NCCL_VERSION", 22809);
  const bool alone = number_in_environment("FAKE_NCCL_ALONE", 0) == 1;

  std::mutex mutex;
  std::map<std::string, std::shared_ptr<World>> worlds;
  std::vector<std::unique_ptr<FakeComm>> comms;
  int n_comms = 0;
  std::uint64_t n_ids = 0;
  std::map<std::string, std::uint64_t> calls;
  std::map<std::string, std::pair<std::uint64_t, Result>> failures;  // at which call
  std::map<int, Result> async_errors;                                // by rank
  Config last_config{};

  // First of every entry: what it should give instead of what it does.
  Result enter(const char* entry) {
    const std::lock_guard lock(mutex);
    const std::uint64_t n = ++calls[entry];
    const auto found = failures.find(entry);
    return found != failures.end() && found->second.first == n ? found->second.second : kSuccess;
  }
};

#define FAKE_NCCL_ENTER() \
  if (const Result entered = Fake::get().enter(__func__); entered != kSuccess) return entered

const cuda::Driver& driver() {
  static const cuda::Driver* const found = cuda::Driver::find(nullptr);
  if (found == nullptr) std::abort();
  return *found;
}

// Pre: a context is current.
cuda::Function kernel() {
  static const cuda::Function function = [] {
    constexpr std::size_t kSizes[] = {sizeof(void*)};
    fake_cuda_register_kernel(
        "fake_nccl",
        [](const fake_cuda_launch* launch) { run(**static_cast<FakeComm::Launch**>(launch->params[0])); },
        kSizes, 1);
    cuda::Module module = nullptr;
    cuda::Function made = nullptr;
    driver().module_load_data(&module, ".version 8.0\n.target sm_90\n");
    driver().module_get_function(&made, module, "fake_nccl");
    if (made == nullptr) std::abort();
    return made;
  }();
  return function;
}

FakeComm& of(Comm comm) {
  return *reinterpret_cast<FakeComm*>(comm);
}

// A launch lives for ever: a graph may run it again.
void launch(std::unique_ptr<FakeComm::Launch> what) {
  static std::mutex mutex;
  static auto& all = *new std::vector<std::unique_ptr<FakeComm::Launch>>;
  FakeComm::Launch* pointer = what.get();
  auto* const stream = static_cast<cuda::Stream>(what->stream);
  {
    const std::lock_guard lock(mutex);
    all.push_back(std::move(what));
  }
  void* parameters[] = {&pointer};
  driver().launch_kernel(kernel(), 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr);
}

// The calls of this thread between ncclGroupStart and ncclGroupEnd.
struct Group {
  int depth = 0;
  std::vector<std::unique_ptr<FakeComm::Launch>> launches;  // one per communicator and stream
};
thread_local Group group;

// What is to be connected first is launched when it has settled.
Result end_group() {
  Result result = kSuccess;
  for (auto& each : std::exchange(group.launches, {})) {
    FakeComm& comm = *each->comm;
    const std::lock_guard lock(comm.mutex);
    bool is_new = false;
    for (const Task& task : each->tasks) is_new = comm.connected.insert(task.kind).second || is_new;
    if (!is_new) {
      launch(std::move(each));
      continue;
    }
    comm.state = result = kInProgress;
    comm.polls_left = 3;
    comm.deferred.push_back(std::move(each));
  }
  return result;
}

Result call(Comm handle, cuda::Stream stream, const Task& task) {
  if (handle == nullptr || task.send == nullptr || (task.recv == nullptr && task.kind != Kind::kReduce))
    return kInvalidArgument;
  FakeComm& comm = of(handle);
  {
    const std::lock_guard lock(comm.mutex);
    if (comm.state != kSuccess || comm.aborted) return kInvalidUsage;
  }
  auto found = std::find_if(group.launches.begin(), group.launches.end(),
                            [&](const auto& each) { return each->comm == &comm && each->stream == stream; });
  if (found == group.launches.end()) {
    group.launches.push_back(std::make_unique<FakeComm::Launch>());
    found = group.launches.end() - 1;
    (*found)->comm = &comm;
    (*found)->stream = stream;
  }
  (*found)->tasks.push_back(task);
  return group.depth == 0 ? end_group() : kSuccess;
}

void stop(FakeComm& comm) {
  const std::lock_guard lock(comm.world->mutex);
  comm.aborted = true;
  comm.world->changed.notify_all();
}

}  // namespace
}  // namespace lockstep::fake_nccl

using namespace lockstep::fake_nccl;
using namespace lockstep::nccl_plugin;
using lockstep::cuda::Stream;

// ---- for tests

FAKE_NCCL_EXPORT void fake_nccl_fail(const char* entry, int nth, int result) {
  Fake& fake = Fake::get();
  const std::lock_guard lock(fake.mutex);
  fake.failures[entry] = {fake.calls[entry] + static_cast<std::uint64_t>(nth), static_cast<Result>(result)};
}
FAKE_NCCL_EXPORT std::uint64_t fake_nccl_calls(const char* entry) {
  Fake& fake = Fake::get();
  const std::lock_guard lock(fake.mutex);
  return fake.calls[entry];
}
FAKE_NCCL_EXPORT void fake_nccl_async_error(int rank, int result) {
  Fake& fake = Fake::get();
  const std::lock_guard lock(fake.mutex);
  fake.async_errors[rank] = static_cast<Result>(result);
}
FAKE_NCCL_EXPORT void fake_nccl_last_config(void* out, std::size_t n_bytes) {
  Fake& fake = Fake::get();
  const std::lock_guard lock(fake.mutex);
  std::memcpy(out, &fake.last_config, std::min(n_bytes, sizeof(Config)));
}
FAKE_NCCL_EXPORT int fake_nccl_comms() {
  Fake& fake = Fake::get();
  const std::lock_guard lock(fake.mutex);
  return fake.n_comms;
}

// ---- NCCL's

FAKE_NCCL_EXPORT Result ncclGetVersion(int* version) {
  FAKE_NCCL_ENTER();
  *version = Fake::get().version;
  return kSuccess;
}

FAKE_NCCL_EXPORT Result ncclGetUniqueId(UniqueId* id) {
  FAKE_NCCL_ENTER();
  Fake& fake = Fake::get();
  const std::lock_guard lock(fake.mutex);
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->bytes, sizeof id->bytes, "id %llu", static_cast<unsigned long long>(++fake.n_ids));
  return kSuccess;
}

FAKE_NCCL_EXPORT Result ncclCommInitRankConfig(Comm* out, int size, UniqueId id, int rank, Config* config) {
  FAKE_NCCL_ENTER();
  if (config == nullptr || config->magic != kConfigMagic || config->blocking != 0 || rank < 0 || rank >= size)
    return kInvalidArgument;
  kernel();
  Fake& fake = Fake::get();
  const std::lock_guard lock(fake.mutex);
  fake.last_config = *config;
  auto& world = fake.worlds[id.bytes];
  if (!world) world = std::make_shared<World>(size);
  auto comm = std::make_unique<FakeComm>();
  comm->world = world;
  comm->rank = rank;
  comm->polls_left = 3;
  {
    const std::lock_guard inner(world->mutex);
    if (world->size != size || !world->joined.insert(rank).second) return kInvalidArgument;
  }
  *out = reinterpret_cast<Comm>(comm.get());
  fake.comms.push_back(std::move(comm));
  ++fake.n_comms;
  return kInProgress;
}

FAKE_NCCL_EXPORT Result ncclCommGetAsyncError(Comm handle, Result* error) {
  FAKE_NCCL_ENTER();
  FakeComm& comm = of(handle);
  Fake& fake = Fake::get();
  {
    const std::lock_guard lock(fake.mutex);
    if (const auto found = fake.async_errors.find(comm.rank);
        found != fake.async_errors.end() && found->second != kSuccess) {
      *error = found->second;
      return kSuccess;
    }
  }
  const std::lock_guard lock(comm.mutex);
  bool all = fake.alone;
  {
    const std::lock_guard inner(comm.world->mutex);
    all = all || static_cast<int>(comm.world->joined.size()) == comm.world->size;
  }
  if (comm.state == kInProgress && all && --comm.polls_left <= 0) {
    for (auto& each : comm.deferred) launch(std::move(each));
    comm.deferred.clear();
    comm.state = kSuccess;
  }
  *error = comm.state;
  return kSuccess;
}

FAKE_NCCL_EXPORT Result ncclCommFinalize(Comm handle) {
  FAKE_NCCL_ENTER();
  FakeComm& comm = of(handle);
  const std::lock_guard lock(comm.mutex);
  if (comm.state != kSuccess || comm.aborted) return kInvalidUsage;
  comm.state = kInProgress;
  comm.polls_left = 3;
  return kInProgress;
}

FAKE_NCCL_EXPORT Result ncclCommDestroy(Comm handle) {
  FAKE_NCCL_ENTER();
  FakeComm& comm = of(handle);
  while (comm.running > 0) std::this_thread::yield();
  stop(comm);
  Fake& fake = Fake::get();
  const std::lock_guard lock(fake.mutex);
  --fake.n_comms;
  return kSuccess;
}

FAKE_NCCL_EXPORT Result ncclCommAbort(Comm handle) {
  FAKE_NCCL_ENTER();
  FakeComm& comm = of(handle);
  stop(comm);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // NCCL takes 240 and more
  while (comm.running > 0) std::this_thread::yield();
  Fake& fake = Fake::get();
  const std::lock_guard lock(fake.mutex);
  --fake.n_comms;
  return kSuccess;
}

FAKE_NCCL_EXPORT Result ncclCommRevoke(Comm handle, int flags) {
  FAKE_NCCL_ENTER();
  if (flags != 0) return kInvalidArgument;
  stop(of(handle));
  return kInProgress;
}

FAKE_NCCL_EXPORT const char* ncclGetErrorString(Result result) {
  return result == kSystemError ? "unhandled system error"
         : result == kSuccess   ? "no error"
                                : "another error";
}

FAKE_NCCL_EXPORT const char* ncclGetLastError(Comm) {
  return "what the fake says last";
}

FAKE_NCCL_EXPORT Result ncclGroupStart() {
  FAKE_NCCL_ENTER();
  ++group.depth;
  return kSuccess;
}

FAKE_NCCL_EXPORT Result ncclGroupEnd() {
  FAKE_NCCL_ENTER();
  if (group.depth == 0) return kInvalidUsage;
  return --group.depth == 0 ? end_group() : kSuccess;
}

FAKE_NCCL_EXPORT Result ncclAllReduce(const void* send, void* recv, std::size_t count, DataType type,
                                      RedOp op, Comm comm, Stream stream) {
  FAKE_NCCL_ENTER();
  return call(comm, stream,
              {.kind = Kind::kAllReduce, .send = send, .recv = recv, .count = count, .type = type, .op = op});
}

FAKE_NCCL_EXPORT Result ncclBroadcast(const void* send, void* recv, std::size_t count, DataType type,
                                      int root, Comm comm, Stream stream) {
  FAKE_NCCL_ENTER();
  return call(
      comm, stream,
      {.kind = Kind::kBroadcast, .send = send, .recv = recv, .count = count, .type = type, .root = root});
}

FAKE_NCCL_EXPORT Result ncclReduce(const void* send, void* recv, std::size_t count, DataType type, RedOp op,
                                   int root, Comm comm, Stream stream) {
  FAKE_NCCL_ENTER();
  return call(comm, stream,
              {.kind = Kind::kReduce,
               .send = send,
               .recv = recv,
               .count = count,
               .type = type,
               .op = op,
               .root = root});
}

FAKE_NCCL_EXPORT Result ncclAllGather(const void* send, void* recv, std::size_t count, DataType type,
                                      Comm comm, Stream stream) {
  FAKE_NCCL_ENTER();
  return call(comm, stream,
              {.kind = Kind::kAllGather, .send = send, .recv = recv, .count = count, .type = type});
}

FAKE_NCCL_EXPORT Result ncclReduceScatter(const void* send, void* recv, std::size_t count, DataType type,
                                          RedOp op, Comm comm, Stream stream) {
  FAKE_NCCL_ENTER();
  return call(
      comm, stream,
      {.kind = Kind::kReduceScatter, .send = send, .recv = recv, .count = count, .type = type, .op = op});
}

FAKE_NCCL_EXPORT Result ncclSend(const void* data, std::size_t count, DataType type, int peer, Comm comm,
                                 Stream stream) {
  FAKE_NCCL_ENTER();
  return call(comm, stream,
              {.kind = Kind::kSend,
               .send = data,
               .recv = const_cast<void*>(data),
               .count = count,
               .type = type,
               .root = peer});
}

FAKE_NCCL_EXPORT Result ncclRecv(void* data, std::size_t count, DataType type, int peer, Comm comm,
                                 Stream stream) {
  FAKE_NCCL_ENTER();
  return call(comm, stream,
              {.kind = Kind::kRecv, .send = data, .recv = data, .count = count, .type = type, .root = peer});
}
