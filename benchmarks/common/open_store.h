// A store that rank 0 holds, for forked ranks to come together.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "benchmarks/common/link.h"
#include "lockstep/store/tcp_store.h"

namespace bench {

// `address` is rank 0's.
inline std::shared_ptr<lockstep::Store> open_store(Link& link, const std::string& address = "127.0.0.1") {
  // A benchmark's ranks are on this machine, also those in namespaces: no secret.
  lockstep::TcpStoreOptions options{
      .port = 0, .is_master = link.rank() == 0, .wait_for_workers = false, .insecure = true};
  std::shared_ptr<lockstep::Store> store;
  std::uint16_t port = 0;
  if (options.is_master) {
    auto server = lockstep::TcpStore::open(address, options);
    port = server->port();
    store = std::move(server);
  }
  options.port = static_cast<std::uint16_t>(link.share_number(port));
  if (!store) store = lockstep::TcpStore::open(address, options);
  return store;
}

}  // namespace bench
