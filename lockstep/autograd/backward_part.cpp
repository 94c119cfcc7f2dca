// The part of a worker in a backward pass, and how a pass fails. The messages are drawn in backward.cpp.
#include <algorithm>
#include <atomic>
#include <memory>

#include "lockstep/autograd/internal/service.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::autograd::internal {

bool AutogradService::is_over(std::uint64_t pass) const {
  const std::lock_guard lock(mutex_);
  return over_.contains(pass);
}

// Any message of a pass may be the first that reaches this worker.
std::shared_ptr<Pass> AutogradService::enter(const PassHead& head) {
  const auto refuse = [] { base::raise(ErrorKind::kAborted, "the backward pass was aborted"); };
  if (is_over(head.pass)) refuse();
  const auto state = find_or_make(head.context);
  if (!state) base::raise(ErrorKind::kUsage, base::cat("autograd context ", head.context, " was released"));
  auto pass = state->enter(head.pass, [&] { return std::make_shared<Pass>(*this, state, head); });
  // Looked at again after it is in the context: whoever ended it in between did not find it there, and this
  // thread must remove it.
  if (is_over(head.pass)) {
    state->leave(*pass);
    refuse();
  }
  return pass;
}

void AutogradService::serve_plan(rpc::Request request) {
  base::ByteWriter writer;
  try {
    base::ByteReader reader(request.body());
    const auto head = PassHead::read(reader);
    const auto messages = read_messages(reader);
    const auto requests = enter(head)->plan_sends(messages);
    writer.put(kOk);
    write_plan_requests(writer, requests);
  } catch (...) {
    writer = {};
    writer.put(kFailed);
    NodeFailure::of(self(), rpc::current_call_failure()).write(writer);
  }
  request.answer({.body = writer.take()});
}

void AutogradService::send_gradients(const std::shared_ptr<Pass>& pass, const RecvNode& from,
                                     const variable_list& gradients) {
  rpc::Payload payload;
  // The way back of the tensors whose gradients these are.
  const rpc::DeviceRoute route(agent_, from.from(), rpc::opposite(from.leg()));
  object::DeviceTransit transit{.targets = &route};
  auto writer = with_head(pass->head());
  writer.put(from.message()).raw(lockstep::encode(gradients, payload.blobs, &transit));
  payload.body = writer.take();
  payload.copies = std::move(transit.copies);
  agent_.request(from.from(), rpc::MessageKind::kBackward, std::move(payload), timeout_of(*pass),
                 "gradients of a backward pass",
                 [this, pass, to = from.from()](rpc::Agent::Answer*, const rpc::CallFailure* failure) {
                   if (failure != nullptr) fail(pass, NodeFailure::of(to, *failure));
                 });
}

void AutogradService::serve_gradients(rpc::Request request) {
  std::shared_ptr<Pass> pass;
  bool start = false;
  try {
    base::ByteReader reader(request.body());
    const auto head = PassHead::read(reader);
    const auto message = need(reader.get<std::uint64_t>());
    if (is_over(head.pass)) {  // whoever ended it has sent the origin the reason
      request.answer({});
      return;
    }
    pass = enter(head);
    object::DeviceTransit
        transit;  // until they are taken: the pass is ordered after the copies to the device
    start = pass->take(message, lockstep::decode<variable_list>(request.body().subspan(reader.position()),
                                                                request.blobs(), &transit));
    request.answer({});
  } catch (...) {
    request.answer_failure(rpc::current_call_failure());
    return;
  }
  if (!start) return;
  request.release();
  // A thread that helps while it waits for something else must not run a whole part: it may hold locks, and
  // the part may take long.
  if (rpc::Agent::helping()) {
    agent_.run([this, pass] { run_part(pass); });
  } else {
    run_part(pass);
  }
}

// leave() before the report: once the origin has all reports its caller may start the next pass, which must
// find the context free.
void AutogradService::run_part(const std::shared_ptr<Pass>& pass) {
  try {
    pass->run();
  } catch (...) {
    fail(pass, NodeFailure::of(self(), rpc::current_call_failure()));
  }
  leave(pass);
  if (!pass->failed()) tell_origin(*pass, nullptr);
}

