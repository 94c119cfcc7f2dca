// Groups: one over an engine's communicator, and the group of one.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/group/internal/backend_parts.h"
#include "lockstep/group/internal/core.h"
#include "lockstep/group/internal/group_base.h"
#include "lockstep/group/internal/work_state.h"
#include "lockstep/group/world.h"

namespace lockstep::internal {
namespace {

// How long close() waits for operations in flight before it aborts them.
constexpr Milliseconds kLeaveGrace{2000};
// The ABI promises that an abort ends operations within 100 ms; a loaded machine gets more.
constexpr Milliseconds kAbortGrace{5000};

constexpr std::size_t kWidths[LOCKSTEP_DTYPES] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1};

std::string where_text(const std::source_location& where) {
  char text[kWhereCapacity];
  write_where(where, text);
  return text;
}

[[noreturn]] void raise_closed(const char* what, const std::string& group) {
  raise(ErrorKind::kUsage, cat(what, ": group \"", group, "\" was destroyed; call init_process_group again"));
}

class EngineGroup final : public GroupBase {
 public:
  explicit EngineGroup(JoinOptions options)
      : GroupBase(options.place), core_(std::make_shared<Core>(std::move(options))) {}
  ~EngineGroup() override {
    try {
      close("");
    } catch (...) {
      log(LogLevel::kError, cat("leaving group \"", name(), "\" failed: ", current_failure().message));
    }
  }

  std::string backend() const override { return core_->engine().name(); }
  void abort(const std::string& reason) override {
    if (!core_->closed()) core_->comm().abort(reason);
  }

  std::uint64_t run(Request& request) override {
    char where[kWhereCapacity], words[comm::kErrorCapacity];
    const std::uint64_t sequence = begin(request, where);
    const auto status = core_->comm().run(request.op, words);
    if (status != LOCKSTEP_OK) [[unlikely]]
      fail(status, words, request, sequence);
    return sequence;
  }

  Work post(Request& request, Held held) override {
    char where[kWhereCapacity];
    const std::uint64_t sequence = begin(request, where);
    comm::OpHandle handle;
    const auto status = core_->comm().post(request.op, handle);
    if (status != LOCKSTEP_OK) fail(status, handle.last_error(), request, sequence);
    auto state = std::make_shared<Work::State>(core_, std::move(handle), request, sequence, std::move(held));
    core_->keep(state);
    // Closed by another thread meanwhile: nobody else will let go of it.
    if (core_->closed()) state->settle(Deadline::after(kAbortGrace));
    return Work(std::move(state));
  }

  const comm::Engine* engine() const override { return &core_->engine(); }
  std::shared_ptr<comm::Communicator> communicator(const comm::Engine& engine) const override {
    return &engine == &core_->engine() && !core_->closed() ? core_->shared_comm() : nullptr;
  }

  std::shared_ptr<void> allocate(std::size_t n_bytes) override {
    if (core_->closed()) raise_closed("empty_shared", name());
    if (!core_->comm().has_memory()) return nullptr;
    void* memory = core_->comm().alloc(n_bytes);
    return {memory, [core = core_](void* block) { core->comm().free(block); }};
  }

  void close(const std::string& cause) override { core_->close(cause); }

 private:
  // What every start has in common. `where` is the text request.op.where points to.
  std::uint64_t begin(Request& request, char* where) {
    if (core_->closed()) [[unlikely]]
      raise_closed(request.name, name());
    core_->reap();
    write_where(request.where, where);
    request.op.where = where;
    request.op.deadline_ns = Deadline::after(request.timeout.value_or(timeout())).monotonic_ns();
    return shared().sequence.fetch_add(1, std::memory_order_relaxed) + 1;
  }

  [[noreturn]] void fail(lockstep_status status, std::string_view words, const Request& request,
                         std::uint64_t sequence) {
    Failure failure = core_->comm().failure(status, words);
    failure.message = cat(core_->describe(request.name, sequence, request.where), ": ", failure.message);
    raise(std::move(failure));
  }

  const std::shared_ptr<Core> core_;
};

class SoloGroup final : public GroupBase {
 public:
  using GroupBase::GroupBase;

  std::string backend() const override { return "none"; }
  void abort(const std::string& reason) override {
    const std::lock_guard lock(mutex_);
    if (!broken_)
      broken_ = Failure{.kind = ErrorKind::kAborted, .message = reason, .family = ErrorFamily::kBackend};
  }

  std::uint64_t run(Request& request) override {
    if (closed_) raise_closed(request.name, name());
    {
      const std::lock_guard lock(mutex_);
      if (broken_) raise(*broken_);
    }
    // Gathering and scattering over one rank are copies; everything else already holds its result.
    const lockstep_op& op = request.op;
    const bool copies = op.kind == LOCKSTEP_ALL_GATHER || op.kind == LOCKSTEP_REDUCE_SCATTER;
    if (copies && op.count > 0) std::memmove(op.recv, op.send, op.count * kWidths[op.dtype]);
    return ++shared().sequence;
  }

