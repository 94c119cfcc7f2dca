// SEND and RECV. A message begins with the sender's call and, when it is small, holds the payload; a large
// one follows under a number of its own, once the receiver has seen that both calls fit. gloo keeps messages
// of one sender and tag in order.
#include <algorithm>
#include <cstring>

#include "engines/gloo/communicator.h"

namespace lockstep::gloo_plugin {

// Pre: connected.
void Communicator::start(Operation& operation) {
  const lockstep_op& op = operation.op;
  const std::size_t n_bytes = op.count * size_of(op.dtype), small = n_bytes <= kInline ? n_bytes : 0;
  operation.call = describe(op, 0, size_);
  if (op.kind == LOCKSTEP_SEND) {
    operation.call.for_you = n_bytes;
    // Counted per receiver, under start_mutex_: a number is never used twice between two ranks, so a payload
    // cannot be taken for that of another message.
    operation.call.data_slot = ++data_slots_[static_cast<std::size_t>(op.root)];
  }
  operation.begun = true;
  Connections& connections = *connections_[static_cast<std::size_t>(op.tag) % connections_.size()];
  const std::uint64_t slot = kTagSlot | static_cast<std::uint64_t>(op.tag);
  // The receiver does not know yet which kind of message comes: it posts room for a call and the largest
  // small payload.
  if (op.kind == LOCKSTEP_RECV) {
    operation.message.resize(kMessage);
    operation.head =
        std::make_unique<Transfer>(stop_source_, connections, operation.message.data(), kMessage);
    op.root < 0 ? operation.head->recv_from_any(size_, rank_, slot)
                : operation.head->recv(op.root, slot, 0, kMessage);
    return;
  }
  operation.message.resize(sizeof(CallHeader) + small);
  std::memcpy(operation.message.data(), &operation.call, sizeof(CallHeader));
  if (small > 0) std::memcpy(operation.message.data() + sizeof(CallHeader), op.send, small);
  operation.head = std::make_unique<Transfer>(stop_source_, connections, operation.message.data(),
                                              operation.message.size());
  operation.head->send(op.root, slot, 0, operation.message.size());
  if (n_bytes <= kInline) return;
  operation.body = std::make_unique<Transfer>(stop_source_, connections, op.send, n_bytes);
  // Both parts are started at once. The body has a slot of its own per message, which the receiver learns
  // from the call; gloo holds the bytes back until that slot is requested.
  operation.body->send(op.root, kTagDataSlot | operation.call.data_slot, 0, n_bytes);
}

void Communicator::finish(Operation& operation) {
  const lockstep_op& op = operation.op;
  operation.waits_for = op.root;
  if (op.kind == LOCKSTEP_SEND) {
    operation.head->wait_send(op.root);
    if (operation.body) operation.body->wait_send(op.root);
    return;
  }
  // Only when the head has arrived is it known which rank sends, and how much.
  int from = op.root;
  if (from >= 0) {
    operation.head->wait_recv(from);
  } else {
    from = receive_from_any(operation);
  }
  operation.waits_for = from;
  CallHeader theirs;
  std::memcpy(&theirs, operation.message.data(), sizeof theirs);
  const std::size_t n_bytes = op.count * size_of(op.dtype);
  // The sender of a small message is done already and learns of the mismatch from the broken group only.
  if (theirs.kind != LOCKSTEP_SEND || theirs.dtype != operation.call.dtype || theirs.for_you != n_bytes) {
    raise(LOCKSTEP_USAGE, cat("rank ", rank_, " called ", text_of(operation.call), " with tag ", op.tag,
                              ", but rank ", from, " called ", text_of(theirs)));
  }
  if (n_bytes > kInline) {
    Connections& connections = *connections_[static_cast<std::size_t>(op.tag) % connections_.size()];
    operation.body = std::make_unique<Transfer>(stop_source_, connections, op.recv, n_bytes);
    operation.body->recv(from, kTagDataSlot | theirs.data_slot, 0, n_bytes);
    operation.body->wait_recv(from);
  } else if (n_bytes > 0) {
    std::memcpy(op.recv, operation.message.data() + sizeof theirs, n_bytes);
  }
  if (op.source != nullptr) *op.source = from;
}

// Counted before gone_ is looked at; note_gone() does it the other way round, so one of the two notices that
// nobody is left.
int Communicator::receive_from_any(Operation& operation) {
  ++wait_for_any_;
  try {
    int last = -1;
    {
      const base::MutexLock lock(mutex_);
      if (std::ranges::count(gone_, true) == size_ - 1) last = rank_ == 0 ? size_ - 1 : 0;
    }
    if (last >= 0) break_with(nobody_left(last));
    const int from = operation.head->wait_recv(-1);
    --wait_for_any_;
    return from;
  } catch (...) {
    --wait_for_any_;
    throw;
  }
}

// What was posted before the group was connected, in its order.
// The backlog keeps its entries while it connects: post_message() sees that it is not empty and appends,
// which keeps the order.
void Communicator::start_backlog() {
  std::shared_ptr<Operation> first;
  {
    const base::MutexLock lock(start_mutex_);
    first = backlog_.front();
  }
  try {
    connect_for(*first);
  } catch (const std::exception&) {
    // The group is broken: each of them fails with that reason below.
  }
  std::vector<std::pair<std::shared_ptr<Operation>, std::exception_ptr>> failed;
  {
    const NoSigpipe quiet;
    const base::MutexLock lock(start_mutex_);
    for (; !backlog_.empty(); backlog_.pop_front()) {
      const auto operation = backlog_.front();
      if (auto thrown = start_and_queue(operation)) failed.emplace_back(operation, std::move(thrown));
    }
  }
  for (const auto& [operation, thrown] : failed) give_up(operation, thrown);
}

std::exception_ptr Communicator::start_and_queue(const std::shared_ptr<Operation>& operation) {
  try {
    stop_source_.check();
    start(*operation);
    queue_message(operation);
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

// Pre: no lock is held. break_with() first, so that the operation ends with the group's first failure, which
// may be older than its own.
void Communicator::give_up(const std::shared_ptr<Operation>& operation, const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (...) {
    break_with(current_failure(*operation));
  }
  runtime_->watch.remove_deadline(operation->alarm);
  operation->head.reset();
  operation->body.reset();
  complete(operation, stop_source_.stop());
}

// One task per stream, started by its first message; later ones only queue. gloo completes messages of a
// stream in order, so waiting for them one after the other loses nothing.
void Communicator::queue_message(const std::shared_ptr<Operation>& operation) {
  const Stream stream{operation->op.kind, operation->op.root, operation->op.tag};
  {
    const base::MutexLock lock(mutex_);
    auto& waiting = streams_[stream];
    waiting.push_back(operation);
    if (waiting.size() > 1) return;
  }
  try {
    spawn([this, stream] { drain_stream(stream); });
  } catch (...) {
    const base::MutexLock lock(mutex_);
    streams_.erase(stream);
    throw;
  }
}

// The operation stays at the front while it is performed: queue_message() sees a stream that is not empty and
// starts no second task. The entry is erased with its last operation, before complete(), whose callback may
// post the next one.
void Communicator::drain_stream(const Stream& stream) {
  for (;;) {
    std::shared_ptr<Operation> operation;
    {
      const base::MutexLock lock(mutex_);
      operation = streams_[stream].front();
    }
    const auto failure = perform(*operation);
    bool last = false;
    {
      const base::MutexLock lock(mutex_);
      const auto found = streams_.find(stream);
      found->second.pop_front();
      last = found->second.empty();
      if (last) streams_.erase(found);
    }
    complete(operation, failure);
    if (last) return;
  }
}

// gloo has no pair for a rank with itself. The first of the two waits for the second, on no thread: its
// deadline and a stop of the group end it. Pairs complete in the order in which they were matched, on one
// task while there are any.
void Communicator::post_to_self(const std::shared_ptr<Operation>& operation) {
  operation->call = describe(operation->op, 0, size_);
  operation->begun = true;
  operation->waits_for = rank_;
  bool is_match = false, is_first = false;
  {
    const base::MutexLock lock(mutex_);
    const auto found = std::ranges::find_if(to_self_, [&](const auto& each) {
      return each->op.kind != operation->op.kind && each->op.tag == operation->op.tag;
    });
    is_match = found != to_self_.end();
    if (is_match) {
      matches_.emplace_back(operation, *found);
      to_self_.erase(found);
      is_first = matches_.size() == 1;
    } else {
      to_self_.push_back(operation);
    }
  }
  // After the push, so that a stop in between is not missed: whoever stops ends what it finds, and this finds
  // the stop.
  if (stop_source_.stop()) end_messages_to_self();
  if (!is_first) return;
  // On another thread where there is one: `done` should not run before post has returned.
  try {
    spawn([this] { drain_matches(); });
  } catch (const std::exception&) {
    drain_matches();
  }
}

void Communicator::drain_matches() {
  for (bool last = false; !last;) {
    Match match;
    {
      const base::MutexLock lock(mutex_);
      match = matches_.front();
    }
    std::optional<Failure> failure;
    try {
      failure = copy_to_self(match);
    } catch (...) {
      failure = Failure{.status = LOCKSTEP_RESOURCE, .message = "no memory"};
    }
    for (const auto& each : {match.first, match.second}) {
      runtime_->watch.remove_deadline(each->alarm);
      complete(each, failure);
    }
    // Not before both are complete: a pair that is matched meanwhile would begin a task of its own and overtake.
    const base::MutexLock lock(mutex_);
    matches_.pop_front();
    last = matches_.empty();
  }
}

std::optional<Failure> Communicator::copy_to_self(const Match& match) {
  const auto& [operation, other] = match;
  const bool receives = operation->op.kind == LOCKSTEP_RECV;
  const lockstep_op &in = receives ? operation->op : other->op, &out = receives ? other->op : operation->op;
  std::optional<Failure> failure;
  if (in.dtype != out.dtype || in.count != out.count) {
    failure = Failure{.status = LOCKSTEP_USAGE,
                      .message = cat("rank ", rank_, " called ", context(*operation), " and ",
                                     context(*other), " with itself, tag ", in.tag)};
    break_with(*failure);
  } else {
    if (in.count > 0) std::memcpy(in.recv, out.send, in.count * size_of(in.dtype));
    if (in.source != nullptr) *in.source = rank_;
  }
  return failure;
}

void Communicator::end(const std::list<std::shared_ptr<Operation>>& operations) {
  for (const auto& each : operations) {
    runtime_->watch.remove_deadline(each->alarm);
    complete(each, stop_source_.stop());
  }
}

// On a task: neither from the watch's thread nor before post returns. Where none can be had they stay, for
// leave() and the destructor.
void Communicator::end_messages_to_self() noexcept {
  try {
    const auto ended = std::make_shared<std::list<std::shared_ptr<Operation>>>();
    {
      const base::MutexLock lock(mutex_);
      ended->swap(to_self_);
    }
    if (ended->empty()) return;
    try {
      spawn([this, ended] { end(*ended); });
    } catch (...) {
      const base::MutexLock lock(mutex_);
      to_self_.splice(to_self_.end(), *ended);
    }
  } catch (...) {
    // Nothing was taken.
  }
}

}  // namespace lockstep::gloo_plugin