void AutogradService::leave(const std::shared_ptr<Pass>& pass) {
  {
    const std::lock_guard lock(mutex_);
    over_.add(pass->head().pass);
  }
  pass->context().leave(*pass);
}

void AutogradService::tell_origin(const Pass& pass, const NodeFailure* failure) {
  auto writer = with_head(pass.head());
  if (failure != nullptr) {
    writer.put(kFailed);
    failure->write(writer);
  } else {
    writer.put(kOk);
    write_workers(writer, pass.sent_to());
  }
  // An origin that cannot be reached is gone, and on_lost knows it.
  agent_.request(pass.head().origin, rpc::MessageKind::kBackwardDone, {.body = writer.take()},
                 agent_.rpc_timeout(), "the end of a backward pass",
                 [](rpc::Agent::Answer*, const rpc::CallFailure*) {});
}

void AutogradService::serve_done(rpc::Request request) {
  try {
    base::ByteReader reader(request.body());
    const auto head = PassHead::read(reader);
    const auto state = find(head.context);
    const auto pass = state ? state->pass() : nullptr;
    if (pass && pass->head().pass == head.pass && pass->is_origin()) {
      if (need(reader.get<std::uint8_t>()) == kOk) {
        const auto workers = read_workers(reader);
        pass->report(request.from(), workers);
        check_present(pass, workers);
      } else {
        pass->fail(NodeFailure::read(reader));
      }
    }
    request.answer({});
  } catch (...) {
    request.answer_failure(rpc::current_call_failure());
  }
}

// Only the first failure of a pass is passed on (pass->fail), so messages about one failure do not circulate.
void AutogradService::fail(const std::shared_ptr<Pass>& pass, NodeFailure failure) {
  if (!pass->fail(failure) || pass->is_origin()) return;
  if (!pass->running()) leave(pass);
  tell_origin(*pass, &failure);
  // Those it notified are not all known to the origin.
  abort_others(*pass, [] {});
}

void AutogradService::check_present(const std::shared_ptr<Pass>& pass, const std::vector<WorkerId>& workers) {
  for (const auto worker : workers) {
    try {
      agent_.find(rpc::Worker(int{worker}));
    } catch (const Error&) {
      pass->fail(NodeFailure::of(worker, rpc::current_call_failure()));
      return;
    }
  }
}

void AutogradService::abort_others(const Pass& pass, const std::function<void()>& done) {
  auto workers = pass.told();
  // Not the origin: it is notified of the failure and gives up by itself, and an abort must not overtake the
  // cause.
  std::erase(workers, pass.head().origin);
  if (workers.empty()) {
    done();
    return;
  }
  const auto n_left = std::make_shared<std::atomic<std::size_t>>(workers.size());
  for (const auto worker : workers) {
    agent_.request(worker, rpc::MessageKind::kBackwardAbort, {.body = with_head(pass.head()).take()}, kGiveUp,
                   "the end of a failed backward pass",
                   [n_left, done](rpc::Agent::Answer*, const rpc::CallFailure*) {
                     if (n_left->fetch_sub(1) == 1) done();
                   });
  }
}

void AutogradService::serve_abort(rpc::Request request) {
  const auto shared = std::make_shared<rpc::Request>(std::move(request));
  try {
    base::ByteReader reader(shared->body());
    const auto head = PassHead::read(reader);
    {
      const std::lock_guard lock(mutex_);
      over_.add(head.pass);
    }
    const auto state = find(head.context);
    const auto pass = state ? state->pass() : nullptr;
    // False when it failed before, also by an abort that went round in a circle.
    const bool mine =
        pass && pass->head().pass == head.pass &&
        pass->fail({.worker = head.origin,
                    .failure = {.kind = ErrorKind::kAborted, .message = "the backward pass was aborted"},
                    .type = "lockstep::Error"});
    if (!mine) {
      shared->answer({});
      return;
    }
    if (!pass->running()) leave(pass);
    abort_others(*pass, [shared] { shared->answer({}); });
  } catch (...) {
    shared->answer_failure(rpc::current_call_failure());
  }
}

}  // namespace lockstep::autograd::internal
