// A request that came in, and its answer.
#include "lockstep/rpc/agent.h"
#include "lockstep/rpc/internal/copy_wait.h"

namespace lockstep::rpc {

Request::Request(std::shared_ptr<Agent> agent, WorkerId from, transport::Message message)
    : agent_(std::move(agent)), from_(from), message_(std::move(message)) {}

Request::Request(Request&&) noexcept = default;

// Whatever happens to a handler, its caller gets an answer.
Request::~Request() {
  if (!agent_) return;
  answer_failure(
      {.failure = {.kind = ErrorKind::kAborted, .message = "the request was dropped without an answer"}});
}

// agent_ is moved out first: an answer that throws is not repeated by the destructor.
void Request::answer(Payload payload) {
  // May throw; the caller of this function then answers with that.
  if (payload.copies)
    internal::wait_for_copies(*agent_, *payload.copies, Deadline::after(agent_->rpc_timeout()));
  const auto agent = std::move(agent_);
  const auto failure = agent->send_answer(from_, {.kind = static_cast<std::uint8_t>(message_.kind | kAnswer),
                                                  .id = message_.id,
                                                  .body = transport::owned_blob(std::move(payload.body)),
                                                  .blobs = std::move(payload.blobs)});
  if (!failure) {
    if (payload.guard) payload.guard->sent();
    return;
  }
  if (failure->kind == ErrorKind::kPeerLost || failure->kind == ErrorKind::kAborted) return;
  // Too long, or no memory for it: the caller should not have to wait for its timeout.
  agent->send_answer(from_, {.kind = kException,
                             .id = message_.id,
                             .body = transport::owned_blob(encode_failure({.failure = *failure}))});
}

void Request::answer_failure(const CallFailure& failure) noexcept {
  const auto agent = std::move(agent_);
  if (!agent) return;
  try {
    agent->send_answer(
        from_,
        {.kind = kException, .id = message_.id, .body = transport::owned_blob(encode_failure(failure))});
  } catch (...) {
    log_current_failure("an RPC request could not be answered");  // its caller waits until its timeout
  }
}

}  // namespace lockstep::rpc
