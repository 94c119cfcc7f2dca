// A store over TCP: one process holds the data in a server thread, all others connect to it. The wire
// protocol is that of torch's TCPStore (docs/wire.md), so either side may be PyTorch: a rank started by
// torchrun uses the agent's store, and PyTorch can connect to ours if no secret is set.
//
// With a secret both ends of every connection first prove that they know it, and all further traffic on TCP
// is encrypted and authenticated with per-connection keys: an attacker in the middle can close the
// connection, nothing else. Without a secret the server listens on loopback only, unless `insecure` is set.
//
// Performance: on the server's host a client switches from TCP to a local socket (local_socket = false keeps
// it on TCP). Before they block, client and server poll for the next bytes for 50 us, yielding their core in
// between.
//
// set, append, multi_set and queue_push have no reply, as in torch: they return when the request is on its
// way, not when the store has it. Many consecutive ones are batched and sent together by a thread of the
// handle (within microseconds, once it is scheduled). A write is visible to every later call on the same
// handle, in order; others see it when it has arrived, whether or not this handle is used again. When a write
// fails (connection lost, store full, no room within the timeout), a later call on the handle raises the
// error, at the latest the first one that waits for a reply; a write that no call follows can be lost
// silently: the destructor waits up to a second until everything has arrived, and can only log. A call that
// has a reply (get, check, num_keys) confirms all writes before it. In a forked child a handle raises kUsage.
//
// Thread safety: as Store; calls on one handle are serialised on its connection. Ownership: the master's
// handle owns the server; when the last handle that shares it is destroyed, the server stops and clients see
// DistNetworkError.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/net/secret.h"
#include "lockstep/store/store.h"

namespace lockstep {

inline constexpr std::uint16_t kDefaultTcpStorePort = 29500;

// What a server accepts from its clients before it closes their connection.
struct TcpStoreLimits {
  std::uint64_t key_bytes = 64 << 10;        // one key
  std::uint64_t value_bytes = 1ull << 30;    // one value
  std::uint64_t keys_per_request = 1 << 16;  // check, wait, multi_get, multi_set
  std::uint64_t total_bytes = 8ull << 30;    // all keys and values together; as much again for replies
  std::uint64_t reply_bytes = 1ull << 31;    // one reply: multi_get, list_keys
  std::uint32_t connections = 16384;
  // Of them, per address: unauthenticated connections; at most an eighth of the process's descriptors
  // (RLIMIT_NOFILE). When all places are taken, the oldest connection from the address with the most of them
  // is closed.
  std::uint32_t strangers = 256;
  Milliseconds validate_timeout{30'000};  // from connect to a valid first request
};

struct TcpStoreOptions {
  std::uint16_t port = kDefaultTcpStorePort;  // 0 with is_master: a free one, read it from TcpStore::port()
  std::optional<int> world_size;              // unset: any number of users
  bool is_master = false;                     // holds the server
  Milliseconds timeout = kDefaultStoreTimeout;
  bool wait_for_workers = true;         // the master waits for world_size users; needs world_size
  bool multi_tenant = false;            // masters of one process on one port share a server
  std::optional<int> master_listen_fd;  // a bound socket that the server takes over; it may already listen
  std::optional<JobSecret> secret;      // required from, and proven to, every peer
  bool local_socket = true;             // use one instead of TCP when the server is on this host and ours
  bool insecure = false;                // allow a server beyond loopback without a secret
  TcpStoreLimits limits;
};

class TcpStore final : public Store {
 public:
  // Starts the server when is_master, connects (retrying until the timeout while there is no answer), and
  // waits for the workers if requested. `host` is a name or an address; a master whose host is 127.x.x.x or
  // ::1 listens there only, for localhost on 127.0.0.1 and ::1 (whichever the machine has), otherwise on all
  // interfaces. Raises kUsage for options that contradict each other or a listener beyond loopback without a
  // secret; DistNetworkError naming host, port and ms when there is no answer, the port is taken, or the
  // secrets differ; DistStoreError with joined/total when workers are missing.
  static std::unique_ptr<TcpStore> open(const std::string& host, const TcpStoreOptions& options = {});
  ~TcpStore() override;

  using Store::set;
  void set(const std::string& key, std::span<const std::uint8_t> value) override;
  Bytes get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;
  Bytes compare_set(const std::string& key, std::span<const std::uint8_t> expected,
                    std::span<const std::uint8_t> desired) override;
  bool check(std::span<const std::string> keys) override;
  void wait(std::span<const std::string> keys, std::optional<Milliseconds> timeout = {}) override;
  bool delete_key(const std::string& key) override;
  std::int64_t num_keys() override;
  std::vector<std::string> list_keys() override;
  void append(const std::string& key, std::span<const std::uint8_t> value) override;
  std::vector<Bytes> multi_get(std::span<const std::string> keys) override;
  void multi_set(std::span<const std::string> keys, std::span<const Bytes> values) override;
  void queue_push(const std::string& key, std::span<const std::uint8_t> value) override;
  Bytes queue_pop(const std::string& key) override;
  std::optional<Bytes> try_queue_pop(const std::string& key) override;
  std::int64_t queue_len(const std::string& key) override;
  // Opens a separate connection; never shares the server.
  std::unique_ptr<Store> clone() override;
  bool has_extended_api() const override { return true; }
  void set_timeout(Milliseconds timeout) override;
  Milliseconds timeout() const override;
  // "TcpStore(client 127.0.0.1:40112 -> 127.0.0.1:29500, server 127.0.0.1:29500)"
  std::string describe() const override;

  const std::string& host() const;
  std::uint16_t port() const;
  // True for the handle that started or shares the server.
  bool is_master() const;

 private:
  struct State;
  explicit TcpStore(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
