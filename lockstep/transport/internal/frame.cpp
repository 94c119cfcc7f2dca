#include "lockstep/transport/internal/frame.h"

#include <algorithm>
#include <cstring>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/transport/internal/record.h"

namespace lockstep::transport::internal {
namespace {

// Messages up to this live in one buffer; in larger ones each part has its own, so that none keeps the
// others.
constexpr std::uint64_t kSmallMessage = 16 << 10;
// What is left of a part when it is worth a read of its own.
constexpr std::uint64_t kLargeRest = 32 << 10;

}  // namespace

Bytes encode_frame_head(const Message& message) {
  const FrameHead head{.magic = kFrameMagic,
                       .kind = message.kind,
                       .id = message.id,
                       .body_bytes = message.body.bytes.size(),
                       .n_blobs = message.blobs.size()};
  base::ByteWriter out;
  out.put(head);
  for (const auto& blob : message.blobs) out.put(static_cast<std::uint64_t>(blob.bytes.size()));
  return out.take();
}

// The stream has no marks at which a reader could find the next frame again, so an error is final: the
// connection ends.
bool FrameDecoder::fail(std::string why) {
  state_ = State::kBroken;
  error_ = std::move(why);
  held_.clear();
  parts_.clear();
  return false;
}

bool FrameDecoder::read_head() {
  std::memcpy(&head_, held_.data(), sizeof head_);
  held_.clear();
  if (head_.magic != kFrameMagic) return fail("bytes that are not a lockstep message");
  if (head_.body_bytes > max_message_bytes_) {
    return fail(
        base::cat("a message of ", head_.body_bytes, " bytes, beyond the limit of ", max_message_bytes_));
  }
  // Bounds the table of sizes, which is held before any of them is known: 8 MiB.
  if (head_.n_blobs >= kMaxParts) return fail(base::cat("a message of ", head_.n_blobs, " pieces"));
  state_ = State::kSizes;
  return head_.n_blobs > 0 || read_sizes();
}

bool FrameDecoder::read_sizes() {
  std::vector<std::uint64_t> sizes(head_.n_blobs + 1);
  sizes[0] = head_.body_bytes;
  if (head_.n_blobs > 0) std::memcpy(sizes.data() + 1, held_.data(), held_.size());
  held_.clear();
  // Subtracts from the limit instead of adding up: sizes of a hostile sender would overflow a sum.
  std::uint64_t left = max_message_bytes_;
  for (const std::uint64_t size : sizes) {
    if (size > left) return fail(base::cat("a message beyond the limit of ", max_message_bytes_, " bytes"));
    left -= size;
  }
  try {
    make_room(sizes);
  } catch (const std::bad_alloc&) {
    return fail(base::cat("no memory for a message of ", max_message_bytes_ - left, " bytes"));
  }
  state_ = State::kParts;
  part_ = 0;
  at_ = 0;
  skip_full_parts();
  return true;
}

// Rounded to cache lines, so that every blob is aligned for a tensor. A small message is one allocation, and
// a blob that is kept keeps all of it; a large blob must not keep the others alive.
void FrameDecoder::make_room(std::span<const std::uint64_t> sizes) {
  std::uint64_t sum = 0;
  for (const std::uint64_t size : sizes) sum += round_to_lines(size);
  parts_.clear();
  parts_.reserve(sizes.size());
  const bool together = sum <= kSmallMessage;
  Buffer shared(together ? sum : 0);
  std::uint64_t at = 0;
  for (const std::uint64_t size : sizes) {
    const Buffer own = together ? shared : Buffer(size);
    parts_.push_back({.data = own.data() + (together ? at : 0), .n_bytes = size, .owner = own.owner()});
    at += round_to_lines(size);
  }
}

// Past parts that are complete; hands the message over after the last.
void FrameDecoder::skip_full_parts() {
  while (part_ < parts_.size() && at_ == parts_[part_].n_bytes) {
    ++part_;
    at_ = 0;
  }
  if (part_ < parts_.size()) return;
  Message message{.kind = head_.kind, .id = head_.id};
  message.blobs.reserve(parts_.size() - 1);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    object::Blob blob{
        .owner = std::move(parts_[i].owner), .bytes = {parts_[i].data, parts_[i].n_bytes}, .yours = true};
    if (i == 0) {
      message.body = std::move(blob);
    } else {
      message.blobs.push_back(std::move(blob));
    }
  }
  messages_.push_back(std::move(message));
  parts_.clear();
  state_ = State::kHead;
}

bool FrameDecoder::feed(std::span<const std::uint8_t> bytes) {
  while (!bytes.empty()) {
    if (state_ == State::kBroken) return false;
    if (state_ == State::kParts) {
      const auto& part = parts_[part_];
      const std::size_t n = std::min<std::uint64_t>(bytes.size(), part.n_bytes - at_);
      std::memcpy(part.data + at_, bytes.data(), n);
      bytes = bytes.subspan(n);
      filled(n);
      continue;
    }
    const std::size_t whole =
        state_ == State::kHead ? sizeof(FrameHead) : head_.n_blobs * sizeof(std::uint64_t);
    const std::size_t n = std::min(bytes.size(), whole - held_.size());
    held_.insert(held_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n));
    bytes = bytes.subspan(n);
    if (held_.size() < whole) continue;
    if (!(state_ == State::kHead ? read_head() : read_sizes())) return false;
  }
  return state_ != State::kBroken;
}

// Saves the copy out of the read buffer. Not for a short rest: one read then takes it together with the
// frames that follow.
std::span<std::uint8_t> FrameDecoder::direct() {
  if (state_ != State::kParts) return {};
  const auto& part = parts_[part_];
  if (part.n_bytes - at_ < kLargeRest) return {};
  return {part.data + at_, part.n_bytes - at_};
}

void FrameDecoder::filled(std::size_t n_bytes) {
  at_ += n_bytes;
  skip_full_parts();
}

}  // namespace lockstep::transport::internal
