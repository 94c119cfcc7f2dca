#include "lockstep/store/tcp_store.h"

#include <atomic>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/store/internal/checks.h"
#include "lockstep/store/internal/tcp_client.h"
#include "lockstep/store/internal/tcp_master.h"
#include "lockstep/store/internal/tcp_server.h"

namespace lockstep {

using internal::Query;
using internal::Status;
using internal::TcpClient;

namespace {

// A reply that has begun is read to its end even when the wait before it took all the time there was.
Deadline reply_deadline(Milliseconds timeout) {
  return Deadline::after(std::max(timeout, Milliseconds(10'000)));
}

}  // namespace

struct TcpStore::State {
  internal::TcpTarget target;
  std::shared_ptr<internal::TcpServer> server;  // shared with other masters of this process (multi_tenant)
  std::atomic<Milliseconds> timeout{kDefaultStoreTimeout};

  base::Mutex mutex;
  std::optional<TcpClient> client LOCKSTEP_GUARDED_BY(mutex);
  // The first failure of the connection; every later call raises it.
  std::optional<Failure> broken LOCKSTEP_GUARDED_BY(mutex);

  std::string name() const { return base::cat("TcpStore ", net::host_and_port(target.host, target.port)); }

  // Runs `call(client, deadline)` with the connection to itself.
  template <class Call>
  auto run(Call call) {
    // One call at a time per handle, also while it waits: a thread that must not wait for another one's get
    // uses clone().
    const base::MutexLock lock(mutex);
    if (broken) base::raise(*broken);
    try {
      return call(*client, Deadline::after(timeout.load()));
    } catch (const DistNetworkError& error) {
      broken = error.failure();
      broken->message = base::cat(name(), ": ", error.what());
      base::raise(*broken);
    }
  }

  // Waits for the status of the request that the connection has sent; the call's own reply follows when this
  // returns.
  void wait_status(TcpClient& connection, std::span<const std::string> keys, Milliseconds given,
                   Deadline deadline) {
    const Status status =
        connection.wait_for_status(deadline, [&] { return internal::waiting_text(name(), keys); });
    if (status == Status::kCanceled) internal::raise_wait_timeout(name(), given, keys);
    if (status == Status::kDone) return;
    const std::string why = connection.read_text(reply_deadline(given));
    connection.done(reply_deadline(given));
    base::raise(ErrorKind::kUsage, base::cat(name(), ": ", why), ErrorFamily::kStore);
  }

  // torch's way: wait, then ask.
  void wait_plainly(TcpClient& connection, std::span<const std::string> keys, Milliseconds given,
                    Deadline deadline) {
    connection.begin(Query::kWait).keys(keys).send(deadline);
    wait_status(connection, keys, given, deadline);
    connection.done(reply_deadline(given));
  }

  std::vector<Bytes> get_all(std::span<const std::string> keys);
  std::int64_t add_plainly(const std::string& key, std::int64_t amount);
  void connect(Milliseconds given, Deadline deadline) {
    const base::MutexLock lock(mutex);
    client = TcpClient::connect(target, given, deadline);
  }
  void join(int world_size, Milliseconds given, Deadline deadline);
};

TcpStore::TcpStore(std::unique_ptr<State> state) : state_(std::move(state)) {}

// What this handle wrote is in the store when it is gone, so that a thread notified of its end finds it
// there.
TcpStore::~TcpStore() {
  if (!state_->client || state_->broken) return;
  constexpr Milliseconds kPatience{1'000};
  try {
    state_->client->flush(Deadline::after(kPatience));
  } catch (const std::exception&) {
    // There is nobody left to throw to.
    base::log(LogLevel::kInfo, base::cat(state_->name(), ": what was written last may not have arrived: ",
                                         base::current_failure().message));
  }
}

std::unique_ptr<TcpStore> TcpStore::open(const std::string& host, const TcpStoreOptions& options) {
  internal::check_options(options);
  const Deadline deadline = Deadline::after(options.timeout);
  auto state = std::make_unique<State>();
  state->target = {.host = host,
                   .port = options.port,
                   .secret = options.secret,
                   .local_socket = options.local_socket,
                   .limits = options.limits};
  state->timeout = options.timeout;
  if (options.is_master) {
    state->server = internal::start_master(host, options);
    state->target.port = state->server->address().port();
  } else if (options.world_size) {
    internal::stagger(*options.world_size);
  }
  state->connect(options.timeout, deadline);
  if (options.world_size && options.wait_for_workers)
    state->join(*options.world_size, options.timeout, deadline);
  return std::unique_ptr<TcpStore>(new TcpStore(std::move(state)));
}

// Clients only count themselves in; the master waits, in its own process, without a request that blocks the
// connection.
void TcpStore::State::join(int world_size, Milliseconds given, Deadline deadline) {
  const base::MutexLock lock(mutex);
  client->begin(Query::kAdd).raw_key(internal::kInitKey).number(1).send(deadline);
  client->read<std::int64_t>(deadline);
  if (!server) return;
  base::SlowWait slow(deadline);
  std::int64_t joined = server->wait_joined(world_size, slow.next());
  if (joined < world_size && !deadline.expired()) {
    slow.say_if_due(
        [&] { return base::cat(name(), ": ", joined, " of ", world_size, " workers have joined"); });
    joined = server->wait_joined(world_size, deadline);
  }
  if (joined >= world_size) return;
  base::raise(
      ErrorKind::kTimeout,
      base::cat(name(), ": ", joined, "/", world_size, " workers joined within ", given.count(), " ms"),
      ErrorFamily::kStore);
}

// Requests without a reply (set, append, multi_set, queue_push) are posted: the server executes the requests of
// a connection in order, so a later one of this handle sees them, and one that failed is raised by the next
// call. Everything else sends and reads its reply under the handle's mutex (run()).

void TcpStore::set(const std::string& key, std::span<const std::uint8_t> value) {
  state_->run([&](TcpClient& client, Deadline deadline) {
    client.begin(Query::kSet).key(key).value(value).post(deadline);
  });
}

Bytes TcpStore::get(const std::string& key) {
  return std::move(state_->get_all({&key, 1}).front());
}

std::vector<Bytes> TcpStore::multi_get(std::span<const std::string> keys) {
  return keys.empty() ? std::vector<Bytes>() : state_->get_all(keys);
}

std::vector<Bytes> TcpStore::State::get_all(std::span<const std::string> keys) {
  return run([&](TcpClient& connection, Deadline deadline) {
    const Milliseconds given = timeout.load();
    // torch's server has no request that waits and answers with the values: there it takes two.
    if (connection.is_ours()) {
      connection.begin(Query::kGetWait).keys(keys).send(deadline);
      wait_status(connection, keys, given, deadline);
    } else {
      wait_plainly(connection, keys, given, deadline);
      connection.begin(Query::kMultiGet).keys(keys).send(deadline);
    }
    const Deadline until = reply_deadline(given);
    std::vector<Bytes> values;
    values.reserve(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) values.push_back(connection.read_sized(until));
    connection.done(until);
    return values;
  });
}

std::int64_t TcpStore::add(const std::string& key, std::int64_t amount) {
  return state_->run([&](TcpClient& client, Deadline deadline) {
    if (!client.is_ours()) return state_->add_plainly(key, amount);
    client.begin(Query::kAddChecked).key(key).number(amount).send(deadline);
    if (client.read<Status>(deadline) == Status::kDone) return client.read<std::int64_t>(deadline);
    base::raise(ErrorKind::kUsage, base::cat(state_->name(), ": ", client.read_text(deadline)),
                ErrorFamily::kStore);
  });
}

// torch's server answers an add to a value that is no number by closing the connection. If that is what
// happened, say so and go on with a new one.
std::int64_t TcpStore::State::add_plainly(const std::string& key, std::int64_t amount) {
  mutex.assume_held();  // by run(), whose call this is
  const Deadline deadline = Deadline::after(timeout.load());
  try {
    client->begin(Query::kAdd).key(key).number(amount).send(deadline);
    return client->read<std::int64_t>(deadline);
  } catch (const DistNetworkError& error) {
    if (error.kind() != ErrorKind::kPeerLost) throw;
    constexpr Milliseconds kPatience{3'000};
    const Failure& cause = error.failure();
    try {
      client = TcpClient::connect(target, kPatience, Deadline::after(kPatience));
      client->begin(Query::kCheck).keys({&key, 1}).send(deadline);
      if (client->read<internal::CheckReply>(deadline) == internal::CheckReply::kReady) {
        client->begin(Query::kGet).key(key).send(deadline);
        internal::add_to_counter(key, client->read_sized(deadline), amount);
      }
    } catch (const DistNetworkError&) {
      // The server is gone: then the connection did not end because of the value.
    }
    base::raise(cause);
  }
}

Bytes TcpStore::compare_set(const std::string& key, std::span<const std::uint8_t> expected,
                            std::span<const std::uint8_t> desired) {
  return state_->run([&](TcpClient& client, Deadline deadline) {
    client.begin(Query::kCompareSet).key(key).value(expected).value(desired).send(deadline);
    return client.read_sized(deadline);
  });
}

bool TcpStore::check(std::span<const std::string> keys) {
  if (keys.empty()) return true;
  return state_->run([&](TcpClient& client, Deadline deadline) {
    client.begin(Query::kCheck).keys(keys).send(deadline);
    return client.read<internal::CheckReply>(deadline) == internal::CheckReply::kReady;
  });
}

void TcpStore::wait(std::span<const std::string> keys, std::optional<Milliseconds> timeout) {
  if (timeout) base::checked_timeout(*timeout, base::cat(state_->name(), ": wait"), ErrorFamily::kStore);
  if (keys.empty()) return;
  const Milliseconds given = timeout.value_or(state_->timeout.load());
  const Deadline deadline = Deadline::after(given);
  // Its own deadline, not run()'s, which is that of the handle.
  state_->run([&](TcpClient& client, Deadline) {
    client.begin(client.is_ours() ? Query::kWaitExist : Query::kWait).keys(keys).send(deadline);
    state_->wait_status(client, keys, given, deadline);
    client.done(reply_deadline(given));
  });
}

bool TcpStore::delete_key(const std::string& key) {
  return state_->run([&](TcpClient& client, Deadline deadline) {
    client.begin(Query::kDeleteKey).key(key).send(deadline);
    return client.read<std::int64_t>(deadline) > 0;
  });
}

std::int64_t TcpStore::num_keys() {
  return state_->run([&](TcpClient& client, Deadline deadline) {
    client.begin(Query::kNumKeys).send(deadline);
    return client.read<std::int64_t>(deadline);
  });
}

std::vector<std::string> TcpStore::list_keys() {
  return state_->run([&](TcpClient& client, Deadline deadline) {
    client.begin(Query::kListKeys).send(deadline);
    std::vector<std::string> keys;
    for (auto left = client.read<std::uint64_t>(deadline); left > 0; --left) {
      const std::string key = client.read_text(deadline);
      // Without the prefix it is the store's own, not a user's.
      if (key.starts_with(internal::kKeyPrefix)) keys.push_back(key.substr(internal::kKeyPrefix.size()));
    }
    return keys;
  });
}

void TcpStore::append(const std::string& key, std::span<const std::uint8_t> value) {
  state_->run([&](TcpClient& client, Deadline deadline) {
    client.begin(Query::kAppend).key(key).value(value).post(deadline);
  });
}

void TcpStore::multi_set(std::span<const std::string> keys, std::span<const Bytes> values) {
  internal::check_pairs(keys.size(), values.size());
  state_->run([&](TcpClient& client, Deadline deadline) {
    client.begin(Query::kMultiSet).count(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) client.key(keys[i]).value(values[i]);
    client.post(deadline);
  });
}

void TcpStore::queue_push(const std::string& key, std::span<const std::uint8_t> value) {
  state_->run([&](TcpClient& client, Deadline deadline) {
    client.begin(Query::kQueuePush).key(key).value(value).post(deadline);
  });
}

Bytes TcpStore::queue_pop(const std::string& key) {
  return state_->run([&](TcpClient& client, Deadline deadline) {
    const Milliseconds given = state_->timeout.load();
    const Deadline until = reply_deadline(given);
    if (client.is_ours()) {
      client.begin(Query::kQueuePopWait).key(key).send(deadline);
      state_->wait_status(client, {&key, 1}, given, deadline);
      Bytes value = client.read_sized(until);
      client.done(until);
      return value;
    }
    for (;;) {
      state_->wait_plainly(client, {&key, 1}, given, deadline);
      client.begin(Query::kQueuePop).key(key).send(until);
      // Another client may have been quicker.
      if (client.read<std::uint64_t>(until) > 0) return client.read_sized(until);
    }
  });
}

std::optional<Bytes> TcpStore::try_queue_pop(const std::string& key) {
  return state_->run([&](TcpClient& client, Deadline deadline) -> std::optional<Bytes> {
    client.begin(Query::kQueuePop).key(key).send(deadline);
    if (client.read<std::uint64_t>(deadline) == 0) return std::nullopt;
    return client.read_sized(deadline);
  });
}

std::int64_t TcpStore::queue_len(const std::string& key) {
  return state_->run([&](TcpClient& client, Deadline deadline) {
    client.begin(Query::kQueueLen).key(key).send(deadline);
    return client.read<std::int64_t>(deadline);
  });
}

// A connection of its own, and no part of the server: that lives as long as the handles that opened it.
std::unique_ptr<Store> TcpStore::clone() {
  const Milliseconds given = timeout();
  auto state = std::make_unique<State>();
  state->target = state_->target;
  state->timeout = given;
  state->connect(given, Deadline::after(given));
  return std::unique_ptr<Store>(new TcpStore(std::move(state)));
}

void TcpStore::set_timeout(Milliseconds timeout) {
  state_->timeout =
      base::checked_timeout(timeout, base::cat(state_->name(), ": set_timeout"), ErrorFamily::kStore);
}
Milliseconds TcpStore::timeout() const {
  return state_->timeout;
}

std::string TcpStore::describe() const {
  std::string text = "TcpStore(client ";
  // Never waits: another thread may be in a long get. Then the client's own port is left out.
  if (state_->mutex.try_lock()) {
    const base::MutexLock lock(state_->mutex, std::adopt_lock);
    text += base::cat(state_->client->path(), state_->broken ? ", broken" : "");
  } else {
    text += base::cat("-> ", net::host_and_port(state_->target.host, state_->target.port), ", in a call");
  }
  if (state_->server) text += base::cat(", server ", state_->server->address().text());
  return text + ")";
}

const std::string& TcpStore::host() const {
  return state_->target.host;
}
std::uint16_t TcpStore::port() const {
  return state_->target.port;
}
bool TcpStore::is_master() const {
  return state_->server != nullptr;
}

}  // namespace lockstep
