// One connection of a TcpStore server as a machine over bytes: what came in, what is to go out. It runs the
// handshake when there is a secret, insists on torch's validation, cuts the stream into requests and executes
// them in order; a request that waits holds back those after it, except the one that cancels it. No I/O; what
// the fuzzer feeds.
//
// A session that fails is closed by its owner and disturbs nobody else.
// Thread safety: none; used by the server's loop thread alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/net/handshake.h"
#include "lockstep/net/sealed.h"
#include "lockstep/store/internal/tcp_data.h"
#include "lockstep/store/internal/tcp_request.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep::internal {

class TcpSession;

// What all sessions of a server share. Outlives them.
struct TcpShared {
  TcpShared(const TcpStoreLimits& limits_in, const std::optional<JobSecret>& secret_in)
      : limits(limits_in),
        secret(secret_in),
        quota{.limit = limits_in.total_bytes},
        unsent{.limit = std::max(limits_in.total_bytes, limits_in.reply_bytes)},
        data(quota) {}

  const TcpStoreLimits limits;
  const std::optional<JobSecret> secret;
  Quota quota;   // values, and input on its way to become some
  Quota unsent;  // replies that clients have not taken; apart, since a full store must still be read
  TcpData data;
  // Where clients of the same host may connect instead, and which host that is; empty: nowhere.
  std::string local_name;
  std::string host;
  // Sessions with new output that were not the one being fed: somebody else's write woke them.
  std::vector<TcpSession*> woken;
  // Called with the init key's value when somebody joins.
  std::function<void(std::int64_t)> joined = [](std::int64_t) {};
};

//   with a secret:  kHello --challenge sent--> kProof --proof right--+
//   without:                                                         +--> kValidate --torch's magic number--> kReady: requests
//   any stage:     something wrong --> why() is set, for ever; the owner closes the connection
class TcpSession final : private TcpWaiter {
 public:
  // `owner` is handed back by owner(). With a secret, `reached` says at which address or local name the
  // client found the server; after the handshake a connection over TCP is sealed.
  explicit TcpSession(TcpShared& shared, void* owner = nullptr, const net::Binding& reached = {});
  ~TcpSession() override;
  TcpSession(const TcpSession&) = delete;
  TcpSession& operator=(const TcpSession&) = delete;

  // Takes bytes from the peer. False: close the connection, why() says why; output() may still be sent.
  bool feed(std::span<const std::uint8_t> bytes);
  // Goes on with input that was held back; after a wake-up and when output was sent. False as above.
  bool go_on();

  // Bytes to send, sealed where the connection is. The owner takes them out, or sends and clears them.
  Bytes& output();
  // The owner's count of bytes taken from output() that the peer has not taken yet.
  void set_unsent(std::size_t n_bytes);
  // True while more input would only be kept: do not read.
  bool saturated() const;
  // True when output holds requests back: go_on() once it is sent.
  bool full() const;
  void* owner() const { return owner_; }
  bool validated() const { return stage_ == Stage::kReady; }
  const std::string& why() const { return why_; }
  // True when the peer did not know the secret.
  bool wrong_secret() const { return wrong_secret_; }

 private:
  enum class Stage : std::uint8_t { kHello, kProof, kValidate, kReady };

  enum class Checked : bool { kNo, kYes };

  // Output and held-back input a connection may have before the server stops reading from it. kInputKept is
  // also what an idle connection keeps of its buffers.
  static constexpr std::size_t kHighWater = 1 << 20;
  static constexpr std::size_t kInputKept = 64 << 10;

  // tcp_session.cpp
  bool run(std::span<const std::uint8_t> bytes, std::size_t& consumed);
  bool shake_hands(std::span<const std::uint8_t>& bytes);
  bool take_hello();
  bool take_proof();
  bool feed_plain(std::span<const std::uint8_t> bytes);
  bool keep(std::span<const std::uint8_t> rest);
  void account(std::size_t n_bytes);
  bool fail(std::string why);

  // tcp_session_requests.cpp
  bool execute();
  bool execute_wait();
  bool execute_get();
  bool execute_multi_get();
  bool execute_multi_set();
  bool execute_compare_set();
  bool execute_add(Checked checked);
  bool execute_pop();
  bool execute_list_keys();
  void execute_local_name();
  void ready() override;
  void reply_values();
  void reply_entry();
  bool all_exist() const;
  void pass_on_entries();
  bool stored(bool fits);
  bool reply_fits(std::uint64_t n_bytes);

  template <class T>
  void put(T value);
  void put_sized(std::span<const std::uint8_t> bytes);
  void refuse(std::string_view why);

  TcpShared& shared_;
  void* const owner_;
  TcpRequestParser parser_;
  const bool sealed_;  // once the handshake is over
  std::optional<net::HandshakeServer> handshake_;
  std::optional<net::Sealer> sealer_;
  std::optional<net::Opener> opener_;
  Stage stage_;
  Bytes greeting_;             // of the handshake's message that is coming in
  Bytes input_;                // held back or incomplete
  std::size_t accounted_ = 0;  // of input_, in the quota
  Bytes output_;               // in the clear
  Bytes wire_;                 // sealed; unused where nothing is
  std::size_t unsent_ = 0;
  Query waiting_for_ = Query::kWait;    // while waiting()
  std::vector<std::string> woken_for_;  // keys of a wait of torch's that has ended; maybe a queue's
  bool feeding_ = false;                // inside feed() or go_on()
  bool wrong_secret_ = false;
  std::string why_;
};

}  // namespace lockstep::internal
