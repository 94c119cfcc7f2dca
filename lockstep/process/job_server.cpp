#include "lockstep/process/job_server.h"

#include <sys/socket.h>
#include <unistd.h>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/net/address.h"
#include "lockstep/net/socket.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep::process {
namespace {

constexpr Milliseconds kConnectTimeout{1'000};  // to another starter's store, which may not be there yet
constexpr Milliseconds kStoreTimeout{5'000};    // of the starter's own requests

// On one host the secret never leaves this process and its children. Across hosts it must come from outside,
// since nothing here can send it to the others safely.
std::optional<JobSecret> find_secret(bool shared) {
  if (!shared) return JobSecret::mint();
  if (auto secret = JobSecret::from_environment()) return secret;
  if (base::environment_flag(base::EnvVar::kLockstepInsecure)) return std::nullopt;
  base::raise(ErrorKind::kUsage,
              base::cat("a job of several hosts needs a secret that all of them can read: set ",
                        name_of(base::EnvVar::kLockstepSecretFile), " to a file on a shared path; ",
                        JobSecret::make_file_hint("lockstep.secret")));
}

net::Listener listen_at(JobServerOptions& options) {
  if (!net::names_loopback(options.address))
    return net::Listener::listen_everywhere(options.port, net::Listener::kBacklog);
  // "localhost" has two addresses, and anybody may listen at the one that is not bound: workers dial the one
  // that is.
  if (!net::Address::parse(options.address, options.port)) {
    const bool is_v6 = net::Address::resolve(options.address, options.port).front().family() == AF_INET6;
    options.address = is_v6 ? "::1" : "127.0.0.1";
  }
  return net::Listener::listen(net::Address::resolve(options.address, options.port).front(),
                               net::Listener::kBacklog);
}

}  // namespace

std::string exit_cause_key(int rank) {
  return base::cat("lockstep/exit/", rank);
}

// The port is bound here, before the workers exist, so that they can be given it; serve() starts the thread
// after they are forked.
JobServer JobServer::open(const JobServerOptions& options) {
  JobServer host;
  host.options_ = options;
  host.run_id_ = base::random_hex(8);
  host.secret_ = find_secret(options.shared);
  if (host.secret_) host.secret_fd_ = host.secret_->to_memfd();
  if (!options.holds_store) return host;
  net::Listener listener = listen_at(host.options_);
  host.options_.port = listener.local().port();
  host.listener_ = listener.release();
  return host;
}

void JobServer::serve() {
  if (listener_) store();
}

JobAddress JobServer::address() const {
  return {.master_addr = options_.address,
          .master_port = options_.port,
          .run_id = run_id_,
          .launcher_pid = ::getpid(),
          .secret_fd = secret_fd_ ? std::optional(secret_fd_.get()) : std::nullopt};
}

Store& JobServer::store() {
  if (store_) return *store_;
  TcpStoreOptions options{.port = options_.port, .timeout = kConnectTimeout, .secret = secret_};
  options.insecure = !secret_;
  options.wait_for_workers = false;
  if (options_.holds_store) {
    options.is_master = true;
    options.timeout = kStoreTimeout;
    options.master_listen_fd = listener_.release();
  }
  store_ = TcpStore::open(options_.address, options);
  store_->set_timeout(kStoreTimeout);
  return *store_;
}

void JobServer::publish_exit(int rank, const ChildExit& exit) noexcept {
  try {
    store().set(exit_cause_key(rank),
                exit.loss.empty() ? exit.cause() : base::cat(exit.cause(), "; its last error: ", exit.loss));
  } catch (const std::exception& error) {
    base::log(LogLevel::kWarn,
              base::cat("cannot publish to the other ranks how rank ", rank, " ended: ", error.what()));
  }
}

}  // namespace lockstep::process
