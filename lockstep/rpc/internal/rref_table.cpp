#include "lockstep/rpc/internal/rref_table.h"

#include <algorithm>

namespace lockstep::rpc::internal {
namespace {

// Of one message.
constexpr std::size_t kMaxEntries = 4096;

}  // namespace

// As owner. An entry of owned_ is released when its creation has come (called) and no fork is left; its
// number goes to ended_, where a late message finds it. Messages overtake each other, so an entry may be made
// by whichever names it first: its creation, a fork, or a question for the value.

RRefTable::Owned* RRefTable::find_or_wait(std::uint64_t rref) {
  const auto found = owned_.find(rref);
  if (found != owned_.end()) return &found->second;
  if (ended_.contains(rref) || lost_.contains(maker_of(rref))) return nullptr;
  return &owned_.emplace(rref, Owned{.value = options_.new_value()}).first->second;
}

RRefTable::Value RRefTable::create_here(const RRefOnWire& ref, WorkerId holder) {
  if (maker_of(ref.rref) != holder || maker_of(ref.fork) != holder || ended_.contains(ref.rref))
    return nullptr;
  // From a worker that is gone meanwhile: its function runs, and what it returns is dropped.
  Owned* owned = find_or_wait(ref.rref);
  if (owned == nullptr) return options_.new_value();
  if (owned->called) return nullptr;
  owned->called = true;
  add_fork(*owned, ref.fork, holder);
  Value value = owned->value;
  if (owned->forks.empty()) {
    ended_.add(ref.rref);
    owned_.erase(ref.rref);  // the caller holds the value
  }
  return value;
}

RRefTable::Value RRefTable::find(std::uint64_t rref) {
  const Owned* owned = find_or_wait(rref);
  return owned == nullptr ? nullptr : owned->value;
}

RRefOnWire RRefTable::share_owned(std::uint64_t rref, const Value& value, WorkerId to) {
  const RRefOnWire child{.rref = rref, .fork = options_.new_id(), .owner = options_.self};
  if (lost_.contains(to)) return child;  // it will not arrive
  ended_.remove(rref);
  auto& owned = owned_[rref];
  if (!owned.value) {
    owned.value = value;
    owned.called = true;
  }
  add_fork(owned, child.fork, to);
  return child;
}

void RRefTable::add_fork(Owned& owned, std::uint64_t fork, WorkerId holder) {
  if (!ended_.contains(fork) && !lost_.contains(holder)) owned.forks.emplace(fork, holder);
}

RRefTable::Owneds::iterator RRefTable::release_if_unused(Owneds::iterator owned, Actions& out) {
  // One that was asked for before its creation came waits for that.
  if (!owned->second.forks.empty() || !owned->second.called) return std::next(owned);
  ended_.add(owned->first);
  out.dropped.push_back(std::move(owned->second.value));
  return owned_.erase(owned);
}

void RRefTable::remove_fork(const ForkEntry& entry, Actions& out) {
  ended_.add(entry.fork);
  const auto owned = owned_.find(entry.rref);
  if (owned == owned_.end() || owned->second.forks.erase(entry.fork) == 0) return;
  release_if_unused(owned, out);
}

// As user. The phases of a fork held here:
//
//   remote() was called    kCreating --its call ends----------------+
//   came from a user       kAsking ----the owner confirms (kFork)---+--> kConfirmed
//   came from the owner    ------------------------------------------+
//   kAsking, kConfirmed    --the owner refuses, or is lost--> kCut
//
// It is released when its last handle is gone, no child of it waits to be accepted, and it is kConfirmed or
// kCut; kDelete goes to the owner only from kConfirmed. So the owner never gets kDelete for a fork before it
// knows the fork, and never loses its last fork while a child is on its way.

void RRefTable::create_there(const RRefOnWire& ref) {
  users_.emplace(ref.fork, User{.rref = ref.rref, .owner = ref.owner, .phase = Phase::kCreating});
}

void RRefTable::creation_over(std::uint64_t fork, Actions& out) {
  const auto user = users_.find(fork);
  if (user == users_.end() || user->second.phase != Phase::kCreating) return;
  user->second.phase = Phase::kConfirmed;
  release_if_over(fork, out);
}

bool RRefTable::share_used(std::uint64_t fork, WorkerId to, RRefOnWire& child) {
  const auto user = users_.find(fork);
  if (user == users_.end() || user->second.dropped) return false;
  child = {.rref = user->second.rref, .fork = options_.new_id(), .owner = user->second.owner};
  if (lost_.contains(to)) return true;  // it will not arrive
  ++user->second.n_children;
  children_.emplace(child.fork, Child{.parent = fork, .to = to});
  return true;
}

void RRefTable::drop(std::uint64_t fork, Actions& out) {
  const auto user = users_.find(fork);
  if (user == users_.end()) return;
  user->second.dropped = true;
  release_if_over(fork, out);
}

void RRefTable::drop_all(Actions& out) {
  std::vector<std::uint64_t> forks;
  for (const auto& [fork, user] : users_) forks.push_back(fork);
  for (const auto fork : forks) drop(fork, out);
}

void RRefTable::release_if_over(std::uint64_t fork, Actions& out) {
  const auto found = users_.find(fork);
  if (found == users_.end()) return;
  const User user = found->second;
  if (!user.dropped || user.n_children != 0) return;
  if (user.phase == Phase::kCreating || user.phase == Phase::kAsking) return;
  users_.erase(found);
  if (user.phase == Phase::kConfirmed)
    post(user.owner, Control::kDelete, {.rref = user.rref, .fork = fork}, out);
}

void RRefTable::release_child(std::uint64_t child, Actions& out) {
  const auto found = children_.find(child);
  if (found == children_.end()) return;
  const auto parent = found->second.parent;
  children_.erase(found);
  const auto user = users_.find(parent);
  if (user == users_.end()) return;
  --user->second.n_children;
  release_if_over(parent, out);
}

// As both.

void RRefTable::unshare(const RRefOnWire& child, Actions& out) {
  if (child.owner == options_.self) {
    remove_fork({.rref = child.rref, .fork = child.fork}, out);
  } else {
    release_child(child.fork, out);
  }
}

RRefTable::Value RRefTable::receive(const RRefOnWire& ref, WorkerId from, bool& fits, Actions& out) {
  fits = maker_of(ref.fork) == from;
  if (!fits) return nullptr;
  if (ref.owner == options_.self) {
    Owned* owned = find_or_wait(ref.rref);
    Value value = owned == nullptr ? nullptr : owned->value;
    if (from == options_.self) {
      remove_fork({.rref = ref.rref, .fork = ref.fork}, out);  // it went round: its own child has arrived
    } else {
      post(from, Control::kAccept, {.rref = ref.rref, .fork = ref.fork}, out);
    }
    if (value) return value;
    value = options_.new_value();
    out.orphaned.push_back(value);
    return value;
  }
  User user{.rref = ref.rref, .owner = ref.owner, .parent = from};
  const bool cut = lost_.contains(ref.owner);
  user.phase = cut ? Phase::kCut : from == ref.owner ? Phase::kConfirmed : Phase::kAsking;
  fits = users_.emplace(ref.fork, user).second;
  if (!fits) return nullptr;
  const ForkEntry entry{.rref = ref.rref, .fork = ref.fork};
  if (user.phase == Phase::kAsking) post(ref.owner, Control::kFork, entry, out);
  if (cut && from != ref.owner) post(from, Control::kAccept, entry, out);
  return nullptr;
}

// Control messages.

std::vector<std::uint64_t> RRefTable::take(WorkerId from, Control control, std::span<const ForkEntry> entries,
                                           Actions& out) {
  std::vector<std::uint64_t> refused;
  for (const auto& entry : entries) {
    switch (control) {
      case Control::kFork:
        if (!ask(entry, from)) refused.push_back(entry.fork);
        break;
      case Control::kAccept:
        release_child(entry.fork, out);
        break;
      case Control::kDelete:
        remove_fork(entry, out);
        break;
    }
  }
  return refused;
}

bool RRefTable::ask(const ForkEntry& entry, WorkerId from) {
  if (ended_.contains(entry.fork)) return false;  // repeated: deleted meanwhile, or refused before
  Owned* owned = lost_.contains(from) ? nullptr : find_or_wait(entry.rref);
  if (owned == nullptr) {
    ended_.add(entry.fork);  // refused once, refused for ever: its holder will not delete it
    return false;
  }
  add_fork(*owned, entry.fork, from);
  return true;
}

// At most one message per worker and control is on its way: entries that come meanwhile wait in the box and
// go together with the next one. flying is what has been sent and not answered; a box exists while it has
// either, so idle() need only look for boxes.
void RRefTable::post(WorkerId to, Control control, ForkEntry entry, Actions& out) {
  if (lost_.contains(to)) return;
  auto& box = boxes_[{to, control}];
  // What is posted in one step goes in one message.
  const auto send = std::ranges::find_if(
      out.sends, [&](const RRefSend& other) { return other.to == to && other.control == control; });
  if (send != out.sends.end() && send->entries.size() < kMaxEntries) {
    send->entries.push_back(entry);
    box.flying.push_back(entry);
  } else if (box.flying.empty()) {
    out.sends.push_back({.to = to, .control = control, .entries = {entry}});
    box.flying.push_back(entry);
  } else {
    box.waiting.push_back(entry);
  }
}

void RRefTable::answered(WorkerId to, Control control, std::span<const std::uint64_t> refused, Actions& out) {
  const auto found = boxes_.find({to, control});
  if (found == boxes_.end()) return;
  const auto flown = std::exchange(found->second.flying, {});
  auto& waiting = found->second.waiting;
  if (waiting.empty()) {
    boxes_.erase(found);
  } else {
    const auto end = waiting.begin() + static_cast<std::ptrdiff_t>(std::min(waiting.size(), kMaxEntries));
    found->second.flying.assign(waiting.begin(), end);
    waiting.erase(waiting.begin(), end);
    out.sends.push_back({.to = to, .control = control, .entries = found->second.flying});
  }
  if (control != Control::kFork) return;
  for (const auto& entry : flown) {
    confirm(entry, std::ranges::find(refused, entry.fork) != refused.end(), out);
  }
}

void RRefTable::confirm(const ForkEntry& entry, bool refused, Actions& out) {
  const auto user = users_.find(entry.fork);
  if (user == users_.end() || user->second.phase != Phase::kAsking) return;
  user->second.phase = refused ? Phase::kCut : Phase::kConfirmed;
  post(user->second.parent, Control::kAccept, entry, out);
  release_if_over(entry.fork, out);
}

// The owner never answered: the forks are cut, and their parents released, as if it had refused.
void RRefTable::unanswered(WorkerId to, Control control, Actions& out) {
  const auto found = boxes_.find({to, control});
  if (found == boxes_.end()) return;
  const Box box = std::move(found->second);
  boxes_.erase(found);
  if (control != Control::kFork) return;
  for (const auto& entry : box.flying) confirm(entry, true, out);
  for (const auto& entry : box.waiting) confirm(entry, true, out);
}

// Losses.

void RRefTable::lost(WorkerId worker, Actions& out) {
  if (!lost_.insert(worker).second) return;
  lose_as_owner(worker, out);
  lose_as_user(worker, out);
}

void RRefTable::lose_as_owner(WorkerId worker, Actions& out) {
  for (auto owned = owned_.begin(); owned != owned_.end();) {
    std::erase_if(owned->second.forks, [&](const auto& fork) { return fork.second == worker; });
    if (!owned->second.called && maker_of(owned->first) == worker) {
      ended_.add(owned->first);
      out.orphaned.push_back(std::move(owned->second.value));
      owned = owned_.erase(owned);
    } else {
      owned = release_if_unused(owned, out);
    }
  }
}

void RRefTable::lose_as_user(WorkerId worker, Actions& out) {
  std::vector<std::uint64_t> children;
  for (const auto& [fork, child] : children_) {
    if (child.to == worker) children.push_back(fork);
  }
  for (const auto fork : children) release_child(fork, out);
  std::vector<std::uint64_t> cut;
  for (auto& [fork, user] : users_) {
    if (user.owner != worker || user.phase == Phase::kCreating)
      continue;  // the end of a creation's call is reported
    if (user.phase == Phase::kAsking)
      post(user.parent, Control::kAccept, {.rref = user.rref, .fork = fork}, out);
    user.phase = Phase::kCut;
    cut.push_back(fork);
  }
  for (const auto fork : cut) release_if_over(fork, out);
  for (const auto control : {Control::kFork, Control::kAccept, Control::kDelete})
    boxes_.erase({worker, control});
}

std::vector<RRefTable::Value> RRefTable::take_values() {
  std::vector<Value> values;
  for (auto& [rref, owned] : owned_) values.push_back(std::move(owned.value));
  owned_.clear();
  return values;
}

std::vector<RRefTable::Value> RRefTable::values() const {
  std::vector<Value> values;
  for (const auto& [rref, owned] : owned_) values.push_back(owned.value);
  return values;
}

// Observers.

bool RRefTable::confirmed(std::uint64_t fork) const {
  const auto user = users_.find(fork);
  return user != users_.end() && user->second.phase == Phase::kConfirmed;
}

bool RRefTable::idle() const {
  return boxes_.empty() && children_.empty() && n_pending_users() == 0;
}

std::size_t RRefTable::n_forks() const {
  std::size_t n = 0;
  for (const auto& [rref, owned] : owned_) n += owned.forks.size();
  return n;
}

std::size_t RRefTable::n_pending_users() const {
  return static_cast<std::size_t>(std::ranges::count_if(users_, [](const auto& user) {
    return user.second.phase == Phase::kCreating || user.second.phase == Phase::kAsking;
  }));
}

std::size_t RRefTable::n_on_the_way() const {
  std::size_t n = 0;
  for (const auto& [key, box] : boxes_) n += box.waiting.size() + box.flying.size();
  return n;
}

}  // namespace lockstep::rpc::internal
