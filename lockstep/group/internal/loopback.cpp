#include "lockstep/group/internal/loopback.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "lockstep/base/detail/text.h"
#include "lockstep/engine/plugin.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/internal/copy_bytes.h"

namespace lockstep::internal {

struct SelfMessage {
  lockstep_op op;
  lockstep_status status = LOCKSTEP_PENDING;
  std::string error;
};

// Shared by the group and every handle, so that a handle may outlive the group.
struct Loopback::Box {
  std::mutex mutex;
  std::condition_variable changed;
  std::list<std::shared_ptr<SelfMessage>> waiting;  // guarded by mutex, as is every SelfMessage
};

namespace {

// What a lockstep_handle of ours points to.
struct Handle {
  std::shared_ptr<Loopback::Box> box;
  std::shared_ptr<SelfMessage> message;
};

Handle* of(lockstep_handle* handle) {
  return reinterpret_cast<Handle*>(handle);
}

void end(SelfMessage& message, lockstep_status status, std::string error = "") {
  message.status = status;
  message.error = std::move(error);
}

// The two are a send and a receive of one tag.
void meet(SelfMessage& one, SelfMessage& other) {
  const bool first_sends = one.op.kind == LOCKSTEP_SEND;
  auto& from = first_sends ? one : other;
  auto& to = first_sends ? other : one;
  if (from.op.count != to.op.count || from.op.dtype != to.op.dtype) {
    const auto text =
        base::cat("a message of ", from.op.count, " elements (", comm::size_of(from.op.dtype),
                  " bytes each) met a receive of ", to.op.count, " (", comm::size_of(to.op.dtype),
                  " bytes each); both sides must name the same type and number");
    end(from, LOCKSTEP_USAGE, text);
    return end(to, LOCKSTEP_USAGE, text);
  }
  if (from.op.count > 0)
    copy_bytes(to.op.recv, from.op.send, from.op.count * comm::size_of(from.op.dtype), to.op);
  // The first of the two may have been posted in another stream, which only the host can order here; messages to
  // oneself are not worth more.
  await_copies(to.op);
  // This rank, as a rank of the group of one.
  if (to.op.source != nullptr) *to.op.source = 0;
  end(from, LOCKSTEP_OK);
  end(to, LOCKSTEP_OK);
}

// The box's mutex is held. There is no thread that could end it in time: whoever looks finds that the
// deadline has passed.
void expire(Handle& handle) {
  auto& message = *handle.message;
  if (message.status != LOCKSTEP_PENDING || !Deadline::from_monotonic_ns(message.op.deadline_ns).expired())
    return;
  std::erase(handle.box->waiting, handle.message);
  const bool sends = message.op.kind == LOCKSTEP_SEND;
  end(message, LOCKSTEP_TIMEOUT,
      base::cat("timed out: no ", sends ? "receive" : "send", " with tag ", message.op.tag,
                " to this rank itself was started"));
}

lockstep_status test(lockstep_handle* handle) {
  const std::lock_guard lock(of(handle)->box->mutex);
  expire(*of(handle));
  return of(handle)->message->status;
}

lockstep_status wait(lockstep_handle* handle, int64_t deadline_ns) {
  auto& [box, message] = *of(handle);
  std::unique_lock lock(box->mutex);
  const auto deadline = Deadline::from_monotonic_ns(std::min(deadline_ns, message->op.deadline_ns));
  while (message->status == LOCKSTEP_PENDING) {
    expire(*of(handle));
    if (message->status != LOCKSTEP_PENDING) break;
    if (deadline.expired()) return LOCKSTEP_TIMEOUT;
    box->changed.wait_until(lock, deadline.time_point());
  }
  return message->status;
}

void release(lockstep_handle* handle) {
  delete of(handle);
}

void last_error(lockstep_handle* handle, char* error, size_t capacity) {
  const std::lock_guard lock(of(handle)->box->mutex);
  std::snprintf(error, capacity, "%s", of(handle)->message->error.c_str());
}

// All an OpHandle calls.
const lockstep_engine& table() {
  static const lockstep_engine entries = [] {
    lockstep_engine made{};
    made.struct_size = sizeof made;
    made.test = test;
    made.wait = wait;
    made.release = release;
    made.last_error = last_error;
    // The copy is over when both have come (meet).
    made.stream_wait = [](lockstep_handle* handle, void*) { return wait(handle, LOCKSTEP_NEVER); };
    return made;
  }();
  return entries;
}

}  // namespace

Loopback::Loopback() : box_(std::make_shared<Box>()) {}

// The first of a pair waits in the list; the second copies and ends both. Pairs of one tag meet in the order
// posted.
comm::OpHandle Loopback::post(const lockstep_op& op) {
  await_copies(op);  // what the caller enqueued before it
  auto message = std::make_shared<SelfMessage>(SelfMessage{.op = op});
  const std::lock_guard lock(box_->mutex);
  const auto found = std::ranges::find_if(
      box_->waiting, [&](const auto& other) { return other->op.kind != op.kind && other->op.tag == op.tag; });
  if (found == box_->waiting.end()) {
    box_->waiting.push_back(message);
  } else {
    meet(**found, *message);
    box_->waiting.erase(found);
    box_->changed.notify_all();
  }
  auto* handle = new Handle{box_, std::move(message)};
  return {&table(), reinterpret_cast<lockstep_handle*>(handle)};
}

void Loopback::abort(const std::string& reason) {
  const std::lock_guard lock(box_->mutex);
  for (const auto& message : box_->waiting) end(*message, LOCKSTEP_ABORTED, reason);
  box_->waiting.clear();
  box_->changed.notify_all();
}

}  // namespace lockstep::internal
