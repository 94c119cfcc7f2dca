#include "lockstep/hierarchy/internal/sub_communicator.h"

#include <algorithm>
#include <charconv>
#include <cstddef>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/detail/table_calls.h"

namespace lockstep::comm::hierarchy {
namespace {

// Separates the fields of a reason. No message contains it, and engines pass the text of an abort through
// unchanged.
constexpr char kMark = '\x1f';  // ASCII's unit separator
// Where starters publish how a rank ended (process/job_server.cpp).
constexpr std::string_view kExit = "/lockstep/exit/";

// Removes and returns what is before the next mark.
std::string_view take(std::string_view& text) {
  const auto end = text.find(kMark);
  const auto field = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return field;
}

std::int64_t number(std::string_view text) {
  std::int64_t value = -1;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

}  // namespace

// An abort carries text only. The last mark ends the message where the engine appends text of its own.
//
//   mark status mark rank mark pid mark cause mark message mark
//
// Ranks are those of the whole group: from_reason() runs in another sub-communicator, with other numbers.
std::string to_reason(const Failure& failure) {
  const LostPeer peer = failure.peer.value_or(LostPeer{});
  return base::cat(kMark, static_cast<int>(status_of(failure.kind)), kMark, peer.rank.value_or(-1), kMark,
                   peer.pid.value_or(-1), kMark, peer.cause, kMark, failure.message, kMark);
}

std::optional<Failure> from_reason(std::string_view text) {
  const auto begin = text.find(kMark);
  if (begin == std::string_view::npos) return std::nullopt;
  text.remove_prefix(begin + 1);
  Failure failure{.family = ErrorFamily::kBackend};
  failure.kind = kind_of(static_cast<lockstep_status>(number(take(text))));
  const auto rank = static_cast<std::int32_t>(number(take(text)));
  const auto pid = number(take(text));
  // take() must be called for every field in order, also for those that are not used.
  LostPeer peer = lost_peer(rank, pid, std::string(take(text)));
  failure.message = std::string(take(text));
  if (failure.kind == ErrorKind::kPeerLost) failure.peer = std::move(peer);
  return failure;
}

// The key-value space of the sub-communicator, inside that of the group. How a rank ended is published under
// its rank in the group; the sub-communicator asks with its own numbering.
struct SubCommunicator::Space {
  const lockstep_host* base;
  std::string prefix;
  const std::vector<int>* members;
  lockstep_host host;

