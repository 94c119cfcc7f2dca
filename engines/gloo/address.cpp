#include "engines/gloo/address.h"

#include <gloo/config.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>

#include "engines/gloo/failure.h"

namespace lockstep::gloo_plugin {
namespace {

std::string environment(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

// Empty when the kernel's address cannot be written as text; callers treat that as no address.
std::string numeric(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST] = "";
  ::getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

// Copied out byte by byte: a sockaddr need not be aligned as a sockaddr_in is.
bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    in_addr_t ip = 0;
    std::memcpy(&ip, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, sizeof ip);
    return ntohl(ip) >> 24 == 127;
  }
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;
AddressList look_up(const std::string& host, const char* port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (::getaddrinfo(host.c_str(), port, &hints, &found) != 0) found = nullptr;
  return {found, &::freeaddrinfo};
}

// The local address of the route to `host`; empty when there is none, or only loopback. Nothing is sent:
// connecting a datagram socket only asks the routing table.
std::string source_towards(const std::string& host) {
  // Port 9 is "discard"; any would do.
  const AddressList list = look_up(host, "9");
  for (const addrinfo* each = list.get(); each != nullptr; each = each->ai_next) {
    const int fd = ::socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage local{};
    socklen_t length = sizeof local;
    auto* address = reinterpret_cast<sockaddr*>(&local);
    const bool routed =
        ::connect(fd, each->ai_addr, each->ai_addrlen) == 0 && ::getsockname(fd, address, &length) == 0;
    ::close(fd);
    if (routed && !is_loopback(address)) return numeric(address, length);
  }
  return "";
}

// An address of this host's own name that can be bound; empty when it has none but loopback. Bound once as a
// test: the name may resolve to an address that this host does not have (a container, a stale /etc/hosts).
std::string address_of_hostname() {
  char name[HOST_NAME_MAX + 1] = "";
  ::gethostname(name, sizeof name - 1);
  const AddressList list = look_up(name, nullptr);
  for (const addrinfo* each = list.get(); each != nullptr; each = each->ai_next) {
    if (is_loopback(each->ai_addr)) continue;
    const int fd = ::socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    const bool bound = ::bind(fd, each->ai_addr, each->ai_addrlen) == 0;
    ::close(fd);
    if (bound) return numeric(each->ai_addr, each->ai_addrlen);
  }
  return "";
}

// IPv4 only: an IPv6 address found this way may be link-local, which needs a scope to be reachable.
std::string first_interface_address() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return "";
  std::string found;
  for (const ifaddrs* each = list; each != nullptr && found.empty(); each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET || (each->ifa_flags & IFF_UP) == 0)
      continue;
    if (!is_loopback(each->ifa_addr)) found = numeric(each->ifa_addr, sizeof(sockaddr_in));
  }
  ::freeifaddrs(list);
  return found;
}

// gloo's own variable. The transports that need a special build are refused with a better message than
// gloo's.
void check_transport() {
  const std::string wanted = environment("GLOO_DEVICE_TRANSPORT");
  if (wanted.empty() || wanted == "TCP") return;
  const bool known = wanted == "TCP_TLS" || wanted == "UV";
  raise(known ? LOCKSTEP_UNSUPPORTED : LOCKSTEP_USAGE,
        cat("GLOO_DEVICE_TRANSPORT is \"", wanted,
            "\": ", known ? "the installed libgloo was built without it" : "not a transport of gloo",
            "; unset it or set it to TCP"));
}

// Each becomes a device, and collectives alternate between them; all ranks must name equally many.
std::vector<BindAddress> named_interfaces(const std::string& list) {
  std::vector<BindAddress> bind_addresses;
  std::istringstream names(list);
  for (std::string name; std::getline(names, name, ',');) {
    if (name.empty() || ::if_nametoindex(name.c_str()) == 0) {
      raise(LOCKSTEP_USAGE,
            cat("GLOO_SOCKET_IFNAME is \"", list, "\": this host has no interface \"", name, "\""));
    }
    bind_addresses.push_back({.interface = name, .address = ""});
  }
  return bind_addresses;
}

}  // namespace

std::string host_identity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  // Two containers on one machine have the same boot id but cannot reach each other's loopback.
  struct stat net {};
  ::stat("/proc/self/ns/net", &net);
  return cat(boot, '/', net.st_ino);
}

std::vector<BindAddress> choose_bind_addresses(bool all_on_this_host,
                                               const std::function<void(const std::string&)>& warn) {
  // In this order because a name is an instruction, a common host the fastest path, a route the only evidence
  // of which interface leads to the other hosts; a host's name and the first interface are guesses.
  check_transport();
  if (const auto names = environment("GLOO_SOCKET_IFNAME"); !names.empty()) return named_interfaces(names);
  if (all_on_this_host) return {{.interface = "", .address = "127.0.0.1"}};
  std::string address;
  if (const auto master = environment("MASTER_ADDR"); !master.empty()) address = source_towards(master);
  if (address.empty()) address = address_of_hostname();
  if (address.empty()) {
    address = first_interface_address();
    const std::string used = address.empty() ? "127.0.0.1" : address;
    warn(cat("gloo: this host's name has no address of its own, and MASTER_ADDR shows no route; using ", used,
             ". GLOO_SOCKET_IFNAME names the interface to use"));
    address = used;
  }
  return {{.interface = "", .address = address}};
}

bool connects_lazily() {
  const std::string text = environment("TORCH_GLOO_LAZY_INIT");
  return text == "1" || text == "true" || text == "TRUE" || text == "yes" || text == "on";
}

}  // namespace lockstep::gloo_plugin
