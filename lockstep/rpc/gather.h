// All-gather and barrier among workers, by name: for set-up and tear-down, not for data.
//
// Led by the worker with the smallest name: every worker sends its value there and is answered when all have
// arrived. The n-th call with a set of names matches the n-th call of the others with that set.
// Blocking: until all have arrived, the options' timeout at most. Raises kTimeout naming those that have not
// arrived (the leader is asked for them, for half a second at most), and kPeerLost naming one that is gone.
// Thread safety: every function may be called from any thread; concurrent calls with one set of names are
// matched in an unspecified order.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/rpc/agent.h"
#include "lockstep/rpc/call.h"

namespace lockstep::rpc {

// Values by worker name. Empty names: all workers of the group. Raises kUsage when this worker is not among
// them.
std::map<std::string, Object> all_gather(const Object& value, std::vector<std::string> names = {},
                                         CallOptions options = {});
void barrier(std::vector<std::string> names = {}, CallOptions options = {});

namespace internal {

class Gatherings final : public Service {
 public:
  explicit Gatherings(Agent& agent);

  std::map<std::string, Object> gather(const Object& value, std::vector<std::string> names,
                                       Milliseconds timeout);

  void on_lost(WorkerId peer, const std::string& cause) override;
  void debug_info(std::map<std::string, std::string>& info) override;
  void on_joined(WorkerId peer) override;
  void on_close() override;
  void on_closed() override { on_close(); }

 private:
  using Key = std::pair<std::set<std::string>, std::uint64_t>;
  struct Gathering {
    std::map<std::string, Object> values;
    std::vector<Request> requests;
  };
  void take(Request request);
  void tell_missing(Request request);
  // The missing workers, for the message of a timeout.
  std::string ask_missing(const WorkerInfo& leader, const Key& key);
  std::optional<Failure> gone_among(const std::set<std::string>& names,
                                    const std::map<std::string, Object>& values) const;

  Agent& agent_;
  base::Mutex mutex_;
  std::map<std::set<std::string>, std::uint64_t> n_calls_ LOCKSTEP_GUARDED_BY(mutex_);
  std::map<Key, Gathering> open_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace internal
}  // namespace lockstep::rpc
