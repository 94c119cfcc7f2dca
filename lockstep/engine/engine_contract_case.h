// One collective call of the contract suite: what goes in, what must come out, and that nothing else was
// touched.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/engine/engine_contract.h"
#include "lockstep/engine/engine_contract_reference.h"

namespace lockstep::comm {

// The largest buffers go with no more ranks than this.
inline constexpr int kMaxRanksOfLarge = long_testing::kUnderTsan ? 2 : kSanitized ? 3 : 4;

// Bytes with a marked margin on either side; from the engine's alloc when `shared`. On a device they have a twin
// there, which operations use and `shared` is about.
class GuardedBuffer {
 public:
  GuardedBuffer(testing::EngineRank& rank, std::size_t n_bytes, bool shared);
  ~GuardedBuffer();
  GuardedBuffer(const GuardedBuffer&) = delete;

  std::uint8_t* data() { return all_ + kMargin; }
  std::size_t n_bytes() const { return n_bytes_; }
  bool margins_whole() const;

 private:
  static constexpr std::size_t kMargin = 64;
  static constexpr std::uint8_t kMark = 0xa5;
  testing::EngineRank& rank_;
  const std::size_t n_bytes_;
  std::vector<std::uint8_t> own_;
  std::pair<std::size_t, void*> shared_{};
  std::uint8_t* all_;
  std::uint8_t* device_ = nullptr;  // the twin
};

struct Case {
  lockstep_op_kind kind;
  lockstep_dtype dtype = LOCKSTEP_F32;
  lockstep_reduce_op reduce = LOCKSTEP_SUM;
  std::uint64_t count = 1;
  int root = 0;
  bool in_place = false;  // ALL_REDUCE, REDUCE
  bool shared = false;    // this rank's buffers are from alloc
  bool posted = false;    // post and wait, instead of run
  std::uint64_t unevenness =
      0;  // the V kinds: blocks of (src * 3 + dst * 5) % 4 * unevenness + count, some of nothing
};

std::string to_string(const Case& one);
// Makes the call on this rank and checks everything about it.
void check(testing::EngineRank& rank, const Case& one);

// Across hosts, a rank that has sent its part to the root may complete before the root has arrived.
inline bool may_end_early(const Engine& engine, lockstep_op_kind kind) {
  return engine.capabilities().crosses_hosts != 0 && (kind == LOCKSTEP_REDUCE || kind == LOCKSTEP_GATHER);
}

// An operation with its buffers, where the rank has its memory, for tests about anything but its result: abort,
// loss, deadlines. Every element sent is 1.
struct PlainOp {
  PlainOp(testing::EngineRank& rank, lockstep_op_kind kind, std::uint64_t count,
          Milliseconds timeout = testing::kPatience);
  ~PlainOp();
  PlainOp(const PlainOp&) = delete;
  testing::TestMemory* memory;
  std::vector<float> send, recv;
  void *device_send = nullptr, *device_recv = nullptr;
  std::vector<std::uint64_t> counts;
  lockstep_op op;
};

}  // namespace lockstep::comm
