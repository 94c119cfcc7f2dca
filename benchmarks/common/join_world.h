// The default process group for forked ranks, over a store that rank 0 holds.
#pragma once

#include <memory>
#include <string>

#include "benchmarks/common/link.h"
#include "lockstep/group/world.h"
#include "lockstep/store/tcp_store.h"

namespace bench {

struct JoinOptions {
  std::string address = "127.0.0.1";  // of rank 0
  std::string backend{};              // as in InitOptions
};

inline void join_world(Link& link, const JoinOptions& join = {}) {
  // A benchmark's ranks are on this machine, also those in namespaces: no secret.
  lockstep::TcpStoreOptions options{
      .port = 0, .is_master = link.rank() == 0, .wait_for_workers = false, .insecure = true};
  std::shared_ptr<lockstep::Store> store;
  std::uint16_t port = 0;
  if (options.is_master) {
    auto server = lockstep::TcpStore::open(join.address, options);
    port = server->port();
    store = std::move(server);
  }
  options.port = static_cast<std::uint16_t>(link.share_number(port));
  if (!store) store = lockstep::TcpStore::open(join.address, options);
  lockstep::init_process_group(
      {.backend = join.backend, .world_size = link.size(), .rank = link.rank(), .store = store});
}

}  // namespace bench
