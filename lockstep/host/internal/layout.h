// The layout of a rank's arena: a header at its start, then a heap with one block per communicator the rank
// is a member of, staging areas, send queues, and the memory that users allocated. Every rank maps every
// arena. The owner writes its arena and the others read it; the exceptions are marked "by others" below.
//
// Memory orders. Words that carry order are lock-free atomics; everything else is written before a release
// store and read after the matching acquire load. A word that another rank may sleep on is stored with
// sequential consistency, since the doorbell is checked after it (local/wake.h). It is loaded with acquire,
// also in the last look before a sleep: on x86-64 the announcement before that look is a full fence. A port
// to a weaker machine must load with sequential consistency there.
//
// Double buffering. Operations of a communicator are numbered from 1, and what exists twice is chosen by the
// number's lowest bit. Two copies suffice: a rank finishes operation N only after it has seen all others
// enter N, and they enter N only after they have finished N-1. So when a rank starts N+1 and reuses the copy
// of N-1, nobody reads that one any more.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "lockstep/engine/engine_abi.h"
#include "lockstep/engine/plugin.h"
#include "lockstep/local/meeting.h"
#include "lockstep/local/wake.h"

namespace lockstep::comm::internal {

inline constexpr std::uint64_t kLayoutMagic = 0x6c6f636b73746570;  // "lockstep"
inline constexpr std::uint32_t kLayoutVersion = 9;

inline constexpr std::size_t kLine = 64;
inline constexpr std::size_t kPage = 4096;
inline constexpr std::size_t kTinyBytes = 48;             // fits beside the flag
inline constexpr std::size_t kEagerBytes = 128;           // travels with the arrival wherever the buffer is
inline constexpr std::size_t kInlineBytes = 8 << 10;      // travels with the arrival
inline constexpr std::size_t kClaimFrom = 64 << 10;       // reductions of less are cut into one part per rank
inline constexpr std::size_t kStageInBytes = 1 << 20;     // one parity of what a rank lays out for the others
inline constexpr std::size_t kStageOutBytes = 512 << 10;  // one parity of a rank's reduced slices
inline constexpr std::size_t kHistory = 32;
inline constexpr int kMaxRanks = local::kMaxLocalRanks;
inline constexpr std::size_t kMaxJoining = 32;  // communicators that a rank makes at the same time
inline constexpr std::size_t kKeyCapacity = 64;
inline constexpr std::uint64_t kMaxCount = kMaxElements;  // the fingerprint has 40 bits for it

// An operation in one word, so that ranks compare their calls by comparing words. Exact, except for the
// caller's sequence number, of which four bits are enough: ranks differ by the number of calls that one of
// them rejected before sending anything.
constexpr std::uint64_t fingerprint(const lockstep_op& op) {
  return static_cast<std::uint64_t>(op.kind) << 60 | static_cast<std::uint64_t>(op.dtype) << 56 |
         static_cast<std::uint64_t>(op.reduce) << 52 | static_cast<std::uint64_t>(op.tag & 15) << 48 |
         static_cast<std::uint64_t>(op.root & 0xFF) << 40 | op.count;
}
static_assert(LOCKSTEP_OP_KINDS <= 16 && LOCKSTEP_DTYPES <= 16 && LOCKSTEP_REDUCE_OPS <= 16 &&
              kMaxRanks <= 256);

// The owner has entered operation `sequence` with this call, and with this payload if it is tiny: one cache
// line. The store of `sequence` publishes the rest of the line, the PublishedCall, the reset claims and the
// inline payload.
struct alignas(kLine) Arrival {
  // The number, shifted left by one; the lowest bit is 1 when the owner's buffers can be reduced in place: no
  // payload then.
  std::atomic<std::uint64_t> sequence;
  std::uint64_t fingerprint;
  std::uint8_t payload[kTinyBytes];
};
static_assert(sizeof(Arrival) == kLine);

// How another rank can access a buffer: by its offset in the owner's arena, by its address because both are
// in one process, or by its address through the kernel.
enum class Reach : std::uint32_t { kNowhere = 0, kInArena, kByAddress, kByKernel };

// One call: where its buffers are, and what error messages say about it. The last kHistory calls stay
// readable after a failure.
struct alignas(kLine) PublishedCall {
  std::uint64_t number;  // the caller's, for error messages
  std::uint64_t fingerprint;
  // Where the buffers are; not set for calls that travel with the arrival.
  std::uint64_t send;
  std::uint64_t recv;
  Reach send_reach;
  Reach recv_reach;
  char where[88];  // caller's file:line, zero-terminated
};
static_assert(sizeof(PublishedCall) == 2 * kLine);

// By others: chunks of the owner's slice in a direct all-reduce. Any rank claims one by adding to `next`, and
// adds to `done` when it is reduced. Reset by the owner before it arrives. `next` only distributes indices
// (relaxed); the additions to `done` release the chunks' bytes, and as read-modify-writes they form one
// release sequence: who loads the final count with acquire sees the bytes of all chunks.
struct alignas(kLine) Claims {
  std::atomic<std::uint64_t> next;
  std::atomic<std::uint64_t> done;
};

// What the owner is writing into another process (push.h). The kernel reads the first two members as iovecs
// when the system call begins, and writes the number into the target's receipts after all other bytes. By
// others: the lengths, set to 0.
struct alignas(kLine) Push {
  struct Part {
    std::atomic<std::uint64_t> at, n_bytes;
  };
  Part bytes, receipt;
  // A counter, with the target rank in the lowest kPushRankBits; 0 before the first push.
  std::atomic<std::uint64_t> number;
  std::atomic<std::int64_t> thread;  // that writes
};
inline constexpr int kPushRankBits = 8;
static_assert(kMaxRanks <= 1 << kPushRankBits);

// The first failure of the communicator; only rank 0's is used. By others:
//
//   kEmpty --compare-exchange by the first rank that fails--> kWriting --release, after the text--> kWritten, read-only
//
// A rank that is killed in between leaves kWriting behind: readers wait for a bounded time
// (failure_record.cpp).
struct FailureRecord {
  static constexpr std::uint32_t kEmpty = 0, kWriting = 1, kWritten = 2;
  std::atomic<std::uint32_t> state;
  std::int32_t status;     // lockstep_status
  std::int32_t peer_rank;  // that caused it, or -1
  std::int32_t by_rank;    // that detected it
  std::int64_t peer_pid;
  char message[768];
  char cause[512];
};

// Identifies a process to the other ranks. In private memory of that process: a kernel copy must read it at
// ArenaHeader::identity_at before the pid is used for any other copy.
struct Identity {
  std::uint64_t magic;
  std::int32_t rank;
  char nonce[32];
};

// A block of a communicator that the owner is creating and that is not complete yet (split.h). Others read
// the block only when the hash is that of the key they search for: any other block may be freed at any time.
struct Listing {
  static constexpr std::uint64_t kFree = 0, kClaimed = 1;
  std::atomic<std::uint64_t> at;  // its offset, or one of the above
  std::atomic<std::uint64_t> key_hash;
};

// The start of an arena: who it belongs to, and where its threads sleep, whichever communicator they wait in.
struct ArenaHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::int32_t rank;
  std::int64_t pid;
  std::uint64_t pid_namespace;  // that pid is a number of; 0: not known
  std::uint64_t block_at;       // of the communicator that made the arena
  std::uint64_t identity_at;    // address of the owner's Identity, in its own process
  char nonce[32];               // of the owner, as in its Identity
  std::uint64_t cores[16];      // a bit for each core the owner may run on
  local::Doorbell doorbell;
  // The kernel lets the owner copy from and to every other rank's process. Stored before the owner is counted
  // in n_joined.
  std::atomic<std::uint32_t> kernel_copies;
  // On rank 0 only, by others: which ranks have arrived (local/meeting.h), and how many have mapped all
  // arenas (host_peers.h).
  local::Attendance attendance;
  std::atomic<std::uint32_t> n_joined;
  // By the owner.
  Listing joining[kMaxJoining];
};

