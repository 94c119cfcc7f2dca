#include "lockstep/host/internal/introduction.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "lockstep/base/base.h"
#include "lockstep/engine/engine.h"

namespace lockstep::comm::internal {
namespace {

enum class Word : std::uint32_t { kHello = 1, kWelcome, kRoster, kDescriptors, kRefusal };

// The beginning of every message.
struct Head {
  std::uint64_t magic = kLayoutMagic;
  std::uint32_t version = kLayoutVersion;
  Word word{};
};
struct Hello {
  Head head;
  char call[kNonceBytes];
  Introduction who;
};
struct Welcome {
  Head head;
  char answer[kNonceBytes];
  Introduction who;
};
struct Refusal {
  Head head;
  std::int32_t status;
  std::int32_t peer_rank;  // -1: none
  char message[768];
};
static_assert(std::is_trivially_copyable_v<Hello> && std::is_trivially_copyable_v<Welcome> &&
              std::is_trivially_copyable_v<Refusal>);
static_assert(sizeof(Head) + kMaxRanks * sizeof(Introduction) <= net::kMaxUnixMessage);

// Descriptors that travel in one message; three belong together.
constexpr std::size_t kRanksPerMessage = net::kMaxUnixFds / 3;

template <class T>
std::span<const std::uint8_t> bytes_of(const T& message) {
  return {reinterpret_cast<const std::uint8_t*>(&message), sizeof(message)};
}

bool is(std::span<const std::uint8_t> message, Word word, std::size_t n_bytes) {
  Head head;
  if (message.size() != n_bytes || n_bytes < sizeof(head)) return false;
  std::memcpy(&head, message.data(), sizeof(head));
  return head.magic == kLayoutMagic && head.version == kLayoutVersion && head.word == word;
}

bool shows(const char (&nonce)[kNonceBytes], const std::string& expected) {
  return expected.size() == kNonceBytes && std::memcmp(nonce, expected.data(), kNonceBytes) == 0;
}

// Text from a peer: surely ended.
void end_text(Introduction& who) {
  who.process[kProcessBytes - 1] = '\0';
}

std::vector<int> numbers_of(const DescriptorNumbers& one) {
  std::vector<int> numbers;
  if (one.memory < 0) return numbers;
  numbers = {one.memory, one.lifeline};
  if (one.process >= 0) numbers.push_back(one.process);
  return numbers;
}

// Takes the descriptors of one rank off the front of `fds`.
Descriptors take(std::vector<Fd>& fds, std::size_t& at, bool with_process) {
  Descriptors one{.memory = std::move(fds[at]), .lifeline = std::move(fds[at + 1]), .process = {}};
  at += 2;
  if (with_process) one.process = std::move(fds[at++]);
  return one;
}

[[noreturn]] void raise_stranger() {
  raise(ErrorKind::kSystem, "whoever answered for rank 0 is not of this job", ErrorFamily::kBackend);
}

// One message of rank 0; what it refuses with is raised.
std::size_t receive(net::UnixSocket& socket, std::span<std::uint8_t> buffer, std::vector<Fd>& fds,
                    Deadline deadline) {
  std::size_t length = 0;
  try {
    length = socket.receive(buffer, deadline, &fds);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kPeerLost) throw;
    raise(Failure{.kind = ErrorKind::kPeerLost,
                  .message = "rank 0 ended while the group was forming",
                  .family = ErrorFamily::kBackend,
                  .peer = LostPeer{.rank = 0, .cause = "ended"}});
  }
  if (!is(buffer.first(length), Word::kRefusal, sizeof(Refusal))) return length;
  Refusal refusal;
  std::memcpy(&refusal, buffer.data(), sizeof(refusal));
  refusal.message[sizeof(refusal.message) - 1] = '\0';
  Failure failure{.kind = kind_of(static_cast<lockstep_status>(refusal.status)),
                  .message = refusal.message,
                  .family = ErrorFamily::kBackend};
  if (refusal.peer_rank >= 0) failure.peer = LostPeer{.rank = refusal.peer_rank};
  raise(std::move(failure));
}

}  // namespace