  Work post(Request& request, Held held) override {
    const std::uint64_t sequence = run(request);
    held.copy_back();
    return Work(std::make_shared<Work::State>(sequence, std::move(held.results)));
  }

  const comm::Engine* engine() const override { return nullptr; }
  std::shared_ptr<comm::Communicator> communicator(const comm::Engine&) const override { return nullptr; }
  std::shared_ptr<void> allocate(std::size_t) override { return nullptr; }
  void close(const std::string&) override { closed_ = true; }

 private:
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
  std::optional<Failure> broken_;  // guarded by mutex_
};

}  // namespace

void Held::copy_back() {
  const at::NoGradGuard no_grad;
  for (auto& [to, from] : copies) to.copy_(from);
}

void write_where(const std::source_location& where, char* out) {
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

std::shared_ptr<comm::Communicator> Core::join() const {
  const GroupPlace& place = options_.place;
  const BackendOptions told{.store = options_.engine_store,
                            .rank = rank(),
                            .size = size(),
                            .timeout = shared().timeout.load(),
                            .group_name = name(),
                            .global_ranks = place.members.ranks()};
  const JoiningScope scope(told);
  std::shared_ptr<comm::Communicator> parent;
  if (options_.parent) parent = resolve(options_.parent)->communicator(*options_.engine);
  return comm::Communicator::create(*options_.engine,
                                    {.struct_size = sizeof(lockstep_comm_config),
                                     .host = host_->table(),
                                     .rank = rank(),
                                     .size = size(),
                                     .name = name().c_str(),
                                     .deadline_ns = Deadline::after(shared().timeout.load()).monotonic_ns(),
                                     .parent = parent ? parent->raw() : nullptr,
                                     .parent_ranks = parent ? place.members.ranks().data() : nullptr});
}

Core::Core(JoinOptions options)
    : options_(std::move(options)),
      host_(std::make_unique<StoreHost>(options_.stores, options_.failed_key, options_.launch_ranks)),
      comm_(join()) {
  options_.parent.reset();
}

std::string Core::describe(const char* name, std::uint64_t sequence,
                           const std::source_location& where) const {
  return cat(name, " #", sequence, " of group \"", this->name(), "\" (rank ", rank(), " of ", size(),
             ", called at ", where_text(where), ")");
}

void Core::keep(std::shared_ptr<Work::State> state) {
  const std::lock_guard lock(mutex_);
  unfinished_.push_back(std::move(state));
  n_unfinished_ = static_cast<int>(unfinished_.size());
}

void Core::forget(const Work::State* state) noexcept {
  std::shared_ptr<Work::State> last;  // may be the last owner: goes after the lock
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(unfinished_, state, [](const auto& kept) { return kept.get(); });
  if (found == unfinished_.end()) return;
  last = std::move(*found);
  unfinished_.erase(found);
  n_unfinished_ = static_cast<int>(unfinished_.size());
}

void Core::reap() {
  // Operations end in the order they were started, so the first that is not over stops the search.
  while (n_unfinished_.load(std::memory_order_relaxed) > 0) {
    std::shared_ptr<Work::State> first;
    {
      const std::lock_guard lock(mutex_);
      if (unfinished_.empty()) return;
      first = unfinished_.front();
    }
    if (!first->poll()) return;
  }
}

void Core::close(const std::string& cause) {
  if (closed_.exchange(true)) return;
  std::vector<std::shared_ptr<Work::State>> pending;
  {
    const std::lock_guard lock(mutex_);
    pending.assign(unfinished_.begin(), unfinished_.end());
  }
  // A rank that gives up must say so at once; an orderly one lets its last operations end.
  auto deadline = cause.empty() ? Deadline::after(kLeaveGrace) : Deadline::now();
  bool settled = true;
  for (const auto& state : pending) settled = state->settle(deadline) && settled;
  if (!settled) {
    if (cause.empty()) {
      comm_->abort(cat("rank ", rank(), " left group \"", name(), "\" with operations still running"));
    } else {
      comm_->leave(cause);
    }
    deadline = Deadline::after(kAbortGrace);
    for (const auto& state : pending) state->settle(deadline);
  }
  comm_->leave(cause);
}

Group make_solo_group(GroupPlace place) {
  return std::make_shared<SoloGroup>(std::move(place));
}

Group make_engine_group(JoinOptions options) {
  return std::make_shared<EngineGroup>(std::move(options));
}

void close_group(ProcessGroup& group, const std::string& cause) {
  dynamic_cast<GroupBase&>(group).close(cause);
}

std::shared_ptr<GroupBase> resolve(const Group& group) {
  const Group chosen = group ? group : default_group();
  if (auto ours = std::dynamic_pointer_cast<GroupBase>(chosen)) return ours;
  raise(ErrorKind::kUsage, cat("group \"", chosen->name(), "\" was not made by lockstep"));
}

}  // namespace lockstep::internal
