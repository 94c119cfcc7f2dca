// From which address this rank connects, by the environment and the routes of this host.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace lockstep::gloo_plugin {

// Where one gloo device binds: an interface's name, or else a numeric address.
struct BindAddress {
  std::string interface;
  std::string address;
  std::string text() const { return interface.empty() ? address : interface; }
};

// Equal on two ranks exactly when they share a host and its network namespace, so that loopback reaches both.
std::string host_identity();

// GLOO_SOCKET_IFNAME's interfaces in their order; else loopback when all ranks share this host; else the
// address from which the route to MASTER_ADDR goes; else the one the host's name has; else the first
// interface that is up, with a warning. Raises kUnsupported for a GLOO_DEVICE_TRANSPORT that this libgloo
// does not have.
std::vector<BindAddress> choose_bind_addresses(bool all_on_this_host,
                                               const std::function<void(const std::string&)>& warn);

// TORCH_GLOO_LAZY_INIT.
bool connects_lazily();

}  // namespace lockstep::gloo_plugin
