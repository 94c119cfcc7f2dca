#include "lockstep/host/internal/split.h"

#include <fmt/core.h>
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <optional>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/engine.h"
#include "lockstep/host/internal/describe.h"
#include "lockstep/host/internal/failure_record.h"
#include "lockstep/host/internal/perturb.h"
#include "lockstep/local/wake.h"

namespace lockstep::comm::internal {
namespace {

constexpr const char* kAgreedKey = "split";  // in the store: the key, where the caller has none
constexpr Milliseconds kStoreSlice{250};     // between two reads of the store while waiting

// FNV-1a.
std::uint64_t hash_of(const std::string& key) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : key) hash = (hash ^ static_cast<std::uint8_t>(c)) * 0x100000001b3;
  return hash;
}

// At most kKeyCapacity with its terminator. Long keys keep their beginning and a hash of the whole.
std::string short_key(const std::string& key) {
  if (key.size() < kKeyCapacity) return key;
  return fmt::format("{:.40}#{:016x}", key, hash_of(key));
}

// Null when there cannot be a block.
// The offset was read from another rank's memory, and the slot it came from may have been reused since:
// everything is checked before a member of the block is used.
CommBlock* block_in(const Peer& peer, std::uint64_t at) {
  const std::uint64_t room = peer.segment->size();
  if (at < kHeapAt || at > room || sizeof(CommBlock) > room - at) return nullptr;
  auto* block = reinterpret_cast<CommBlock*>(peer.segment->data() + at);
  const bool fits = block->magic == kLayoutMagic && block->size >= 1 && block->size <= kMaxRanks &&
                    CommBlock::bytes(block->size) <= room - at;
  return fits ? block : nullptr;
}

// Between announce and retract, exception safe: everything that ends a wait below throws.
class Announced {
 public:
  explicit Announced(local::Doorbell& door) : door_(door), ticket_(local::announce(door)) {}
  ~Announced() { local::retract(door_); }
  Announced(const Announced&) = delete;
  void sleep_until(Deadline deadline) { local::sleep(door_, ticket_, deadline); }

 private:
  local::Doorbell& door_;
  const std::uint32_t ticket_;
};

class Split {
 public:
  explicit Split(const SplitOptions& options);
  ~Split() { unlist(); }
  std::unique_ptr<CommMembers> run();

 private:
  void list();
  void unlist();
  void collect();
  void give_verdict(CommBlock::Verdict verdict);
  void await_verdict();
  bool counts_on_us(CommBlock& block);
  // Where the block of a member is, once it is listed; compares its members with ours.
  std::optional<std::uint64_t> find(int rank);
  CommBlock* block_at(int rank, std::uint64_t at) { return block_in(peer(rank), at); }
  void check_members(int rank, CommBlock& theirs);
  // Sleeps until ready() or something ends the waiting for member `rank`.
  template <class Ready>
  void wait(int rank, Ready ready);
  void check_alive(int rank);
  void check_refused();
  void tell_store(const Failure& failure);
  void look_into_store();
  std::string refused_key() const { return base::cat("split/refused", key_); }
  // "rank 1 (pid 7) did not join group ..." of each that has not come; `rank` alone when all have.
  std::string missing(int rank, const char* verb, const char* when);
  [[noreturn]] void raise_late(int rank);
  // A member as the user knows it.
  std::string name_of(int rank);

  Peer& peer(int rank) { return service_.host_peers().peer(members_[static_cast<std::size_t>(rank)]); }
  int parent_rank(int rank) const { return config_.parent_ranks[rank]; }

  ProgressService& service_;
  CommMembers& parent_;
  const lockstep_comm_config& config_;
  const Deadline deadline_;
  const std::string key_;
  std::vector<int> members_;  // ranks of HostPeers
  CommBlock* block_ = nullptr;
  Listing* listed_ = nullptr;
  std::vector<CommBlock*> found_;  // by the first member
};

Split::Split(const SplitOptions& options)
    : service_(options.service),
      parent_(options.parent),
      config_(options.config),
      deadline_(Deadline::from_monotonic_ns(options.config.deadline_ns)),
      key_(short_key(options.key)),
      found_(static_cast<std::size_t>(options.config.size)) {
  for (int r = 0; r < config_.size; ++r) members_.push_back(parent_.host_rank(parent_rank(r)));
  block_ = make_comm_block(service_.host_peers().arena(), config_.rank, config_.size);
  key_.copy(block_->key, kKeyCapacity - 1);
  for (int r = 0; r < config_.size; ++r)
    block_->members()[r] = static_cast<std::uint64_t>(members_[static_cast<std::size_t>(r)]);
}

