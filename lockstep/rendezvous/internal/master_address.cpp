#include "lockstep/rendezvous/internal/master_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/net/address.h"
#include "lockstep/net/secret.h"
#include "lockstep/store/prefix_store.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep::internal {
namespace {

// 224.0.0.0/4 and ff00::/8; names are never multicast.
bool is_multicast(const std::string& host) {
  in_addr four{};
  in6_addr six{};
  if (::inet_pton(AF_INET, host.c_str(), &four) == 1) return IN_MULTICAST(ntohl(four.s_addr));
  return ::inet_pton(AF_INET6, host.c_str(), &six) == 1 && IN6_IS_ADDR_MULTICAST(&six);
}

bool is_torchruns_store(bool agent_store) {
  return agent_store && !base::environment(base::EnvVar::kLockstepLauncher);
}

std::optional<JobSecret> find_secret(bool agent_store) {
  if (!is_torchruns_store(agent_store)) return JobSecret::from_environment();
  if (base::environment(base::EnvVar::kLockstepSecretFd) ||
      base::environment(base::EnvVar::kLockstepSecretFile)) {
    base::log(LogLevel::kInfo,
              "the store is torchrun's, which cannot answer a challenge: the job secret is not used for it");
  }
  return std::nullopt;
}

// On every rank, not only on the one that would listen: otherwise the others wait their whole timeout for it.
void check_secured(const MasterAddress& place) {
  if (net::names_loopback(place.host) || base::environment_flag(base::EnvVar::kLockstepInsecure)) return;
  base::raise(
      ErrorKind::kUsage,
      base::cat(
          "the store at ", net::host_and_port(place.host, static_cast<std::uint16_t>(place.port)),
          " would be open to everyone on the network. Give all ranks one secret, in a file on a path that "
          "they share; ",
          JobSecret::make_file_hint("lockstep.secret"), "; export ",
          name_of(base::EnvVar::kLockstepSecretFile), "=\"$PWD/lockstep.secret\"\nor accept that with ",
          name_of(base::EnvVar::kLockstepInsecure), "=1"));
}

// As torch does, so that the workers of a restart do not meet the keys of the last one. Our own launcher
// publishes at the root of its store, which the first workers therefore share with it.
std::shared_ptr<Store> for_this_attempt(std::unique_ptr<TcpStore> store) {
  const std::string attempt = base::environment(base::EnvVar::kElasticRestartCount).value_or("0");
  if (base::environment(base::EnvVar::kLockstepLauncher) && attempt == "0") return store;
  return std::make_shared<PrefixStore>("/worker/attempt_" + attempt, std::move(store));
}

}  // namespace

void say_one_server(const std::string& asked) {
  base::log(
      LogLevel::kInfo,
      base::cat(asked,
                " requests torch's plain store server, but lockstep has only one server and uses that"));
}

std::shared_ptr<Store> open_tcp(const MasterAddress& place) {
  if (is_multicast(place.host)) {
    base::raise(ErrorKind::kUnsupported,
                base::cat("multicast rendezvous (", place.host,
                          ") does not exist any more: give the address of rank 0's host"));
  }
  if (base::environment(base::EnvVar::kUseLibuv) && !base::environment_flag(base::EnvVar::kUseLibuv))
    say_one_server("USE_LIBUV=0");
  const bool agent_store = base::environment_flag(base::EnvVar::kElasticUseAgentStore);
  if (place.port == 0 && (place.world_size != 1 || agent_store)) {
    base::raise(ErrorKind::kUsage,
                base::cat("the store at ", place.host,
                          " has port 0, a free one of rank 0's choice, which the other ranks cannot know"));
  }
  TcpStoreOptions options;
  options.port = static_cast<std::uint16_t>(place.port);
  options.world_size = place.world_size;
  options.is_master = place.rank == 0 && !agent_store;
  options.timeout = place.timeout;
  options.multi_tenant = true;
  options.secret = find_secret(agent_store);
  options.insecure = base::environment_flag(base::EnvVar::kLockstepInsecure);
  if (!options.secret && !is_torchruns_store(agent_store)) check_secured(place);
  auto store = TcpStore::open(place.host, options);
  base::log(LogLevel::kInfo, base::cat(place.rank ? base::cat("rank ", *place.rank) : "a rank", " of ",
                                       place.world_size ? base::cat(*place.world_size) : "an open number",
                                       " met in ", store->describe()));
  if (agent_store) return for_this_attempt(std::move(store));
  return store;
}

}  // namespace lockstep::internal
