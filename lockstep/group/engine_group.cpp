// A group over an engine's communicator.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "lockstep/base/detail/forks.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/detail/work_state.h"
#include "lockstep/group/internal/backend_parts.h"
#include "lockstep/group/internal/disposal.h"
#include "lockstep/group/internal/engine_group_state.h"
#include "lockstep/group/world.h"
#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep::internal {
namespace {

double milliseconds_since(Deadline started) {
  return static_cast<double>(Deadline::now().monotonic_ns() - started.monotonic_ns()) * 1e-6;
}

// Two objects per group: this one is the users' handle, EngineGroupState what operations in flight and shared
// tensors hold as well. The handle's end closes the group; the communicator is destroyed with the last holder
// of the state, on another thread where that ends inside an engine's callback (make_disposable).
class EngineGroup final : public GroupBase {
 public:
  explicit EngineGroup(EngineGroupOptions options)
      : GroupBase(options.identity), core_(make_disposable<EngineGroupState>(std::move(options))) {}
  ~EngineGroup() override {
    try {
      close("");
    } catch (...) {
      base::log(LogLevel::kError,
                base::cat("leaving group \"", name(), "\" failed: ", base::current_failure().message));
    }
  }

  std::string backend() const override { return core_->engine().name(); }
  void abort(const std::string& reason) override {
    if (!core_->closed()) core_->comm().abort(reason);
  }

  // The blocking path makes no Work: the call's line and the error are on the stack. Timing costs two clock
  // reads, so it is off unless somebody has asked for it.
  std::uint64_t run(OperationRequest& request) override {
    char where[kWhereCapacity], message[comm::kErrorCapacity];
    std::int32_t source = -1;
    begin(request, where);
    if (request.stream) [[unlikely]]
      return run_on_stream(request, message);
    request.op.source = &source;
    // acquire: with the store that announces the hook, so the hook itself is visible. `timing` is only a
    // switch.
    const bool hooked = shared().has_hook.load(std::memory_order_acquire);
    const bool timed = hooked || shared().timing.load(std::memory_order_relaxed);
    const auto started = timed ? Deadline::now() : Deadline::never();
    const auto status = core_->comm().run(request.op, message);
    if (timed) [[unlikely]]
      request.ended.duration_ms = milliseconds_since(started);
    if (status != LOCKSTEP_OK) [[unlikely]]
      fail(status, message, request, started);
    request.ended.source_rank = core_->world_rank(source);
    if (hooked) [[unlikely]]
      announce(request, started, nullptr);
    return request.ended.sequence_number;
  }

  Work post(OperationRequest& request, HeldTensors held) override {
    char where[kWhereCapacity];
    begin(request, where);
    // The state exists before the engine knows the operation: its callback may run before post returns.
    auto state = std::make_shared<Work::State>(core_, request, std::move(held));
    const auto status = start(*state, request.op);
    if (status != LOCKSTEP_OK) {
      state->launched();
      fail(status, "", request, Deadline::never());
    }
    // What was started goes on: a failure of a later part is the Work's.
    for (auto& op : request.more) {
      op.where = request.op.where;
      op.deadline_ns = request.op.deadline_ns;
      if (start(*state, op) != LOCKSTEP_OK) break;
    }
    // From here to launched() the state has one count of its own, so that a callback that runs meanwhile does
    // not complete it half-posted.
    core_->keep(state);
    state->launched();
    // close() lists the operations to wait for. One that was kept after the list was made would be waited for
    // by nobody.
    if (core_->closed()) core_->settle_late(*state);
    return Work(std::move(state));
  }

  const comm::Engine* engine() const override { return &core_->engine(); }
  std::shared_ptr<comm::Communicator> communicator(const comm::Engine& engine) const override {
    return &engine == &core_->engine() && !core_->closed() ? core_->shared_comm() : nullptr;
  }

  std::shared_ptr<void> allocate(std::size_t n_bytes, c10::Device device) override {
    if (core_->closed()) raise_closed("empty_shared", name());
    if (device.is_cuda()) return allocate_on(n_bytes, device);
    if (!core_->comm().has_memory()) return nullptr;
    void* memory = core_->comm().alloc(n_bytes);
    // Memory keeps the communicator alive: it may be freed long after the group's last handle. A forked child
    // frees nothing: the pages are its parent's, who may still use them.
    return {memory, [core = core_, here = base::MadeHere()](void* block) {
              if (here) core->comm().free(block);
            }};
  }