// One rank's state in one communicator.
struct CommBlock {
  // Stored by rank 0 once it has found the blocks of all members (split.h).
  enum Verdict : std::uint32_t { kNone = 0, kComplete, kRefused };

  std::uint64_t magic;
  std::int32_t rank;
  std::int32_t size;
  // Identifies the communicator on this host. Written before the block is listed in ArenaHeader::joining.
  char key[kKeyCapacity];
  // By rank 0 of the communicator, along with its rank among HostPeers and the offset of its own block; with
  // kRefused, its failure record has the reason.
  std::atomic<std::uint32_t> verdict;
  std::int32_t first_rank;
  std::uint64_t first_at;
  // By any rank: stop; the failure record has the reason. Sequentially consistent against `inside`, see
  // there.
  alignas(kLine) std::atomic<std::uint32_t> broken;
  // Set by the owner when it leaves in order; kAfterAnother when it gives up joining since another did.
  enum Left : std::uint32_t { kHere, kLeft, kAfterAnother };
  std::atomic<std::uint32_t> left;
  // By others: how many ranks will never read any block of the communicator again. Counted on rank 0's block,
  // and copied to the other blocks by the last rank. The owner frees its block when all have released it.
  std::atomic<std::uint32_t> released;
  // Offset of the owner's staging area; 0 until it is needed. Stored before the phase after which others read
  // it.
  std::atomic<std::uint64_t> stage_at;
  // sequence << 24 | phase: how far the owner is inside a staged or direct operation.
  alignas(kLine) std::atomic<std::uint64_t> step;
  // The operation for which the owner is accessing the others' buffers right now; 0: none. The owner stores
  // it and then loads `broken`; a rank that gives up stores `broken` and then loads this: one of the two sees
  // the other.
  std::atomic<std::uint64_t> inside;
  Arrival arrivals[2];
  Claims claims[2];
  // By others: a rank whose memory is the target revokes the write.
  Push push;
  // Of this block in the owner's process: the kernel writes receipts there.
  std::uint64_t address;
  PublishedCall history[kHistory];
  FailureRecord record;
  alignas(kLine) std::uint8_t payload[2][kInlineBytes];

