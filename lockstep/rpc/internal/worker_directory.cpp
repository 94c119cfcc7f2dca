#include "lockstep/rpc/internal/worker_directory.h"

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::rpc::internal {

// Entries are never erased: messages about a worker that is gone can still name it, and say why.
std::uint64_t WorkerDirectory::add(const WorkerInfo& info) {
  const base::MutexLock lock(mutex_);
  const auto old = entries_.find(info.id);
  if (old != entries_.end() && !old->second.gone) {
    base::raise(ErrorKind::kUsage,
                base::cat("worker number ", info.id, " exists already: ", old->second.name));
  }
  // Names are unique among those present, numbers too; both may be used again by a later worker.
  for (const auto& [id, entry] : entries_) {
    if (entry.name == info.name && !entry.gone) {
      base::raise(ErrorKind::kUsage, base::cat("a worker named ", info.name, " exists already: number ", id));
    }
  }
  entries_[info.id] = {.name = info.name, .incarnation = ++n_incarnations_};
  return n_incarnations_;
}

void WorkerDirectory::list(WorkerId id, std::uint64_t incarnation) {
  const base::MutexLock lock(mutex_);
  const auto entry = entries_.find(id);
  if (entry == entries_.end() || (incarnation != 0 && entry->second.incarnation != incarnation)) return;
  entry->second.listed = true;
}

// True for exactly one caller per incarnation: who gets it reports the loss, so a loss seen by several
// threads is reported once.
bool WorkerDirectory::end(WorkerId id, const std::string& cause, std::uint64_t incarnation) {
  const base::MutexLock lock(mutex_);
  const auto entry = entries_.find(id);
  if (entry == entries_.end() || entry->second.gone) return false;
  // A loss that was noticed late is of an earlier worker with this number; the present one is not affected.
  // 0: whichever it is.
  if (incarnation != 0 && entry->second.incarnation != incarnation) return false;
  entry->second.gone = cause;
  return true;
}

std::uint64_t WorkerDirectory::incarnation(WorkerId id) const {
  const base::MutexLock lock(mutex_);
  const auto entry = entries_.find(id);
  return entry == entries_.end() || entry->second.gone ? 0 : entry->second.incarnation;
}

WorkerInfo WorkerDirectory::find(const Worker& worker) const {
  const base::MutexLock lock(mutex_);
  if (const auto* name = std::get_if<std::string>(&worker.target())) return find_name(*name);
  return find_id(std::get<int>(worker.target()));
}

// A name may have had several numbers. One that is there wins; otherwise the one with the largest number is
// reported, which with numbers given in order is the latest.
WorkerInfo WorkerDirectory::find_name(const std::string& name) const {
  const Entry* gone = nullptr;
  WorkerId gone_id = 0;
  for (const auto& [id, entry] : entries_) {
    if (entry.name != name || !entry.listed) continue;
    if (!entry.gone) return {.id = id, .name = name};
    gone = &entry;
    gone_id = id;
  }
  if (gone == nullptr)
    base::raise(ErrorKind::kUsage, base::cat("there is no worker named \"", name, "\"; there are ", names()));
  base::raise({.kind = ErrorKind::kPeerLost,
               .message = base::cat("worker ", name, " is gone: ", *gone->gone),
               .peer = LostPeer{.rank = gone_id, .cause = *gone->gone}});
}

WorkerInfo WorkerDirectory::find_id(int id) const {
  const auto entry = id < 0 || id > 0xFFFF ? entries_.end() : entries_.find(static_cast<WorkerId>(id));
  if (entry == entries_.end() || !entry->second.listed) {
    base::raise(ErrorKind::kUsage, base::cat("there is no worker with number ", id, "; there are ", names()));
  }
  if (entry->second.gone) {
    base::raise({.kind = ErrorKind::kPeerLost,
                 .message = base::cat("worker ", entry->second.name, " is gone: ", *entry->second.gone),
                 .peer = LostPeer{.rank = id, .cause = *entry->second.gone}});
  }
  return {.id = entry->first, .name = entry->second.name};
}

WorkerInfo WorkerDirectory::info(WorkerId id) const {
  const base::MutexLock lock(mutex_);
  const auto entry = entries_.find(id);
  return {.id = id, .name = entry == entries_.end() ? base::cat("#", id) : entry->second.name};
}

bool WorkerDirectory::present(WorkerId id) const {
  const base::MutexLock lock(mutex_);
  const auto entry = entries_.find(id);
  return entry != entries_.end() && !entry->second.gone;
}

std::vector<WorkerInfo> WorkerDirectory::present() const {
  const base::MutexLock lock(mutex_);
  std::vector<WorkerInfo> list;
  for (const auto& [id, entry] : entries_) {
    if (entry.listed && !entry.gone) list.push_back({.id = id, .name = entry.name});
  }
  return list;
}

std::vector<WorkerId> WorkerDirectory::gone() const {
  const base::MutexLock lock(mutex_);
  std::vector<WorkerId> list;
  for (const auto& [id, entry] : entries_) {
    if (entry.gone && entry.listed) list.push_back(id);
  }
  return list;
}

Failure WorkerDirectory::lost(WorkerId id, const std::string& what) const {
  const base::MutexLock lock(mutex_);
  const auto entry = entries_.find(id);
  const std::string name = entry == entries_.end() ? base::cat("#", id) : entry->second.name;
  const std::string cause =
      entry == entries_.end() || !entry->second.gone ? "its connection ended" : *entry->second.gone;
  return {.kind = ErrorKind::kPeerLost,
          .message = base::cat(what, ": worker ", name, " (number ", id, ") is gone: ", cause),
          .peer = LostPeer{.rank = id, .cause = cause}};
}

std::string WorkerDirectory::names() const {
  std::string list;
  int n = 0;
  for (const auto& [id, entry] : entries_) {
    if (entry.gone || !entry.listed) continue;
    if (n++ == 16) return list + ", ...";
    list += (list.empty() ? "" : ", ") + entry.name + " (" + std::to_string(id) + ")";
  }
  return list.empty() ? "none" : list;
}

}  // namespace lockstep::rpc::internal
