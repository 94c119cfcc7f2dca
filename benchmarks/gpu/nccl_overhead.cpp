// What the NCCL plug-in adds to bare NCCL: both in the same run, by turns, on the same device and stream, 2 processes.
//
//   nccl_overhead <lockstep_nccl.so> [rounds = 9] [threads]      with `threads` ranks are threads of one process
//
// Prints per size: a call in a loop with one synchronisation at its end, the time until the loop has issued everything, and
// a call with a synchronisation after each; microseconds per call, medians over the rounds, of rank 0. Aim: a plug-in call
// takes at most 1.05 times the bare one plus 3 us. Exit code 1 when a call fails or a result is wrong.
//
// With one GPU both ranks share it: NCCL 2.30 or newer (LOCKSTEP_NCCL_LIBRARY), and MPS for times that mean something.
#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "benchmarks/common/clock.h"
#include "benchmarks/common/shared_kv.h"
#include "engines/cuda/resources.h"
#include "engines/nccl/nccl_api.h"

namespace {

namespace cuda = lockstep::cuda;
namespace nccl = lockstep::nccl_plugin;

constexpr int kRanks = 2;
constexpr double kSecondsPerLoop = 0.1;

using bench::now_ns;

std::int64_t in_seconds(int seconds) {
  return now_ns() + seconds * 1'000'000'000LL;
}

[[noreturn]] void die(const std::string& why) {
  std::fprintf(stderr, "nccl_overhead: %s\n", why.c_str());
  std::_Exit(1);
}

// One rank: its GPU, a communicator of bare NCCL and one of the plug-in.
class Rank {
 public:
  Rank(int rank, const lockstep_host& host, const lockstep_engine& engine)
      : rank_(rank), host_(host), engine_(engine) {
    std::string why;
    const cuda::Driver* const driver = cuda::Driver::find(&why);
    if (driver == nullptr) die(why);
    int n_devices = 0;
    driver->device_get_count(&n_devices);
    if (n_devices == 1) ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    gpu_ = &cuda::PrimaryContext::of(*driver, rank % n_devices);
    library_ = nccl::Library::find(&why);
    if (library_ == nullptr) die(why);
    scope_ = std::make_unique<cuda::ContextScope>(*gpu_);
    stream_ = cuda::create_stream(*gpu_, cuda::Priority::kLeast);
    if (rank == 0)
      std::printf("NCCL %s (%s), %d GPU(s)\n", nccl::version_text(library_->version).c_str(),
                  library_->path.c_str(), n_devices);
    connect_bare();
    connect_plugin();
  }
  ~Rank() {
    engine_.comm_destroy(comm_, nullptr);
    library_->comm_abort(bare_);
  }
  Rank(const Rank&) = delete;

  // Both give the sum in place.
  void bare(cuda::DevicePtr data, std::size_t count) {
    auto* const at = reinterpret_cast<void*>(data);
    settle(library_->all_reduce(at, at, count, nccl::kFloat32, nccl::kSum, bare_, stream_.get()),
           "ncclAllReduce");
  }
  void plugin(cuda::DevicePtr data, std::size_t count) {
    auto* const at = reinterpret_cast<void*>(data);
    const lockstep_op op{.struct_size = sizeof op,
                         .kind = LOCKSTEP_ALL_REDUCE,
                         .dtype = LOCKSTEP_F32,
                         .reduce = LOCKSTEP_SUM,
                         .root = 0,
                         .send = at,
                         .recv = at,
                         .count = count,
                         .deadline_ns = in_seconds(60),
                         .where = nullptr,
                         .device_kind = LOCKSTEP_CUDA,
                         .device = gpu_->device(),
                         .stream = stream_.get()};
    char error[512] = "";
    if (engine_.run(comm_, &op, error, sizeof error) != LOCKSTEP_OK) die(error);
  }
  void synchronize() {
    cuda::check(gpu_->driver(), gpu_->driver().stream_synchronize(stream_.get()), "cuStreamSynchronize");
  }
  const cuda::PrimaryContext& gpu() const { return *gpu_; }
  cuda::Stream stream() const { return stream_.get(); }
  int rank() const { return rank_; }

