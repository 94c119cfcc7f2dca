// The group of one: every operation is a copy, or nothing.
#include <cstring>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/plugin.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/detail/group_state.h"
#include "lockstep/group/detail/work_state.h"
#include "lockstep/group/internal/copy_bytes.h"
#include "lockstep/group/internal/loopback.h"

namespace lockstep::internal {
namespace {

bool is_message(const lockstep_op& op) {
  return op.kind == LOCKSTEP_SEND || op.kind == LOCKSTEP_RECV;
}

// Elements that one rank sends to itself.
std::uint64_t n_own(const lockstep_op& op) {
  if (op.kind == LOCKSTEP_ALL_TO_ALL_V || op.kind == LOCKSTEP_ALL_GATHER_V) return op.recv_counts[0];
  return op.count;
}

// Messages of a rank to itself wait in the loopback; everything else is over when the call returns, so
// nothing calls back.
class SoloOwner final : public GroupState {
 public:
  explicit SoloOwner(GroupIdentity identity) : identity_(std::move(identity)) {}

  const GroupIdentity& identity() const override { return identity_; }
  bool calls_back() const override { return false; }
  Failure failure(lockstep_status status, std::string_view message) const override {
    return {.kind = comm::kind_of(status), .message = std::string(message), .family = ErrorFamily::kBackend};
  }

  Loopback& loopback() { return loopback_; }
  std::optional<Failure> broken() {
    const std::lock_guard lock(mutex_);
    return broken_;
  }
  void abort(const std::string& reason) override {
    {
      const std::lock_guard lock(mutex_);
      if (!broken_) broken_ = failure(LOCKSTEP_ABORTED, reason);
    }
    loopback_.abort(reason);
  }

 protected:
  void leave(const std::string&) override { loopback_.abort("the group was left"); }

 private:
  const GroupIdentity identity_;
  Loopback loopback_;
  std::mutex mutex_;
  std::optional<Failure> broken_;  // guarded by mutex_
};

class SoloGroup final : public GroupBase {
 public:
  explicit SoloGroup(const GroupIdentity& identity)
      : GroupBase(identity), owner_(std::make_shared<SoloOwner>(identity)) {}
  ~SoloGroup() override { owner_->close(""); }

  std::string backend() const override { return "none"; }
  void abort(const std::string& reason) override { owner_->abort(reason); }

  std::uint64_t run(OperationRequest& request) override {
    begin(request);
    const auto started = Deadline::now();
    if (is_message(request.op)) {
      exchange(request, started);
    } else {
      move(request.op);
    }
    end(request, started, nullptr);
    // Timed for the hook in any case; a duration is reported only to who asked for timing.
    if (!shared().timing) request.ended.duration_ms = -1;
    return request.ended.sequence_number;
  }

  Work post(OperationRequest& request, HeldTensors held) override {
    begin(request);
    if (is_message(request.op)) {
      auto state = std::make_shared<Work::State>(owner_, request, std::move(held));
      state->arm(request.op);
      state->add(owner_->loopback().post(request.op));
      owner_->keep(state);
      if (owner_->closed()) owner_->settle_late(*state);
      return Work(std::move(state));
    }
    const auto started = Deadline::now();
    move(request.op);
    for (const auto& op : request.more) move(op);
    held.copy_back();
    end(request, started, nullptr);
    return Work(std::make_shared<Work::State>(request.ended, std::move(held.results), request.stream));
  }

  const comm::Engine* engine() const override { return nullptr; }
  std::shared_ptr<comm::Communicator> communicator(const comm::Engine&) const override { return nullptr; }
  std::shared_ptr<void> allocate(std::size_t, c10::Device) override { return nullptr; }
  void close(const std::string& cause) override { owner_->close(cause); }

 private:
  void begin(OperationRequest& request) {
    if (owner_->closed()) raise_closed(request.name, name());
    if (const auto broken = owner_->broken()) base::raise(*broken);
    owner_->reap();
    request.op.deadline_ns = deadline_of(request, *this).monotonic_ns();
    number(request);
  }

  void end(OperationRequest& request, Deadline started, const Failure* failure) {
    const auto finished = Deadline::Clock::now();
    request.ended.duration_ms =
        std::chrono::duration<double, std::milli>(finished - started.time_point()).count();
    shared().completed({.op = request.name,
                        .sequence_number = request.ended.sequence_number,
                        .started = started.time_point(),
                        .finished = finished,
                        .failure = failure});
  }

  // What leaves this rank comes back to it; what is done in place is done.
  static void move(const lockstep_op& op) {
    const std::uint64_t n_bytes = n_own(op) * comm::size_of(op.dtype);
    if (op.kind != LOCKSTEP_BARRIER && op.send != op.recv && n_bytes > 0)
      copy_bytes(op.recv, op.send, n_bytes, op);
  }

  void exchange(OperationRequest& request, Deadline started) {
    std::int32_t source = -1;
    request.op.source = &source;
    auto handle = owner_->loopback().post(request.op);
    if (const auto status = handle.wait(Deadline::never()); status != LOCKSTEP_OK) {
      Failure failure = owner_->failure(status, handle.last_error());
      failure.message =
          base::cat(owner_->describe(request.name, request.ended.sequence_number, request.where), ": ",
                    failure.message);
      end(request, started, &failure);
      base::raise(std::move(failure));
    }
    request.ended.source_rank = owner_->world_rank(source);
  }

  const std::shared_ptr<SoloOwner> owner_;
};

}  // namespace

Group make_solo_group(GroupIdentity identity) {
  return std::make_shared<SoloGroup>(identity);
}

}  // namespace lockstep::internal