  std::string key_of(const char* key) const {
    // Keys that begin with a slash are not the communicator's own: those of the launcher, which are the same
    // for all groups.
    if (*key != '/') return prefix + key;
    const std::string_view text(key);
    if (!text.starts_with(kExit)) return key;
    const std::int64_t rank = number(text.substr(kExit.size()));
    if (rank < 0 || rank >= static_cast<std::int64_t>(members->size())) return key;
    return base::cat(kExit, (*members)[static_cast<std::size_t>(rank)]);
  }
  static lockstep_status set(void* self, const char* key, const void* value, size_t length) {
    const auto* space = static_cast<Space*>(self);
    return space->base->kv_set(space->base->context, space->key_of(key).c_str(), value, length);
  }
  static lockstep_status get(void* self, const char* key, void* value, size_t capacity, size_t* length,
                             int64_t deadline_ns) {
    const auto* space = static_cast<Space*>(self);
    return space->base->kv_get(space->base->context, space->key_of(key).c_str(), value, capacity, length,
                               deadline_ns);
  }
  static void log(void* self, int level, const char* text) {
    const auto* space = static_cast<Space*>(self);
    if (space->base->log != nullptr) space->base->log(space->base->context, level, text);
  }
};

SubCommunicator::SubCommunicator(const Engine& engine, const lockstep_comm_config& whole, std::string space,
                                 std::vector<int> members, const Parent& parent)
    : engine_(engine), name_(std::move(space)), members_(std::move(members)) {
  space_ = std::make_unique<Space>(
      Space{.base = whole.host, .prefix = name_ + "/", .members = &members_, .host = {}});
  // context points to the Space itself, which therefore must not move: it is on the heap and lives as long as
  // the engine's communicator, whose threads may call these functions at any time.
  space_->host = {.struct_size = sizeof(lockstep_host),
                  .context = space_.get(),
                  .log = whole.host->log == nullptr ? nullptr : Space::log,
                  .kv_set = Space::set,
                  .kv_get = Space::get};
  const std::string name = base::cat(whole.name != nullptr ? whole.name : "", ", ", name_);
  // The key of the group tells the engine's sub-communicators of different groups apart, the name which of
  // one group's.
  const bool keyed = whole.struct_size > offsetof(lockstep_comm_config, key) && whole.key != nullptr;
  const std::string key = keyed ? base::cat(whole.key, ", ", name_) : std::string();
  const lockstep_comm_config config{.struct_size = sizeof(config),
                                    .host = &space_->host,
                                    .rank = rank_of(whole.rank),
                                    .size = static_cast<std::int32_t>(members_.size()),
                                    .name = name.c_str(),
                                    .deadline_ns = whole.deadline_ns,
                                    .parent = parent.comm,
                                    .parent_ranks = parent.comm != nullptr ? parent.ranks.data() : nullptr,
                                    .engine = engine.given(),
                                    .key = key.empty() ? nullptr : key.c_str()};
  char text[kErrorCapacity] = "";
  const auto status = table().comm_create(&config, &comm_, text, sizeof text);
  text[sizeof text - 1] = '\0';
  if (status == LOCKSTEP_OK && comm_ != nullptr) return;
  base::raise(status == LOCKSTEP_OK ? ErrorKind::kInternal : kind_of(status),
              base::cat("engine ", engine.name(), " could not join its sub-communicator (", name_,
                        ") as rank ", config.rank, " of ", config.size, ": ", text),
              ErrorFamily::kBackend);
}

SubCommunicator::~SubCommunicator() {
  table().comm_destroy(comm_, nullptr);
}

// size() for a rank that is no member.
int SubCommunicator::rank_of(int whole_rank) const {
  return static_cast<int>(std::ranges::find(members_, whole_rank) - members_.begin());
}

std::optional<Failure> SubCommunicator::failure() const {
  char text[kErrorCapacity] = "", cause[kErrorCapacity] = "";
  std::int32_t rank = -1;
  std::int64_t pid = -1;
  const auto status = table().comm_failure(comm_, text, sizeof text, &rank, &pid, cause, sizeof cause);
  if (status == LOCKSTEP_OK) return std::nullopt;
  text[sizeof text - 1] = cause[sizeof cause - 1] = '\0';
  Failure failure = explain(status, text);
  // Already there when the failure came through from_reason(): then the number is the group's. Here it is the
  // engine's, and is translated.
  if (failure.kind == ErrorKind::kPeerLost && !failure.peer && rank >= 0 &&
      rank < static_cast<int>(members_.size())) {
    const int whole = members_[static_cast<std::size_t>(rank)];
    failure.peer = lost_peer(whole, pid, cause);
    failure.message = base::cat("rank ", whole, pid < 0 ? "" : base::cat(" (pid ", pid, ")"),
                                " is lost: ", cause, "; ", failure.message);
  }
  return failure;
}

// Engines name ranks as they know them. Where the numbers differ from the group's, the message says what they
// mean instead of being rewritten: its text is the engine's.
Failure SubCommunicator::explain(lockstep_status status, std::string text) const {
  if (auto told = from_reason(text)) return *told;
  bool same = true;
  std::string names;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    same = same && members_[i] == static_cast<int>(i);
    names += base::cat(i == 0 ? "" : ", ", "rank ", members_[i]);
  }
  if (!same)
    text += base::cat(" (ranks are those of the sub-communicator ", name_, ": ", names, " of the group)");
  return {.kind = kind_of(status), .message = std::move(text), .family = ErrorFamily::kBackend};
}

void SubCommunicator::abort(const Failure& failure) const {
  table().comm_abort(comm_, to_reason(failure).c_str());
}

void SubCommunicator::leave(const char* cause) const {
  if (table().comm_leave != nullptr) return table().comm_leave(comm_, cause);
  // No rank may be left waiting for one that gave up.
  if (cause != nullptr) table().comm_abort(comm_, cause);
}

}  // namespace lockstep::comm::hierarchy
