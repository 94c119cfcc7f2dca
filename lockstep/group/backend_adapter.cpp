// A registered C++ Backend behind the engine ABI: one thread per executor (collectives, sends, receives),
// started by the first posted operation of that executor; blocking calls run on the caller when their
// executor is free.
#include <array>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <optional>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/engine/detail/table_calls.h"
#include "lockstep/group/internal/backend_parts.h"

namespace lockstep::internal {
namespace {

// How the options reach a factory through a C table that has no field for them: set around comm_create on
// this thread.
thread_local const BackendOptions* t_joining = nullptr;

// Never freed: the registry keeps the table until the process ends.
struct Registered {
  lockstep_engine table;  // first: config.engine points to it
  std::string name;
  BackendFactory factory;
};

void say(char* out, std::size_t capacity, const std::string& text) {
  if (out != nullptr && capacity > 0) std::snprintf(out, capacity, "%s", text.c_str());
}

// A posted operation; owned by the handle and, until it is over, by its executor.
struct Posted {
  explicit Posted(const lockstep_op& given) : op(given), where(given.where == nullptr ? "" : given.where) {
    op.where = where.c_str();
  }

  // A copy with pointers into the members below: the caller's op is gone when post returns.
  lockstep_op op;
  std::string where;
  std::vector<std::uint64_t> send_counts, recv_counts;
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<Failure> failure;  // guarded by mutex
  bool over = false;               // guarded by mutex
};
using PostedPtr = std::shared_ptr<Posted>;

// Lock order: turn, then Adapter::mutex_. `mutex` guards the queue only, and nothing is called under it. A
// back end may block inside turn for as long as it likes.
struct Executor {
  std::mutex turn;  // held while the back end runs an operation of this executor
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<PostedPtr> queue;  // guarded by mutex
  bool stop = false;            // guarded by mutex
  base::Thread thread;          // guarded by mutex until stop
};

// States of the back end: intact, then permanently broken by the first failure that is not a refusal, or by
// abort; operations that are queued then fail with that failure, one by one, on their executor's thread.
class Adapter {
 public:
  Adapter(std::shared_ptr<Backend> backend, int size) : backend_(std::move(backend)), size_(size) {}
  ~Adapter() {
    for (auto& executor : executors_) {
      {
        const std::lock_guard lock(executor.mutex);
        executor.stop = true;
      }
      // The thread runs what is still queued before it ends. Its owner has aborted by then if that could
      // block.
      executor.changed.notify_all();
      executor.thread.join();
    }
  }

  const std::shared_ptr<Backend>& backend() const { return backend_; }

  lockstep_status post(const lockstep_op& op, lockstep_handle** out) {
    if (const auto failure = first_failure()) return comm::status_of(failure->kind);
    auto posted = std::make_shared<Posted>(op);
    copy_counts(*posted);
    Executor& executor = executor_of(op);
    {
      const std::lock_guard lock(executor.mutex);
      if (!executor.thread.joinable())
        executor.thread = base::Thread("ls-backend", [this, &executor] { serve(executor); });
      executor.queue.push_back(posted);
    }
    executor.changed.notify_all();
    *out = reinterpret_cast<lockstep_handle*>(new PostedPtr(std::move(posted)));
    return LOCKSTEP_OK;
  }

  // On the caller's thread while nothing was ever posted to this executor; afterwards behind what is queued,
  // to keep the order.
  lockstep_status run(const lockstep_op& op, char* error, std::size_t capacity) {
    Executor& executor = executor_of(op);
    bool idle = false;
    {
      const std::lock_guard lock(executor.mutex);
      idle = !executor.thread.joinable();
    }
    if (!idle) return post_and_wait(op, error, capacity);
    // Two threads may both have found the executor idle; they take turns.
    const std::lock_guard turn(executor.turn);
    const auto failure = perform(op);
    if (!failure) return LOCKSTEP_OK;
    say(error, capacity, failure->message);
    return comm::status_of(failure->kind);
  }

  void abort(const std::string& reason) {
    end({.kind = ErrorKind::kAborted, .message = reason, .family = ErrorFamily::kBackend});
  }

