// How a communicator breaks, and how ranks tell a peer that left from one that gave up or died.
#include <algorithm>
#include <system_error>
#include <thread>

#include "engines/gloo/communicator.h"

namespace lockstep::gloo_plugin {
namespace {

constexpr char kSeparator = '\x1f';
// The launcher notices an exit a moment after the sockets closed, and publishes it then.
constexpr std::int64_t kPatienceMs = 300;
// Every rank detects a dead one by itself. A quick rank must not shut its connections down before the others
// have: to them it would look like the one that hung up.
constexpr std::chrono::milliseconds kOthersSee{50};
constexpr std::int64_t kFlushMs = 2000;

// `joined`: whether the rank that publishes it had joined the group.
std::string pack(const Failure& failure, bool joined) {
  return cat(joined ? 1 : 0, kSeparator, static_cast<int>(failure.status), kSeparator, failure.peer,
             kSeparator, failure.pid, kSeparator, failure.cause, kSeparator, failure.message);
}

// Written by another rank: numbers are clamped to what the ABI knows, missing fields stay empty.
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
  std::getline(in, failure.message, '\0');
  failure.status = static_cast<lockstep_status>(std::clamp(number_in<int>(status), 2, 9));
  failure.peer = number_in<int>(peer);
  failure.pid = number_in<std::int64_t>(pid);
  return failure;
}

}  // namespace

std::string Communicator::who(int peer) const {
  if (peer < 0) return "any rank";
  return cat("rank ", peer, " (pid ", members_[static_cast<std::size_t>(peer)].pid, ")");
}

// May be called by any thread, also the watch's, and under its lock: what blocks (the store) is done by a
// task.
void Communicator::break_with(Failure failure) {
  if (!stop_source_.break_with(failure)) return;
  end_messages_to_self();
  try {
    spawn([this, failure] { tear_down(failure); });
  } catch (...) {
    for (const auto& connections : connections_) connections->shut_down();
  }
}

// Published before the connections are shut down: a rank that notices the hang-up finds the reason.
// close_pairs() comes last, since it may take 10 ms for each pair.
void Communicator::tear_down(const Failure& failure) {
  try {
    write(cat("broken/", rank_), pack(failure, connected_));
  } catch (const Error&) {
    // The store is gone: the others still notice that we hung up.
  }
  if (failure.status == LOCKSTEP_PEER_LOST && failure.peer != rank_) std::this_thread::sleep_for(kOthersSee);
  for (const auto& connections : connections_) connections->shut_down();
  for (const auto& connections : connections_) connections->close_pairs();
}

void Communicator::abort(const std::string& reason) {
  break_with({.status = LOCKSTEP_ABORTED, .message = cat("rank ", rank_, " aborted the group: ", reason)});
}

