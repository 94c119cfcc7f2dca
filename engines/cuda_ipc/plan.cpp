#include "engines/cuda_ipc/plan.h"

#include <algorithm>
#include <numeric>

#include "lockstep/engine/plugin.h"

namespace lockstep::cuda_ipc {
namespace {

const char* at(const void* base, std::uint64_t n_bytes) {
  return static_cast<const char*>(base) + n_bytes;
}
char* at(void* base, std::uint64_t n_bytes) {
  return static_cast<char*>(base) + n_bytes;
}

// A plan is a pure function of the calls, made by the leader alone: every piece is read from one rank's buffer and written
// to another's, and no two pieces write the same bytes, so that their order does not matter.

// Pieces, as many launches as they need; a piece per row of the grid.
class Copies {
 public:
  void add(const void* from, void* to, std::uint64_t n_bytes) {
    if (n_bytes == 0 || from == to) return;
    if (launches_.empty() || launches_.back().rows == kMaxPieces) {
      launches_.emplace_back();
      launches_.back().rows = 0;
    }
    Launch& last = launches_.back();
    last.copy.pieces[last.rows++] = {from, to, n_bytes};
    last.row_bytes = std::max(last.row_bytes, n_bytes);
  }
  std::vector<Launch> take() { return std::move(launches_); }

 private:
  std::vector<Launch> launches_;
};

// In rank order. ALL_REDUCE: every rank is a target; REDUCE: the root; REDUCE_SCATTER: each rank of its part.
std::vector<Launch> plan_reduction(const PlannedKind& kind, std::span<const PlannedCall> calls) {
  if (kind.count == 0) return {};
  const bool scatters = kind.kind == LOCKSTEP_REDUCE_SCATTER;
  Launch launch{.kernel = static_cast<int>(kind.dtype)};
  ReduceTask& task = launch.reduce;
  for (const PlannedCall& call : calls) task.from[task.n_from++] = call.send;
  for (std::size_t r = 0; r < calls.size(); ++r) {
    if (kind.kind != LOCKSTEP_REDUCE || static_cast<int>(r) == kind.root)
      task.to[task.n_to++] = calls[r].recv;
  }
  launch.row_bytes = kind.count * comm::size_of(kind.dtype);
  launch.rows = scatters ? task.n_to : 1;
  task.count = kind.count;
  task.part_bytes = scatters ? launch.row_bytes : 0;
  task.scale = kind.reduce == LOCKSTEP_AVG ? 1.0 / static_cast<double>(task.n_from) : 1.0;
  task.op = kind.reduce;
  task.scatter = scatters ? 1 : 0;
  return {launch};
}

// received[r] grows in the order of senders: receivers hold the parts in rank order.
void add_all_to_all_v(Copies& copies, std::span<const PlannedCall> calls, std::size_t width) {
  std::vector<std::uint64_t> received(calls.size());  // elements, per receiver
  for (const PlannedCall& from : calls) {
    std::uint64_t sent = 0;
    for (std::size_t r = 0; r < calls.size(); ++r) {
      const std::uint64_t n = from.send_counts[r];
      copies.add(at(from.send, sent * width), at(calls[r].recv, received[r] * width), n * width);
      sent += n;
      received[r] += n;
    }
  }
}

}  // namespace

std::vector<Launch> plan_copy(const void* from, void* to, std::uint64_t n_bytes) {
  Copies copies;
  copies.add(from, to, n_bytes);
  return copies.take();
}

std::vector<Launch> plan(const PlannedKind& kind, std::span<const PlannedCall> calls) {
  if (comm::has_reduce(kind.kind)) return plan_reduction(kind, calls);
  const std::size_t n = calls.size(), width = comm::size_of(kind.dtype);
  const std::uint64_t block = kind.count * width;
  const auto root = static_cast<std::size_t>(kind.root);
  Copies copies;
  switch (kind.kind) {
    case LOCKSTEP_BROADCAST:
      for (std::size_t r = 0; r < n; ++r) {
        if (r != root) copies.add(calls[root].send, calls[r].recv, block);
      }
      break;
    case LOCKSTEP_ALL_GATHER:
      for (std::size_t s = 0; s < n; ++s) {
        for (std::size_t r = 0; r < n; ++r) copies.add(calls[s].send, at(calls[r].recv, s * block), block);
      }
      break;
    case LOCKSTEP_ALL_GATHER_V: {
      std::uint64_t before = 0;
      for (std::size_t s = 0; s < n; before += kind.recv_counts[s++] * width) {
        for (std::size_t r = 0; r < n; ++r)
          copies.add(calls[s].send, at(calls[r].recv, before), kind.recv_counts[s] * width);
      }
      break;
    }
    case LOCKSTEP_GATHER:
      for (std::size_t s = 0; s < n; ++s) copies.add(calls[s].send, at(calls[root].recv, s * block), block);
      break;
    case LOCKSTEP_SCATTER:
      for (std::size_t r = 0; r < n; ++r) copies.add(at(calls[root].send, r * block), calls[r].recv, block);
      break;
    case LOCKSTEP_ALL_TO_ALL:
      for (std::size_t s = 0; s < n; ++s) {
        for (std::size_t r = 0; r < n; ++r)
          copies.add(at(calls[s].send, r * block), at(calls[r].recv, s * block), block);
      }
      break;
    case LOCKSTEP_ALL_TO_ALL_V:
      add_all_to_all_v(copies, calls, width);
      break;
    default:
      break;
  }
  return copies.take();
}

// What the rank's buffers must span, in elements: checked against its segment before a kernel may touch it.
Extent extent_of(const lockstep_op& op, int rank, int size) {
  const auto n = static_cast<std::uint64_t>(size);
  const bool is_root = rank == op.root;
  const auto sum = [&](const std::uint64_t* counts) {
    return std::accumulate(counts, counts + size, std::uint64_t{0});
  };
  switch (op.kind) {
    case LOCKSTEP_BROADCAST:
      return is_root ? Extent{op.count, 0} : Extent{0, op.count};
    case LOCKSTEP_ALL_REDUCE:
      return {op.count, op.count};
    case LOCKSTEP_ALL_GATHER:
      return {op.count, n * op.count};
    case LOCKSTEP_REDUCE_SCATTER:
      return {n * op.count, op.count};
    case LOCKSTEP_REDUCE:
      return {op.count, is_root ? op.count : 0};
    case LOCKSTEP_GATHER:
      return {op.count, is_root ? n * op.count : 0};
    case LOCKSTEP_SCATTER:
      return {is_root ? n * op.count : 0, op.count};
    case LOCKSTEP_ALL_TO_ALL:
      return {n * op.count, n * op.count};
    case LOCKSTEP_ALL_TO_ALL_V:
      return {sum(op.send_counts), sum(op.recv_counts)};
    case LOCKSTEP_ALL_GATHER_V:
      return {op.recv_counts[rank], sum(op.recv_counts)};
    case LOCKSTEP_SEND:
      return {op.count, 0};
    case LOCKSTEP_RECV:
      return {0, op.count};
    default:
      return {};
  }
}

}  // namespace lockstep::cuda_ipc
