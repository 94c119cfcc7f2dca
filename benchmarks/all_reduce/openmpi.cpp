// Open MPI's MPI_Allreduce, in place on ordinary memory, run by mpirun.
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

#include "benchmarks/all_reduce/measure.h"
#include "benchmarks/common/fork_link.h"
#include "benchmarks/common/serve.h"

namespace bench {
namespace {

// Over MPI itself. A rank waiting inside MPI spins; here it asks, then sleeps.
class MpiLink final : public Link {
 public:
  MpiLink() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::string share(const std::string& words) override {
    if (rank_ != 0) return receive(0);
    for (int rank = 1; rank < size_; ++rank) send(rank, words);
    return words;
  }

  bool all(bool mine) override {
    if (rank_ != 0) {
      send(0, mine ? "1" : "0");
      return mine;
    }
    bool every = mine;
    for (int rank = 1; rank < size_; ++rank) every = (receive(rank) == "1") && every;
    return every;
  }

 private:
  static void send(int rank, const std::string& words) {
    MPI_Send(words.data(), static_cast<int>(words.size()), MPI_CHAR, rank, 0, MPI_COMM_WORLD);
  }
  static std::string receive(int rank) {
    MPI_Status status;
    for (unsigned nap_us = 50;; nap_us = std::min(2 * nap_us, 10'000u)) {
      int here = 0;
      MPI_Iprobe(rank, 0, MPI_COMM_WORLD, &here, &status);
      if (here) break;
      ::usleep(nap_us);
    }
    int length = 0;
    MPI_Get_count(&status, MPI_CHAR, &length);
    std::string words(static_cast<std::size_t>(length), '\0');
    MPI_Recv(words.data(), length, MPI_CHAR, rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    return words;
  }

  int rank_ = 0;
  int size_ = 1;
};

class OpenMpi {
 public:
  void prepare(const std::string&, std::size_t n_bytes, std::size_t n_buffers) {
    if (n_bytes == n_bytes_ && n_buffers == buffers_.size()) return;
    n_bytes_ = n_bytes;
    buffers_.clear();
    for (std::size_t i = 0; i < n_buffers; ++i) {
      void* memory = std::aligned_alloc(64, (n_bytes + 63) / 64 * 64);
      if (memory == nullptr) throw std::bad_alloc();
      buffers_.emplace_back(static_cast<float*>(memory), &std::free);
    }
  }

  std::span<float> buffer(std::size_t i) { return {buffers_[i].get(), n_bytes_ / sizeof(float)}; }

  void all_reduce(std::size_t i) {
    MPI_Allreduce(MPI_IN_PLACE, buffers_[i].get(), static_cast<int>(n_bytes_ / sizeof(float)), MPI_FLOAT,
                  MPI_SUM, MPI_COMM_WORLD);
  }

 private:
  std::size_t n_bytes_ = 0;
  std::vector<std::unique_ptr<float, decltype(&std::free)>> buffers_;
};

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int code = 0;
  {
    bench::MpiLink link;
    bench::bind_to_core(link.rank());
    bench::OpenMpi openmpi;
    code = bench::serve(link, [&](const bench::Request& request) {
      return bench::measure_all_reduce(openmpi, link, request);
    });
  }
  if (code != 0) MPI_Abort(MPI_COMM_WORLD, code);
  MPI_Finalize();
  return code;
}