  std::optional<Failure> first_failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  Executor& executor_of(const lockstep_op& op) {
    return executors_[op.kind == LOCKSTEP_SEND ? 1 : op.kind == LOCKSTEP_RECV ? 2 : 0];
  }

  void copy_counts(Posted& posted) const {
    const auto n = static_cast<std::size_t>(size_);
    lockstep_op& op = posted.op;
    if (op.send_counts != nullptr) posted.send_counts.assign(op.send_counts, op.send_counts + n);
    if (op.recv_counts != nullptr) posted.recv_counts.assign(op.recv_counts, op.recv_counts + n);
    if (op.send_counts != nullptr) op.send_counts = posted.send_counts.data();
    if (op.recv_counts != nullptr) op.recv_counts = posted.recv_counts.data();
  }

  lockstep_status post_and_wait(const lockstep_op& op, char* error, std::size_t capacity);

  // Runs one operation. A failure breaks the back end permanently, as the ABI asks, except a refusal: nothing
  // was sent.
  std::optional<Failure> perform(const lockstep_op& op) {
    if (auto failure = first_failure()) return failure;
    try {
      backend_->run(op);
      return std::nullopt;
    } catch (...) {
      Failure failure = base::current_failure();
      failure.family = ErrorFamily::kBackend;
      if (failure.kind != ErrorKind::kUsage && failure.kind != ErrorKind::kUnsupported) end(failure);
      return failure;
    }
  }

  void serve(Executor& executor) {
    while (true) {
      PostedPtr next;
      {
        std::unique_lock lock(executor.mutex);
        executor.changed.wait(lock, [&] { return executor.stop || !executor.queue.empty(); });
        // Stopped, and nothing is left: every handle has been completed.
        if (executor.queue.empty()) return;
        next = std::move(executor.queue.front());
        executor.queue.pop_front();
      }
      std::optional<Failure> failure;
      {
        const std::lock_guard turn(executor.turn);
        failure = perform(next->op);
      }
      const auto done = next->op.done;
      void* const context = next->op.done_context;
      {
        const std::lock_guard lock(next->mutex);
        next->failure = std::move(failure);
        next->over = true;
      }
      next->changed.notify_all();
      if (done != nullptr) done(context);
    }
  }

  // The first failure stays; abort() of the back end is called once, outside mutex_. What it throws is
  // dropped: the first failure is what counts.
  void end(Failure failure) {
    const std::string reason = failure.message;
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return;
      failure_ = std::move(failure);
    }
    try {
      backend_->abort(reason);
    } catch (...) {
    }
  }