bool Introduction::same_process(const Introduction& other) const {
  return std::strncmp(process, other.process, kProcessBytes) == 0;
}

Bytes Address::encode() const {
  ByteWriter out;
  out.put(kLayoutVersion).sized(host).sized(process).sized(socket).sized(call).sized(answer);
  return out.take();
}

std::optional<Address> Address::decode(std::span<const std::uint8_t> bytes) {
  ByteReader in(bytes);
  if (in.get<std::uint32_t>() != kLayoutVersion) return std::nullopt;
  const auto host = in.sized(), process = in.sized(), socket = in.sized(), call = in.sized(),
             answer = in.sized();
  if (!host || !process || !socket || !call || !answer) return std::nullopt;
  if (call->size() != kNonceBytes || answer->size() != kNonceBytes) return std::nullopt;
  return Address{to_text(*host), to_text(*process), to_text(*socket), to_text(*call), to_text(*answer)};
}

// ---- rank 0 ----

std::optional<Caller> Caller::accept(net::UnixListener& listener, const Address& address, Deadline deadline) {
  while (!deadline.expired()) {
    net::UnixSocket socket;
    try {
      socket = listener.accept(deadline);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kTimeout) return std::nullopt;
      throw;
    }
    if (!socket.trust_own_user()) continue;
    Hello hello{};
    std::vector<Fd> fds;
    try {
      // A stranger that connects and says nothing must not hold up the others for long.
      const Deadline patience = Deadline::after(Milliseconds(2000));
      std::uint8_t buffer[sizeof(Hello)];
      const std::size_t length = socket.receive(buffer, patience, &fds);
      if (!is({buffer, length}, Word::kHello, sizeof(Hello))) continue;
      std::memcpy(&hello, buffer, sizeof(hello));
    } catch (const Error& error) {
      log(LogLevel::kInfo, fmt::format("dropped a local connection: {}", error.what()));
      continue;
    }
    end_text(hello.who);
    const bool here = address.process == hello.who.process;
    if (!shows(hello.call, address.call) || (here ? !fds.empty() : fds.size() != 2 && fds.size() != 3))
      continue;
    Acquaintance caller{.who = hello.who, .descriptors = {}};
    std::size_t at = 0;
    caller.who.has_process = fds.size() == 3 ? 1 : 0;
    if (!here) caller.descriptors = take(fds, at, fds.size() == 3);
    return Caller(std::move(socket), std::move(caller));
  }
  return std::nullopt;
}

void Caller::welcome(const Address& address, const Introduction& own, const DescriptorNumbers& descriptors,
                     Deadline deadline) {
  Welcome welcome{.head = {.word = Word::kWelcome}, .answer = {}, .who = own};
  address.answer.copy(welcome.answer, kNonceBytes);
  const bool here = own.same_process(acquaintance_.who);
  socket_.send(bytes_of(welcome), deadline, here ? std::vector<int>() : numbers_of(descriptors));
}

void Caller::tell(std::span<const Introduction> all, std::span<const DescriptorNumbers> descriptors,
                  Deadline deadline) {
  const Head head{.word = Word::kRoster};
  std::vector<std::uint8_t> roster(sizeof(head) + all.size_bytes());
  std::memcpy(roster.data(), &head, sizeof(head));
  std::memcpy(roster.data() + sizeof(head), all.data(), all.size_bytes());
  socket_.send(roster, deadline);
  const Head with{.word = Word::kDescriptors};
  std::vector<int> numbers;
  std::size_t n_ranks = 0;
  const auto flush = [&] {
    if (!numbers.empty()) socket_.send(bytes_of(with), deadline, numbers);
    numbers.clear();
    n_ranks = 0;
  };
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r].same_process(acquaintance_.who)) continue;
    const auto more = numbers_of(descriptors[r]);
    numbers.insert(numbers.end(), more.begin(), more.end());
    if (++n_ranks == kRanksPerMessage) flush();
  }
  flush();
}

