#include "lockstep/store/internal/tcp_server.h"

#include <signal.h>
#include <uv.h>

#include <algorithm>
#include <array>
#include <list>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/net/complaints.h"
#include "lockstep/store/internal/server_look.h"
#include "lockstep/store/internal/store_acceptor.h"
#include "lockstep/store/internal/tcp_session.h"
#include "lockstep/store/internal/uv_view.h"

#ifdef __SANITIZE_THREAD__
extern "C" void __sanitizer_syscall_pre_impl_close(long fd);
#endif

namespace lockstep::internal {

namespace {

constexpr std::size_t kReadBytes = 64 << 10;
constexpr std::size_t kOutputKept = 64 << 10;

// libuv closes descriptors with a bare system call, which ThreadSanitizer does not see: the next owner of the
// same number would seem to race with this thread's reads.
void announce_close([[maybe_unused]] const uv_handle_t* handle) {
#ifdef __SANITIZE_THREAD__
  uv_os_fd_t fd = -1;
  if (uv_fileno(handle, &fd) == 0) __sanitizer_syscall_pre_impl_close(fd);
#endif
}

}  // namespace

// One thread, one libuv loop; no lock is held while a session runs, since sessions belong to the loop thread.
// Other threads only send stop_ and wait for joined_.
//
//   accepted: stranger --session validated--> client --EOF, error, refused--> closing --libuv's callback--> erased
//              '--too slow, or displaced by others-------------------------------^
class TcpServer::Loop {
 public:
  Loop(std::vector<net::Listener> listeners, const TcpStoreLimits& limits,
       const std::optional<JobSecret>& secret)
      : address_(listeners.front().local()), shared_(limits, secret) {
    shared_.joined = [this](std::int64_t n) { set_joined(n); };
    set_up(std::move(listeners));
    thread_ = base::Thread("ls-store", [this] { run(); });
  }
  // stop_ is the only handle that libuv allows other threads to touch. The loop ends when all handles are
  // closed.
  ~Loop() {
    if (thread_.joinable()) {
      uv_async_send(&stop_);
      thread_.join();
    }
    uv_loop_close(&loop_);
  }

  const net::Address& address() const { return address_; }
  const std::optional<JobSecret>& secret() const { return shared_.secret; }

  std::int64_t wait_joined(std::int64_t n, Deadline deadline) {
    const base::MutexLock lock(mutex_);
    grown_.wait_until(mutex_, deadline.time_point(),
                      [&]() LOCKSTEP_REQUIRES(mutex_) { return joined_ >= n; });
    return joined_;
  }

 private:
  // A connection's handle, of either kind; both begin as a uv_stream_t.
  union Stream {
    uv_stream_t stream;
    uv_tcp_t tcp;
    uv_pipe_t pipe;
  };
  struct Connection {
    Connection(Loop& loop_in, StoreAcceptor& acceptor_in, const net::Binding& reached)
        : loop(loop_in), acceptor(acceptor_in), session(std::in_place, loop_in.shared_, this, reached) {}
    Loop& loop;
    StoreAcceptor& acceptor;
    Stream handle{};
    std::optional<TcpSession> session;  // empty once closing
    std::size_t unsent = 0;
    std::uint64_t opened_ms = 0;
    bool reading = false;
    std::list<Connection>::iterator place;
    std::optional<StoreAcceptor::Strangers::iterator> stranger;  // until it has proven who it is
  };
  struct Write {
    uv_write_t request{};
    Connection* connection = nullptr;
    Bytes bytes;
    std::size_t n_bytes = 0;
  };

  // ---- set-up and end ----

