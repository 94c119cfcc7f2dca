// What each operation is in NCCL's calls, and what types and reductions mean there.
#include <numeric>
#include <optional>

#include "engines/nccl/lane.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::nccl_plugin {
namespace {

// A type as NCCL moves it: int16 has no name there and goes as bytes.
struct Moved {
  DataType type;
  std::size_t per_element = 1;
};

Moved moved(lockstep_dtype dtype) {
  switch (dtype) {
    case LOCKSTEP_I8:
      return {kInt8};
    case LOCKSTEP_I16:
      return {kUint8, 2};
    case LOCKSTEP_I32:
      return {kInt32};
    case LOCKSTEP_I64:
      return {kInt64};
    case LOCKSTEP_F16:
      return {kFloat16};
    case LOCKSTEP_BF16:
      return {kBfloat16};
    case LOCKSTEP_F32:
      return {kFloat32};
    case LOCKSTEP_F64:
      return {kFloat64};
    default:
      return {kUint8};
  }
}

bool is_floating(lockstep_dtype dtype) {
  return dtype == LOCKSTEP_F16 || dtype == LOCKSTEP_BF16 || dtype == LOCKSTEP_F32 || dtype == LOCKSTEP_F64;
}

// Booleans are bytes of 0 and 1: "or" is their maximum, "and" their minimum.
std::optional<RedOp> bool_reduction(lockstep_reduce_op op) {
  switch (op) {
    case LOCKSTEP_SUM:
    case LOCKSTEP_MAX:
    case LOCKSTEP_BOR:
      return kMax;
    case LOCKSTEP_PRODUCT:
    case LOCKSTEP_MIN:
    case LOCKSTEP_BAND:
      return kMin;
    default:
      return std::nullopt;
  }
}

std::optional<RedOp> reduction(lockstep_dtype dtype, lockstep_reduce_op op) {
  if (dtype == LOCKSTEP_I16) return std::nullopt;
  if (dtype == LOCKSTEP_BOOL) return bool_reduction(op);
  switch (op) {
    case LOCKSTEP_SUM:
      return kSum;
    case LOCKSTEP_PRODUCT:
      return kProd;
    case LOCKSTEP_MIN:
      return kMin;
    case LOCKSTEP_MAX:
      return kMax;
    case LOCKSTEP_AVG:
      return is_floating(dtype) ? std::optional(kAvg) : std::nullopt;
    default:
      return std::nullopt;
  }
}

const char* at(const void* data, std::uint64_t n_bytes) {
  return static_cast<const char*>(data) + n_bytes;
}

// The pieces that this rank exchanges with each rank, as sends and receives of one group.
class Exchange {
 public:
  Exchange(const LaneContext& context, const Operation& operation, Comm comm, int rank, int size,
           cuda::Stream stream)
      : context_(context), op_(operation.op), comm_(comm), rank_(rank), size_(size), stream_(stream) {}

  Result run() {
    switch (op_.kind) {
      case LOCKSTEP_GATHER:
        for (int r = 0; r < size_ && rank_ == op_.root; ++r)
          receive(r, op_.count, op_.count * static_cast<std::uint64_t>(r));
        send(op_.root, op_.count, 0);
        break;
      case LOCKSTEP_SCATTER:
        for (int r = 0; r < size_ && rank_ == op_.root; ++r)
          send(r, op_.count, op_.count * static_cast<std::uint64_t>(r));
        receive(op_.root, op_.count, 0);
        break;
      case LOCKSTEP_ALL_TO_ALL:
        for (int r = 0; r < size_; ++r) {
          const std::uint64_t block = op_.count * static_cast<std::uint64_t>(r);
          send(r, op_.count, block);
          receive(r, op_.count, block);
        }
        break;
      default:
        uneven();
        break;
    }
    // A rank and itself: no call of NCCL's.
    if (own_count_ > 0 && own_to_ != own_from_) {
      const cuda::Driver& driver = context_.gpu.driver();
      cuda::check(driver,
                  driver.memcpy_async(reinterpret_cast<cuda::DevicePtr>(own_to_),
                                      reinterpret_cast<cuda::DevicePtr>(own_from_),
                                      own_count_ * comm::size_of(op_.dtype), stream_),
                  "cuMemcpyAsync");
    }
    return result_;
  }