  // The larger of the two ranks' numbers, so that both make the same number of calls.
  int agree(const std::string& key, int number) {
    host_.kv_set(host_.context, (key + std::to_string(rank_)).c_str(), &number, sizeof number);
    int theirs = 0;
    std::size_t length = 0;
    const auto status = host_.kv_get(host_.context, (key + std::to_string(1 - rank_)).c_str(), &theirs,
                                     sizeof theirs, &length, in_seconds(60));
    if (status != LOCKSTEP_OK) die("the other rank is gone");
    return std::max(number, theirs);
  }

 private:
  void settle(nccl::Result result, const char* call) {
    const std::int64_t deadline = in_seconds(60);
    while (result == nccl::kInProgress && now_ns() < deadline) {
      if (library_->comm_get_async_error(bare_, &result) != nccl::kSuccess) break;
    }
    if (result != nccl::kSuccess)
      die(std::string(call) + ": " + library_->get_error_string(result) + "; " +
          library_->get_last_error(bare_));
  }
  void connect_bare() {
    nccl::UniqueId id{};
    std::size_t length = 0;
    if (rank_ == 0) {
      if (library_->get_unique_id(&id) != nccl::kSuccess) die("ncclGetUniqueId");
      host_.kv_set(host_.context, "bare", &id, sizeof id);
    } else if (host_.kv_get(host_.context, "bare", &id, sizeof id, &length, in_seconds(60)) != LOCKSTEP_OK) {
      die("no unique id");
    }
    nccl::Config config;
    settle(library_->comm_init_rank_config(&bare_, kRanks, id, rank_, &config), "ncclCommInitRankConfig");
  }
  void connect_plugin() {
    const lockstep_comm_config config{.struct_size = sizeof config,
                                      .host = &host_,
                                      .rank = rank_,
                                      .size = kRanks,
                                      .name = "bench",
                                      .deadline_ns = in_seconds(60),
                                      .parent = nullptr,
                                      .parent_ranks = nullptr,
                                      .engine = &engine_,
                                      .key = nullptr,
                                      .device_kind = LOCKSTEP_CUDA,
                                      .device = gpu_->device(),
                                      .options = "blocking=1"};
    char error[512] = "";
    if (engine_.comm_create(&config, &comm_, error, sizeof error) != LOCKSTEP_OK) die(error);
  }

