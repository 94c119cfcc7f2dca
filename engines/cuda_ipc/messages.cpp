// Sends and receives on the progress thread. The receiver takes a message out of the sender's table and copies it.
#include <algorithm>

#include "engines/cuda_ipc/communicator.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/plugin.h"

namespace lockstep::cuda_ipc {

bool Communicator::serve_sends() {
  bool moved = false;
  for (auto at = sends_.begin(); at != sends_.end();) {
    const OperationPtr send = *at;
    Message& message = page_->message(rank_, send->slot);
    if (ControlPage::number_in(page_->message_done(rank_, send->slot)) >= send->number) {
      message.state.store(Message::kFree, std::memory_order_release);
      at = sends_.erase(at);
      complete(*send, nullptr);
      moved = true;
      continue;
    }
    if (send->phase.load(std::memory_order_relaxed) == Operation::kPosted &&
        message.submitted.load(std::memory_order_acquire) >= send->number)
      submitted(*send);
    ++at;
  }
  return moved;
}

// In the order posted: of two receives for one message the earlier gets it.
bool Communicator::serve_receives() {
  bool moved = false;
  // What all receives may see in this pass: otherwise a later one could find a message that an earlier one just missed.
  for (int r = 0; !receives_.empty() && r < size_; ++r)
    published_[static_cast<std::size_t>(r)] = page_->rank(r).published.load(std::memory_order_acquire);
  for (auto at = receives_.begin(); at != receives_.end() && !page_->broken();) {
    const OperationPtr receive = *at;
    if (receive->source < 0) moved = match(*receive) || moved;
    if (receive->source >= 0 && !receive->launched) moved = launch_receive(*receive) || moved;
    if (receive->launched &&
        ControlPage::number_in(page_->message_done(receive->source, receive->slot)) >= receive->number) {
      at = receives_.erase(at);
      complete(*receive, nullptr);
      moved = true;
    } else {
      ++at;
    }
  }
  return moved;
}

bool Communicator::match(Operation& receive) {
  if (receive.op.root >= 0) return match_from(receive, receive.op.root);
  for (int r = 0; r < size_; ++r) {
    if (match_from(receive, r)) return true;
  }
  return false;
}

// The oldest message of that rank for this receive, of those that were published before the pass: a later one may already
// be visible when an earlier one, in a slot that was passed, was not.
bool Communicator::match_from(Operation& receive, int source) {
  const std::uint64_t published = published_[static_cast<std::size_t>(source)];
  receive.searched.resize(static_cast<std::size_t>(size_));
  std::uint64_t& searched = receive.searched[static_cast<std::size_t>(source)];
  if (searched == published) return false;
  std::optional<std::size_t> oldest;
  for (std::size_t slot = 0; slot < kMessages; ++slot) {
    const Message& message = page_->message(source, slot);
    if (message.state.load(std::memory_order_acquire) != Message::kPosted || message.to != rank_ ||
        message.tag != receive.op.tag || message.number > published)
      continue;
    if (!oldest || message.number < page_->message(source, *oldest).number) oldest = slot;
  }
  if (!oldest) {
    searched = published;
    return false;
  }
  return take_message(receive, source, *oldest);
}

bool Communicator::take_message(Operation& receive, int source, std::size_t slot) {
  Message& message = page_->message(source, slot);
  std::uint32_t posted = Message::kPosted;
  // Fails when the sender has withdrawn it meanwhile.
  if (!message.state.compare_exchange_strong(posted, Message::kTaken, std::memory_order_acq_rel))
    return false;
  receive.source = source;
  receive.slot = slot;
  receive.number = message.number;
  if (message.dtype == static_cast<std::uint32_t>(receive.op.dtype) && message.count == receive.op.count)
    return true;
  break_with({.kind = ErrorKind::kUsage,
              .message = base::cat("rank ", source, " called ", describe(message), ", but rank ", rank_,
                                   " called ", describe(receive.op))});
  return true;
}

// When both streams have reached their posts.
bool Communicator::launch_receive(Operation& receive) {
  Message& message = page_->message(receive.source, receive.slot);
  if (page_->message_ready(receive.source, receive.slot).load(std::memory_order_acquire) != receive.number ||
      !has_reached(receive) || page_->broken())
    return false;
  Word& done = page_->message_done(receive.source, receive.slot);
  const std::uint64_t n_bytes = receive.recv_bytes();
  if (n_bytes == 0) {
    ControlPage::put_number(done, receive.number);
  } else {
    DeviceState& device = *receive.device;
    const void* const from = locate(device, receive.source, message.device, message.send, n_bytes);
    const cuda::ContextScope scope(device.context());
    for (const Launch& launch : plan_copy(from, receive.op.recv, n_bytes)) device.launch(launch);
    page_->enqueue_own_write(device.stream(), done, receive.number);
  }
  message.submitted.store(receive.number, std::memory_order_release);
  receive.launched = true;
  if (receive.op.source != nullptr) *receive.op.source = receive.source;
  submitted(receive);
  return true;
}

// The peer has left and will not take part. It may have done its part just before: the caller looks at that first.
bool Communicator::is_abandoned(const Operation& message) {
  const int peer = message.op.root;
  if (message.op.kind == LOCKSTEP_RECV && message.source >= 0) return false;
  if (peer >= 0) return peer != rank_ && has_left(peer);
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && !has_left(r)) return false;
  }
  return size_ > 1;
}

std::optional<Failure> Communicator::late_message(const Operation& operation) {
  const int peer = operation.op.root;
  const std::string whom = peer < 0 ? std::string("any rank") : who(peer);
  if (is_abandoned(operation)) {
    Failure failure{.kind = ErrorKind::kPeerLost,
                    .message = base::cat(peer < 0 ? "every other rank" : whom, " left the group while rank ",
                                         rank_, " was in ", describe(operation.op)),
                    .peer = LostPeer{.cause = "left the group"}};
    if (peer >= 0) failure.peer = LostPeer{peer, pid(peer), "left the group"};
    return failure;
  }
  if (!operation.deadline.expired()) return std::nullopt;
  return Failure{.kind = ErrorKind::kTimeout,
                 .message = base::cat("rank ", rank_, " ran out of time in ", describe(operation.op),
                                      ": it waits for ", whom)};
}

// One that no peer has taken and no stream waits for fails alone.
void Communicator::check_messages(std::list<OperationPtr>& list) {
  for (auto at = list.begin(); at != list.end();) {
    const OperationPtr operation = *at;
    const auto next = std::next(at);
    if (auto failure = late_message(*operation)) {
      if (!operation->in_stream.load(std::memory_order_acquire) && withdraw(*operation)) {
        list.erase(at);
        complete(*operation, &*failure);
      } else if (failure->kind == ErrorKind::kTimeout ||
                 operation->in_stream.load(std::memory_order_acquire)) {
        break_with(std::move(*failure));
      }
    }
    at = next;
  }
}

bool Communicator::withdraw(Operation& operation) {
  if (operation.op.kind == LOCKSTEP_RECV) return operation.source < 0;
  if (operation.deferred && !operation.published) {
    n_deferred_sends_.fetch_sub(1, std::memory_order_relaxed);
    return true;
  }
  std::uint32_t posted = Message::kPosted;
  if (!page_->message(rank_, operation.slot)
           .state.compare_exchange_strong(posted, Message::kFree, std::memory_order_acq_rel))
    return false;
  // Streams that wait for it go on.
  ControlPage::put_number(page_->message_done(rank_, operation.slot), operation.number);
  return true;
}

}  // namespace lockstep::cuda_ipc
