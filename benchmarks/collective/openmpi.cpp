// Open MPI's collectives and messages on ordinary memory, run by mpirun.
#include <mpi.h>
#include <unistd.h>

#include <algorithm>

#include "benchmarks/collective/buffers.h"
#include "benchmarks/collective/measure.h"
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
  bool prepare(const Case& which) { return buffers_.prepare(which, &Buffers::ordinary); }
  std::span<float> send(std::size_t i) { return buffers_.send(i); }
  std::span<float> recv(std::size_t i) { return buffers_.recv(i); }
  void barrier() { MPI_Barrier(MPI_COMM_WORLD); }

  void run(std::size_t i) {
    const Case& which = buffers_.which();
    float* const from = send(i).data();
    float* const to = recv(i).data();
    const auto whole = static_cast<int>(which.n_whole());
    const auto block = static_cast<int>(which.n_block());
    const MPI_Comm world = MPI_COMM_WORLD;
    switch (which.kind) {
      case Kind::kBarrier:
        MPI_Barrier(world);
        break;
      case Kind::kBroadcast:
        MPI_Bcast(to, whole, MPI_FLOAT, 0, world);
        break;
      case Kind::kAllReduce:
        MPI_Allreduce(MPI_IN_PLACE, to, whole, MPI_FLOAT, MPI_SUM, world);
        break;
      case Kind::kReduce:
        MPI_Reduce(which.rank == 0 ? MPI_IN_PLACE : from, to, whole, MPI_FLOAT, MPI_SUM, 0, world);
        break;
      case Kind::kAllGather:
        MPI_Allgather(from, block, MPI_FLOAT, to, block, MPI_FLOAT, world);
        break;
      case Kind::kGather:
        MPI_Gather(from, block, MPI_FLOAT, to, block, MPI_FLOAT, 0, world);
        break;
      case Kind::kReduceScatter:
        MPI_Reduce_scatter_block(from, to, block, MPI_FLOAT, MPI_SUM, world);
        break;
      case Kind::kScatter:
        MPI_Scatter(from, block, MPI_FLOAT, to, block, MPI_FLOAT, 0, world);
        break;
      case Kind::kAllToAll:
        MPI_Alltoall(from, block, MPI_FLOAT, to, block, MPI_FLOAT, world);
        break;
      case Kind::kSendRecv:
        ping_pong(from, to, whole, which);
        break;
      case Kind::kExchange:
        MPI_Sendrecv(from, whole, MPI_FLOAT, which.partner(), kTag, to, whole, MPI_FLOAT, which.partner(),
                     kTag, world, MPI_STATUS_IGNORE);
        break;
    }
  }

 private:
  static constexpr int kTag = 1;  // MpiLink has 0

  static void ping_pong(const float* from, float* to, int n, const Case& which) {
    const bool first = which.rank < which.partner();
    if (first) MPI_Send(from, n, MPI_FLOAT, which.partner(), kTag, MPI_COMM_WORLD);
    MPI_Recv(to, n, MPI_FLOAT, which.partner(), kTag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (!first) MPI_Send(from, n, MPI_FLOAT, which.partner(), kTag, MPI_COMM_WORLD);
  }

  Buffers buffers_;
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
    code = bench::serve(
        link, [&](const bench::Request& request) { return bench::measure(openmpi, link, request); });
  }
  if (code != 0) MPI_Abort(MPI_COMM_WORLD, code);
  MPI_Finalize();
  return code;
}
