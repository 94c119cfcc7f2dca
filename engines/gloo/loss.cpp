// How a communicator breaks, and how ranks tell a peer that left from one that gave up or died.
#include <algorithm>
#include <system_error>
#include <thread>

#include "engines/gloo/communicator.h"

namespace lockstep::gloo_plugin {
namespace {

constexpr char kSeparator = '\x1f';
// The launcher sees an exit a moment after the sockets closed, and tells then.
constexpr std::int64_t kPatienceMs = 300;
// Every rank sees a dead one by itself; those that are quick must not look like the ones that hung up.
constexpr std::chrono::milliseconds kOthersSee{50};
constexpr std::int64_t kFlushMs = 2000;

// `joined`: whether the rank that tells it had joined the group.
std::string pack(const Failure& failure, bool joined) {
  return cat(joined ? 1 : 0, kSeparator, static_cast<int>(failure.status), kSeparator, failure.peer,
             kSeparator, failure.pid, kSeparator, failure.cause, kSeparator, failure.words);
}

Failure unpack(const std::string& text, bool& joined) {
  std::istringstream in(text);
  std::string by, status, peer, pid;
  Failure failure;
  std::getline(in, by, kSeparator);
  joined = by == "1";
  std::getline(in, status, kSeparator);
  std::getline(in, peer, kSeparator);
  std::getline(in, pid, kSeparator);
  std::getline(in, failure.cause, kSeparator);
  std::getline(in, failure.words, '\0');
  failure.status = static_cast<lockstep_status>(std::clamp(std::atoi(status.c_str()), 2, 9));
  failure.peer = std::atoi(peer.c_str());
  failure.pid = std::atoll(pid.c_str());
  return failure;
}

}  // namespace

std::string Communicator::who(int peer) const {
  if (peer < 0) return "any rank";
  return cat("rank ", peer, " (pid ", members_[static_cast<std::size_t>(peer)].pid, ")");
}

void Communicator::break_with(Failure failure) {
  if (!bond_.break_with(failure)) return;
  end_messages_to_self();
  try {
    spawn([this, failure] { tear_down(failure); });
  } catch (...) {
    for (const auto& mesh : meshes_) mesh->shut_down();
  }
}

void Communicator::tear_down(const Failure& failure) {
  try {
    write(cat("broken/", rank_), pack(failure, connected_));
  } catch (const Error&) {
    // The store is gone: the others see us hang up all the same.
  }
  if (failure.status == LOCKSTEP_PEER_LOST && failure.peer != rank_) std::this_thread::sleep_for(kOthersSee);
  for (const auto& mesh : meshes_) mesh->shut_down();
  for (const auto& mesh : meshes_) mesh->close_pairs();
}

void Communicator::abort(const std::string& reason) {
  break_with({.status = LOCKSTEP_ABORTED, .words = cat("rank ", rank_, " aborted the group: ", reason)});
}

void Communicator::leave(const char* cause) {
  if (left_.exchange(true)) return;
  if (!bond_.close({.status = LOCKSTEP_ABORTED, .words = "this rank has left the group"})) return;
  end_messages_to_self();
  Failure mine{.status = LOCKSTEP_PEER_LOST,
               .words = "",
               .peer = rank_,
               .pid = -1,
               .cause = cause != nullptr ? cause : ""};
  mine.pid = members_[static_cast<std::size_t>(rank_)].pid;
  mine.words = cat(who(rank_), " is gone: ", mine.cause);
  const auto go = [this, mine, orderly = cause == nullptr] {
    try {
      if (size_ > 1)
        orderly ? write(cat("left/", rank_), "") : write(cat("broken/", rank_), pack(mine, connected_));
    } catch (const Error&) {
      // As in tear_down.
    }
    // What was sent must have arrived before a late word of a peer makes the kernel reset the connection.
    const std::int64_t patience = after_ms(kFlushMs);
    const auto flushed = [](const auto& mesh) { return mesh->flushed(); };
    while (!std::ranges::all_of(meshes_, flushed) && now_ns() < patience) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (const auto& mesh : meshes_) mesh->shut_down();
    if (!connected_) {
      for (const auto& mesh : meshes_) mesh->close_pairs();
    }
  };
  try {
    spawn(go);
  } catch (...) {
    go();
  }
}

std::string Communicator::waits_for(const Operation& operation) const {
  if (operation.begun) return cat("it waits for ", who(operation.waits_for));
  if (!connected_) return cat("it waits for ", who(connecting_to_), " to connect");
  return "it has not begun, what was posted before it is not over";
}

void Communicator::timed_out(const Operation& operation) {
  break_with(
      {.status = LOCKSTEP_TIMEOUT,
       .words = cat("rank ", rank_, " ran out of time in ", context(operation), ": ", waits_for(operation))});
}

void Communicator::hung_up(int peer) {
  if (bond_.stop()) return;
  try {
    spawn([this, peer] { judge(peer); });
  } catch (const std::exception&) {
    break_with({.status = LOCKSTEP_PEER_LOST,
                .words = cat(who(peer), " hung up"),
                .peer = peer,
                .cause = "hung up"});
  }
}

std::optional<std::string> Communicator::look(const std::string& key, bool* published) {
  std::string value(2048, '\0');
  std::size_t length = 0;
  const auto status = host_->kv_get(host_->context, key.c_str(), value.data(), value.size(), &length, 0);
  if (published != nullptr) *published = status != LOCKSTEP_UNSUPPORTED;
  if (status != LOCKSTEP_OK) return {};
  value.resize(std::min(length, value.size()));
  return value;
}

Communicator::Verdict Communicator::judge(int peer) {
  const Member& member = members_[static_cast<std::size_t>(peer)];
  const std::int64_t patience = after_ms(kPatienceMs);
  std::string cause;
  while (cause.empty()) {
    if (bond_.stop()) return Verdict::kBroken;
    if (look(cat("left/", peer))) {
      note_gone(peer);
      return Verdict::kLeft;
    }
    if (const auto text = look(cat("broken/", peer))) {
      bool joined = false;
      Failure failure = unpack(*text, joined);
      if (joined) all_joined_ = true;
      break_with(std::move(failure));
      return Verdict::kBroken;
    }
    bool published = true;
    if (const auto words = look(cat("/lockstep/exit/", peer), &published)) cause = *words;
    // What the peer itself had to say it said before its sockets closed.
    if (cause.empty() && (!published || now_ns() > patience)) cause = "gone, cause unknown";
    if (cause.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  break_with({.status = LOCKSTEP_PEER_LOST,
              .words = cat(who(peer), " is lost: ", cause),
              .peer = peer,
              .pid = member.pid,
              .cause = cause});
  return Verdict::kBroken;
}

void Communicator::note_gone(int peer) {
  bool nobody = false;
  {
    const std::lock_guard lock(mutex_);
    gone_[static_cast<std::size_t>(peer)] = true;
    nobody = std::ranges::count(gone_, true) == size_ - 1;
  }
  // gloo ends what waits for one peer by itself, but not what waits for any.
  if (nobody && wait_for_any_ > 0) break_with(nobody_left(peer));
}

Failure Communicator::nobody_left(int peer) const {
  return {
      .status = LOCKSTEP_PEER_LOST,
      .words = cat("every other rank has left the group while rank ", rank_, " waits to receive from any"),
      .peer = peer,
      .pid = members_[static_cast<std::size_t>(peer)].pid,
      .cause = "left the group"};
}

Failure Communicator::failure_of(const PairFailed& failed, const Operation& operation) {
  if (auto stop = bond_.stop()) return *stop;
  const int peer = failed.peer;
  const bool hung_up =
      peer >= 0 && std::ranges::any_of(meshes_, [&](auto& mesh) { return mesh->hung_up(peer); });
  if (!hung_up) {
    return {.status = LOCKSTEP_SYSTEM, .words = cat(context(operation), ": gloo failed with ", failed.words)};
  }
  if (judge(peer) == Verdict::kBroken) return bond_.stop().value_or(Failure{});
  return {.status = LOCKSTEP_PEER_LOST,
          .words = cat(who(peer), " left the group while rank ", rank_, " was in ", context(operation)),
          .peer = peer,
          .pid = members_[static_cast<std::size_t>(peer)].pid,
          .cause = "left the group"};
}

Failure Communicator::current_failure(const Operation& operation) {
  try {
    throw;
  } catch (const Error& error) {
    return error.failure();
  } catch (const PairFailed& failed) {
    return failure_of(failed, operation);
  } catch (const std::bad_alloc&) {
    return {.status = LOCKSTEP_RESOURCE, .words = cat("no memory for ", context(operation))};
  } catch (const std::system_error& error) {
    return {.status = LOCKSTEP_RESOURCE, .words = cat(context(operation), ": ", error.what())};
  } catch (const std::exception& error) {
    return {.status = LOCKSTEP_INTERNAL, .words = cat(context(operation), ": ", error.what())};
  }
}

}  // namespace lockstep::gloo_plugin
