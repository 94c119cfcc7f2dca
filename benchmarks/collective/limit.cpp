// What the machine allows, for all_reduce and barrier: processes, one mapping, two barriers, one vectorised
// pass. Each rank reduces its slice of the buffer, reading every rank's input and writing every rank's
// output: n loads and n stores per element for n ranks. A waiting rank spins, or yields where there are more
// ranks than cores. No error handling, no deadlines, no other operation; built with -O3 -march=native. Not a
// library: a yardstick.
#include <emmintrin.h>
#include <sched.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <stdexcept>

#include "benchmarks/collective/measure.h"
#include "benchmarks/common/fork_link.h"
#include "benchmarks/common/serve.h"

namespace bench {
namespace {

constexpr std::size_t kRegion = std::size_t{1} << 30;  // address space per rank; pages come when touched
constexpr int kMaxRanks = 16;

struct alignas(128) Counter {
  std::atomic<std::uint64_t> value{0};
};

struct Shared {
  Counter arrived[kMaxRanks];
};
constexpr std::size_t kHead = 4096;
static_assert(sizeof(Shared) <= kHead);

using Ranks = std::array<float*, kMaxRanks>;  // the same element in every rank's buffer

template <int kRanks>
void add_all(const Ranks& ranks, std::size_t n) {
  std::array<float*, kRanks> at;
  std::copy_n(ranks.begin(), kRanks, at.begin());
#pragma GCC ivdep
  for (std::size_t i = 0; i < n; ++i) {
    float sum = at[0][i];
#pragma GCC unroll 16
    for (int r = 1; r < kRanks; ++r) sum += at[static_cast<std::size_t>(r)][i];
#pragma GCC unroll 16
    for (int r = 0; r < kRanks; ++r) at[static_cast<std::size_t>(r)][i] = sum;
  }
}

auto add_for(int n_ranks) {
  switch (n_ranks) {
    case 2:
      return &add_all<2>;
    case 4:
      return &add_all<4>;
    case 8:
      return &add_all<8>;
    case 16:
      return &add_all<16>;
    default:
      throw std::runtime_error("the limit knows 2, 4, 8 and 16 ranks");
  }
}

class Limit {
 public:
  // Before the fork: all ranks inherit the mapping.
  explicit Limit(int n_ranks) : add_(add_for(n_ranks)), yields_(n_ranks > n_cores()) {
    void* memory = ::mmap(nullptr, kHead + static_cast<std::size_t>(n_ranks) * kRegion,
                          PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no shared mapping");
    shared_ = new (memory) Shared;
    data_ = static_cast<char*>(memory) + kHead;
  }

  bool prepare(const Case& which) {
    if (which.kind != Kind::kAllReduce && which.kind != Kind::kBarrier) refuse(which);
    if (which.n_bytes * which.n_buffers > kRegion) {
      throw std::runtime_error("more memory asked for than was reserved");
    }
    if (which == which_) return false;
    // What an earlier, larger request left behind goes back.
    ::madvise(region(which.rank), kRegion, MADV_REMOVE);
    which_ = which;
    return true;
  }

  std::span<float> send(std::size_t i) { return {at(which_.rank, i), which_.n_send()}; }
  std::span<float> recv(std::size_t i) { return send(i); }

  void run(std::size_t i) {
    barrier();
    if (which_.kind == Kind::kBarrier) return;
    const auto size = static_cast<std::size_t>(which_.size);
    const auto rank = static_cast<std::size_t>(which_.rank);
    const std::size_t slice = which_.n_whole() / size / 16 * 16;  // whole cache lines
    const std::size_t from = rank * slice;
    Ranks slices{};
    for (std::size_t r = 0; r < size; ++r) slices[r] = at(static_cast<int>(r), i) + from;
    add_(slices, rank + 1 == size ? which_.n_whole() - from : slice);
    barrier();
  }

  void barrier() {
    ++turn_;
    shared_->arrived[which_.rank].value.store(turn_, std::memory_order_release);
    for (int r = 0; r < which_.size; ++r) {
      while (shared_->arrived[r].value.load(std::memory_order_acquire) < turn_) relax();
    }
  }

 private:
  char* region(int rank) const { return data_ + static_cast<std::size_t>(rank) * kRegion; }
  float* at(int rank, std::size_t i) const {
    return reinterpret_cast<float*>(region(rank) + i * which_.n_bytes);
  }
  void relax() const {
    if (yields_) {
      ::sched_yield();
    } else {
      _mm_pause();
    }
  }

  void (*const add_)(const Ranks&, std::size_t);
  const bool yields_;
  Shared* shared_ = nullptr;
  char* data_ = nullptr;
  std::uint64_t turn_ = 0;
  Case which_;
};

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  const auto n_ranks = static_cast<int>(bench::arguments(argc, argv).number("ranks"));
  bench::Limit limit(n_ranks);
  const auto link = bench::fork_ranks(n_ranks);
  bench::bind_to_core(link->rank());
  return bench::serve(*link,
                      [&](const bench::Request& request) { return bench::measure(limit, *link, request); });
}