  void close(const std::string& cause) override { core_->close(cause); }

 private:
  // What every start has in common. `where` is the text request.op.where points to.
  void begin(OperationRequest& request, char* where) {
    if (core_->closed()) [[unlikely]]
      raise_closed(request.name, name());
    // Operations that have ended release their tensors at the next start; no thread exists for that.
    core_->reap();
    write_where(request.where, where);
    if (shared().has_refusal.load(std::memory_order_relaxed)) [[unlikely]]
      add_refusal(where);
    request.op.where = where;
    request.op.deadline_ns = deadline_of(request, *this).monotonic_ns();
    number(request);
  }

  // Returns when the stream is ordered after the operation. A receive from anyone is the exception: who sent is
  // known only when the message has come, so that it is awaited here.
  std::uint64_t run_on_stream(OperationRequest& request, char* message) {
    auto& op = request.op;
    std::int32_t source = op.kind == LOCKSTEP_RECV ? op.root : -1;
    const auto started = Deadline::now();
    auto status = LOCKSTEP_OK;
    if (op.kind == LOCKSTEP_RECV && op.root < 0) {
      op.source = &source;
      message[0] = '\0';
      comm::OpHandle handle;
      status = core_->comm().post(op, handle);
      if (status == LOCKSTEP_OK) status = handle.wait(Deadline::never());
      if (status != LOCKSTEP_OK) comm::put(message, comm::kErrorCapacity, handle.last_error());
    } else {
      status = core_->comm().run(op, message);
    }
    if (status != LOCKSTEP_OK) fail(status, message, request, started);
    request.ended.source_rank = core_->world_rank(source);
    announce(request, started, nullptr);
    return request.ended.sequence_number;
  }

  // Freed when nothing on the device can use it any more: an engine gives the memory to the next who asks.
  std::shared_ptr<void> allocate_on(std::size_t n_bytes, c10::Device device) {
    if (!core_->comm().has_memory_on(LOCKSTEP_CUDA)) return nullptr;
    void* memory = core_->comm().alloc_on(LOCKSTEP_CUDA, device.index(), n_bytes);
    return {memory, [core = core_, device, here = base::MadeHere()](void* block) {
              if (!here) return;
              try {
                synchronize_device(device);
              } catch (...) {
                base::log(LogLevel::kWarn,
                          base::cat("memory of group \"", core->name(), "\" on ", device.str(),
                                    " is not given back: ", base::current_failure().message));
                return;
              }
              core->comm().free(block);
            }};
  }

  lockstep_status start(Work::State& state, lockstep_op& op) {
    comm::OpHandle handle;
    // Counted before it is posted, taken back in post_failed(): the callback of a fast operation must find
    // its count.
    state.arm(op);
    const auto status = core_->comm().post(op, handle);
    if (status == LOCKSTEP_OK) {
      state.add(std::move(handle));
    } else {
      state.post_failed(status, handle.last_error());
    }
    return status;
  }

  // Raises the failure, after telling the hook when it was `started`.
  [[noreturn]] void fail(lockstep_status status, std::string_view message, const OperationRequest& request,
                         Deadline started) {
    Failure failure = core_->failure(status, message);
    failure.message = base::cat(core_->describe(request.name, request.ended.sequence_number, request.where),
                                ": ", failure.message);
    if (!started.is_never()) announce(request, started, &failure);
    base::raise(std::move(failure));
  }

  void announce(const OperationRequest& request, Deadline started, const Failure* failure) {
    shared().completed({.op = request.name,
                        .sequence_number = request.ended.sequence_number,
                        .started = started.time_point(),
                        .finished = Deadline::Clock::now(),
                        .failure = failure});
  }

  const std::shared_ptr<EngineGroupState> core_;
};

// Equal bit for bit; of tensors without data always. Pre: one type and size; no gradients are recorded.
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_meta()) return true;
  const auto on_host = [](const at::Tensor& tensor) {
    return tensor.resolve_conj().resolve_neg().contiguous().cpu();
  };
  const auto x = on_host(a), y = on_host(b);
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

}  // namespace

void HeldTensors::copy_back() {
  if (!finish && copies.empty()) return;
  const at::NoGradGuard no_grad;
  if (finish) finish();
  for (auto& [to, from] : copies) to.copy_(from);
  for (const auto& [to, from] : shared) {
    if (same_bits(to, from)) continue;
    base::raise(
        ErrorKind::kUsage,
        "two different values were to be written to elements that share memory; one was lost. Give each "
        "result "
        "memory of its own (clone())");
  }
}

