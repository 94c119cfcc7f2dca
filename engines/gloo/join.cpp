// How ranks find each other: through the key-value space they publish which host they are on, then where each
// listens for each; then all connect, and prove to each other that they have read it there. Rank 0 reads what
// all wrote and relays to each rank what it needs: a few requests per rank, where one per pair would be
// thousands.
//
//   rank r:  write member/r --> read members --> listen; write mesh/r --> read mesh_for/r --> connect to all --> Hello, both ways
//   rank 0:  read all member/* --> write members ....... read all mesh/* --> write mesh_for/* for each rank
//
// With TORCH_GLOO_LAZY_INIT everything from mesh_for on happens in the first operation.
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "engines/gloo/communicator.h"
#include "engines/gloo/slow_wait.h"

namespace lockstep::gloo_plugin {
namespace {

constexpr std::size_t kKeyBytes = 16;
// How long one read of a key waits before it checks whether another rank has given up meanwhile.
constexpr std::int64_t kSliceMs = 100;

// The first message on a new connection. A stranger that connects to gloo's port cannot know the key, which
// is in the store only.
struct Hello {
  std::uint32_t magic = 0x4C53474Cu;
  std::int32_t rank = -1;
  char key[kKeyBytes] = {};
  sockaddr_storage name{};  // of the sender's socket; not checked, only used
};
constexpr std::size_t kProof = offsetof(Hello, name);

std::string random_key() {
  unsigned char bytes[kKeyBytes];
  if (::getrandom(bytes, sizeof bytes, 0) != static_cast<ssize_t>(sizeof bytes)) {
    raise(LOCKSTEP_SYSTEM, "the system did not return random bytes");
  }
  return {reinterpret_cast<const char*>(bytes), sizeof bytes};
}

std::string pack(const Member& member) {
  return cat(member.pid, ' ', member.host, '\n', member.key);
}

Member unpack(const std::string& text) {
  Member member;
  const auto line = text.find('\n');
  if (line == std::string::npos || text.size() - line - 1 != kKeyBytes) return member;
  std::istringstream head(text.substr(0, line));
  head >> member.pid >> member.host;
  member.key = text.substr(line + 1);
  return member;
}

std::string pack(const std::vector<std::string>& parts) {
  std::string all;
  for (const auto& part : parts) {
    const auto length = static_cast<std::uint32_t>(part.size());
    all.append(reinterpret_cast<const char*>(&length), sizeof length);
    all += part;
  }
  return all;
}

std::vector<std::string> unpack_parts(const std::string& all) {
  std::vector<std::string> parts;
  std::uint32_t length = 0;
  for (std::size_t at = 0; all.size() - at >= sizeof length; at += length) {
    std::memcpy(&length, all.data() + at, sizeof length);
    at += sizeof length;
    if (all.size() - at < length) break;
    parts.push_back(all.substr(at, length));
  }
  return parts;
}

}  // namespace

void Communicator::write(const std::string& key, const std::string& value) {
  const auto status = host_->kv_set(host_->context, key.c_str(), value.data(), value.size());
  if (status != LOCKSTEP_OK)
    raise(status, cat("rank ", rank_, " cannot write key ", key, " of the group's store"));
}

std::optional<std::string> Communicator::read(const std::string& key, std::int64_t deadline_ns,
                                              const std::function<std::string()>& slow_text) {
  std::string value(4096, '\0');
  std::int64_t lasted_ns = slow_text ? slow_from_now() : LOCKSTEP_NEVER;
  for (;;) {
    stop_source_.check();
    std::size_t length = 0;
    const std::int64_t slice = std::min(deadline_ns, after_ms(kSliceMs));
    const auto status =
        host_->kv_get(host_->context, key.c_str(), value.data(), value.size(), &length, slice);
    // The store reports the length even when the buffer is too small; then the buffer grows and the key is
    // read again.
    if (status == LOCKSTEP_OK && length <= value.size()) {
      value.resize(length);
      return value;
    }
    if (status == LOCKSTEP_OK) {
      value.resize(length);
    } else if (status == LOCKSTEP_PEER_LOST) {
      raise(status, "another rank could not join");
    } else if (status != LOCKSTEP_TIMEOUT) {
      raise(status, cat("rank ", rank_, " cannot read key ", key, " of the group's store"));
    } else if (now_ns() >= deadline_ns) {
      return std::nullopt;
    } else if (now_ns() >= lasted_ns) {
      lasted_ns = LOCKSTEP_NEVER;
      log_line(slow_line(cat("rank ", rank_, " joins group \"", name_, "\": ", slow_text()), deadline_ns));
    }
  }
}

int Communicator::first_missing(const char* what) {
  int peer = 1;
  while (peer < size_ && read(cat(what, '/', peer), after_ms(1))) ++peer;
  return peer == size_ ? 0 : peer;
}

void Communicator::raise_missing(int peer) {
  raise(LOCKSTEP_TIMEOUT, cat("rank ", rank_, " ran out of time joining group \"", name_, "\": rank ", peer,
                              " has not joined"));
}

std::vector<std::string> Communicator::read_all(const char* what, std::int64_t deadline_ns) {
  std::vector<std::string> all;
  for (int peer = 0; peer < size_; ++peer) {
    auto text = read(cat(what, '/', peer), deadline_ns, [peer] { return cat("it waits for rank ", peer); });
    if (!text) raise_missing(peer);
    all.push_back(std::move(*text));
  }
  return all;
}

std::string Communicator::read_relayed(const std::string& key, const char* what, std::int64_t deadline_ns) {
  // Most likely rank 0 has not answered because it waits for another rank itself.
  const auto slow_text = [&] { return cat("it waits for rank ", first_missing(what)); };
  if (auto text = read(key, deadline_ns, slow_text)) return std::move(*text);
  raise_missing(first_missing(what));
}

void Communicator::meet(std::int64_t deadline_ns) {
  Member& mine = members_[static_cast<std::size_t>(rank_)];
  mine = {.pid = ::getpid(), .host = host_identity(), .key = random_key()};
  if (size_ == 1) return;
  write(cat("member/", rank_), pack(mine));
  std::string all;
  if (rank_ == 0) {
    all = pack(read_all("member", deadline_ns));
    write("members", all);
  } else {
    all = read_relayed("members", "member", deadline_ns);
  }
  auto texts = unpack_parts(all);
  texts.resize(static_cast<std::size_t>(size_));
  for (int peer = 0; peer < size_; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    members_[p] = unpack(texts[p]);
    if (members_[p].key.empty())
      raise(LOCKSTEP_INTERNAL, cat("rank ", peer, " published something that this version cannot read"));
  }
}

void Communicator::listen(std::int64_t deadline_ns) {
  const auto& own = members_[static_cast<std::size_t>(rank_)].host;
  const bool together = std::ranges::all_of(members_, [&](const Member& each) { return each.host == own; });
  const auto bind_addresses = choose_bind_addresses(together, [this](const std::string& text) {
    if (host_->log != nullptr) host_->log(host_->context, 1, text.c_str());
  });
  const auto n = static_cast<std::size_t>(size_);
  std::vector<std::vector<std::string>> addresses(n);  // by peer and interface
  for (const BindAddress& address : bind_addresses) {
    try {
      connections_.push_back(std::make_unique<Connections>(runtime_->device(address), rank_, size_));
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      raise(LOCKSTEP_SYSTEM, cat("gloo cannot listen on ", address.text(), ": ", error.what()));
    }
    auto here = connections_.back()->addresses();
    for (std::size_t peer = 0; peer < n; ++peer) addresses[peer].push_back(std::move(here[peer]));
  }
  if (size_ == 1) return;
  std::vector<std::string> by_peer;
  for (const auto& each : addresses) by_peer.push_back(pack(each));
  write(cat("mesh/", rank_), pack(by_peer));
  if (rank_ != 0) return;
  // Row by row in, column by column out: each rank gets what all others have for it.
  std::vector<std::vector<std::string>> for_rank(n, std::vector<std::string>(n));
  const auto all = read_all("mesh", deadline_ns);
  for (std::size_t peer = 0; peer < n; ++peer) {
    auto row = unpack_parts(all[peer]);
    row.resize(n);
    for (std::size_t r = 0; r < n; ++r) for_rank[r][peer] = std::move(row[r]);
  }
  for (std::size_t r = 0; r < n; ++r) write(cat("mesh_for/", r), pack(for_rank[r]));
}

// The check after each connection: gloo's connect cannot be interrupted, except by tear_down() closing the
// pairs.
void Communicator::connect_to(int peer, const std::string& packed) {
  const auto addresses = unpack_parts(packed);
  if (addresses.size() != connections_.size()) {
    raise(LOCKSTEP_USAGE,
          cat("rank ", peer, " uses ", addresses.size(), " interfaces and rank ", rank_, " uses ",
              connections_.size(), "; GLOO_SOCKET_IFNAME must name equally many on every rank"));
  }
  for (std::size_t m = 0; m < connections_.size(); ++m) {
    try {
      connections_[m]->connect(peer, addresses[m]);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      stop_source_.check();
      raise(LOCKSTEP_SYSTEM, cat("rank ", rank_, " cannot connect to rank ", peer, ": ", error.what()));
    }
    stop_source_.check();
  }
}

// Every rank takes its peers in rank order, so no cycle of waits can form. gloo has no deadline of its own
// here (kConnect): the watch breaks the group, which closes the pairs and so ends the calls.
void Communicator::connect(std::int64_t deadline_ns) {
  std::vector<std::string> addresses;
  if (size_ > 1) addresses = unpack_parts(read_relayed(cat("mesh_for/", rank_), "mesh", deadline_ns));
  addresses.resize(static_cast<std::size_t>(size_));
  const NoSigpipe quiet;
  const auto waits = [this] { return cat("it waits for ", who(connecting_to_), " to connect"); };
  const auto alarm = runtime_->watch.add_deadline(
      deadline_ns,
      [&] {
        break_with(
            {.status = LOCKSTEP_TIMEOUT,
             .message = cat("rank ", rank_, " ran out of time joining group \"", name_, "\": ", waits())});
      },
      lazy_ ? LOCKSTEP_NEVER : slow_from_now(),  // lazily an operation connects, which logs its own line
      [&] {
        log_line(slow_line(cat("rank ", rank_, " joins group \"", name_, "\": ", waits()), deadline_ns));
      });
  try {
    for (int peer = 0; peer < size_; ++peer) {
      connecting_to_ = peer;
      if (peer != rank_) connect_to(peer, addresses[static_cast<std::size_t>(peer)]);
    }
    for (const auto& connections : connections_) {
      connections->adopt_sockets(greet(*connections));
      stop_source_.check();
      watch_over(*connections);
    }
    mailbox_ = std::make_unique<Mailbox>(stop_source_, *connections_.front(), rank_, size_);
  } catch (const PairFailed& failed) {
    runtime_->watch.remove_deadline(alarm);
    if (failed.peer >= 0 && judge(failed.peer) == Verdict::kLeft) {
      raise(LOCKSTEP_PEER_LOST,
            cat(who(failed.peer), " left the group while rank ", rank_, " was joining it"));
    }
    stop_source_.check();
    raise(LOCKSTEP_SYSTEM, failed.message);
  } catch (...) {
    runtime_->watch.remove_deadline(alarm);
    throw;
  }
  runtime_->watch.remove_deadline(alarm);
  connected_ = true;
}

void Communicator::watch_over(const Connections& connections) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if (connections.socket(peer) >= 0) {
      watched_.push_back(
          runtime_->watch.add_socket(connections.socket(peer), [this, peer] { hung_up(peer); }));
    } else if (judge(peer) == Verdict::kBroken) {
      stop_source_.check();
    }  // else it has joined and left: operations will say so
  }
}