  // After the block, one entry per rank each: the offset of the owner's send queue to it, 0 before the first
  // message; the members the owner was created with, as ranks among HostPeers; on rank 0's block, the offsets
  // of all blocks; and, by others, the number of the last push by which that rank wrote into the owner's
  // memory.
  std::atomic<std::uint64_t>* send_queues() {
    return reinterpret_cast<std::atomic<std::uint64_t>*>(this + 1);
  }
  std::uint64_t* members() { return reinterpret_cast<std::uint64_t*>(send_queues() + size); }
  std::uint64_t* blocks() { return members() + size; }
  std::atomic<std::uint64_t>* receipts() {
    return reinterpret_cast<std::atomic<std::uint64_t>*>(blocks() + size);
  }
  static constexpr std::size_t bytes(int n_ranks) {
    return sizeof(CommBlock) + static_cast<std::size_t>(n_ranks) * 4 * sizeof(std::uint64_t);
  }
};

// Instead of a payload, for the kinds with counts per peer: what this rank sends each other rank (offset in
// its buffer, bytes, and how many are contiguous: all but where the buffer has rows) and what it
// expects from it.
struct Counts {
  std::uint64_t at;
  std::uint64_t sends;
  std::uint64_t expects;
  std::uint64_t run;
};
static_assert(kMaxRanks * sizeof(Counts) <= kInlineBytes);

// A rank's staged input and its reduced slices, each twice.
struct Stage {
  alignas(kPage) std::uint8_t in[2][kStageInBytes];
  std::uint8_t out[2][kStageOutBytes];
};

// Messages from one rank to one other, in the order sent: a ring with one writer and one reader. A message of
// at most kSendSlotBytes is copied into a slot; the slot of a longer one refers to its LongMessage.
inline constexpr std::uint64_t kSendSlots = 8;
inline constexpr std::size_t kSendSlotBytes = 4096;
struct alignas(kLine) Envelope {
  std::uint64_t n_bytes;
  std::uint64_t message_at;  // in the sender's arena; 0: the payload is in the slot
  std::int32_t tag;
  std::uint32_t dtype;  // lockstep_dtype
};
struct SendQueue {
  // Both only grow; sent - taken slots are in use. Each store releases slots to the other side and is
  // sequentially consistent, since either side may sleep until the other has moved.
  alignas(kLine) std::atomic<std::uint64_t> sent;   // by the sender
  alignas(kLine) std::atomic<std::uint64_t> taken;  // by the receiver
  Envelope slots[kSendSlots];
  alignas(kLine) std::uint8_t payload[kSendSlots][kSendSlotBytes];
};

inline constexpr std::size_t kPipeChunk = 128 << 10;
inline constexpr std::uint64_t kPipeChunks = 4;

// A long message in transit, in the sender's arena. The receiver chooses how the bytes are moved, since it
// alone knows both buffers.
//
//                 sender: kOffered --receiver--> kTaken --receiver, all bytes moved--> kDone --sender--> kFree
//                            |
//                            '--sender gives up--> kWithdrawn --receiver has seen it--> kGone, reused by the sender
//
// Both transitions out of kOffered are a compare-exchange: either the receiver takes the message or the
// sender withdraws it. Until kDone or kGone the sender keeps the struct, so the receiver may write its
// members at any time.
struct LongMessage {
  enum State : std::uint32_t {
    kFree = 0,
    kOffered,    // by the sender
    kWithdrawn,  // by the sender
    kGone,       // by the receiver, after kWithdrawn
    kTaken,      // by the receiver: `mode` is set
    kDone,       // by the receiver: all bytes are there
  };
  enum Mode : std::uint32_t {
    kPull,  // the receiver copies from the sender's buffer
    kPush,  // the sender copies into the receiver's
    kBoth,  // both do, in claimed chunks
    kPipe,  // through a pipe of the sender
  };
  std::atomic<std::uint32_t> state;
  Reach send_reach;
  std::uint64_t send_at;
  std::uint64_t n_bytes;
  // By the receiver, before kTaken.
  Mode mode;
  Reach recv_reach;
  std::uint64_t recv_at;
  // kPipe: its offset, and how many bytes the sender has written and the receiver has read. kPush: written.
  std::uint64_t pipe_at;
  alignas(kLine) std::atomic<std::uint64_t> laid;
  alignas(kLine) std::atomic<std::uint64_t> drained;
  Claims claims;  // kBoth
  // By the side that gave up: neither side begins to access the other's buffer any more.
  std::atomic<std::uint32_t> given_up;
  // That side is accessing the other's buffer right now. Against given_up, as CommBlock::inside against
  // broken.
  std::atomic<std::uint32_t> sender_inside;
  std::atomic<std::uint32_t> receiver_inside;
};

static_assert(sizeof(std::atomic<std::uint64_t>) == sizeof(std::uint64_t) &&
              std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

inline constexpr int kPhaseBits = 24;

constexpr std::size_t round_up(std::size_t n, std::size_t to) {
  return (n + to - 1) / to * to;
}
inline constexpr std::size_t kHeapAt = round_up(sizeof(ArenaHeader), kPage);

}  // namespace lockstep::comm::internal
