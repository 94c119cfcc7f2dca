#include "launch/nodes.h"

#include <algorithm>
#include <string_view>

#include "lockstep/base/bytes.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"

namespace lockstep::launch {
namespace {

constexpr Milliseconds kCheckInterval{1'000};
constexpr Milliseconds kHurriedInterval{100};
constexpr Milliseconds kRetryInterval{5'000};  // while the store is not there yet
constexpr Milliseconds kEndTimeout{300'000};   // as torchrun's exit barrier
const std::string kFailedKey = "lockstep/launch/failed";
const std::string kEndedKey = "lockstep/launch/ended";
const std::string kAllEndedKey = "lockstep/launch/all_ended";

}  // namespace

void Nodes::hurry() {
  if (connected_) next_check_ = std::min(next_check_, Deadline::after(kHurriedInterval));
}

std::optional<std::string> Nodes::check() {
  if (n_nodes_ == 1 || !next_check_.expired()) return std::nullopt;
  next_check_ = Deadline::after(kCheckInterval);
  try {
    Store& store = host_.store();
    connected_ = true;
    if (told_ || !store.check({&kFailedKey, 1})) return std::nullopt;
    return to_text(store.get(kFailedKey));
  } catch (const Error& error) {
    next_check_ = Deadline::after(kRetryInterval);
    if (!connected_) return std::nullopt;
    return cat("the rendezvous store is gone (", error.what(), ")");
  }
}

void Nodes::tell_failure(const std::string& what) noexcept {
  if (n_nodes_ == 1 || told_) return;
  told_ = true;
  try {
    const Bytes text = to_bytes(what);
    host_.store().compare_set(kFailedKey, {}, text);
  } catch (const std::exception& error) {
    log(LogLevel::kWarn, cat("cannot tell the other hosts that this one failed: ", error.what()));
  }
}

void Nodes::end() noexcept {
  if (n_nodes_ == 1) return;
  try {
    Store& store = host_.store();
    if (store.add(kEndedKey, 1) == n_nodes_) store.set(kAllEndedKey, "");
    if (node_rank_ == 0) store.wait({&kAllEndedKey, 1}, kEndTimeout);
  } catch (const std::exception& error) {
    log(LogLevel::kWarn, cat("not every host is known to be done: ", error.what()));
  }
}

}  // namespace lockstep::launch
