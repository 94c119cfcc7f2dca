#include "lockstep/net/channel.h"

#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::net {

namespace {

constexpr std::size_t kReadBytes = 16 << 10;
constexpr std::size_t kKept = 64 << 10;
// Sealed and sent in steps, so that a large value is not there twice.
constexpr std::size_t kWriteStep = 4 * kMaxRecord;

}  // namespace

void Channel::seal_as_client(const SessionKeys& keys) {
  sealer_.emplace(keys.client);
  opener_.emplace(keys.server);
  in_.resize(kReadBytes);
}

void Channel::write_all(std::span<const std::uint8_t> bytes, Deadline deadline) {
  if (!sealer_) return socket_.write_all(bytes, deadline);
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min(bytes.size(), kWriteStep));
    bytes = bytes.subspan(part.size());
    out_.clear();
    sealer_->seal(part, out_);
    socket_.write_all(out_, deadline);
  }
  if (out_.capacity() > kKept) out_ = Bytes();
}

// A record may be longer than what the caller reads at a time; the rest stays in plain_ for the next call.
std::size_t Channel::take_plain(std::span<std::uint8_t> buffer) {
  const std::size_t n = std::min(buffer.size(), plain_.size() - plain_begin_);
  std::copy_n(plain_.begin() + static_cast<std::ptrdiff_t>(plain_begin_), n, buffer.begin());
  plain_begin_ += n;
  return n;
}

// One record into plain_.
void Channel::read_record(Deadline deadline) {
  for (;;) {
    auto rest = std::span<const std::uint8_t>(in_).subspan(in_begin_, in_end_ - in_begin_);
    const auto plain = opener_->next(rest);
    in_begin_ = in_end_ - rest.size();
    if (plain) {
      if (plain_.capacity() > kKept) plain_ = Bytes();
      plain_.assign(plain->begin(), plain->end());
      plain_begin_ = 0;
      return;
    }
    if (opener_->failed()) {
      base::raise(ErrorKind::kSystem,
                  base::cat("connection to ", socket_.peer().text(),
                            ": data arrived that it did not send: it was changed or added in transit"),
                  ErrorFamily::kNetwork);
    }
    in_begin_ = 0;
    in_end_ = 0;
    in_end_ = socket_.read_some(in_, deadline);
  }
}

std::size_t Channel::read_some(std::span<std::uint8_t> buffer, Deadline deadline) {
  if (!opener_) return socket_.read_some(buffer, deadline);
  if (plain_begin_ == plain_.size()) read_record(deadline);
  return take_plain(buffer);
}

void Channel::read_exact(std::span<std::uint8_t> buffer, Deadline deadline) {
  while (!buffer.empty()) buffer = buffer.subspan(read_some(buffer, deadline));
}

}  // namespace lockstep::net
