// A message as a record of a ring (docs/wire.md): a head, a table of parts (the body, then the blobs), and
// the small parts themselves; large ones are in the sender's heap. A record too large for a ring is stored
// there as a whole, and the ring carries a record that refers to it.
//
// The decoder works on a private copy and trusts nothing in it. Thread safety: none needed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/bytes.h"
#include "lockstep/transport/internal/buffer.h"
#include "lockstep/transport/internal/message_heap.h"
#include "lockstep/transport/message.h"

namespace lockstep::transport::internal {

struct RecordHead {
  std::uint32_t n_bytes = 0;  // of the whole record
  std::uint8_t kind = 0;
  std::uint8_t elsewhere = 0;  // 1: one part, which is the real record
  std::uint16_t unused = 0;
  std::uint32_t n_parts = 0;
  std::uint32_t unused2 = 0;
  std::uint64_t id = 0;
};
struct RecordPart {
  std::uint64_t offset = 0;  // in the record; with kInHeap, in the heap
  std::uint64_t n_bytes = 0;
};
inline constexpr std::uint64_t kInHeap = std::uint64_t{1} << 63;
inline constexpr std::uint64_t kMaxSmallPart = 2048;
inline constexpr std::uint64_t kMaxRingRecord = 8192;
inline constexpr std::uint64_t kMinRecord = sizeof(RecordHead) + sizeof(RecordPart);
// Of one message.
inline constexpr std::uint64_t kMaxParts = 1 << 20;

// Writes `message` into `record`, large parts into the heap. False when the heap has no memory; nothing is
// held then.
bool encode_record(const Message& message, MessageHeap& heap, const std::shared_ptr<Holder>& holder,
                   Bytes& record);

// Takes back what a record of the own heap holds, which nobody will read. `record` may have been damaged by
// the reader.
void take_back_record(MessageHeap& heap, std::span<const std::uint8_t> record);

// What the receiver knows of a sender.
struct Sender {
  Mapping heap{};
  std::uint64_t max_message_bytes = 0;
};

struct Decoded {
  std::optional<Message> message{};
  std::string error{};  // when there is no message
};
// `record` is private memory of `n_bytes`. Blobs share it, or hold their block of the heap.
Decoded decode_record(const Buffer& record, std::uint64_t n_bytes, const Sender& sender);

}  // namespace lockstep::transport::internal