 private:
  void uneven() {
    std::uint64_t send_at = 0, recv_at = 0;
    const auto mine = static_cast<std::size_t>(rank_);
    for (int r = 0; r < size_; ++r) {
      const auto i = static_cast<std::size_t>(r);
      const bool all_to_all = op_.kind == LOCKSTEP_ALL_TO_ALL_V;
      const std::uint64_t sent = all_to_all ? op_.send_counts[i] : op_.recv_counts[mine];
      send(r, sent, send_at);
      receive(r, op_.recv_counts[i], recv_at);
      if (all_to_all) send_at += sent;
      recv_at += op_.recv_counts[i];
    }
  }
  void send(int to, std::uint64_t count, std::uint64_t element) {
    const char* const data = at(op_.send, element * comm::size_of(op_.dtype));
    if (to == rank_) {
      own_from_ = data;
      own_count_ = count;
    } else if (count > 0 && result_ == kSuccess) {
      const auto [type, per_element] = moved(op_.dtype);
      keep(context_.nccl.send(data, count * per_element, type, to, comm_, stream_));
    }
  }
  void receive(int from, std::uint64_t count, std::uint64_t element) {
    char* const data = const_cast<char*>(at(op_.recv, element * comm::size_of(op_.dtype)));
    if (from == rank_) {
      own_to_ = data;
    } else if (count > 0 && result_ == kSuccess) {
      const auto [type, per_element] = moved(op_.dtype);
      keep(context_.nccl.recv(data, count * per_element, type, from, comm_, stream_));
    }
  }
  // Inside a group kInProgress says nothing; the group's end does.
  void keep(Result result) {
    if (result != kInProgress) result_ = result;
  }

  const LaneContext& context_;
  const lockstep_op& op_;
  Comm comm_;
  const int rank_, size_;
  cuda::Stream stream_;
  const char* own_from_ = nullptr;
  char* own_to_ = nullptr;
  std::uint64_t own_count_ = 0;
  Result result_ = kSuccess;
};

// A byte per device that barriers reduce, for the life of the process: freeing device memory waits for streams.
cuda::DevicePtr barrier_byte(const cuda::PrimaryContext& gpu) {
  static base::Mutex mutex;
  static std::vector<std::pair<int, cuda::DevicePtr>> bytes;
  const base::MutexLock lock(mutex);
  for (const auto& [device, byte] : bytes) {
    if (device == gpu.device()) return byte;
  }
  cuda::DevicePtr byte = 0;
  cuda::check(gpu.driver(), gpu.driver().mem_alloc(&byte, 16), "cuMemAlloc");
  bytes.emplace_back(gpu.device(), byte);
  return byte;
}

// A message of a rank to itself: the receive copies, the send is done with it.
Result copy_to_self(const LaneContext& context, const Operation& operation, cuda::Stream stream) {
  if (!operation.partner) return kSuccess;
  const cuda::Driver& driver = context.gpu.driver();
  cuda::check(driver,
              driver.memcpy_async(reinterpret_cast<cuda::DevicePtr>(operation.op.recv),
                                  reinterpret_cast<cuda::DevicePtr>(operation.partner->op.send),
                                  operation.op.count * comm::size_of(operation.op.dtype), stream),
              "cuMemcpyAsync");
  return kSuccess;
}

}  // namespace

bool can_reduce(lockstep_dtype dtype, lockstep_reduce_op op) {
  return reduction(dtype, op).has_value();
}

bool needs_group(const lockstep_op& op) {
  return op.kind == LOCKSTEP_GATHER || op.kind == LOCKSTEP_SCATTER || op.kind == LOCKSTEP_ALL_TO_ALL ||
         comm::is_uneven(op.kind);
}

Result enqueue(const LaneContext& context, const Operation& operation, Comm comm, int rank, int size,
               cuda::Stream stream) {
  const lockstep_op& op = operation.op;
  const Library& nccl = context.nccl;
  if (op.kind == LOCKSTEP_BARRIER) {
    auto* const byte = reinterpret_cast<void*>(barrier_byte(context.gpu));
    return nccl.all_reduce(byte, byte, 1, kUint8, kMax, comm, stream);
  }
  if (op.count == 0 && !comm::is_uneven(op.kind)) return kSuccess;
  const auto [type, per_element] = moved(op.dtype);
  const std::size_t count = op.count * per_element;
  // Where it reduces, post has checked that this pair exists.
  const RedOp how = comm::has_reduce(op.kind) ? reduction(op.dtype, op.reduce).value_or(kSum) : kSum;
  switch (op.kind) {
    case LOCKSTEP_ALL_REDUCE:
      return nccl.all_reduce(op.send, op.recv, count, type, how, comm, stream);
    case LOCKSTEP_BROADCAST:
      return nccl.broadcast(op.send, op.recv, count, type, op.root, comm, stream);
    case LOCKSTEP_REDUCE:
      return nccl.reduce(op.send, op.recv, count, type, how, op.root, comm, stream);
    case LOCKSTEP_ALL_GATHER:
      return nccl.all_gather(op.send, op.recv, count, type, comm, stream);
    case LOCKSTEP_REDUCE_SCATTER:
      return nccl.reduce_scatter(op.send, op.recv, count, type, how, comm, stream);
    case LOCKSTEP_SEND:
      return size == 1 ? copy_to_self(context, operation, stream)
                       : nccl.send(op.send, count, type, 1 - rank, comm, stream);
    case LOCKSTEP_RECV:
      return size == 1 ? copy_to_self(context, operation, stream)
                       : nccl.recv(op.recv, count, type, 1 - rank, comm, stream);
    default:
      return Exchange(context, operation, comm, rank, size, stream).run();
  }
}

}  // namespace lockstep::nccl_plugin
