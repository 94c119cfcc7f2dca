#include "engines/cuda_ipc/family.h"

#include <unistd.h>

#include <algorithm>
#include <thread>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/detail/host_store.h"
#include "lockstep/local/meeting.h"

namespace lockstep::cuda_ipc {
namespace {

// Rank 0's segment is the page. The others bring a header's worth, for the meeting alone.
local::Mapping make_segment(const lockstep_comm_config& config) {
  const std::size_t n_bytes = config.rank == 0 ? page_bytes(config.size) : kFlagsAt;
  auto segment = local::SegmentTable::of_process().create("lockstep-cuda-ipc", n_bytes);
  segment->commit(0, n_bytes);
  auto& header = *reinterpret_cast<ControlHeader*>(segment->data());
  header.magic = kMagic;
  header.version = kVersion;
  header.size = config.size;
  return segment;
}

// Until all have joined. In slices, since a rank that dies wakes nobody.
void await_all(ControlPage& page, const lockstep_comm_config& config,
               const std::vector<local::LocalPeer>& peers) {
  const Deadline deadline = Deadline::from_monotonic_ns(config.deadline_ns);
  const auto all = static_cast<std::uint32_t>(config.size);
  page.header().n_joined.fetch_add(1, std::memory_order_acq_rel);
  for (int turn = 0; page.header().n_joined.load(std::memory_order_acquire) != all; ++turn) {
    std::this_thread::sleep_for(std::chrono::microseconds(turn < 50 ? 20 : 500));
    for (int r = 0; r < config.size; ++r) {
      if (page.rank(r).left.load(std::memory_order_acquire) == RankState::kGaveUp)
        local::raise_gone(r, "left");
      if (turn % 64 == 63 && peers[static_cast<std::size_t>(r)].process.lost() &&
          page.header().n_joined.load(std::memory_order_acquire) != all)
        local::raise_gone(r, "ended");
    }
    if (deadline.expired())
      base::raise(ErrorKind::kTimeout, "some ranks did not finish joining the group in time",
                  ErrorFamily::kBackend);
  }
}

std::vector<Family::Member> to_members(std::vector<local::LocalPeer> peers) {
  std::vector<Family::Member> members;
  for (local::LocalPeer& peer : peers)
    members.push_back({peer.process.pid().value_or(peer.pid), peer.same_process, std::move(peer.process)});
  return members;
}

}  // namespace

Joined join(const lockstep_comm_config& config, const Parent* parent,
            const std::function<void(ControlPage&)>& prepare) {
  comm::HostStore store(*config.host);
  const local::Mapping own = make_segment(config);
  auto peers = local::meet(store, {.rank = config.rank,
                                   .size = config.size,
                                   .group = config.name != nullptr ? config.name : "",
                                   .version = kVersion,
                                   .own = own,
                                   .attendance_at = offsetof(ControlHeader, attendance),
                                   .deadline = Deadline::from_monotonic_ns(config.deadline_ns)});
  const local::Mapping& first = peers[0].segment;
  const auto& header = *reinterpret_cast<const ControlHeader*>(first->data());
  if (first->size() < page_bytes(config.size) || header.magic != kMagic || header.version != kVersion ||
      header.size != config.size)
    base::raise(ErrorKind::kInternal, "rank 0's control page is not laid out as expected",
                ErrorFamily::kBackend);
  Joined joined{.family = nullptr, .ranks = {}, .page = std::make_shared<ControlPage>(first, config.size)};
  try {
    prepare(*joined.page);
    await_all(*joined.page, config, peers);
    for (int r = 0; r < config.size; ++r)
      joined.ranks.push_back(
          parent == nullptr ? r : parent->ranks[static_cast<std::size_t>(config.parent_ranks[r])]);
    joined.family =
        parent == nullptr ? std::make_shared<Family>(to_members(std::move(peers))) : parent->family;
  } catch (...) {
    joined.page->rank(config.rank).left.store(RankState::kGaveUp, std::memory_order_release);
    throw;
  }
  return joined;
}

Family::Family(std::vector<Member> members)
    : members_(std::move(members)), gone_(new std::atomic<bool>[members_.size()]()) {
  std::vector<local::DeathWatch::Watched> watched;
  for (std::size_t r = 0; r < members_.size(); ++r)
    watched.push_back({static_cast<int>(r), &members_[r].process});
  watch_ = std::make_unique<local::DeathWatch>(
      std::move(watched), [this](int r, local::DeathWatch::Loss loss) { tell(r, loss); });
}

// Under the lock until the last callback has returned: remove() is then enough to be never called again. Callbacks take the
// communicator's locks, never this one.
void Family::add(Relative& relative) {
  const base::MutexLock lock(mutex_);
  relatives_.push_back(&relative);
  for (const auto& [r, cause] : lost_) {
    if (relative.needs(r)) relative.lost(r, cause);
  }
}

void Family::remove(Relative& relative) {
  const base::MutexLock lock(mutex_);
  std::erase(relatives_, &relative);
}

// On the watch's thread.
void Family::tell(int r, local::DeathWatch::Loss loss) {
  gone_[static_cast<std::size_t>(r)].store(true, std::memory_order_release);
  const base::MutexLock lock(mutex_);
  std::vector<Relative*> concerned = relatives_;
  std::erase_if(concerned, [&](Relative* relative) { return !relative->needs(r); });
  std::string cause = "its process has ended";
  if (loss == local::DeathWatch::Loss::kExec) {
    cause = "its process became another program (exec), or closed its descriptors";
  } else if (!concerned.empty()) {
    cause = cause_of_loss(*concerned.front(), r);
  }
  lost_.emplace_back(r, cause);
  for (Relative* relative : concerned) relative->lost(r, cause);
}

// The kernel reports how a process ended once its parent has reaped it, and who started the ranks publishes it. Both take
// a moment: at most 300 ms.
std::string Family::cause_of_loss(Relative& relative, int r) {
  const std::string key = base::cat("/lockstep/exit/", relative.rank_of(r));
  bool published = true;
  for (Deadline patience = Deadline::after(Milliseconds(300)); !patience.expired();) {
    if (const auto cause = member(r).process.exit_cause()) return *cause;
    if (published) {
      char text[512];
      std::size_t length = 0;
      const auto status = relative.host().kv_get(relative.host().context, key.c_str(), text, sizeof text,
                                                 &length, Deadline::after(Milliseconds(10)).monotonic_ns());
      if (status == LOCKSTEP_OK) return std::string(text, std::min(length, sizeof text));
      published = status != LOCKSTEP_UNSUPPORTED;
      // Nobody publishes: only the parent is waited for, which may never reap.
      if (!published) patience = Deadline::after(Milliseconds(5));
    }
    std::this_thread::sleep_for(Milliseconds(1));
  }
  return "gone, cause unknown";
}

}  // namespace lockstep::cuda_ipc
