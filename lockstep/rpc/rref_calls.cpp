// The calls of RRefManager: making a value on another worker, and fetching it.
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/demangle.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/rpc/detail/rref_manager.h"
#include "lockstep/rpc/detail/rref_scope.h"
#include "lockstep/rpc/internal/with_table.h"

namespace lockstep::rpc {

using internal::CallHead;
using internal::OutgoingCall;
using internal::RRefOnWire;
using internal::RRefTable;

namespace {

// kRemoteHead bytes in front of an ordinary call.
Bytes remote_body(const RRefOnWire& ref, const Bytes& call) {
  base::ByteWriter writer;
  writer.put(ref.rref).put(ref.fork).raw(call);
  return writer.take();
}

// context u64, RRef u64, fork u64, what u8.
struct FetchHead {
  std::uint64_t context = 0;
  std::uint64_t rref = 0;
  std::uint64_t fork = 0;
  std::uint8_t ask = 0;
};

FetchHead read_fetch(std::span<const std::uint8_t> body) {
  base::ByteReader reader(body);
  const auto context = reader.get<std::uint64_t>();
  const auto rref = reader.get<std::uint64_t>();
  const auto fork = reader.get<std::uint64_t>();
  const auto ask = reader.get<std::uint8_t>();
  // `ask` is the last field: when it is there the others are.
  if (!ask || *ask > 1)
    base::raise(ErrorKind::kUsage, "this does not ask for an RRef's value: the message is damaged");
  return {.context = *context, .rref = *rref, .fork = *fork, .ask = *ask};
}

Payload encode_fetched(Agent& agent, const FetchHead& head, WorkerId to, const OwnedValue& value) {
  const auto& state = *value.promise.state();
  if (const auto* failure = state.failure()) failure->raise();
  const ValueType* type = value.type.load();
  const void* object = value.promise.state()->value().get();
  if (head.ask == static_cast<std::uint8_t>(RRefManager::Ask::kType)) {
    return internal::encode_value(agent, 0, to, [&](object::Encoder& encoder) {
      object::write(encoder, base::demangle(type->dynamic(object).name()));
    });
  }
  if (type->encode == nullptr) {
    base::raise(ErrorKind::kUsage, base::cat("a value of type ", base::demangle(type->type->name()),
                                             " cannot be sent: call its methods "
                                             "through the RRef instead of to_here()"));
  }
  return internal::encode_value(agent, head.context, to,
                                [&](object::Encoder& encoder) { type->encode(encoder, object); });
}

}  // namespace

// remote(): the numbers are chosen here, so the handle exists at once and can be passed on while the call is
// under way.
//
//   caller                              owner
//   create_there(rref, fork)
//   kRemoteCall ----------------------> create_here: entry without a value
//                                       run the function; fetches that come meanwhile wait in the entry
//   creation_over(fork) <-------------- value->set(), answer
std::shared_ptr<RRefState> RRefManager::start_remote(const OutgoingCall& call) {
  const auto alive = agent_for("remote()");
  const RRefOnWire ref{.rref = alive->new_id(), .fork = alive->new_id(), .owner = call.to.id};
  const bool here = call.to.id == self_.id;
  Payload payload = internal::encode_call(call);
  payload.body = remote_body(ref, payload.body);
  // Owned here: a fork of this worker's own keeps the value until its function is over.
  auto value = with_table([&](RRefTable& table, Actions&) -> std::shared_ptr<OwnedValue> {
    if (here) return table.create_here(ref, self_.id);
    table.create_there(ref);
    return nullptr;
  });
  auto state = std::make_shared<RRefState>(
      shared_from_this(), here ? RRefOnWire{.rref = ref.rref, .owner = self_.id} : ref, call.to, value);
  state->created.emplace(agent_);
  const auto made = [self = shared_from_this(), ref, value, promise = *state->created](
                        Agent::Answer* answer, const CallFailure* failure) {
    // Also after a failure: the owner may have received the call although its answer was lost, so the fork
    // must be released there by an ordinary kDelete.
    if (!value) {
      self->with_table([&](RRefTable& table, Actions& actions) { table.creation_over(ref.fork, actions); });
    } else if (failure != nullptr) {
      value->promise.fail(*failure);
      self->unshare({ref});
    }
    auto callbacks = answer != nullptr ? promise.state()->set({}) : promise.state()->fail(*failure);
    if (const auto agent = self->agent()) {
      agent->run_callbacks(std::move(callbacks));
    } else {
      internal::FutureBase::run(std::move(callbacks));
    }
  };
  alive->request(call.to.id, MessageKind::kRemoteCall, std::move(payload), call.timeout,
                 internal::describe_call(call), internal::profiled(call, made));
  return state;
}

// The value's entry exists before the function runs: a fork that overtakes the result finds it and waits.
void RRefManager::serve_remote(Request request) {
  auto shared = std::make_shared<Request>(std::move(request));
  RRefOnWire ref{.owner = self_.id};
  std::shared_ptr<OwnedValue> value;
  CallHead head;
  try {
    base::ByteReader reader(shared->body());
    const auto rref = reader.get<std::uint64_t>();
    const auto fork = reader.get<std::uint64_t>();
    if (!fork) base::raise(ErrorKind::kUsage, "this is not a call: the message is damaged");
    ref.rref = *rref;
    ref.fork = *fork;
    head = internal::read_call_head(shared->body().subspan(internal::kRemoteHead));
    // A call to oneself was entered by start_remote() already.
    value = with_table([&](RRefTable& table, Actions&) {
      return shared->from() == self_.id ? table.find(ref.rref) : table.create_here(ref, shared->from());
    });
    if (!value) {
      // Received and dropped, so that the forks of RRefs among the arguments are released.
      const internal::ReceiveScope taken(shared->agent(), shared->from(), head.rrefs);
      if (shared->from() == self_.id)
        base::raise(ErrorKind::kAborted, "the RRef that this call was for is gone");
      base::raise(ErrorKind::kUsage,
                  base::cat("RRef ", ref.rref,
                            " was made before, or is not its sender's to make: the message is repeated "
                            "or damaged"));
    }
  } catch (...) {
    shared->answer_failure(current_call_failure());
    return;
  }
  internal::run_call(shared->agent(), shared->from(), head, shared->blobs(),
                     [self = shared_from_this(), shared, value, ref](
                         const ValueType* type, std::shared_ptr<void> result, const CallFailure* failure) {
                       const bool here = shared->from() == self->self_.id;
                       if (failure != nullptr) {
                         value->promise.fail(*failure);
                         shared->answer_failure(*failure);
                       } else {
                         value->set(type, std::move(result));
                         shared->answer({});
                       }
                       // remote() to oneself shares the value with oneself for the time of the call;
                       // otherwise it could be released before it is made.
                       if (here) self->unshare({ref});
                     });
}

void RRefManager::fetch(const RRefState& state, Ask ask, std::optional<Milliseconds> timeout,
                        Agent::OnAnswer on_answer, const internal::FutureBase* future) {
  const auto alive = agent_for("to_here");
  const Milliseconds limit = alive->timeout_or_default(timeout);
  // The type's name has no gradient.
  const auto context = ask == Ask::kValue ? this_call().autograd_context : 0;
  // The owner will know the context from now on, and must be notified of its end.
  if (auto* extension = context == 0 ? nullptr : alive->extension())
    extension->encode(context, state.owner.id, [] {});
  base::ByteWriter writer;
  writer.put(context).put(state.ref.rref).put(state.ref.fork).put(static_cast<std::uint8_t>(ask));
  alive->request(state.owner.id, MessageKind::kRRefFetch, {.body = writer.take()}, limit,
                 base::cat("the value of ", state.text()), std::move(on_answer), future);
}

void RRefState::wait_made(std::optional<Milliseconds> timeout) const {
  if (!is_owner()) {
    base::raise(ErrorKind::kUsage,
                text() +
                    " has its value on another worker: local_value() works at the owner only; use to_here() "
                    "for a copy, or call a method through the RRef");
  }
  if (timeout) base::checked_timeout(*timeout, "local_value");
  if (value->over()) return;
  const Milliseconds limit = manager->agent_for("local_value")->timeout_or_default(timeout);
  const auto waiting = [this] {
    return base::cat("the value of ", text(), " is not made yet, and its owner waits");
  };
  if (!value->promise.state()->wait_over(Deadline::after(limit), waiting))
    base::raise(timeout_failure("the value of " + text(), limit));
}

// Fetched once and kept: it never changes. Two threads may both fetch it; they get the same text.
std::string RRefState::type_name(std::optional<Milliseconds> timeout) const {
  {
    const base::MutexLock lock(mutex_);
    if (!type_name_.empty()) return type_name_;
  }
  std::string name;
  if (is_owner()) {
    wait_made(timeout);
    if (const auto* failure = value->promise.state()->failure()) failure->raise();
    name = base::demangle(value->type.load()->dynamic(value->promise.state()->value().get()).name());
  } else {
    check();
    const auto agent = manager->agent_for("type_name");
    Promise<std::string> promise(agent->weak_from_this());
    manager->fetch(*this, RRefManager::Ask::kType, timeout,
                   internal::end_with_answer<std::string>(agent, owner.id, promise), promise.state().get());
    name = promise.future().wait();
  }
  const base::MutexLock lock(mutex_);
  return type_name_ = name;
}

// Holds no thread while the value is not made: the request waits in the value's callbacks.
void RRefManager::serve_fetch(Request request) {
  auto shared = std::make_shared<Request>(std::move(request));
  try {
    const FetchHead head = read_fetch(shared->body());
    const auto value = value_of(head.rref);
    const auto answer = [shared, head, value] {
      try {
        shared->answer(encode_fetched(shared->agent(), head, shared->from(), *value));
      } catch (...) {
        shared->answer_failure(current_call_failure());
      }
    };
    if (value->over()) {
      answer();
      return;
    }
    // On a thread of the pool: encoding may take long, and this callback runs wherever the value was
    // finished.
    value->promise.state()->on_over([self = shared_from_this(), answer] {
      if (const auto alive = self->agent()) alive->run(answer);
    });
  } catch (...) {
    shared->answer_failure(current_call_failure());
  }
}

}  // namespace lockstep::rpc
