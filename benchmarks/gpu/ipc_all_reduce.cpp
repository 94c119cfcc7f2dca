// Time of an all_reduce of an engine for CUDA memory, ranks as processes of one machine, through the C table alone: no
// libtorch, and nothing but the plug-in needs to be there.
//
//   gpu_all_reduce <plug-in.so> [ranks] [rounds] [device or -1: rank % devices]
//
// For each size: `run` in a loop and the stream synchronised at the end (what a training step does), and `run` with the
// stream synchronised after each (what a blocking call costs). Medians over the rounds, of the slowest rank. Results are
// checked. One line per size; exit code 1 when a result is wrong or a call fails.
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "engines/cuda/resources.h"
#include "lockstep/engine/engine_abi.h"

namespace {

using lockstep::cuda::check;
using Clock = std::chrono::steady_clock;

constexpr int kMaxRanks = 16, kMaxRounds = 64;
constexpr std::size_t kSizes[] = {std::size_t{4} << 10, std::size_t{1} << 20, std::size_t{25} << 20,
                                  std::size_t{256} << 20};

// Shared by the processes: the key-value space, a barrier, and what they measured.
struct Shared {
  struct Entry {
    std::atomic<int> state;  // 0 free, 1 being written, 2 there
    char key[128];
    std::size_t length;
    char value[1024];
  };
  Entry entries[256];
  std::atomic<int> arrived, round, failed;
  double us[2][kMaxRounds][kMaxRanks];
};
Shared* shared = nullptr;

lockstep_status kv_set(void*, const char* key, const void* value, std::size_t length) {
  for (Shared::Entry& entry : shared->entries) {
    int free = 0;
    if (!entry.state.compare_exchange_strong(free, 1)) continue;
    std::snprintf(entry.key, sizeof entry.key, "%s", key);
    entry.length = std::min(length, sizeof entry.value);
    std::memcpy(entry.value, value, entry.length);
    entry.state = 2;
    return LOCKSTEP_OK;
  }
  return LOCKSTEP_RESOURCE;
}

lockstep_status kv_get(void*, const char* key, void* value, std::size_t capacity, std::size_t* length,
                       std::int64_t deadline_ns) {
  if (*key == '/') return LOCKSTEP_UNSUPPORTED;
  for (;;) {
    for (Shared::Entry& entry : shared->entries) {
      if (entry.state != 2 || std::strcmp(entry.key, key) != 0) continue;
      *length = entry.length;
      std::memcpy(value, entry.value, std::min(capacity, entry.length));
      return LOCKSTEP_OK;
    }
    if (Clock::now().time_since_epoch().count() >= deadline_ns) return LOCKSTEP_TIMEOUT;
    ::usleep(200);
  }
}

void log(void*, int level, const char* text) {
  std::fprintf(stderr, "log %d: %s\n", level, text);
}

std::int64_t in_seconds(int seconds) {
  return (Clock::now() + std::chrono::seconds(seconds)).time_since_epoch().count();
}

void meet(int ranks) {
  const int round = shared->round;
  if (shared->arrived.fetch_add(1) + 1 == ranks) {
    shared->arrived = 0;
    shared->round = round + 1;
    return;
  }
  while (shared->round == round && shared->failed == 0) std::this_thread::yield();
}

struct Rank {
  int rank, ranks, rounds, device;
  const lockstep_engine* engine;
  lockstep_comm* comm = nullptr;
  const lockstep::cuda::Driver* driver = nullptr;
  lockstep::cuda::Stream stream = nullptr;

  [[noreturn]] void fail(const char* what, const char* why) const {
    std::fprintf(stderr, "rank %d: %s: %s\n", rank, what, why);
    shared->failed = 1;
    std::_Exit(1);
  }

  void all_reduce(lockstep::cuda::DevicePtr data, std::size_t count) {
    lockstep_op op{};
    op.struct_size = sizeof op;
    op.kind = LOCKSTEP_ALL_REDUCE;
    op.dtype = LOCKSTEP_F32;
    op.reduce = LOCKSTEP_AVG;
    op.send = op.recv = reinterpret_cast<void*>(static_cast<std::uintptr_t>(data));
    op.count = count;
    op.deadline_ns = in_seconds(30);
    op.where = "benchmark";
    op.device_kind = LOCKSTEP_CUDA;
    op.device = device;
    op.stream = stream;
    char error[1024] = "";
    if (engine->run(comm, &op, error, sizeof error) != LOCKSTEP_OK) fail("run", error);
  }
  void synchronize() {
    check(*driver, driver->stream_synchronize(stream), "cuStreamSynchronize");
    char error[1024] = "";
    if (engine->comm_failure(comm, error, sizeof error, nullptr, nullptr, nullptr, 0) != LOCKSTEP_OK)
      fail("the group broke", error);
  }
  double time(lockstep::cuda::DevicePtr data, std::size_t count, int n, bool each) {
    meet(ranks);
    const auto begin = Clock::now();
    for (int i = 0; i < n; ++i) {
      all_reduce(data, count);
      if (each) synchronize();
    }
    synchronize();
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / n;
  }