// Members other than the first need nothing of each other: they are done when the verdict is there, and read
// the offsets of all blocks from the first member's block.
std::unique_ptr<CommMembers> Split::run() {
  try {
    list();
    if (config_.rank == 0) {
      collect();
    } else {
      local::wake(peer(0).header->doorbell);
      await_verdict();
    }
    CommBlock& first = config_.rank == 0 ? *block_ : *block_at(0, block_->first_at);
    return std::make_unique<CommMembers>(service_.host_peers(), config_.rank, members_,
                                         std::span(first.blocks(), members_.size()));
  } catch (...) {
    // Others may have seen the block by now: it is never freed. A release would do, since nobody is woken: an
    // operation that waits for this member in a communicator which the others completed looks at `left`
    // before it sleeps and at its deadline.
    block_->left.store(1, std::memory_order_seq_cst);
    throw;
  }
}

// Several threads of a rank may create groups at once, so a slot is claimed by compare-exchange. The hash is
// stored before the offset, which makes the block findable: its store releases hash, key and members to
// find(). It is seq_cst, since the first member may sleep until the block is listed: run() wakes it next.
void Split::list() {
  const std::uint64_t at = service_.host_peers().arena().offset_of(block_);
  for (Listing& slot : service_.host_peers().own().joining) {
    std::uint64_t free = Listing::kFree;
    if (!slot.at.compare_exchange_strong(free, Listing::kClaimed, std::memory_order_seq_cst)) continue;
    slot.key_hash.store(hash_of(key_), std::memory_order_seq_cst);
    slot.at.store(at, std::memory_order_seq_cst);
    listed_ = &slot;
    return perturb();
  }
  base::raise(ErrorKind::kResource,
              fmt::format("rank {} makes more than {} groups at the same time", config_.rank, kMaxJoining),
              ErrorFamily::kBackend);
}

// A release would do, which keeps this behind the last use of the block; who finds kFree reads nothing.
void Split::unlist() {
  if (listed_ != nullptr) listed_->at.store(Listing::kFree, std::memory_order_seq_cst);
  listed_ = nullptr;
}

// Slots are reused while they are read: the offset is loaded again after the hash, and the key in the block
// decides. The loads must stay in this order, for which acquire would do; they are seq_cst as the last look
// before a sleep, between announce() and sleep (local/wake.h).
std::optional<std::uint64_t> Split::find(int rank) {
  const std::uint64_t hash = hash_of(key_);
  for (Listing& slot : peer(rank).header->joining) {
    const std::uint64_t at = slot.at.load(std::memory_order_seq_cst);
    if (at == Listing::kFree || at == Listing::kClaimed) continue;
    if (slot.key_hash.load(std::memory_order_seq_cst) != hash) continue;
    if (slot.at.load(std::memory_order_seq_cst) != at) continue;  // the hash may be another block's
    CommBlock* block = block_at(rank, at);
    if (block != nullptr && std::strncmp(block->key, key_.c_str(), kKeyCapacity) == 0) return at;
  }
  return std::nullopt;
}

// Called by rank 0 for every member it has found.
void Split::check_members(int rank, CommBlock& theirs) {
  bool same = theirs.size == config_.size;
  for (int r = 0; same && r < config_.size; ++r) same = theirs.members()[r] == block_->members()[r];
  if (same) return;
  const auto ranks_of = [&](CommBlock& block) {
    std::string text;
    for (int r = 0; r < std::min(block.size, 16); ++r)
      text += fmt::format("{}{}", r == 0 ? "" : " ", parent_.rank_of(static_cast<int>(block.members()[r])));
    return block.size > 16 ? fmt::format("{} and {} more", text, block.size - 16) : text;
  };
  base::raise(
      ErrorKind::kUsage,
      fmt::format("ranks make different groups: rank {} makes group \"{}\" with the ranks {}, but rank {} "
                  "with {}; all ranks must make the same groups in the same order",
                  parent_rank(config_.rank), config_.name, ranks_of(*block_), parent_rank(rank),
                  ranks_of(theirs)),
      ErrorFamily::kBackend);
}

