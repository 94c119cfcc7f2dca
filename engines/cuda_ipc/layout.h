// The control page: what the ranks of a communicator share in host memory. It is rank 0's segment (local/meeting.h), mapped
// by every rank and registered with CUDA, so that streams write and wait for words in it. docs/wire.md describes it too.
//
//   ControlHeader       who is there, the first failure
//   flags               64-bit words that streams write or wait for; the part that is registered
//     done[kWindow]           operation k has completed: k, in the word of its slot k % kWindow; by the leader's stream
//     per rank:
//       ready[kWindow]        the rank's stream has reached operation k: k; by that stream
//       message_ready[kMessages], message_done[kMessages]     the same for its sends, by the number of the message
//   Call[size][kWindow]       what each rank called, with its counts per peer; by that rank
//   Message[size][kMessages]  each rank's sends; by that rank, `state` also by the receiver
//
// Slots. Operations are numbered from 1 and a rank publishes k only when it has seen done of k - kWindow. So when a slot is
// reused, every rank's ready and done of its last operation have been stored, and nothing of it is in flight. Waits compare
// with >=: a stream that looks late finds a larger number.
//
// Failure. Whoever breaks the communicator stores kReleased, larger than any number, into every word that a stream may wait
// for. A kernel that is still running stores its own k into its own slot afterwards: enough for those who wait for k, and
// nobody waits for k + kWindow yet.
//
// Memory orders: numbers are stored with release after what they announce and loaded with acquire. What a stream wrote before
// a word is visible to whoever has seen the word: cuStreamWriteValue64 has the fence.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "engines/cuda/driver.h"
#include "engines/cuda_ipc/kernels.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/local/meeting.h"

namespace lockstep::cuda_ipc {

inline constexpr std::uint64_t kMagic = 0x6c6f636b63756461;  // "lockcuda"
inline constexpr std::uint32_t kVersion = 1;
inline constexpr std::size_t kPage = 4096;
inline constexpr std::uint64_t kWindow = 64;     // collectives that a rank may be ahead of the slowest
inline constexpr std::uint64_t kMessages = 256;  // sends of one rank that are not received yet
inline constexpr std::uint64_t kReleased = std::uint64_t{1} << 62;

using Word = std::atomic<std::uint64_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 8);

// Device memory of a rank, for other processes.
struct MemoryRef {
  std::uint64_t address;  // in the owner's process; 0: no buffer
  std::uint64_t segment_bytes;
  std::uint64_t offset;     // in the segment
  std::uint64_t buffer_id;  // of the segment, unique in the owner's process; 0: not exported
  cuda::IpcMemHandle handle;
};

struct Call {
  Word number;
  std::uint32_t kind, dtype, reduce;
  std::int32_t root, tag;
  std::int32_t device;  // as its process numbers them; -1: none
  std::uint64_t count;
  MemoryRef send, recv;
  char where[88];  // zero-terminated
  // Then std::uint64_t send_counts[size], recv_counts[size].
  std::uint64_t* counts() { return reinterpret_cast<std::uint64_t*>(this + 1); }
  static constexpr std::size_t bytes(int size) {
    return sizeof(Call) + 2 * sizeof(std::uint64_t) * static_cast<std::size_t>(size);
  }
};
static_assert(sizeof(Call) % 8 == 0);

// A send:  kFree --sender--> kPosted --receiver--> kTaken --sender, when message_done is there--> kFree
//                               '---- sender withdraws ---------------------------------------------^
struct Message {
  enum State : std::uint32_t { kFree = 0, kPosted, kTaken };
  std::atomic<std::uint32_t> state;
  std::int32_t to, tag, device;
  std::uint32_t dtype;
  std::uint64_t count;
  std::uint64_t number;  // grows with every send of the rank
  Word submitted;        // number, once the receiver's process has submitted the copy
  MemoryRef send;
  char where[88];
};

// The first failure, written once:  kEmpty --compare-exchange--> kWriting --> kWritten.
struct FailureRecord {
  enum State : std::uint32_t { kEmpty = 0, kWriting, kWritten };
  std::atomic<std::uint32_t> state;
  std::int32_t status, peer_rank;
  std::int64_t peer_pid;
  char message[768];
  char cause[512];
};

struct RankState {
  enum Left : std::uint32_t { kHere = 0, kLeft, kGaveUp };  // in order; before all had joined
  std::atomic<std::uint32_t> left;                          // after everything it published
  std::atomic<std::uint64_t> published;  // messages with this number and below are in the table
};

struct ControlHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::int32_t size;
  local::Attendance attendance;
  std::atomic<std::uint32_t> n_joined;
  std::atomic<std::uint32_t> broken;  // the record has the reason, or is about to
  FailureRecord record;
  RankState ranks[kMaxRanks];
  // By the leader: it is about to launch operation k, and it has. Host words.
  Word launching[kWindow], submitted[kWindow];
};

inline constexpr std::size_t kFlagsAt = (sizeof(ControlHeader) + kPage - 1) / kPage * kPage;
constexpr std::size_t flag_bytes(int size) {
  const auto words = kWindow + static_cast<std::size_t>(size) * (kWindow + 2 * kMessages);
  return (words * sizeof(Word) + kPage - 1) / kPage * kPage;
}
constexpr std::size_t calls_at(int size) {
  return kFlagsAt + flag_bytes(size);
}
constexpr std::size_t messages_at(int size) {
  return calls_at(size) + static_cast<std::size_t>(size) * kWindow * Call::bytes(size);
}
constexpr std::size_t page_bytes(int size) {
  return messages_at(size) + static_cast<std::size_t>(size) * kMessages * sizeof(Message);
}

}  // namespace lockstep::cuda_ipc