  // Element i of rank r is r + i % 7: the mean is (ranks - 1) / 2 + i % 7, and stays that.
  void verify(lockstep::cuda::DevicePtr data, std::size_t count) {
    std::vector<float> host(count);
    for (std::size_t i = 0; i < count; ++i) host[i] = static_cast<float>(rank) + static_cast<float>(i % 7);
    const auto address = reinterpret_cast<std::uintptr_t>(host.data());
    // In the stream: cuMemcpy may return before the copy has reached the device, and no other stream waits for it.
    check(*driver, driver->memcpy_async(data, address, count * 4, stream), "cuMemcpyAsync");
    all_reduce(data, count);
    synchronize();
    check(*driver, driver->memcpy(address, data, count * 4), "cuMemcpy");
    for (std::size_t i = 0; i < count; ++i) {
      const float want = static_cast<float>(ranks - 1) / 2 + static_cast<float>(i % 7);
      if (std::abs(host[i] - want) < 1e-3f) continue;
      char text[96];
      std::snprintf(text, sizeof text, "element %zu of %zu is %g, not %g", i, count, host[i], want);
      fail("a wrong result", text);
    }
  }

  void measure(lockstep::cuda::DevicePtr data, std::size_t n_bytes) {
    const std::size_t count = n_bytes / 4;
    verify(data, count);
    const int n = n_bytes < std::size_t{8} << 20 ? 100 : n_bytes < std::size_t{64} << 20 ? 40 : 10;
    time(data, count, n, false);
    for (int round = 0; round < rounds; ++round) {
      for (const bool each : {false, true}) shared->us[each][round][rank] = time(data, count, n, each);
    }
    verify(data, count);
    meet(ranks);
    if (rank != 0) return;
    double median[2];
    for (const int each : {0, 1}) {
      std::vector<double> slowest;
      for (int round = 0; round < rounds; ++round)
        slowest.push_back(*std::max_element(shared->us[each][round], shared->us[each][round] + ranks));
      std::nth_element(slowest.begin(), slowest.begin() + rounds / 2, slowest.end());
      median[each] = slowest[static_cast<std::size_t>(rounds / 2)];
    }
    // Every byte of every rank is read once and written once.
    std::printf("%-9s %d ranks %10zu bytes: %9.1f us in a loop (%6.0f GB/s), %9.1f us each\n", engine->name,
                ranks, n_bytes, median[0], 2e-3 * ranks * static_cast<double>(n_bytes) / median[0],
                median[1]);
    std::fflush(stdout);
  }

  void body() {
    std::string why;
    driver = lockstep::cuda::Driver::find(&why);
    if (driver == nullptr) fail("no driver", why.c_str());
    int n_devices = 0;
    check(*driver, driver->device_get_count(&n_devices), "cuDeviceGetCount");
    if (device < 0) device = rank % n_devices;
    const auto& context = lockstep::cuda::PrimaryContext::of(*driver, device);
    const lockstep::cuda::ContextScope scope(context);
    const auto own = lockstep::cuda::create_stream(context, lockstep::cuda::Priority::kLeast);
    stream = own.get();
    const lockstep_host host{sizeof host, nullptr, log, kv_set, kv_get};
    lockstep_comm_config config{};
    config.struct_size = sizeof config;
    config.host = &host;
    config.rank = rank;
    config.size = ranks;
    config.name = "benchmark";
    config.deadline_ns = in_seconds(60);
    config.engine = engine;
    config.device_kind = LOCKSTEP_CUDA;
    config.device = device;
    char error[1024] = "";
    if (engine->comm_create(&config, &comm, error, sizeof error) != LOCKSTEP_OK) fail("comm_create", error);
    const auto memory = lockstep::cuda::allocate(context, kSizes[std::size(kSizes) - 1]);
    for (const std::size_t n_bytes : kSizes) measure(memory.get(), n_bytes);
    meet(ranks);
    engine->comm_destroy(comm, nullptr);
  }
};

int run_rank(const char* plugin, int rank, int ranks, int rounds, int device) {
  void* const library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    shared->failed = 1;
    return 1;
  }
  const auto entry = reinterpret_cast<lockstep_engine_entry>(dlsym(library, LOCKSTEP_ENGINE_SYMBOL));
  Rank one{rank, ranks, rounds, device, entry()};
  try {
    one.body();
  } catch (const std::exception& error) {
    one.fail("an exception", error.what());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s <plug-in.so> [ranks] [rounds] [device or -1]\n", argv[0]);
    return 2;
  }
  const int ranks = argc > 2 ? std::atoi(argv[2]) : 2, rounds = argc > 3 ? std::atoi(argv[3]) : 7;
  const int device = argc > 4 ? std::atoi(argv[4]) : 0;
  if (ranks < 1 || ranks > kMaxRanks || rounds < 1 || rounds > kMaxRounds) return 2;
  void* const memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  shared = new (memory) Shared{};
  for (int r = 0; r < ranks; ++r) {
    if (::fork() == 0) std::_Exit(run_rank(argv[1], r, ranks, rounds, device));
  }
  int worst = 0, status = 0;
  while (::wait(&status) > 0) worst = status != 0 ? 1 : worst;
  return worst;
}
