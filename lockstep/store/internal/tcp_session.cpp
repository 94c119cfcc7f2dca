// The bytes of a session: handshake, seals, what is kept of the input and of the output, and the quotas. The
// requests are executed in tcp_session_requests.cpp.
#include "lockstep/store/internal/tcp_session.h"

#include <algorithm>
#include <utility>

namespace lockstep::internal {

namespace {

template <class Array>
Array array_of(std::span<const std::uint8_t> bytes) {
  Array array;
  std::copy_n(bytes.begin(), array.size(), array.begin());
  return array;
}

}  // namespace

TcpSession::TcpSession(TcpShared& shared, void* owner, const net::Binding& reached)
    : shared_(shared),
      owner_(owner),
      parser_(shared.limits),
      sealed_(shared.secret && reached.purpose == net::Purpose::kStoreTcp),
      stage_(shared.secret ? Stage::kHello : Stage::kValidate) {
  if (shared.secret) handshake_.emplace(*shared.secret, reached);
}

// Order matters: no longer a waiter, then out of `woken`; what it held on the quotas is returned; and a
// queue's entry that it was woken for and never took goes to the next waiter.
TcpSession::~TcpSession() {
  shared_.data.cancel(*this);
  std::erase(shared_.woken, this);
  account(0);
  set_unsent(0);
  pass_on_entries();
}

bool TcpSession::fail(std::string why) {
  if (why_.empty()) why_ = std::move(why);
  return false;
}

// Bytes of one read may hold the end of the handshake and the first requests: each stage takes what it needs
// from the front.
bool TcpSession::feed(std::span<const std::uint8_t> bytes) {
  if (!why_.empty()) return false;
  while (stage_ < Stage::kValidate && !bytes.empty()) {
    if (!shake_hands(bytes)) return false;
  }
  if (!opener_) return bytes.empty() || feed_plain(bytes);
  while (!bytes.empty()) {
    const auto plain = opener_->next(bytes);
    if (opener_->failed())
      return fail("data arrived that it did not send: it was changed or added in transit");
    if (plain && !feed_plain(*plain)) return false;
  }
  return true;
}

// feeding_ tells ready() whether this session is the one at work: then its output is sent by the caller
// anyway.
bool TcpSession::feed_plain(std::span<const std::uint8_t> bytes) {
  feeding_ = true;
  std::size_t consumed = 0;
  bool good = true;
  if (input_.empty()) {
    // The usual case: whole requests, executed in the read buffer.
    good = run(bytes, consumed) && keep(bytes.subspan(consumed));
  } else {
    good = keep(bytes) && (input_.size() < parser_.wanted() || go_on());
  }
  feeding_ = false;
  return good;
}

// Invariant of input_: it begins with a whole or partial request that has not been executed.
bool TcpSession::go_on() {
  if (!why_.empty()) return false;
  feeding_ = true;
  std::size_t consumed = 0;
  const bool good = run(input_, consumed);
  if (consumed == input_.size()) {
    // A connection that once sent a large value does not keep its room.
    if (input_.capacity() > kInputKept) input_ = Bytes();
    input_.clear();
  } else {
    input_.erase(input_.begin(), input_.begin() + static_cast<std::ptrdiff_t>(consumed));
  }
  feeding_ = false;
  return good && keep({});
}

// Adds to the input and counts its size against the quota. The buffer grows with what has come, never by
// what was announced.
bool TcpSession::keep(std::span<const std::uint8_t> rest) {
  if (rest.size() > shared_.quota.left()) return fail("the store's quota is used up");
  input_.insert(input_.end(), rest.begin(), rest.end());
  account(input_.size());
  return true;
}

void TcpSession::account(std::size_t n_bytes) {
  shared_.quota.used += n_bytes;
  shared_.quota.used -= accounted_;
  accounted_ = n_bytes;
}

void TcpSession::set_unsent(std::size_t n_bytes) {
  shared_.unsent.used += n_bytes;
  shared_.unsent.used -= unsent_;
  unsent_ = n_bytes;
}

bool TcpSession::full() const {
  return unsent_ + output_.size() + wire_.size() > kHighWater;
}

// Sealed only now: a seal fixes the order of records, so it is made when the bytes really leave.
Bytes& TcpSession::output() {
  if (!sealer_) return output_;
  sealer_->seal(output_, wire_);
  if (output_.capacity() > kInputKept) output_ = Bytes();
  output_.clear();
  return wire_;
}

bool TcpSession::saturated() const {
  return full() || (waiting() && input_.size() > kInputKept);
}

// Executes whole requests from the front of `bytes`. Ends with true when it has to wait: for the rest of a
// request, for the peer to read (full()), or for a key; `consumed` says how far it came, and the caller keeps
// the rest.
bool TcpSession::run(std::span<const std::uint8_t> bytes, std::size_t& consumed) {
  while (consumed < bytes.size()) {
    const auto rest = bytes.subspan(consumed);
    if (stage_ == Stage::kValidate && rest[0] != static_cast<std::uint8_t>(Query::kValidate)) {
      return fail(rest[0] == net::kHandshakeMagic[0] ? "it has a job secret and this store has none"
                                                     : "its first bytes are not those of a store client");
    }
    if (full() || (waiting() && rest[0] != static_cast<std::uint8_t>(Query::kCancelWait))) return true;
    switch (parser_.parse(rest, shared_.quota.left() + accounted_)) {
      case TcpRequestParser::Result::kMore:
        return true;
      case TcpRequestParser::Result::kBad:
        return fail(parser_.why());
      case TcpRequestParser::Result::kRequest:
        break;
    }
    account(0);  // what is stored now counts as stored
    if (!execute()) return false;
    consumed += parser_.consumed();
    parser_.next();
  }
  return true;
}

// Takes what the handshake's next message needs from the front of `bytes`.
bool TcpSession::shake_hands(std::span<const std::uint8_t>& bytes) {
  // The first byte decides quickly: a client without a secret begins with a query, whose numbers differ from
  // the magic's.
  const bool hello = stage_ == Stage::kHello;
  if (hello && greeting_.empty() && bytes[0] != net::kHandshakeMagic[0])
    return fail("it has no job secret and this store requires one");
  const std::size_t whole = hello ? sizeof(net::Hello) : sizeof(net::Proof);
  const auto part = bytes.first(std::min(bytes.size(), whole - greeting_.size()));
  greeting_.insert(greeting_.end(), part.begin(), part.end());
  bytes = bytes.subspan(part.size());
  if (greeting_.size() < whole) return true;
  const bool good = hello ? take_hello() : take_proof();
  greeting_.clear();
  return good;
}

bool TcpSession::take_hello() {
  const auto challenge = handshake_->challenge(array_of<net::Hello>(greeting_));
  if (!challenge) return fail(handshake_->why());
  output_.insert(output_.end(), challenge->begin(), challenge->end());
  stage_ = Stage::kProof;
  return true;
}

bool TcpSession::take_proof() {
  wrong_secret_ = !handshake_->accept(array_of<net::Proof>(greeting_));
  if (wrong_secret_) return fail("it has another job secret");
  if (sealed_) {
    const net::SessionKeys keys = handshake_->keys();
    opener_.emplace(keys.client);
    sealer_.emplace(keys.server);
    std::swap(wire_, output_);  // what was written in the clear is sent as it is
  }
  handshake_.reset();
  stage_ = Stage::kValidate;
  return true;
}

}  // namespace lockstep::internal