  void set_up(std::vector<net::Listener> listeners) {
    check_uv(uv_loop_init(&loop_), "uv_loop_init");
    uv_async_init(&loop_, &stop_, [](uv_async_t* async) { static_cast<Loop*>(async->data)->close_all(); });
    uv_timer_init(&loop_, &timer_);
    look_.open(loop_);
    stop_.data = timer_.data = this;
    try {
      for (auto& listener : listeners) add_acceptor(std::move(listener), "");
      // A name that nobody can guess and bind first; clients learn it over TCP.
      const std::string name = "lockstep-store-" + base::random_hex(16);
      add_acceptor(net::Listener::listen(net::Address::local_name(name), net::Listener::kBacklog), name);
      shared_.local_name = name;
      shared_.host = base::host_identity();
    } catch (...) {
      close_all();
      uv_run(&loop_, UV_RUN_DEFAULT);
      uv_loop_close(&loop_);
      throw;
    }
  }

  void add_acceptor(net::Listener listener, std::string local_name) {
    acceptors_.emplace_back(
        std::move(listener), std::move(local_name), strangers_allowed(shared_.limits.strangers),
        [this](StoreAcceptor& acceptor, base::Fd fd) { open(acceptor, std::move(fd)); },
        [this](void* who) {
          refuse(*static_cast<Connection*>(who), "it did not authenticate while others wait to be accepted");
        });
    acceptors_.back().open(loop_);
  }

  void run() {
    // Signals are for the program's own threads; and libuv writes without MSG_NOSIGNAL.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    uv_run(&loop_, UV_RUN_DEFAULT);
  }

  // On the loop thread, through stop_. Closing is asynchronous: uv_run returns when the last callback has
  // run.
  void close_all() {
    uv_close(as_handle(&stop_), nullptr);
    uv_close(as_handle(&timer_), nullptr);
    look_.close();
    for (StoreAcceptor& acceptor : acceptors_) acceptor.close();
    for (Connection& connection : connections_) close(connection);
  }

  // The loop's only hand-over to other threads: the master waits here for its workers.
  void set_joined(std::int64_t n) {
    const base::MutexLock lock(mutex_);
    joined_ = n;
    grown_.notify_all();
  }

  // ---- connections ----

  static net::Binding reached(const StoreAcceptor& acceptor, const base::Fd& fd, bool secret) {
    if (!acceptor.local_name().empty())
      return {.purpose = net::Purpose::kStoreLocal, .server = acceptor.local_name()};
    if (!secret) return {};
    return {.purpose = net::Purpose::kStoreTcp, .address = net::Address::local_of(fd.get()).canonical()};
  }

  // Never raises: it is called from the loop.
  void open(StoreAcceptor& acceptor, base::Fd fd) noexcept {
    try {
      const net::Binding binding = reached(acceptor, fd, shared_.secret.has_value());
      connections_.emplace_back(*this, acceptor, binding);
    } catch (const std::exception& error) {
      return base::log(LogLevel::kInfo,
                       base::cat("store ", address_.text(), ": a connection was lost: ", error.what()));
    }
    Connection& connection = connections_.back();
    connection.place = std::prev(connections_.end());
    connection.opened_ms = uv_now(&loop_);
    const bool is_tcp = acceptor.local_name().empty();
    int opened = 0;
    if (is_tcp) {
      uv_tcp_init(&loop_, &connection.handle.tcp);
      opened = uv_tcp_open(&connection.handle.tcp, fd.get());
    } else {
      uv_pipe_init(&loop_, &connection.handle.pipe, 0);
      opened = uv_pipe_open(&connection.handle.pipe, fd.get());
    }
    connection.handle.stream.data = &connection;
    if (opened != 0) return close(connection);
    const std::uint64_t quota_key = net::quota_key_of(fd.get());
    fd.release();  // libuv closes it from here on
    if (connections_.size() > shared_.limits.connections) return refuse(connection, "too many connections");
    if (is_tcp) {
      uv_tcp_nodelay(&connection.handle.tcp, 1);
      uv_tcp_keepalive(&connection.handle.tcp, 1, 60);
    }
    connection.stranger = acceptor.arrive(&connection, quota_key);
    set_reading(connection, true);
    if (!uv_is_active(as_handle(&timer_))) {
      const auto patience = static_cast<std::uint64_t>(shared_.limits.validate_timeout.count());
      const std::uint64_t period = std::clamp<std::uint64_t>(patience / 4, 10, 1000);
      uv_timer_start(&timer_, on_timer, period, period);
    }
  }

