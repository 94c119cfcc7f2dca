// What lies in a rank's arena: a header at its start, then a heap with one block per communicator the rank is a
// member of, staging areas, mail and the memory users asked for. Every rank maps every arena; the owner writes its own
// blocks, others read them, except where said. All words that carry order are lock-free atomics; everything else is
// written before a release store and read after the matching acquire load.
//
// Operations of a communicator are numbered from 1. Parts that exist twice are chosen by the number's lowest bit: a rank can be at most
// one operation ahead, since finishing one means having seen all others enter it.
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
inline constexpr std::uint32_t kLayoutVersion = 8;

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

// An operation's numbers in one word, exact but for the caller's number of it, so that comparing words compares calls.
// Of that number four bits are enough: ranks part by as many calls as one of them refused before anything was sent.
constexpr std::uint64_t fingerprint(const lockstep_op& op) {
  return static_cast<std::uint64_t>(op.kind) << 60 | static_cast<std::uint64_t>(op.dtype) << 56 |
         static_cast<std::uint64_t>(op.reduce) << 52 | static_cast<std::uint64_t>(op.tag & 15) << 48 |
         static_cast<std::uint64_t>(op.root & 0xFF) << 40 | op.count;
}
static_assert(LOCKSTEP_OP_KINDS <= 16 && LOCKSTEP_DTYPES <= 16 && LOCKSTEP_REDUCE_OPS <= 16 &&
              kMaxRanks <= 256);

// "I entered operation `sequence` with these numbers, and here is the payload if it is tiny": one cache line.
struct alignas(kLine) Arrival {
  // The number, shifted left by one; the lowest bit says "my buffers can be reduced in place, no payload here".
  std::atomic<std::uint64_t> sequence;
  std::uint64_t fingerprint;
  std::uint8_t payload[kTinyBytes];
};
static_assert(sizeof(Arrival) == kLine);

// How another rank gets at a buffer: by its offset in the owner's arena, by its address because both share a process,
// or by its address through the kernel.
enum class Reach : std::uint32_t { kNowhere = 0, kInArena, kByAddress, kByKernel };

// One call, for buffers and for messages; the last kHistory of them stay readable after a failure.
struct alignas(kLine) CallRecord {
  std::uint64_t number;  // the caller's, for messages
  std::uint64_t fingerprint;
  // Where the buffers are; not set for calls that travel with the arrival.
  std::uint64_t send;
  std::uint64_t recv;
  Reach send_reach;
  Reach recv_reach;
  char where[88];  // caller's file:line, zero-terminated
};
static_assert(sizeof(CallRecord) == 2 * kLine);

// Chunks of the owner's slice in a direct all-reduce: anyone claims one by adding to `next`, and adds to `done` when
// it is reduced. Reset by the owner before it arrives.
struct alignas(kLine) Claims {
  std::atomic<std::uint64_t> next;
  std::atomic<std::uint64_t> done;
};

// What the owner is writing into another process (push.h). The kernel reads the first two as iovecs when the call begins,
// and writes the number where the other one looks for it when all bytes are there.
struct alignas(kLine) Push {
  struct Part {
    std::atomic<std::uint64_t> at, n_bytes;
  };
  Part bytes, receipt;
  // Counts up, with the rank it goes to in the lowest kPushRankBits; 0 before the first.
  std::atomic<std::uint64_t> number;
  std::atomic<std::int64_t> thread;  // that writes
};
inline constexpr int kPushRankBits = 8;
static_assert(kMaxRanks <= 1 << kPushRankBits);

// The first failure of the communicator; only rank 0's is used. Claimed once by compare-exchange, then read-only.
struct FailureRecord {
  static constexpr std::uint32_t kEmpty = 0, kWriting = 1, kWritten = 2;
  std::atomic<std::uint32_t> state;
  std::int32_t status;     // lockstep_status
  std::int32_t peer_rank;  // to blame, or -1
  std::int32_t by_rank;    // who found out
  std::int64_t peer_pid;
  char message[768];
  char cause[512];
};

// Who a process is to the other ranks, in memory of its own that nobody else maps: what a kernel copy must find at
// ArenaHeader::identity_at before a pid is trusted with any other.
struct Identity {
  std::uint64_t magic;
  std::int32_t rank;
  char nonce[32];
};

// A block of a communicator that the owner is making and that is not complete yet (split.h). Others look
// into the block only when the hash is that of the key they seek: any other may be given back at any moment.
struct Listing {
  static constexpr std::uint64_t kFree = 0, kClaimed = 1;
  std::atomic<std::uint64_t> at;  // where it lies, or one of the above
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
  // The kernel lets the owner copy from and to every other rank's process. Set before it is counted in n_joined.
  std::atomic<std::uint32_t> kernel_copies;
  // On rank 0 only. Which ranks have come (local/meeting.h), and how many have mapped all others (host_peers.h).
  local::Attendance attendance;
  std::atomic<std::uint32_t> n_joined;
  // By the owner.
  Listing joining[kMaxJoining];
};