// All receives and sends are started before the first is waited for, so the exchange takes one round trip for
// all peers together.
std::vector<sockaddr_storage> Communicator::greet(Connections& connections) {
  const auto n = static_cast<std::size_t>(size_);
  const auto proof_of = [this](int rank) {
    Hello hello;
    hello.rank = rank;
    std::memcpy(hello.key, members_[static_cast<std::size_t>(rank)].key.data(), kKeyBytes);
    return hello;
  };
  std::vector<Hello> mine(n, proof_of(rank_)), theirs(n);
  std::vector<sockaddr_storage> names(n);
  std::vector<std::unique_ptr<Transfer>> ins(n), outs(n);
  for (int peer = 0; peer < size_; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    if (peer == rank_) continue;
    mine[p].name = connections.local_name(peer);
    ins[p] = std::make_unique<Transfer>(stop_source_, connections, &theirs[p], sizeof(Hello));
    ins[p]->recv(peer, kHelloSlot, 0, sizeof(Hello));
    outs[p] = std::make_unique<Transfer>(stop_source_, connections, &mine[p], sizeof(Hello));
    outs[p]->send(peer, kHelloSlot, 0, sizeof(Hello));
  }
  for (int peer = 0; peer < size_; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    if (peer == rank_) continue;
    connecting_to_ = peer;
    ins[p]->wait_recv(peer);
    outs[p]->wait_send(peer);
    const Hello expected = proof_of(peer);
    if (std::memcmp(&expected, &theirs[p], kProof) != 0) {
      raise(LOCKSTEP_SYSTEM,
            cat("what connected to rank ", rank_, " as rank ", peer,
                " does not belong to this group: something else on the network connects to gloo's port"));
    }
    names[p] = theirs[p].name;
  }
  return names;
}

// Double-checked: collectives and point-to-point operations may both be the first. Whoever comes second waits
// for the first one's connections, or finds the group broken.
void Communicator::connect_for(Operation& operation) {
  if (connected_) return;
  const base::MutexLock lock(connect_mutex_);
  if (connected_) return;
  stop_source_.check();
  try {
    connect(operation.op.deadline_ns);
  } catch (...) {
    break_with(current_failure(operation));  // before the next one tries
    throw;
  }
}

}  // namespace lockstep::gloo_plugin