  static void no_stranger_any_more(Connection& connection) {
    if (connection.stranger) connection.acceptor.leave(*std::exchange(connection.stranger, std::nullopt));
  }

  // Drops connections that never authenticated.
  static void on_timer(uv_timer_t* timer) {
    auto& loop = *static_cast<Loop*>(timer->data);
    const auto patience = static_cast<std::uint64_t>(loop.shared_.limits.validate_timeout.count());
    bool pending = false;
    for (Connection& connection : loop.connections_) {
      if (!connection.session || connection.session->validated()) continue;
      if (uv_now(&loop.loop_) - connection.opened_ms > patience) {
        loop.refuse(connection, "it sent nothing valid in time");
      } else {
        pending = true;
      }
    }
    if (!pending) uv_timer_stop(timer);
  }

  void refuse(Connection& connection, std::string_view why) {
    const bool wrong_secret = connection.session && connection.session->wrong_secret();
    // A wrong secret concerns an operator; port scans and the like do not.
    const LogLevel level = wrong_secret ? LogLevel::kWarn : LogLevel::kInfo;
    if (base::log_enabled(level) && complaints_.allowed()) {
      base::log(level, base::cat("store ", address_.text(), ": closed the connection of ",
                                 peer_of(connection), ": ", why, complaints_.held_back()));
    }
    close(connection);
  }

  static std::string peer_of(const Connection& connection) {
    try {
      uv_os_fd_t fd = -1;
      uv_fileno(reinterpret_cast<const uv_handle_t*>(&connection.handle), &fd);
      return net::Address::peer_of(fd).text();
    } catch (const Error&) {
      return "a peer that is gone";
    }
  }

  // The session ends here, so nobody's entry is handed to it any more; the handle's memory a little later.
  void close(Connection& connection) {
    connection.session.reset();
    no_stranger_any_more(connection);
    if (uv_is_closing(as_handle(&connection.handle))) return;
    announce_close(as_handle(&connection.handle));
    uv_close(as_handle(&connection.handle), [](uv_handle_t* handle) {
      auto& closed = *static_cast<Connection*>(handle->data);
      closed.loop.connections_.erase(closed.place);
    });
  }

  void set_reading(Connection& connection, bool reading) {
    if (connection.reading == reading) return;
    connection.reading = reading;
    if (reading) {
      uv_read_start(&connection.handle.stream, on_alloc, on_read);
    } else {
      uv_read_stop(&connection.handle.stream);
    }
  }

  // ---- bytes in and out ----

  // One buffer for all: libuv fills it and calls on_read before it asks again.
  static void on_alloc(uv_handle_t* handle, std::size_t, uv_buf_t* buffer) {
    auto& bytes = static_cast<Connection*>(handle->data)->loop.buffer_;
    *buffer = uv_buf_init(bytes.data(), static_cast<unsigned>(bytes.size()));
  }

  static void on_read(uv_stream_t* stream, ssize_t n, const uv_buf_t* buffer) {
    auto& connection = *static_cast<Connection*>(stream->data);
    if (n == 0 || !connection.session) return;
    Loop& loop = connection.loop;
    if (n < 0) {
      loop.close(connection);
    } else {
      loop.look_.after_request();
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(buffer->base);
      loop.advance(connection, [&](TcpSession& session) {
        return session.feed({bytes, static_cast<std::size_t>(n)});
      });
    }
    loop.serve_woken();
  }

  static void on_written(uv_write_t* request, int status) {
    const std::unique_ptr<Write> write(static_cast<Write*>(request->data));
    Connection& connection = *write->connection;
    if (!connection.session) return;
    connection.unsent -= write->n_bytes;
    connection.session->set_unsent(connection.unsent);
    Loop& loop = connection.loop;
    if (status != 0) {
      loop.close(connection);
    } else {
      loop.advance(connection, [](TcpSession& session) { return session.go_on(); });
    }
    loop.serve_woken();
  }