// A rank's end of one communicator.
struct CommBlock {
  // What rank 0 says once it has found the blocks of all (split.h).
  enum Verdict : std::uint32_t { kNone = 0, kComplete, kRefused };

  std::uint64_t magic;
  std::int32_t rank;
  std::int32_t size;
  // Which communicator this is, among those of HostPeers. Written before the block is listed in ArenaHeader::joining.
  char key[kKeyCapacity];
  // By rank 0 (a rank of HostPeers), which also says where its own block is; with kRefused its failure record has the words.
  std::atomic<std::uint32_t> verdict;
  std::int32_t first_rank;
  std::uint64_t first_at;
  // Set by anyone: stop, the failure record says why.
  alignas(kLine) std::atomic<std::uint32_t> broken;
  // Set by the owner when it leaves in order; kAfterAnother when it gives up joining since another did.
  enum Left : std::uint32_t { kHere, kLeft, kAfterAnother };
  std::atomic<std::uint32_t> left;
  // Ranks that will never look at any block of the communicator again: counted on rank 0's block, and copied to the
  // others by the last one. The owner gives its block back when all have said so.
  std::atomic<std::uint32_t> released;
  // Where the owner's staging area is; 0 until it was needed. Written before the phase that makes others look.
  std::atomic<std::uint64_t> stage_at;
  // sequence << 24 | phase: how far the owner is inside a staged or direct operation.
  alignas(kLine) std::atomic<std::uint64_t> step;
  // The operation for which the owner is inside the others' buffers right now; 0: none.
  std::atomic<std::uint64_t> inside;
  Arrival arrivals[2];
  Claims claims[2];
  // Here others write: anyone whose memory it goes to may take the permission back.
  Push push;
  // Of this block in the owner's process: receipts are written there by the kernel.
  std::uint64_t address;
  CallRecord history[kHistory];
  FailureRecord record;
  alignas(kLine) std::uint8_t payload[2][kInlineBytes];

  // Behind the block, one per rank each: where the owner's send queue for it is, 0 until it sends it something; the members
  // as the owner was told, by their ranks in HostPeers; on rank 0's block, where the blocks of all lie; and the number
  // of the last push by which that rank wrote into the owner's memory.
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

// In place of a payload, for the kinds with counts of their own: what this rank has for each other (where in its
// buffer, how much) and what it expects.
struct Counts {
  std::uint64_t at;
  std::uint64_t sends;
  std::uint64_t expects;
};
static_assert(kMaxRanks * sizeof(Counts) <= kInlineBytes);

// What a rank lays out and what it reduced, twice each.
struct Stage {
  alignas(kPage) std::uint8_t in[2][kStageInBytes];
  std::uint8_t out[2][kStageOutBytes];
};

// Messages from one rank to one other, in the order sent. A message of at most kSendSlotBytes travels in a slot; of a
// longer one the slot only says where its LongMessage is.
inline constexpr std::uint64_t kSendSlots = 8;
inline constexpr std::size_t kSendSlotBytes = 4096;
struct alignas(kLine) Envelope {
  std::uint64_t n_bytes;
  std::uint64_t message_at;  // in the sender's arena; 0: the payload is in the slot
  std::int32_t tag;
  std::uint32_t dtype;  // lockstep_dtype
};
struct SendQueue {
  alignas(kLine) std::atomic<std::uint64_t> sent;   // by the sender
  alignas(kLine) std::atomic<std::uint64_t> taken;  // by the receiver
  Envelope slots[kSendSlots];
  alignas(kLine) std::uint8_t payload[kSendSlots][kSendSlotBytes];
};

inline constexpr std::size_t kPipeChunk = 128 << 10;
inline constexpr std::uint64_t kPipeChunks = 4;

// A long message on its way. The sender makes it; the receiver decides how the bytes travel, since it alone knows
// both ends.
struct LongMessage {
  enum State : std::uint32_t {
    kFree = 0,
    kOffered,    // by the sender
    kWithdrawn,  // by the sender, instead of kTaken; the receiver answers with kGone
    kGone,
    kTaken,  // by the receiver: `mode` is set
    kDone,   // by the receiver: it has everything
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
  // kPipe: where it is, and how many bytes were laid into it and taken out. kPush: laid.
  std::uint64_t pipe_at;
  alignas(kLine) std::atomic<std::uint64_t> laid;
  alignas(kLine) std::atomic<std::uint64_t> drained;
  Claims claims;  // kBoth
  // Set by either side that gave up: nobody begins to touch the other's buffer any more.
  std::atomic<std::uint32_t> given_up;
  // This side is inside the other's buffer right now.
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
