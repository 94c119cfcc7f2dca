#include "lockstep/rpc/profile.h"

#include <algorithm>
#include <atomic>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/rpc/agent.h"

namespace lockstep::rpc {
namespace internal {
namespace {

struct Servers {
  std::atomic<int> n{0};
  base::Mutex mutex;
  std::vector<std::shared_ptr<ProfileLog>> logs LOCKSTEP_GUARDED_BY(mutex);
};
Servers& servers() {
  static Servers list;
  return list;
}

}  // namespace

void ProfileLog::add(ProfileEvent event) {
  const base::MutexLock lock(mutex_);
  events_.push_back(std::move(event));
}

void ProfileLog::add_all(const std::string& prefix, std::vector<ProfileEvent> events) {
  const base::MutexLock lock(mutex_);
  for (auto& event : events) {
    event.name.insert(0, prefix);
    events_.push_back(std::move(event));
  }
}

std::vector<ProfileEvent> ProfileLog::events() const {
  const base::MutexLock lock(mutex_);
  return events_;
}

std::shared_ptr<ProfileLog>& profile_here() {
  thread_local std::shared_ptr<ProfileLog> log;
  return log;
}

bool profiling_server() {
  return servers().n.load(std::memory_order_relaxed) != 0;
}

void profile_served(const ProfileEvent& event) {
  if (!profiling_server()) return;
  const base::MutexLock lock(servers().mutex);
  for (const auto& log : servers().logs) log->add(event);
}

std::string call_name(const char* mode, const std::string& function, const std::string& caller,
                      const std::string& callee) {
  return std::string(mode)
      .append("#")
      .append(function)
      .append("(")
      .append(caller)
      .append(" -> ")
      .append(callee)
      .append(")");
}

}  // namespace internal

Profile::Profile() : log_(std::make_shared<internal::ProfileLog>()), before_(internal::profile_here()) {
  internal::profile_here() = log_;
}

Profile::~Profile() {
  internal::profile_here() = before_;
}

ServerProfile::ServerProfile() : log_(std::make_shared<internal::ProfileLog>()) {
  auto& servers = internal::servers();
  const base::MutexLock lock(servers.mutex);
  servers.logs.push_back(log_);
  ++servers.n;
}

ServerProfile::~ServerProfile() {
  auto& servers = internal::servers();
  const base::MutexLock lock(servers.mutex);
  std::erase(servers.logs, log_);
  --servers.n;
}

ProfileRange::ProfileRange(std::string name)
    : name_(std::move(name)), start_ns_(Deadline::now().monotonic_ns()) {}

ProfileRange::~ProfileRange() {
  const auto& log = internal::profile_here();
  if (!log) return;
  const auto agent = current_agent_if_any();
  log->add({.name = name_,
            .worker = agent ? agent->self().name : "",
            .start_ns = start_ns_,
            .duration_ns = Deadline::now().monotonic_ns() - start_ns_});
}

}  // namespace lockstep::rpc