void raise_closed(const char* what, const std::string& group) {
  base::raise(ErrorKind::kUsage,
              base::cat(what, ": group \"", group,
                        "\" was destroyed, alone or with its world; make it again (new_group, create_group, "
                        "or init_process_group for the default group) and use the new handle"));
}

void write_where(const std::source_location& where, char* out) {
  // A colon, ten digits and the terminator. The end of a long path says more than its beginning.
  constexpr std::size_t kLineRoom = 12;
  const char* file = where.file_name();
  std::size_t length = std::strlen(file);
  if (const std::size_t room = kWhereCapacity - kLineRoom; length > room) {
    file += length - room;
    length = room;
  }
  std::memcpy(out, file, length);
  out[length] = ':';
  *std::to_chars(out + length + 1, out + kWhereCapacity - 1, where.line()).ptr = '\0';
}

// An engine that builds on the parent compares the members itself; otherwise they are compared through the
// store first, since ranks with different lists would wait for each other.
std::shared_ptr<comm::Communicator> EngineGroupState::join() const {
  const GroupIdentity& identity = options_.identity;
  // For registered back ends, whose factory takes options that the C table cannot pass: valid on this thread
  // while the engine creates its communicator.
  const BackendOptions told{.store = options_.engine_store,
                            .rank = rank(),
                            .size = size(),
                            .timeout = shared().timeout.load(),
                            .name = name(),
                            .global_ranks = identity.members.ranks()};
  const JoiningScope scope(told);
  std::shared_ptr<comm::Communicator> parent;
  if (options_.parent) parent = resolve(options_.parent)->communicator(*options_.engine);
  const bool compares = parent && options_.engine->capabilities().compares_members != 0;
  if (options_.compare_members && !compares) options_.compare_members();
  const bool bound = options_.device && options_.engine->takes(LOCKSTEP_CUDA);
  return comm::Communicator::create(
      *options_.engine,
      {.struct_size = sizeof(lockstep_comm_config),
       .host = host_->table(),
       .rank = rank(),
       .size = size(),
       .name = name().c_str(),
       .deadline_ns = options_.deadline.monotonic_ns(),
       .parent = parent ? parent->raw() : nullptr,
       .parent_ranks = parent ? identity.members.ranks().data() : nullptr,
       .key = options_.key.c_str(),
       .device_kind = bound ? LOCKSTEP_CUDA : LOCKSTEP_HOST_MEMORY,
       .device = options_.device.value_or(0),
       .options = options_.engine_options.empty() ? nullptr : options_.engine_options.c_str()});
}

EngineGroupState::EngineGroupState(EngineGroupOptions options)
    : options_(std::move(options)),
      host_(std::make_unique<EngineHost>(options_.stores, options_.failed_key, options_.launch_ranks)),
      comm_(join()) {
  // Needed for joining only; kept, they would hold the parent's communicator for as long as this group lives.
  options_.parent.reset();
  options_.compare_members = nullptr;
}

Group make_engine_group(EngineGroupOptions options) {
  return make_disposable<EngineGroup>(std::move(options));
}

void close_group(ProcessGroup& group, const std::string& cause) {
  dynamic_cast<GroupBase&>(group).leave(cause);
}

std::shared_ptr<GroupBase> resolve(const Group& group) {
  const Group chosen = group ? group : default_group();
  if (auto ours = std::dynamic_pointer_cast<GroupBase>(chosen)) return ours;
  base::raise(ErrorKind::kUsage, base::cat("group \"", chosen->name(), "\" was not made by lockstep"));
}

std::shared_ptr<GroupBase> still_there(const Group& group, const char* what) {
  auto chosen = resolve(group);
  if (chosen->was_left()) raise_closed(what, chosen->name());
  return chosen;
}

bool have_same_members(const Group& a, const Group& b) {
  const auto one = resolve(a), other = resolve(b);
  return one->world() == other->world() && one->ranks() == other->ranks();
}

Deadline deadline_of(const OperationRequest& request, const GroupBase& group) {
  return request.deadline ? *request.deadline : Deadline::after(request.timeout.value_or(group.timeout()));
}

}  // namespace lockstep::internal
