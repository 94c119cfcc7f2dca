// Profiles of remote calls, at the caller and at the callee.
//
//   rpc::Profile profile;
//   rpc_sync("worker1", add, {2, 3});
//   for (const auto& event : profile.events()) ...
//     rpc_sync#add(worker0 -> worker1)                    on worker0: the whole call
//     rpc_sync#add(worker0 -> worker1)#remote_op: add     on worker1: the function alone
//
// Calls that the function makes in turn are included, prefixed with the call's name. A function adds ranges
// of its own with ProfileRange. ServerProfile records everything that runs here for others, whoever calls.
// Thread safety: a Profile belongs to the thread that opened it; events() may be called from any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/object/object.h"

namespace lockstep::rpc {

struct ProfileEvent {
  std::string name;
  std::string worker;            // where it ran
  std::int64_t start_ns = 0;     // on that worker's monotonic clock
  std::int64_t duration_ns = 0;  // zero or more
};
auto lockstep_fields(SelfOf<ProfileEvent> auto& self) {
  return fields({.name = "lockstep.rpc.ProfileEvent", .version = 1}, self.name, self.worker, self.start_ns,
                self.duration_ns);
}

namespace internal {

// Events in the order they are added; shared with calls in flight.
class ProfileLog {
 public:
  void add(ProfileEvent event);
  // Those of a call's callee, `prefix` before each name.
  void add_all(const std::string& prefix, std::vector<ProfileEvent> events);
  std::vector<ProfileEvent> events() const;

 private:
  mutable base::Mutex mutex_;
  std::vector<ProfileEvent> events_ LOCKSTEP_GUARDED_BY(mutex_);
};

// Where this thread's calls are recorded; null: nowhere.
std::shared_ptr<ProfileLog>& profile_here();
// Adds to every open ServerProfile. Cheap when there is none.
void profile_served(const ProfileEvent& event);
bool profiling_server();

// "rpc_sync#add(worker0 -> worker1)".
std::string call_name(const char* mode, const std::string& function, const std::string& caller,
                      const std::string& callee);

}  // namespace internal

// Records the calls this thread makes while it lives. A nested Profile takes over until it ends.
class Profile {
 public:
  Profile();
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;
  // Of completed calls, in the order of completion.
  std::vector<ProfileEvent> events() const { return log_->events(); }

 private:
  const std::shared_ptr<internal::ProfileLog> log_;
  const std::shared_ptr<internal::ProfileLog> before_;
};

// Records what this process runs for others while it lives, callers' names included.
class ServerProfile {
 public:
  ServerProfile();
  ~ServerProfile();
  ServerProfile(const ServerProfile&) = delete;
  ServerProfile& operator=(const ServerProfile&) = delete;
  std::vector<ProfileEvent> events() const { return log_->events(); }

 private:
  const std::shared_ptr<internal::ProfileLog> log_;
};

// An event of the program's own, in this thread's Profile or the caller's.
class ProfileRange {
 public:
  explicit ProfileRange(std::string name);
  ~ProfileRange();
  ProfileRange(const ProfileRange&) = delete;
  ProfileRange& operator=(const ProfileRange&) = delete;

 private:
  const std::string name_;
  const std::int64_t start_ns_;
};

}  // namespace lockstep::rpc