void Caller::refuse(const Failure& failure) noexcept {
  Refusal refusal{.head = {.word = Word::kRefusal},
                  .status = status_of(failure.kind),
                  .peer_rank = failure.peer ? failure.peer->rank : -1,
                  .message = {}};
  failure.message.copy(refusal.message, sizeof(refusal.message) - 1);
  try {
    socket_.send(bytes_of(refusal), Deadline::after(Milliseconds(100)));
  } catch (...) {
    // It is gone itself.
  }
}

// ---- the others ----

CallToFirst CallToFirst::connect(const Address& address, Deadline deadline) {
  auto socket = net::UnixSocket::connect(address.socket, deadline);
  // Before anything is sent: with the descriptors goes the arena.
  if (!socket.trust_own_user()) raise_stranger();
  return CallToFirst(std::move(socket));
}

void CallToFirst::introduce(const Address& address, const Introduction& own,
                            const DescriptorNumbers& descriptors, Deadline deadline) {
  Hello hello{.head = {.word = Word::kHello}, .call = {}, .who = own};
  address.call.copy(hello.call, kNonceBytes);
  const bool here = address.process == own.process;
  socket_.send(bytes_of(hello), deadline, here ? std::vector<int>() : numbers_of(descriptors));
}

Acquaintance CallToFirst::rank_0(const Address& address, Deadline deadline) {
  std::uint8_t buffer[std::max(sizeof(Welcome), sizeof(Refusal))];
  std::vector<Fd> fds;
  const std::size_t length = receive(socket_, buffer, fds, deadline);
  Welcome welcome{};
  if (!is({buffer, length}, Word::kWelcome, sizeof(welcome))) raise_stranger();
  std::memcpy(&welcome, buffer, sizeof(welcome));
  end_text(welcome.who);
  if (!shows(welcome.answer, address.answer) || (!fds.empty() && fds.size() != 2 && fds.size() != 3))
    raise_stranger();
  Acquaintance first{.who = welcome.who, .descriptors = {}};
  std::size_t at = 0;
  if (!fds.empty()) first.descriptors = take(fds, at, fds.size() == 3);
  return first;
}

std::vector<Acquaintance> CallToFirst::roster(const Introduction& own, Deadline deadline) {
  const auto n = static_cast<std::size_t>(own.size);
  std::vector<std::uint8_t> buffer(std::max(sizeof(Head) + n * sizeof(Introduction), sizeof(Refusal)));
  std::vector<Fd> fds;
  const std::size_t length = receive(socket_, buffer, fds, deadline);
  if (!is({buffer.data(), length}, Word::kRoster, sizeof(Head) + n * sizeof(Introduction))) raise_stranger();
  std::vector<Acquaintance> all(n);
  for (std::size_t r = 0; r < n; ++r) {
    std::memcpy(&all[r].who, buffer.data() + sizeof(Head) + r * sizeof(Introduction), sizeof(Introduction));
    end_text(all[r].who);
  }
  std::size_t at = 0;
  for (std::size_t r = 1; r < n; ++r) {
    if (all[r].who.same_process(own)) continue;
    if (at == fds.size()) {
      at = 0;
      const std::size_t got = receive(socket_, buffer, fds, deadline);
      if (!is({buffer.data(), got}, Word::kDescriptors, sizeof(Head)) || fds.empty()) raise_stranger();
    }
    const bool with_process = all[r].who.has_process != 0;
    if (fds.size() - at < (with_process ? 3u : 2u)) raise_stranger();
    all[r].descriptors = take(fds, at, with_process);
  }
  return all;
}

}  // namespace lockstep::comm::internal