void Split::collect() {
  try {
    block_->first_at = block_->blocks()[0] = service_.host_peers().arena().offset_of(block_);
    for (int r = 1; r < config_.size; ++r) {
      std::optional<std::uint64_t> at;
      wait(r, [&] { return (at = find(r)).has_value(); });
      block_->blocks()[r] = *at;
      CommBlock* theirs = block_at(r, *at);
      found_[static_cast<std::size_t>(r)] = theirs;
      check_members(r, *theirs);
    }
  } catch (...) {
    const Failure failure = base::current_failure();
    write_failure_record(block_->record, failure, 0);
    // Members that have arrived and were not waited for yet must be notified too.
    for (int r = 1; r < config_.size; ++r) {
      const auto at = find(r);
      if (at) found_[static_cast<std::size_t>(r)] = block_at(r, *at);
    }
    give_verdict(CommBlock::kRefused);
    tell_store(failure);
    throw;
  }
  give_verdict(CommBlock::kComplete);
}

// first_at and first_rank are plain: the store of the verdict publishes them. blocks() of the first block as
// well. It is seq_cst, since the member may sleep until it is there; await_verdict() and check_refused() load
// it with seq_cst in their last look before that sleep.
void Split::give_verdict(CommBlock::Verdict verdict) {
  for (int r = 1; r < config_.size; ++r) {
    CommBlock* theirs = found_[static_cast<std::size_t>(r)];
    if (theirs == nullptr) continue;
    theirs->first_at = block_->first_at;
    theirs->first_rank = service_.host_peers().rank();
    theirs->verdict.store(verdict, std::memory_order_seq_cst);
    local::wake(peer(r).header->doorbell);
  }
}

// Whether the group that another rank creates under this key includes this rank.
bool Split::counts_on_us(CommBlock& block) {
  const auto me = static_cast<std::uint64_t>(service_.host_peers().rank());
  return std::find(block.members(), block.members() + block.size, me) != block.members() + block.size;
}

// The offset comes from another rank, so it is checked before run() uses the block.
void Split::await_verdict() {
  const auto first_came = [&] {
    if (block_->verdict.load(std::memory_order_seq_cst) == CommBlock::kComplete) return true;
    // It may create the group without this rank: then it never gives this rank a verdict.
    const auto at = find(0);
    if (at && !counts_on_us(*block_at(0, *at))) check_members(0, *block_at(0, *at));
    return false;
  };
  wait(0, first_came);
  if (block_at(0, block_->first_at) != nullptr) return;
  base::raise(ErrorKind::kInternal,
              fmt::format("the block of {} is not at the offset it published", name_of(0)),
              ErrorFamily::kBackend);
}

// By the first member; or by that of a group with the same key and other members, of which this rank may be
// the first.
void Split::check_refused() {
  if (block_->verdict.load(std::memory_order_seq_cst) != CommBlock::kRefused) return;
  const int by = block_->first_rank;
  CommBlock* first = by >= 0 && by < service_.host_peers().size()
                         ? block_in(service_.host_peers().peer(by), block_->first_at)
                         : nullptr;
  if (first != nullptr) base::raise(read_failure_record(first->record));
  base::raise(ErrorKind::kInternal, fmt::format("group \"{}\" was refused without a reason", config_.name),
              ErrorFamily::kBackend);
}

template <class Ready>
void Split::wait(int rank, Ready ready) {
  // While every rank has a core, polling is quicker than sleeping.
  const bool cores_for_all = service_.host_peers().size() <= base::available_cores();
  for (int turns = cores_for_all ? 100 : 1; turns > 0; --turns) {
    if (ready()) return;
    ::sched_yield();
  }
  Deadline next_look = Deadline::after(kStoreSlice);
  base::SlowWait slow(deadline_);
  for (;;) {
    Announced announced(service_.host_peers().own().doorbell);
    if (ready()) return;
    check_refused();
    check_alive(rank);
    if (deadline_.expired()) raise_late(rank);
    if (next_look.expired()) {
      look_into_store();
      next_look = Deadline::after(kStoreSlice);
      slow.say_if_due([&] {
        return fmt::format("rank {} waits for {}", parent_rank(config_.rank), missing(rank, "to join", ""));
      });
    }
    announced.sleep_until(std::min(deadline_, next_look));
  }
}

