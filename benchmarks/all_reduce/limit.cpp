// What the machine allows: two processes, one mapping, two barriers, one vectorised pass. Each rank reduces
// its half of the buffer, reading both inputs and writing both outputs: 2 loads and 2 stores per element and
// pair of ranks. No error handling, no deadlines, no other operation; built with -O3 -march=native. Not a
// library: a yardstick.
#include <emmintrin.h>
#include <sys/mman.h>

#include <atomic>
#include <stdexcept>

#include "benchmarks/all_reduce/measure.h"
#include "benchmarks/common/fork_link.h"
#include "benchmarks/common/serve.h"

namespace bench {
namespace {

constexpr std::size_t kRegion = std::size_t{1} << 30;  // address space per rank; pages come when touched

struct alignas(128) Counter {
  std::atomic<std::uint64_t> value{0};
};

struct Shared {
  Counter arrived[2];
};

void add_both(float* __restrict a, float* __restrict b, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const float sum = a[i] + b[i];
    a[i] = sum;
    b[i] = sum;
  }
}

class Limit {
 public:
  // Before the fork: both ranks inherit the mapping.
  Limit() {
    void* memory = ::mmap(nullptr, 4096 + 2 * kRegion, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no shared mapping");
    shared_ = new (memory) Shared;
    data_ = static_cast<char*>(memory) + 4096;
  }

  void join(int rank) { rank_ = rank; }

  void prepare(const std::string&, std::size_t n_bytes, std::size_t n_buffers) {
    if (n_bytes * n_buffers > kRegion) throw std::runtime_error("more memory asked for than was reserved");
    if (n_bytes == n_bytes_ && n_buffers == n_buffers_) return;
    // What an earlier, larger request left behind goes back.
    ::madvise(region(rank_), kRegion, MADV_REMOVE);
    n_bytes_ = n_bytes;
    n_buffers_ = n_buffers;
  }

  std::span<float> buffer(std::size_t i) { return {at(rank_, i), n_bytes_ / sizeof(float)}; }

  void all_reduce(std::size_t i) {
    const std::size_t n = n_bytes_ / sizeof(float);
    const std::size_t half = n / 2 / 16 * 16;  // whole cache lines
    const std::size_t from = rank_ == 0 ? 0 : half;
    barrier();
    add_both(at(0, i) + from, at(1, i) + from, rank_ == 0 ? half : n - half);
    barrier();
  }

 private:
  char* region(int rank) const { return data_ + static_cast<std::size_t>(rank) * kRegion; }
  float* at(int rank, std::size_t i) const { return reinterpret_cast<float*>(region(rank) + i * n_bytes_); }

  void barrier() {
    ++turn_;
    shared_->arrived[rank_].value.store(turn_, std::memory_order_release);
    while (shared_->arrived[1 - rank_].value.load(std::memory_order_acquire) < turn_) _mm_pause();
  }

  Shared* shared_ = nullptr;
  char* data_ = nullptr;
  int rank_ = 0;
  std::uint64_t turn_ = 0;
  std::size_t n_bytes_ = 0;
  std::size_t n_buffers_ = 0;
};

}  // namespace
}  // namespace bench

int main() {
  bench::Limit limit;
  const auto link = bench::fork_ranks(2);
  limit.join(link->rank());
  bench::bind_to_core(link->rank());
  return bench::serve(
      *link, [&](const bench::Request& request) { return bench::measure_all_reduce(limit, *link, request); });
}
