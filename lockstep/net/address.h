// The address of a stream socket: an IPv4 or IPv6 address with a port, or an abstract local name. Thread
// safety: a value, no shared state.
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
  // "127.0.0.1", "::1", "[::1]", "fe80::1%eth0"; nothing for host names and malformed text.
  static std::optional<Address> parse(std::string_view ip, std::uint16_t port);
  // All addresses of a name or literal, in the resolver's order, without duplicates; never empty. Blocks as
  // long as the system's resolver does. Raises DistNetworkError naming the host.
  static std::vector<Address> resolve(const std::string& host, std::uint16_t port);
  // An abstract name in this network namespace, without the leading zero byte; up to 107 bytes.
  static Address local_name(std::string_view name);
  // Every interface: [::] or 0.0.0.0.
  static Address any(int family, std::uint16_t port);
  // The addresses of a socket's two ends. Raise DistNetworkError.
  static Address local_of(int fd);
  static Address peer_of(int fd);

  // "127.0.0.1:29500", "[::1]:29500", "@name".
  std::string text() const;
  // 0 for a local name.
  std::uint16_t port() const;
  int family() const { return storage_.ss_family; }
  // True when only this machine can reach it.
  bool is_loopback() const;
  // IPv6 address, IPv4 as ::ffff:a.b.c.d, then the port, in network order: equal on two ends for the same
  // endpoint, whichever family each one's socket has. Zeros for a local name.
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

// By what the quota for unauthenticated connections is divided: a local peer's user, an IPv4 address, the /64
// network of an IPv6 address. 0 when the kernel does not report it.
std::uint64_t quota_key_of(int fd) noexcept;

// True for localhost and literal loopback addresses: what a user writes to mean "this machine only". A name
// that merely resolves to loopback (Debian gives every host 127.0.1.1) does not count.
bool names_loopback(std::string_view host);

// The source address of packets to `host`, as text; "" when there is no route. Sends nothing.
std::string own_address_toward(const std::string& host);

// "host:port", with brackets around an IPv6 literal.
std::string host_and_port(std::string_view host, std::uint16_t port);

}  // namespace lockstep::net
