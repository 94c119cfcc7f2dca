// One connection to a TcpStore server, torch's or ours: builds a request and sends it in one write, reads
// replies through a small buffer, so most requests cost two system calls.
//
// Thread safety: none; TcpStore's mutex guards it. Errors: DistNetworkError; after one, the connection is of
// no use.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/net/channel.h"
#include "lockstep/net/handshake.h"
#include "lockstep/net/secret.h"
#include "lockstep/store/internal/tcp_protocol.h"
#include "lockstep/store/internal/tcp_writer.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep::internal {

struct TcpTarget {
  std::string host;
  std::uint16_t port = 0;
  std::optional<JobSecret> secret;
  bool local_socket = true;
  TcpStoreLimits limits;
};

class TcpClient {
 public:
  // Connects, proves the secret when there is one, validates and pings; tries again, ever more slowly, until
  // the deadline, `timeout` from when the caller began. Secrets that differ are an error at once.
  static TcpClient connect(const TcpTarget& target, Milliseconds timeout, Deadline deadline);

  // Once, to the first of the addresses of target.host at which the store answers: a stranger may hold
  // another of them, since "localhost" is 127.0.0.1 and ::1 to a client and may be one of the two to the
  // master. Raises the most telling failure.
  static TcpClient connect_to_any(std::span<const net::Address> addresses, const TcpTarget& target,
                                  Deadline deadline);

  // True when the server knows our own requests.
  bool is_ours() const { return is_ours_; }
  // "127.0.0.1:40112 -> 127.0.0.1:29500", the addresses it connected with; a local socket may have taken
  // over.
  const std::string& path() const { return path_; }

  // A request: its query, then its fields, then send(). Keys get their prefix here. Raise kUsage beyond the
  // limits.
  TcpClient& begin(Query query);
  TcpClient& key(std::string_view key);
  TcpClient& keys(std::span<const std::string> keys);
  TcpClient& value(std::span<const std::uint8_t> bytes);
  TcpClient& number(std::int64_t number) { return put(number); }
  TcpClient& count(std::size_t n);
  TcpClient& raw_key(std::string_view key);
  // Ends a request that has a reply.
  void send(Deadline deadline);
  // Ends one that has none: it may go out a little later, together with others. What goes wrong then is
  // raised by the next call.
  void post(Deadline deadline);

  template <class T>
  T read(Deadline deadline) {
    fill(sizeof(T), deadline);
    T result;
    std::memcpy(&result, buffer_.data() + begin_, sizeof result);
    begin_ += sizeof result;
    return result;
  }
  // Grows with what comes, never by what is announced.
  Bytes read_sized(Deadline deadline);
  std::string read_text(Deadline deadline);

  // The status byte of a request that waits. At the deadline the wait is taken back: kCanceled, unless the
  // answer was on its way. Call done() after the rest of the reply. A slow wait logs waiting().
  Status wait_for_status(Deadline deadline, const std::function<std::string()>& waiting);
  void done(Deadline deadline);

  // Returns when the server has executed all that was sent: requests without a reply may still be on their
  // way.
  void flush(Deadline deadline);

 private:
  TcpClient(net::Socket socket, const TcpStoreLimits& limits);
  static TcpClient connect_once(const net::Address& address, const TcpTarget& target, Deadline deadline);
  void introduce(const TcpTarget& target, const net::Binding& binding, Deadline deadline);
  void validate(Deadline deadline);
  void go_local(const TcpTarget& target, Deadline deadline);
  void fill(std::size_t n_bytes, Deadline deadline);
  std::size_t buffered() const { return end_ - begin_; }
  template <class T>
  TcpClient& put(T value) {
    // Not insert(): g++ 12 at -O3 sees an overflow in it that is not there.
    const std::size_t at = request_.size();
    request_.resize(at + sizeof value);
    std::memcpy(request_.data() + at, &value, sizeof value);
    return *this;
  }

  net::Channel& channel() { return writer_->channel(); }

  std::unique_ptr<TcpWriter> writer_;
  TcpStoreLimits limits_;
  std::string path_;
  bool is_ours_ = false;
  bool cancel_pending_ = false;  // a kCanceled will follow the reply being read
  bool unconfirmed_ = false;     // something was sent since the last byte came
  Bytes request_;
  std::array<std::uint8_t, 4096> buffer_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace lockstep::internal