  // Sessions that another session's write or end has woken; serving them may wake more.
  void serve_woken() {
    while (!shared_.woken.empty()) {
      // A session removes itself from `woken` when it ends, so every pointer here is valid, however many
      // serving the others has closed.
      TcpSession* session = shared_.woken.back();
      shared_.woken.pop_back();
      advance(*static_cast<Connection*>(session->owner()), [](TcpSession& woken) { return woken.go_on(); });
    }
  }

  // Runs the session, sends its output, and continues while that makes room.
  template <class Step>
  void advance(Connection& connection, Step step) {
    TcpSession& session = *connection.session;
    try {
      bool good = step(session);
      for (bool was_full = session.full(); send(connection) && good && was_full && !session.full();
           was_full = session.full()) {
        good = session.go_on();
      }
      if (!connection.session) return;  // sending failed
      if (!good) return refuse(connection, session.why());
      if (connection.stranger && session.validated()) no_stranger_any_more(connection);
      set_reading(connection, !session.saturated());
    } catch (const std::exception& error) {
      refuse(connection, error.what());  // out of memory, caused by this client
    }
  }

  // False when the connection is lost, and closed.
  // Most replies fit the socket's buffer: try first, and let libuv wait for room only for the rest.
  bool send(Connection& connection) {
    Bytes& output = connection.session->output();
    if (output.empty()) return true;
    std::size_t sent = 0;
    if (connection.unsent == 0) {
      const uv_buf_t part = uv_view(output);
      const int n = uv_try_write(&connection.handle.stream, &part, 1);
      if (n < 0 && n != UV_EAGAIN) {
        close(connection);
        return false;
      }
      sent = n > 0 ? static_cast<std::size_t>(n) : 0;
    }
    if (sent == output.size()) {
      if (output.capacity() > kOutputKept) output = Bytes();
      output.clear();
      return true;
    }
    return queue(connection, sent);
  }

  // The buffer moves into the request, which libuv refers to until on_written(); the session goes on with a
  // new one.
  bool queue(Connection& connection, std::size_t from) {
    auto write = std::make_unique<Write>();
    write->connection = &connection;
    write->request.data = write.get();
    write->bytes = std::exchange(connection.session->output(), {});
    write->n_bytes = write->bytes.size() - from;
    const uv_buf_t part = uv_view(std::span(write->bytes).subspan(from));
    if (uv_write(&write->request, &connection.handle.stream, &part, 1, on_written) != 0) {
      close(connection);
      return false;
    }
    connection.unsent += write->n_bytes;
    connection.session->set_unsent(connection.unsent);
    static_cast<void>(write.release());  // on_written takes it back
    return true;
  }

  const net::Address address_;
  uv_loop_t loop_{};
  uv_async_t stop_{};
  uv_timer_t timer_{};
  // The loop thread's alone.
  TcpShared shared_;
  std::list<StoreAcceptor> acceptors_;
  std::list<Connection> connections_;
  std::array<char, kReadBytes> buffer_;
  ServerLook look_;
  net::Complaints complaints_;
  base::Mutex mutex_;
  base::ConditionVariable grown_;
  std::int64_t joined_ LOCKSTEP_GUARDED_BY(mutex_) = 0;

  base::Thread thread_;
};

TcpServer::TcpServer(std::unique_ptr<Loop> loop) : loop_(std::move(loop)) {}
TcpServer::~TcpServer() = default;

std::unique_ptr<TcpServer> TcpServer::start(std::vector<net::Listener> listeners,
                                            const TcpStoreLimits& limits,
                                            const std::optional<JobSecret>& secret) {
  return std::unique_ptr<TcpServer>(
      new TcpServer(std::make_unique<Loop>(std::move(listeners), limits, secret)));
}

const net::Address& TcpServer::address() const {
  return loop_->address();
}

bool TcpServer::has_secret(const std::optional<JobSecret>& secret) const {
  return loop_->secret() == secret;
}

std::int64_t TcpServer::wait_joined(std::int64_t n, Deadline deadline) {
  return loop_->wait_joined(n, deadline);
}

}  // namespace lockstep::internal
