#include "launch/nodes.h"

#include <unistd.h>

#include <algorithm>
#include <string_view>

#include "launch/failure_report.h"
#include "lockstep/base/bytes.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep::launch {
namespace {

constexpr Milliseconds kCheckInterval{1'000};
constexpr Milliseconds kHurriedInterval{100};
constexpr Milliseconds kRetryInterval{5'000};  // while the store is not there yet
constexpr Milliseconds kEndTimeout{300'000};   // as torchrun's exit barrier
const std::string kFailedKey = "lockstep/launch/failed";

std::string came_key(int node) {
  return base::cat("lockstep/launch/came/", node);
}

std::string ended_key(int node) {
  return base::cat("lockstep/launch/ended/", node);
}

}  // namespace

void Nodes::hurry() {
  if (connected_) next_check_ = std::min(next_check_, Deadline::after(kHurriedInterval));
}

// The first contact also publishes this launcher: number of workers, host, pid. compare_set shows whether
// another has the same number.
Store& Nodes::store() {
  Store& store = host_.store();
  if (!connected_) {
    came_as_ = base::cat(n_workers_, ' ', host_name(), ", pid ", ::getpid());
    first_came_as_ = to_text(store.compare_set(came_key(node_rank_), {}, to_bytes(came_as_)));
  }
  connected_ = true;
  return store;
}

std::optional<std::string> Nodes::misfit() {
  if (compared_) return std::nullopt;
  const auto who = [](const std::string& came_as) { return came_as.substr(came_as.find(' ') + 1); };
  if (first_came_as_ != came_as_) {
    compared_ = true;
    return base::cat("two launchers have --node-rank ", node_rank_, ": ", who(first_came_as_), ", and ",
                     who(came_as_), "; each host needs a number of its own");
  }
  const std::string zero_key = came_key(0);
  if (!store().check({&zero_key, 1})) return std::nullopt;
  compared_ = true;
  const std::string zero = to_text(store().get(zero_key));
  const std::string n_workers = zero.substr(0, zero.find(' '));
  if (n_workers == base::cat(n_workers_)) return std::nullopt;
  return base::cat("host 0 (", who(zero), ") was given -n ", n_workers, ", host ", node_rank_, " (",
                   who(came_as_), ") -n ", n_workers_, "; every host must run the same number of workers");
}

std::optional<std::string> Nodes::check() {
  if (n_nodes_ == 1 || !next_check_.expired()) return std::nullopt;
  next_check_ = Deadline::after(kCheckInterval);
  try {
    Store& store = this->store();
    if (auto why = misfit()) {
      tell_failure(*why);
      return why;
    }
    if (told_ || !store.check({&kFailedKey, 1})) return std::nullopt;
    return to_text(store.get(kFailedKey));
  } catch (const Error& error) {
    next_check_ = Deadline::after(kRetryInterval);
    if (!connected_) return std::nullopt;
    return base::cat("the rendezvous store is gone (", error.what(), ")");
  }
}

// compare_set: the first host to fail is the one that all report.
void Nodes::tell_failure(const std::string& what) noexcept {
  if (n_nodes_ == 1 || told_) return;
  told_ = true;
  try {
    const Bytes text = to_bytes(what);
    store().compare_set(kFailedKey, {}, text);
  } catch (const std::exception& error) {
    base::log(LogLevel::kWarn,
              base::cat("cannot notify the other hosts that this one failed: ", error.what()));
  }
}

// What the store's host waits for. A host that has not come to a job that failed will find it over.
std::vector<std::string> Nodes::awaited_keys(bool well) {
  std::vector<std::string> keys;
  for (int node = 0; node < n_nodes_; ++node) {
    const std::string came = came_key(node);
    if (node != node_rank_ && (well || store().check({&came, 1}))) keys.push_back(ended_key(node));
  }
  return keys;
}

void Nodes::end(bool well) noexcept {
  if (n_nodes_ == 1) return;
  try {
    Store& store = this->store();
    // A second launcher of the same number ends only itself: host 0 waits for the first, which has not
    // noticed it yet.
    if (first_came_as_ != came_as_) return;
    store.set(ended_key(node_rank_), "");
    if (node_rank_ != 0) return;
    const auto keys = awaited_keys(well);
    const Deadline deadline = Deadline::after(kEndTimeout);
    base::SlowWait slow(deadline);
    while (!keys.empty()) {
      try {
        return store.wait(keys, base::time_left(slow.next()));
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kTimeout || deadline.expired()) throw;
      }
      slow.say_if_due([&] {
        return base::cat("this launcher holds the store and waits until the other hosts are done (",
                         std::ranges::count_if(keys,
                                               [&](const auto& key) {
                                                 return !store.check({&key, 1});
                                               }),
                         " of ", n_nodes_ - 1, " are not); Ctrl-C ends it");
      });
    }
  } catch (const std::exception& error) {
    base::log(LogLevel::kWarn, base::cat("not every host is known to be done: ", error.what()));
  }
}

}  // namespace lockstep::launch