// "left/<rank>" is written before the connections end, so that the others do not take the hang-up for a loss.
// Runs on a task: writing to the store and flushing may block.
void Communicator::leave(const char* cause) {
  if (left_.exchange(true)) return;
  const bool closed =
      stop_source_.close({.status = LOCKSTEP_ABORTED, .message = "this rank has left the group"});
  end_messages_to_self();  // also where the group broke before and there was no thread for it
  if (!closed) return;
  Failure mine{.status = LOCKSTEP_PEER_LOST,
               .message = "",
               .peer = rank_,
               .pid = -1,
               .cause = cause != nullptr ? cause : ""};
  mine.pid = members_[static_cast<std::size_t>(rank_)].pid;
  mine.message = cat(who(rank_), " is gone: ", mine.cause);
  const auto go = [this, mine, orderly = cause == nullptr] {
    try {
      if (size_ > 1)
        orderly ? write(cat("left/", rank_), "") : write(cat("broken/", rank_), pack(mine, connected_));
    } catch (const Error&) {
      // As in tear_down.
    }
    // What was sent must have arrived before a late message of a peer makes the kernel reset the connection.
    const std::int64_t patience = after_ms(kFlushMs);
    const auto flushed = [](const auto& connections) { return connections->flushed(); };
    while (!std::ranges::all_of(connections_, flushed) && now_ns() < patience) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (const auto& connections : connections_) connections->shut_down();
    if (!connected_) {
      for (const auto& connections : connections_) connections->close_pairs();
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
  return "it has not begun, since operations posted before it are not complete";
}

// On the watch's thread. One late operation breaks the whole group: its peers have matched it, or wait for
// it, and cannot go on.
void Communicator::timed_out(const Operation& operation) {
  break_with({.status = LOCKSTEP_TIMEOUT,
              .message = cat("rank ", rank_, " ran out of time in ", context(operation), ": ",
                             waits_for(operation))});
}

void Communicator::hung_up(int peer) {
  if (stop_source_.stop()) return;
  try {
    spawn([this, peer] { judge(peer); });
  } catch (const std::exception&) {
    break_with({.status = LOCKSTEP_PEER_LOST,
                .message = cat(who(peer), " hung up"),
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

//   connection ended --"left/p" in the store-----------> kLeft
//                    --"broken/p"----------------------> kBroken, with that rank's own reason
//                    --"/lockstep/exit/p" by a launcher-> kBroken: the process ended, and how
//                    --nothing within 300 ms-----------> kBroken, cause unknown
//
// Blocks for as long as that; never called on the watch's thread, nor under a lock other than connect_mutex_.
Communicator::Verdict Communicator::judge(int peer) {
  const Member& member = members_[static_cast<std::size_t>(peer)];
  const std::int64_t patience = after_ms(kPatienceMs);
  std::string cause;
  while (cause.empty()) {
    if (stop_source_.stop()) return Verdict::kBroken;
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
    if (const auto text = look(cat("/lockstep/exit/", peer), &published)) cause = *text;
    // Anything the peer itself published was there before its sockets closed.
    if (cause.empty() && (!published || now_ns() > patience)) cause = "gone, cause unknown";
    if (cause.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  break_with({.status = LOCKSTEP_PEER_LOST,
              .message = cat(who(peer), " is lost: ", cause),
              .peer = peer,
              .pid = member.pid,
              .cause = cause});
  return Verdict::kBroken;
}

// The count and the look at wait_for_any_ are not one step. A receive that begins in between is covered by
// receive_from_any(), which counts itself first and then looks at gone_.
void Communicator::note_gone(int peer) {
  bool nobody = false;
  {
    const base::MutexLock lock(mutex_);
    gone_[static_cast<std::size_t>(peer)] = true;
    nobody = std::ranges::count(gone_, true) == size_ - 1;
  }
  // gloo ends what waits for one peer by itself, but not what waits for any.
  if (nobody && wait_for_any_ > 0) break_with(nobody_left(peer));
}

Failure Communicator::nobody_left(int peer) const {
  return {
      .status = LOCKSTEP_PEER_LOST,
      .message = cat("every other rank has left the group while rank ", rank_, " waits to receive from any"),
      .peer = peer,
      .pid = members_[static_cast<std::size_t>(peer)].pid,
      .cause = "left the group"};
}

// gloo's own text is used only when no hang-up explains the failure: it names a socket, not a rank or a
// cause.
Failure Communicator::failure_of(const PairFailed& failed, const Operation& operation) {
  if (auto stop = stop_source_.stop()) return *stop;
  const int peer = failed.peer;
  const bool hung_up = peer >= 0 && std::ranges::any_of(connections_, [&](auto& connections) {
                         return connections->hung_up(peer);
                       });
  if (!hung_up) {
    return {.status = LOCKSTEP_SYSTEM,
            .message = cat(context(operation), ": gloo failed with ", failed.message)};
  }
  if (judge(peer) == Verdict::kBroken) return stop_source_.stop().value_or(Failure{});
  return {.status = LOCKSTEP_PEER_LOST,
          .message = cat(who(peer), " left the group while rank ", rank_, " was in ", context(operation)),
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
    return {.status = LOCKSTEP_RESOURCE, .message = cat("no memory for ", context(operation))};
  } catch (const std::system_error& error) {
    return {.status = LOCKSTEP_RESOURCE, .message = cat(context(operation), ": ", error.what())};
  } catch (const std::exception& error) {
    return {.status = LOCKSTEP_INTERNAL, .message = cat(context(operation), ": ", error.what())};
  }
}

}  // namespace lockstep::gloo_plugin
