// Where a stream socket is: an IPv4 or IPv6 address with a port, or an abstract local name. Value type.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::net {

class Address {
 public:
  // "127.0.0.1", "::1", "[::1]", "fe80::1%eth0"; nothing for names and nonsense.
  static std::optional<Address> parse(std::string_view ip, std::uint16_t port);
  // All addresses of a name or literal, in the resolver's order, without repeats; never empty. Blocks for as long as
  // the system's resolver does. Raises DistNetworkError naming the host.
  static std::vector<Address> resolve(const std::string& host, std::uint16_t port);
  // An abstract name of this host's network namespace, without the leading zero byte; up to 107 bytes.
  static Address local_name(std::string_view name);
  // Every interface: [::] or 0.0.0.0.
  static Address any(int family, std::uint16_t port);
  // Of a socket's two ends. Raises DistNetworkError.
  static Address local_of(int fd);
  static Address peer_of(int fd);

  // "127.0.0.1:29500", "[::1]:29500", "@name".
  std::string text() const;
  // 0 for a local name.
  std::uint16_t port() const;
  int family() const { return storage_.ss_family; }
  // True when only this machine can reach it.
  bool is_loopback() const;
  // IPv6 address, IPv4 as ::ffff:a.b.c.d, then the port, in network order: equal for two ends that mean the same place,
  // whichever family each one's socket has. Zeros for a local name.
  using Canonical = std::array<std::uint8_t, 18>;
  Canonical canonical() const;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const { return length_; }
  friend bool operator==(const Address& a, const Address& b) { return a.text() == b.text(); }

 private:
  Address() = default;
  static Address from(const sockaddr* address, socklen_t length);

  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

// Where the peer of a connected socket comes from, as far as places for strangers are shared out by it: a local peer's user, an
// IPv4 address, the network (64 bits) of an IPv6 address. 0 when the kernel does not tell.
std::uint64_t origin_of(int fd) noexcept;

// True for localhost and literal loopback addresses: what a user writes to mean "this machine only". A name that
// merely resolves to loopback here (Debian gives every host 127.0.1.1) does not count.
bool names_loopback(std::string_view host);

// The address of this machine from which packets to `host` leave, as text; "" when there is no way there. Sends nothing.
std::string own_address_toward(const std::string& host);

// "host:port", with brackets around an IPv6 literal.
std::string host_and_port(std::string_view host, std::uint16_t port);

}  // namespace lockstep::net
