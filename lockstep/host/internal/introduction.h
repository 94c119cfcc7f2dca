// The messages by which ranks come to know each other, through rank 0: each connects to it once, says who it is and hands
// over descriptors of its memory and of its life; when all have come, rank 0 hands everybody's to everybody. One connection
// per rank and no look at the store but for rank 0's address.
//
//   rank r                              rank 0
//   hello: who I am; descriptors  --->
//                                 <---  welcome: its own descriptors (its memory shows who has come so far)
//                                       ... until all ranks have come ...
//                                 <---  roster: who all are; then their descriptors
//                                 or    refusal: why nothing comes of it
//
// Both sides ask the kernel for the other's user before they send a descriptor, and show a nonce that was published in the
// store. Thread safety: none; used by one thread while it joins.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/host/internal/layout.h"
#include "lockstep/local/segment_table.h"
#include "lockstep/net/unix_socket.h"

namespace lockstep::comm::internal {

// What rank 0 publishes in the store.
struct Address {
  std::string host, process, socket;
  std::string call, answer;  // nonces: callers show the first, rank 0 the second

  Bytes encode() const;
  static std::optional<Address> decode(std::span<const std::uint8_t> bytes);
};

inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kProcessBytes = 64;

// A rank in its own words.
struct Introduction {
  std::int32_t rank;
  std::int32_t size;  // of the group it wants to join
  std::int64_t pid;   // in its own pid namespace
  std::uint64_t arena_bytes;
  local::SegmentId arena;     // by which ranks of the same process find it
  std::uint32_t has_process;  // a pidfd is among its descriptors
  char process
      [kProcessBytes];  // zero-terminated: alike for ranks that are threads of one process, and only for those

  bool same_process(const Introduction& other) const;
};

// What of a rank others get besides: its memory, a pipe that hangs up when its process ends or becomes another program, and
// its process. The last may be empty: the kernel has no pidfds.
struct Descriptors {
  Fd memory, lifeline, process;
};
// The same, owned by others.
struct DescriptorNumbers {
  int memory = -1, lifeline = -1, process = -1;
};

struct Acquaintance {
  Introduction who{};
  Descriptors descriptors;  // empty for ranks of this process
};

// Rank 0's side of one connection.
class Caller {
 public:
  // Takes the next good caller, until the deadline (nothing); strangers are dropped.
  static std::optional<Caller> accept(net::UnixListener& listener, const Address& address, Deadline deadline);

  const Acquaintance& acquaintance() const { return acquaintance_; }
  Acquaintance take_acquaintance() { return std::move(acquaintance_); }
  bool gone() const { return socket_.peer_closed(); }
  void welcome(const Address& address, const Introduction& own, const DescriptorNumbers& descriptors,
               Deadline deadline);
  // `all` by rank; without descriptors for ranks of the caller's process and for rank 0.
  void tell(std::span<const Introduction> all, std::span<const DescriptorNumbers> descriptors,
            Deadline deadline);
  // Never raises.
  void refuse(const Failure& failure) noexcept;

 private:
  Caller(net::UnixSocket socket, Acquaintance acquaintance)
      : socket_(std::move(socket)), acquaintance_(std::move(acquaintance)) {}
  net::UnixSocket socket_;
  Acquaintance acquaintance_;
};

// The other side. Raises kSystem when whoever listens is not of this job, kTimeout, kPeerLost when rank 0 ended, and what
// it refuses with.
class CallToFirst {
 public:
  static CallToFirst connect(const Address& address, Deadline deadline);
  // Once. Raises kTimeout, with nothing sent, while rank 0 has not looked at the call: it takes no descriptors of
  // strangers.
  void introduce(const Address& address, const Introduction& own, const DescriptorNumbers& descriptors,
                 Deadline deadline);
  // Once, after that.
  Acquaintance rank_0(const Address& address, Deadline deadline);
  // Once, after that: all ranks, by rank; rank 0's and this one's have no descriptors.
  std::vector<Acquaintance> roster(const Introduction& own, Deadline deadline);

 private:
  explicit CallToFirst(net::UnixSocket socket) : socket_(std::move(socket)) {}
  net::UnixSocket socket_;
};

}  // namespace lockstep::comm::internal