  const std::shared_ptr<Backend> backend_;  // shared with the caller of get_backend_impl
  const int size_;
  std::array<Executor, 3> executors_;
  std::mutex mutex_;
  std::optional<Failure> failure_;  // guarded by mutex_
};

Adapter& of(lockstep_comm* comm) {
  return *reinterpret_cast<Adapter*>(comm);
}

PostedPtr& of(lockstep_handle* handle) {
  return *reinterpret_cast<PostedPtr*>(handle);
}

lockstep_status test(lockstep_handle* handle) {
  auto& posted = *of(handle);
  const std::lock_guard lock(posted.mutex);
  if (!posted.over) return LOCKSTEP_PENDING;
  return posted.failure ? comm::status_of(posted.failure->kind) : LOCKSTEP_OK;
}

lockstep_status wait(lockstep_handle* handle, std::int64_t deadline_ns) {
  auto& posted = *of(handle);
  const auto deadline = Deadline::from_monotonic_ns(deadline_ns);
  {
    std::unique_lock lock(posted.mutex);
    const auto over = [&] { return posted.over; };
    if (deadline.is_never()) {
      posted.changed.wait(lock, over);
    } else if (!posted.changed.wait_until(lock, deadline.time_point(), over)) {
      return LOCKSTEP_TIMEOUT;
    }
  }
  return test(handle);
}

void last_error(lockstep_handle* handle, char* error, std::size_t capacity) {
  auto& posted = *of(handle);
  const std::lock_guard lock(posted.mutex);
  say(error, capacity, posted.failure ? posted.failure->message : "");
}

void release(lockstep_handle* handle) {
  delete &of(handle);
}

lockstep_status Adapter::post_and_wait(const lockstep_op& op, char* error, std::size_t capacity) {
  lockstep_op quiet = op;
  quiet.done = nullptr;
  lockstep_handle* handle = nullptr;
  if (const auto status = post(quiet, &handle); status != LOCKSTEP_OK) return status;
  const auto status = wait(handle, LOCKSTEP_NEVER);
  if (status != LOCKSTEP_OK) last_error(handle, error, capacity);
  release(handle);
  return status;
}

// What a back end cannot do it refuses when it is called; there is no list to ask.
lockstep_status everything(lockstep_capabilities* out) {
  out->op_kinds = (1u << LOCKSTEP_OP_KINDS) - 1;
  out->dtypes = (1u << LOCKSTEP_DTYPES) - 1;
  for (auto& ops : out->reduce) ops = (1u << LOCKSTEP_REDUCE_OPS) - 1;
  out->crosses_hosts = 1;
  out->calls_back = 1;
  return LOCKSTEP_OK;
}

lockstep_status create(const lockstep_comm_config* config, lockstep_comm** out, char* error,
                       std::size_t capacity) {
  *out = nullptr;
  const auto& registered = *reinterpret_cast<const Registered*>(config->engine);
  try {
    if (t_joining == nullptr)
      base::raise(ErrorKind::kUnsupported, "a registered back end cannot be part of another engine");
    auto backend = registered.factory(*t_joining);
    if (!backend) base::raise(ErrorKind::kInternal, "its factory returned null");
    *out = reinterpret_cast<lockstep_comm*>(new Adapter(std::move(backend), config->size));
    return LOCKSTEP_OK;
  } catch (...) {
    const Failure failure = base::current_failure();
    say(error, capacity, failure.message);
    return comm::status_of(failure.kind);
  }
}

lockstep_status failure_of(lockstep_comm* comm, char* error, std::size_t capacity, std::int32_t* rank,
                           std::int64_t* pid, char* cause, std::size_t cause_capacity) {
  const auto failure = of(comm).first_failure();
  comm::put_peer(failure, rank, pid, cause, cause_capacity);
  if (!failure) return LOCKSTEP_OK;
  say(error, capacity, failure->message);
  return comm::status_of(failure->kind);
}

lockstep_status post(lockstep_comm* comm, const lockstep_op* op, lockstep_handle** out) {
  try {
    return of(comm).post(*op, out);
  } catch (...) {
    return comm::status_of(base::current_failure().kind);
  }
}

lockstep_status run(lockstep_comm* comm, const lockstep_op* op, char* error, std::size_t capacity) {
  try {
    return of(comm).run(*op, error, capacity);
  } catch (...) {
    return comm::status_of(base::current_failure().kind);
  }
}

}  // namespace

JoiningScope::JoiningScope(const BackendOptions& options) {
  t_joining = &options;
}

JoiningScope::~JoiningScope() {
  t_joining = nullptr;
}

std::shared_ptr<Backend> backend_of(comm::Communicator& comm, const comm::Engine& engine) {
  return engine.table().comm_create == create ? of(comm.raw()).backend() : nullptr;
}

const lockstep_engine* make_backend_table(std::string name, BackendFactory factory) {
  auto* made = new Registered{.table = {}, .name = std::move(name), .factory = std::move(factory)};
  made->table = {.struct_size = sizeof(lockstep_engine),
                 .abi_version = LOCKSTEP_ENGINE_ABI_VERSION,
                 .name = made->name.c_str(),
                 .capabilities = everything,
                 .comm_create = create,
                 .comm_destroy = [](lockstep_comm* comm, const char*) { delete &of(comm); },
                 .comm_abort = [](lockstep_comm* comm, const char* reason) { of(comm).abort(reason); },
                 .comm_failure = failure_of,
                 .alloc = nullptr,
                 .free = nullptr,
                 .post = post,
                 .test = test,
                 .wait = wait,
                 .release = release,
                 .last_error = last_error,
                 .run = run,
                 .comm_leave = nullptr};
  return &made->table;
}

}  // namespace lockstep::internal
