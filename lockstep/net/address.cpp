#include "lockstep/net/address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>

#include "lockstep/base/detail/fd.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::net {

namespace {

using InfoList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

// One socket type: the resolver would otherwise return every address several times.
InfoList look_up(const std::string& host, std::uint16_t port, int flags, int& code) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  return InfoList(code == 0 ? found : nullptr, &::freeaddrinfo);
}

// As IPv6 addresses are written in URLs.
std::string_view without_brackets(std::string_view host) {
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') return host.substr(1, host.size() - 2);
  return host;
}

}  // namespace

Address Address::from(const sockaddr* address, socklen_t length) {
  Address result;
  result.length_ = std::min<socklen_t>(length, sizeof result.storage_);
  std::memcpy(&result.storage_, address, result.length_);
  return result;
}

std::optional<Address> Address::parse(std::string_view ip, std::uint16_t port) {
  int code = 0;
  const InfoList found = look_up(std::string(without_brackets(ip)), port, AI_NUMERICHOST, code);
  if (!found) return std::nullopt;
  return from(found->ai_addr, found->ai_addrlen);
}

// Order and number of entries are the resolver's; duplicates (one per socket type or per line of /etc/hosts)
// are dropped, so that no address is tried twice.
std::vector<Address> Address::resolve(const std::string& host, std::uint16_t port) {
  int code = 0;
  const InfoList found = look_up(std::string(without_brackets(host)), port, 0, code);
  std::vector<Address> addresses;
  for (const addrinfo* at = found.get(); at != nullptr; at = at->ai_next) {
    if (at->ai_family != AF_INET && at->ai_family != AF_INET6) continue;
    const Address address = from(at->ai_addr, at->ai_addrlen);
    if (std::find(addresses.begin(), addresses.end(), address) == addresses.end())
      addresses.push_back(address);
  }
  if (addresses.empty()) {
    base::raise(ErrorKind::kSystem,
                base::cat("host name \"", host,
                          "\" has no address: ", code == 0 ? "no IPv4 or IPv6 entry" : ::gai_strerror(code)),
                ErrorFamily::kNetwork);
  }
  return addresses;
}

Address Address::any(int family, std::uint16_t port) {
  if (family == AF_INET6) {
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(port);
    return from(reinterpret_cast<const sockaddr*>(&address), sizeof address);
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  return from(reinterpret_cast<const sockaddr*>(&address), sizeof address);
}

// The abstract namespace of Linux: a leading zero byte, no file, gone with its socket. The length is part of
// the name.
Address Address::local_name(std::string_view name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.empty() || name.size() > sizeof address.sun_path - 1) {
    base::raise(ErrorKind::kUsage, base::cat("a local socket name of ", name.size(), " bytes"),
                ErrorFamily::kNetwork);
  }
  std::copy(name.begin(), name.end(), address.sun_path + 1);
  const std::size_t length = offsetof(sockaddr_un, sun_path) + 1 + name.size();
  return from(reinterpret_cast<const sockaddr*>(&address), static_cast<socklen_t>(length));
}

Address Address::local_of(int fd) {
  Address result;
  result.length_ = sizeof result.storage_;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&result.storage_), &result.length_) != 0) {
    base::raise(base::system_failure(errno, "getsockname", ErrorFamily::kNetwork));
  }
  return result;
}

Address Address::peer_of(int fd) {
  Address result;
  result.length_ = sizeof result.storage_;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&result.storage_), &result.length_) != 0) {
    base::raise(base::system_failure(errno, "getpeername", ErrorFamily::kNetwork));
  }
  return result;
}

std::string Address::text() const {
  if (family() == AF_UNIX) {
    const auto& local = reinterpret_cast<const sockaddr_un&>(storage_);
    constexpr std::size_t kBefore = offsetof(sockaddr_un, sun_path) + 1;
    std::string name(local.sun_path + 1, length_ > kBefore ? length_ - kBefore : 0);
    // The peer chooses it, and it is written to logs.
    std::ranges::replace_if(
        name, [](char c) { return c < ' ' || c > '~'; }, '?');
    return base::cat('@', name);
  }
  char host[NI_MAXHOST] = "?";
  ::getnameinfo(get(), length_, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return host_and_port(host, port());
}

std::uint16_t Address::port() const {
  if (family() == AF_UNIX) return 0;
  if (family() == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(storage_).sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in&>(storage_).sin_port);
}

// All of 127.0.0.0/8, also when it comes as an IPv4-mapped address from a socket that serves both families.
// Local sockets do not leave the host either.
bool Address::is_loopback() const {
  if (family() == AF_UNIX) return true;
  if (family() == AF_INET) {
    return ntohl(reinterpret_cast<const sockaddr_in&>(storage_).sin_addr.s_addr) >> 24 == 127;
  }
  if (family() != AF_INET6) return false;
  const in6_addr& ip = reinterpret_cast<const sockaddr_in6&>(storage_).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&ip) || (IN6_IS_ADDR_V4MAPPED(&ip) && ip.s6_addr[12] == 127);
}

// IPv4 as an IPv4-mapped IPv6 address, so that both ends of a connection write it alike whichever family
// their socket has. Bytes stay in network order.
Address::Canonical Address::canonical() const {
  Canonical result{};
  if (family() == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(storage_);
    result[10] = result[11] = 0xFF;
    std::memcpy(result.data() + 12, &in.sin_addr, 4);
    std::memcpy(result.data() + 16, &in.sin_port, 2);
  } else if (family() == AF_INET6) {
    const auto& in = reinterpret_cast<const sockaddr_in6&>(storage_);
    std::memcpy(result.data(), &in.sin6_addr, 16);
    std::memcpy(result.data() + 16, &in.sin6_port, 2);
  }
  return result;
}

// IPv6 by its first 64 bits: a host usually has a whole network of that size to choose its addresses from. 0
// when the peer is gone already: such connections share one quota.
std::uint64_t quota_key_of(int fd) noexcept {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) return 0;
  if (peer.ss_family == AF_UNIX) {
    ucred who{};
    length = sizeof who;
    return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &length) == 0 ? who.uid : 0;
  }
  if (peer.ss_family == AF_INET) return reinterpret_cast<const sockaddr_in&>(peer).sin_addr.s_addr;
  if (peer.ss_family != AF_INET6) return 0;
  const in6_addr& ip = reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&ip)) return ip.s6_addr32[3];
  std::uint64_t network = 0;
  std::memcpy(&network, ip.s6_addr, sizeof network);
  return network;
}

// By name or number, without a resolver: its answer for another name may change.
bool names_loopback(std::string_view host) {
  std::string lower(host);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  if (lower == "localhost") return true;
  const auto literal = Address::parse(lower, 0);
  return literal && literal->is_loopback();
}

std::string host_and_port(std::string_view host, std::uint16_t port) {
  if (host.find(':') != std::string_view::npos && host.front() != '[')
    return base::cat('[', host, "]:", port);
  return base::cat(host, ':', port);
}

// Connecting a datagram socket sends nothing: the kernel looks up the route and binds the source address that
// it would use.
std::string own_address_toward(const std::string& host) {
  for (const auto& target : Address::resolve(host, 9)) {
    const base::Fd fd(::socket(target.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!fd || ::connect(fd.get(), target.get(), target.length()) != 0) continue;
    std::string text = Address::local_of(fd.get()).text();
    // Without the port, and without the brackets of IPv6.
    text.resize(text.rfind(':'));
    if (text.starts_with('[')) text = text.substr(1, text.size() - 2);
    return text;
  }
  return "";
}

}  // namespace lockstep::net
