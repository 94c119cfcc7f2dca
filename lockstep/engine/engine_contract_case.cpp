#include "lockstep/engine/engine_contract_case.h"

#include <numeric>

namespace lockstep::comm {
namespace {

using Counts = std::vector<std::uint64_t>;

std::uint64_t block(const Case& one, int source, int target) {
  const auto turn = static_cast<std::uint64_t>(source * 3 + target * 5) % 4;
  return turn == 0 ? 0 : turn * one.unevenness + one.count;
}

std::uint64_t sum(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

// The whole call as seen from one rank.
struct Shape {
  std::uint64_t n_send = 0, n_recv = 0;
  Counts send_counts, recv_counts;

  Shape(const Case& one, int me, int size) {
    const auto n = static_cast<std::uint64_t>(size);
    const bool root = me == one.root;
    for (int r = 0; r < size; ++r) {
      send_counts.push_back(block(one, me, r));
      recv_counts.push_back(one.kind == LOCKSTEP_ALL_GATHER_V ? block(one, r, 0) : block(one, r, me));
    }
    switch (one.kind) {
      case LOCKSTEP_BARRIER:
        return;
      case LOCKSTEP_ALL_GATHER:
      case LOCKSTEP_GATHER:
        n_send = one.count;
        n_recv = one.kind == LOCKSTEP_ALL_GATHER || root ? one.count * n : 0;
        return;
      case LOCKSTEP_REDUCE_SCATTER:
      case LOCKSTEP_SCATTER:
        n_send = one.kind == LOCKSTEP_REDUCE_SCATTER || root ? one.count * n : 0;
        n_recv = one.count;
        return;
      case LOCKSTEP_ALL_TO_ALL:
        n_send = n_recv = one.count * n;
        return;
      case LOCKSTEP_ALL_TO_ALL_V:
        n_send = sum(send_counts);
        n_recv = sum(recv_counts);
        return;
      case LOCKSTEP_ALL_GATHER_V:
        n_send = recv_counts[static_cast<std::size_t>(me)];
        n_recv = sum(recv_counts);
        return;
      case LOCKSTEP_REDUCE:
        n_send = one.count;
        n_recv = root ? one.count : 0;
        return;
      default:
        n_send = n_recv = one.count;
    }
  }
};

// Elements of one rank's input that are contiguous in the result.
struct Run {
  int rank;  // -1: reduced over all
  std::uint64_t first, n;
};

// Where the result of rank `me` comes from, in order.
std::vector<Run> origins(const Case& one, const Shape& shape, int me, int size) {
  const std::uint64_t mine = static_cast<std::uint64_t>(me) * one.count;
  std::vector<Run> runs;
  switch (one.kind) {
    case LOCKSTEP_BROADCAST:
      return {{one.root, 0, one.count}};
    case LOCKSTEP_SCATTER:
      return {{one.root, mine, one.count}};
    case LOCKSTEP_REDUCE_SCATTER:
      return {{-1, mine, one.count}};
    case LOCKSTEP_ALL_GATHER:
    case LOCKSTEP_GATHER:
      for (int r = 0; r < size; ++r) runs.push_back({r, 0, one.count});
      return runs;
    case LOCKSTEP_ALL_TO_ALL:
      for (int r = 0; r < size; ++r) runs.push_back({r, mine, one.count});
      return runs;
    case LOCKSTEP_ALL_GATHER_V:
      for (int r = 0; r < size; ++r) runs.push_back({r, 0, shape.recv_counts[static_cast<std::size_t>(r)]});
      return runs;
    case LOCKSTEP_ALL_TO_ALL_V:
      for (int r = 0; r < size; ++r) {
        std::uint64_t first = 0;
        for (int d = 0; d < me; ++d) first += block(one, r, d);
        runs.push_back({r, first, shape.recv_counts[static_cast<std::size_t>(r)]});
      }
      return runs;
    default:
      return {{-1, 0, one.count}};
  }
}

// What is put in repeats after this many elements, no multiple of any size an engine might cut at.
constexpr std::uint64_t kPeriod = 997;

// Writes `run` to `to`, from one period that is computed element by element.
void write(const Case& one, const Run& run, int size, std::uint8_t* to) {
  const std::size_t width = reference::bytes_of(one.dtype);
  std::vector<std::uint8_t> period(kPeriod * width);
  for (std::uint64_t i = 0; i < std::min(kPeriod, run.n); ++i) {
    const std::uint64_t at = (run.first + i) % kPeriod;
    const std::int64_t value = run.rank < 0 ? reference::reduced(one.dtype, one.reduce, size, at)
                                            : reference::element(one.dtype, one.reduce, run.rank, size, at);
    reference::encode(one.dtype, value, period.data() + i * width);
  }
  for (std::uint64_t done = 0; done < run.n; done += kPeriod)
    std::memcpy(to + done * width, period.data(), std::min(kPeriod, run.n - done) * width);
}

std::vector<std::uint8_t> expected(const Case& one, const Shape& shape, int me, int size) {
  const std::size_t width = reference::bytes_of(one.dtype);
  std::vector<std::uint8_t> bytes(shape.n_recv * width);
  std::uint8_t* to = bytes.data();
  if (bytes.empty()) return bytes;
  for (const Run& run : origins(one, shape, me, size)) {
    write(one, run, size, to);
    to += run.n * width;
  }
  return bytes;
}

std::string first_difference(const std::uint8_t* got, const std::vector<std::uint8_t>& want) {
  std::size_t at = 0;
  while (got[at] == want[at]) ++at;
  return base::cat("byte ", at, " of ", want.size(), " is ", static_cast<int>(got[at]), ", not ",
                   static_cast<int>(want[at]));
}

}  // namespace

GuardedBuffer::GuardedBuffer(testing::EngineRank& rank, std::size_t n_bytes, bool shared)
    : rank_(rank), n_bytes_(n_bytes) {
  const std::size_t total = n_bytes + 2 * kMargin;
  if (shared) shared_ = rank.take_memory(total);
  if (shared && rank.memory() == nullptr) {
    all_ = static_cast<std::uint8_t*>(shared_.second);
  } else {
    own_.resize(total);
    all_ = own_.data();
  }
  std::memset(all_, kMark, total);
  if (rank.memory() == nullptr) return;
  device_ = static_cast<std::uint8_t*>(shared ? shared_.second : rank.memory()->allocate(total));
  rank.memory()->copy_in(device_, all_, total);
  rank.add_twin({all_, total, device_});
}

GuardedBuffer::~GuardedBuffer() {
  if (device_ != nullptr) rank_.remove_twin(all_);
  if (device_ != nullptr && shared_.second == nullptr) rank_.memory()->free(device_, own_.size());
  if (shared_.second != nullptr) rank_.give_memory(shared_);
}

bool GuardedBuffer::margins_whole() const {
  std::uint8_t before[kMargin], behind[kMargin];
  if (device_ != nullptr) {  // as they are now, also when an operation failed
    rank_.memory()->copy_out(before, device_, kMargin);
    rank_.memory()->copy_out(behind, device_ + kMargin + n_bytes_, kMargin);
  } else {
    std::memcpy(before, all_, kMargin);
    std::memcpy(behind, all_ + kMargin + n_bytes_, kMargin);
  }
  const auto marked = [](std::uint8_t byte) { return byte == kMark; };
  return std::all_of(before, before + kMargin, marked) && std::all_of(behind, behind + kMargin, marked);
}

std::string to_string(const Case& one) {
  return base::cat("kind ", one.kind, " dtype ", one.dtype, " reduce ", one.reduce, " count ", one.count,
                   " root ", one.root, one.in_place ? " in place" : "", one.shared ? " shared" : "",
                   one.posted ? " posted" : " run", " unevenness ", one.unevenness);
}

void check(testing::EngineRank& rank, const Case& one) {
  const Shape shape(one, rank.rank(), rank.size());
  const std::size_t width = reference::bytes_of(one.dtype);
  const bool same = one.in_place || one.kind == LOCKSTEP_BROADCAST;
  GuardedBuffer send(rank, shape.n_send * width, one.shared);
  GuardedBuffer recv(rank, same ? 0 : shape.n_recv * width, one.shared && !same);
  write(one, {rank.rank(), 0, shape.n_send}, rank.size(), send.data());
  const std::vector<std::uint8_t> sent(send.data(), send.data() + send.n_bytes());
  std::uint8_t* const result = same && shape.n_recv > 0 ? send.data() : recv.data();
  auto op = testing::EngineRank::op(one.kind, shape.n_send > 0 ? send.data() : nullptr,
                                    shape.n_recv > 0 ? result : nullptr, one.count, one.dtype);
  op.reduce = one.reduce;
  op.root = one.root;
  op.send_counts = one.kind == LOCKSTEP_ALL_TO_ALL_V ? shape.send_counts.data() : nullptr;
  op.recv_counts = one.kind == LOCKSTEP_ALL_TO_ALL_V || one.kind == LOCKSTEP_ALL_GATHER_V
                       ? shape.recv_counts.data()
                       : nullptr;
  const auto status = one.posted ? rank.post_and_wait(op) : rank.run(op);
  const auto context = [&] {
    return base::cat("rank ", rank.rank(), " of ", rank.size(), ", ", to_string(one), ": ");
  };
  ASSERT_EQ(status, LOCKSTEP_OK) << context() << rank.error();
  const auto want = expected(one, shape, rank.rank(), rank.size());
  ASSERT_TRUE(want.empty() || std::memcmp(result, want.data(), want.size()) == 0)
      << context() << first_difference(result, want);
  ASSERT_TRUE(send.margins_whole() && recv.margins_whole()) << context() << "wrote beyond a buffer";
  const bool untouched = sent.empty() || std::memcmp(send.data(), sent.data(), sent.size()) == 0;
  ASSERT_TRUE(same || untouched) << context() << "changed what was sent";
}

PlainOp::PlainOp(testing::EngineRank& rank, lockstep_op_kind kind, std::uint64_t count, Milliseconds timeout)
    : memory(rank.memory()),
      send(count * static_cast<std::size_t>(rank.size()), 1.f),
      recv(count * static_cast<std::size_t>(rank.size())),
      counts(static_cast<std::size_t>(rank.size()), count),
      op(testing::EngineRank::op(kind, send.data(), recv.data(), count, LOCKSTEP_F32, timeout)) {
  if (memory != nullptr) {
    const std::size_t n_bytes = send.size() * sizeof(float);
    op.send = device_send = memory->allocate(n_bytes);
    op.recv = device_recv = memory->allocate(n_bytes);
    memory->copy_in(device_send, send.data(), n_bytes);
    memory->place(op);
  }
  if (kind == LOCKSTEP_BROADCAST) op.recv = const_cast<void*>(op.send);
  if (kind == LOCKSTEP_BARRIER) op.send = op.recv = nullptr, op.count = 0;
  op.send_counts = op.recv_counts = counts.data();
}

PlainOp::~PlainOp() {
  if (memory == nullptr) return;
  memory->free(device_send, send.size() * sizeof(float));
  memory->free(device_recv, recv.size() * sizeof(float));
}

}  // namespace lockstep::comm
