// Messages on a TCP connection (docs/wire.md), and the decoder that takes them apart as bytes arrive: small
// pieces from a read buffer, large ones read straight to where they stay. Every size is compared with the
// limit before memory is taken. Thread safety: none needed, one per connection.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/bytes.h"
#include "lockstep/transport/internal/buffer.h"
#include "lockstep/transport/message.h"

namespace lockstep::transport::internal {

struct FrameHead {
  std::uint32_t magic = 0;
  std::uint8_t kind = 0;
  std::uint8_t unused[3] = {};
  std::uint64_t id = 0;
  std::uint64_t body_bytes = 0;
  std::uint64_t n_blobs = 0;
};
inline constexpr std::uint32_t kFrameMagic = 0x014D534C;  // "LSM" 01
static_assert(sizeof(FrameHead) == 32);

// Head and table of a message's frame; the body and the blobs follow it on the wire.
Bytes encode_frame_head(const Message& message);

//   kHead --32 bytes, limits hold--> kSizes --one u64 per blob, sum within the limit--> kParts --last byte--> kHead, a message
//     |                                |                                                                      is complete
//     '------------- bad magic, too large, no memory -------------> kBroken, for ever
//
// A frame without blobs passes kSizes at once. Memory is allocated on the way to kParts, when all sizes have
// been checked.
class FrameDecoder {
 public:
  explicit FrameDecoder(std::uint64_t max_message_bytes) : max_message_bytes_(max_message_bytes) {}

  // Takes bytes in the order in which they came. False when they are no frame: error() says why, nothing more
  // is taken.
  bool feed(std::span<const std::uint8_t> bytes);
  // Where the next bytes belong, when they are part of a large blob: read into it, then call filled().
  // Otherwise empty.
  std::span<std::uint8_t> direct();
  void filled(std::size_t n_bytes);

  // Complete messages, oldest first; to be taken away.
  std::deque<Message>& messages() { return messages_; }
  const std::string& error() const { return error_; }
  // Nothing of a next frame has come.
  bool between_frames() const { return state_ == State::kHead && held_.empty(); }

 private:
  enum class State : std::uint8_t { kHead, kSizes, kParts, kBroken };
  struct Part {
    std::uint8_t* data = nullptr;
    std::uint64_t n_bytes = 0;
    std::shared_ptr<const void> owner;
  };

  bool fail(std::string why);
  bool read_head();
  bool read_sizes();
  void make_room(std::span<const std::uint64_t> sizes);
  void skip_full_parts();

  const std::uint64_t max_message_bytes_;
  State state_ = State::kHead;
  Bytes held_;  // of the head or the sizes, while they are incomplete
  FrameHead head_{};
  std::vector<Part> parts_;
  std::size_t part_ = 0;
  std::uint64_t at_ = 0;  // in that part
  std::deque<Message> messages_;
  std::string error_;
};

}  // namespace lockstep::transport::internal