  const int rank_;
  const lockstep_host& host_;
  const lockstep_engine& engine_;
  const cuda::PrimaryContext* gpu_ = nullptr;
  const nccl::Library* library_ = nullptr;
  std::unique_ptr<cuda::ContextScope> scope_;
  cuda::OwnedStream stream_;
  nccl::Comm bare_ = nullptr;
  lockstep_comm* comm_ = nullptr;
};

struct Times {
  std::vector<double> loop, issue, single;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void measure(Rank& rank, int calls, const std::function<void()>& call, Times& times) {
  rank.synchronize();
  const auto us_each = [&](std::int64_t from) { return static_cast<double>(now_ns() - from) * 1e-3 / calls; };
  std::int64_t begin = now_ns();
  for (int i = 0; i < calls; ++i) call();
  times.issue.push_back(us_each(begin));
  rank.synchronize();
  times.loop.push_back(us_each(begin));
  begin = now_ns();
  for (int i = 0; i < calls; ++i) {
    call();
    rank.synchronize();
  }
  times.single.push_back(us_each(begin));
}

void check(Rank& rank, const std::function<void()>& call, cuda::DevicePtr data, std::size_t count,
           const char* who) {
  std::vector<float> host(count, static_cast<float>(rank.rank() + 1));
  const cuda::Driver& driver = rank.gpu().driver();
  cuda::check(driver, driver.memcpy(data, reinterpret_cast<cuda::DevicePtr>(host.data()), count * 4),
              "cuMemcpy");
  call();
  rank.synchronize();
  cuda::check(driver, driver.memcpy(reinterpret_cast<cuda::DevicePtr>(host.data()), data, count * 4),
              "cuMemcpy");
  if (std::any_of(host.begin(), host.end(), [](float x) { return x != 3.f; }))
    die(std::string(who) + ": a wrong sum");
  // Zeros from here on: repeated sums must not overflow.
  cuda::check(driver, driver.memset_d8_async(data, 0, count * 4, rank.stream()), "cuMemsetD8Async");
  rank.synchronize();
}

void one_size(Rank& rank, std::size_t n_bytes, int rounds) {
  const std::size_t count = n_bytes / 4;
  const auto memory = cuda::allocate(rank.gpu(), n_bytes);
  const auto bare = [&] { rank.bare(memory.get(), count); };
  const auto plugin = [&] { rank.plugin(memory.get(), count); };
  check(rank, bare, memory.get(), count, "bare NCCL");
  check(rank, plugin, memory.get(), count, "the plug-in");
  Times warm;
  measure(rank, 5, bare, warm);
  measure(rank, 5, plugin, warm);
  const int mine =
      std::clamp(static_cast<int>(kSecondsPerLoop * 1e6 / std::max(warm.single.back(), 1.0)), 5, 200);
  const int calls = rank.agree("calls/" + std::to_string(n_bytes) + "/", mine);
  Times times[2];
  for (int round = 0; round < rounds; ++round) {
    for (const int which : {round % 2, 1 - round % 2}) {
      which == 0 ? measure(rank, calls, bare, times[0]) : measure(rank, calls, plugin, times[1]);
    }
  }
  if (rank.rank() != 0) return;
  const auto line = [&](const char* what, const std::vector<double> Times::*field) {
    const double a = median(times[0].*field), b = median(times[1].*field);
    std::printf("%8zu KiB  %-7s bare %9.2f us  plug-in %9.2f us  ratio %5.3f  difference %+7.2f us%s\n",
                n_bytes >> 10, what, a, b, b / a, b - a, b <= 1.05 * a + 3 ? "" : "  MISSES THE AIM");
  };
  line("loop", &Times::loop);
  line("issue", &Times::issue);
  line("single", &Times::single);
  std::fflush(stdout);
}

int be(int rank, const lockstep_host& host, const char* path, int rounds) {
  void* const handle = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) die(::dlerror());
  const auto entry = reinterpret_cast<lockstep_engine_entry>(::dlsym(handle, LOCKSTEP_ENGINE_SYMBOL));
  if (entry == nullptr) die("not a plug-in");
  Rank me(rank, host, *entry());
  for (const std::size_t n_bytes : {std::size_t{4} << 10, std::size_t{1} << 20, std::size_t{25} << 20})
    one_size(me, n_bytes, rounds);
  me.agree("end/", 0);
  return 0;
}

}  // namespace

int main(int n_arguments, char** arguments) {
  if (n_arguments < 2) die("usage: nccl_overhead <lockstep_nccl.so> [rounds]");
  const int rounds = n_arguments > 2 ? std::max(1, std::atoi(arguments[2])) : 9;
  const bench::SharedKv kv;
  const auto rank_of = [&](int r) {
    try {
      return be(r, *kv.host(), arguments[1], rounds);
    } catch (const std::exception& error) {
      die(error.what());
    }
  };
  if (n_arguments > 3) {
    std::thread other([&] { rank_of(1); });
    rank_of(0);
    other.join();
    return 0;
  }
  pid_t pids[kRanks];
  for (int r = 0; r < kRanks; ++r) {
    pids[r] = ::fork();
    if (pids[r] == 0) {
      const int code = rank_of(r);
      std::fflush(stdout);
      std::_Exit(code);
    }
  }
  int worst = 0;
  for (int n = 0; n < kRanks; ++n) {
    int status = 0;
    const pid_t ended = ::wait(&status);
    if (status == 0) continue;
    worst = 1;
    // The other one would wait for it.
    for (const pid_t other : pids) {
      if (other != ended) ::kill(other, SIGTERM);
    }
  }
  return worst;
}