// Only of the rank that is waited for. The first member waits for each in turn, so it comes across every
// loss; the others wait for the first, whose verdict ends their wait. acquire on `left` as wherever it is
// read: what the rank published before it left is readable, such as its last call.
void Split::check_alive(int rank) {
  const int host_rank = members_[static_cast<std::size_t>(rank)];
  const auto cause = service_.loss_of(host_rank);
  const bool left = parent_.block(parent_rank(rank)).left.load(std::memory_order_acquire) != 0;
  if (!cause && !left) return;
  const std::string text = cause ? *cause : "left the group that this one is built on";
  base::raise(
      Failure{.kind = ErrorKind::kPeerLost,
              .message = fmt::format("{} cannot join group \"{}\": {}", name_of(rank), config_.name, text),
              .family = ErrorFamily::kBackend,
              .peer = LostPeer{rank, peer(rank).pid, text}});
}

// For members that arrive when the first one has given up, and no longer lists its block.
void Split::tell_store(const Failure& failure) {
  const std::string text = fmt::format("{} {}", static_cast<int>(status_of(failure.kind)), failure.message);
  config_.host->kv_set(config_.host->context, refused_key().c_str(), text.data(), text.size());
}

// Reads without waiting: 1 ms is as little as the interface allows to say "now".
void Split::look_into_store() {
  char text[sizeof(FailureRecord::message)];
  std::size_t length = 0;
  const lockstep_host& host = *config_.host;
  const auto status = host.kv_get(host.context, refused_key().c_str(), text, sizeof(text), &length,
                                  Deadline::after(Milliseconds(1)).monotonic_ns());
  if (status == LOCKSTEP_PEER_LOST)
    base::raise(ErrorKind::kPeerLost, "another rank could not join", ErrorFamily::kBackend);
  if (status != LOCKSTEP_OK) return;
  int kind = LOCKSTEP_INTERNAL;
  const char* end = text + std::min(length, sizeof(text));
  const char* message = std::from_chars(text, end, kind).ptr;
  base::raise(kind_of(static_cast<lockstep_status>(kind)), std::string(std::min(message + 1, end), end),
              ErrorFamily::kBackend);
}

std::string Split::name_of(int rank) {
  return fmt::format("rank {} (pid {})", parent_rank(rank), peer(rank).pid);
}

// Every member that has not arrived, and what it does instead: another call of the parent, most likely.
std::string Split::missing(int rank, const char* verb, const char* when) {
  constexpr int kMostNamed = 8;
  std::string text;
  int n_missing = 0;
  const auto add = [&](int r) {
    if (++n_missing > kMostNamed) return;
    text +=
        fmt::format("{}{} {} group \"{}\"{}; on the group it is built on it {}", text.empty() ? "" : "; and ",
                    name_of(r), verb, config_.name, when, describe_last(parent_.block(parent_rank(r))));
  };
  for (int r = 0; r < config_.size; ++r) {
    const bool came = r == config_.rank || found_[static_cast<std::size_t>(r)] != nullptr || find(r);
    if (!came) add(r);
  }
  if (n_missing == 0) add(rank);
  if (n_missing > kMostNamed) text += fmt::format("; and {} more", n_missing - kMostNamed);
  return text;
}

void Split::raise_late(int rank) {
  base::raise(ErrorKind::kTimeout, missing(rank, "did not join", " in time"), ErrorFamily::kBackend);
}

}  // namespace

std::string split_key(const lockstep_comm_config& config, const std::string& parent_key) {
  const bool given = config.struct_size > offsetof(lockstep_comm_config, key) && config.key != nullptr;
  if (given) return base::cat(parent_key, "/", config.key);
  const lockstep_host& host = *config.host;
  char text[33] = {};
  std::size_t length = 32;
  lockstep_status status = LOCKSTEP_OK;
  if (config.rank == 0) {
    base::random_hex(16).copy(text, length);
    status = host.kv_set(host.context, kAgreedKey, text, length);
  } else {
    status = host.kv_get(host.context, kAgreedKey, text, sizeof(text), &length, config.deadline_ns);
  }
  if (status == LOCKSTEP_OK && length == 32) return {text, length};
  base::raise(status == LOCKSTEP_TIMEOUT ? ErrorKind::kTimeout : ErrorKind::kSystem,
              "rank 0 did not join the group in time: its key is not in the store", ErrorFamily::kBackend);
}

std::unique_ptr<CommMembers> split(const SplitOptions& options) {
  return Split(options).run();
}

}  // namespace lockstep::comm::internal
