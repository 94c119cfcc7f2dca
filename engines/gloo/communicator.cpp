#include "engines/gloo/communicator.h"

#include <algorithm>

#include "engines/gloo/collectives.h"
#include "engines/gloo/slow_wait.h"

namespace lockstep::gloo_plugin {
namespace {

// Its text is short enough to need none.
Failure no_memory() {
  return {.status = LOCKSTEP_RESOURCE, .message = "no memory"};
}

}  // namespace

Communicator::Communicator(const lockstep_comm_config& config)
    : rank_(config.rank),
      size_(config.size),
      name_(config.name != nullptr ? config.name : ""),
      host_(config.host),
      runtime_(Runtime::get()),
      lazy_(connects_lazily()),
      members_(static_cast<std::size_t>(config.size)),
      data_slots_(static_cast<std::size_t>(config.size)),
      gone_(static_cast<std::size_t>(config.size)) {
  try {
    meet(config.deadline_ns);
    listen(config.deadline_ns);
    if (!lazy_) connect(config.deadline_ns);
  } catch (const Error& error) {
    break_with(error.failure());
    // Then this rank has joined too, a group that is broken by now.
    // all_joined_: another rank had joined, so on that rank the group exists, with this one as a member. It
    // must then exist here too, as a broken group: its first operation reports why.
    if (all_joined_) return;
    wait_until_idle();
    throw;
  } catch (const std::exception& error) {
    break_with(
        {.status = LOCKSTEP_RESOURCE, .message = cat("rank ", rank_, " could not join: ", error.what())});
    wait_until_idle();
    throw;
  }
}

// A Transfer must be gone before its Connections, and tasks hold Transfers: hence the wait.
Communicator::~Communicator() {
  leave(nullptr);
  wait_until_idle();
  // No thread could be had for these when the group stopped; their alarms refer to this communicator.
  std::list<std::shared_ptr<Operation>> rest;
  {
    const base::MutexLock lock(mutex_);
    rest.swap(to_self_);
  }
  end(rest);
}

void Communicator::wait_until_idle() {
  const auto wait = [this] {
    const base::MutexLock lock(mutex_);
    idle_.wait(mutex_, [&]() LOCKSTEP_REQUIRES(mutex_) { return tasks_ == 0 && !driven_; });
  };
  wait();
  for (const auto id : watched_) runtime_->watch.remove_socket(id);
  wait();  // a hang-up seen until just now may have left a task
}

// Counted before it runs, so that wait_until_idle() cannot miss a task that has not begun. `task` must not
// throw.
void Communicator::spawn(std::function<void()> task) {
  {
    const base::MutexLock lock(mutex_);
    ++tasks_;
  }
  const auto done = [this] {
    const base::MutexLock lock(mutex_);
    --tasks_;
    idle_.notify_all();
  };
  try {
    runtime_->pool.run([task = std::move(task), done] {
      task();
      done();
    });
  } catch (...) {
    done();
    raise(LOCKSTEP_RESOURCE, "no thread can be started for an operation");
  }
}

// Armed before anything starts: an operation that hangs in its first step has a deadline already.
std::shared_ptr<Operation> Communicator::post(const lockstep_op& op) {
  if (left_) stop_source_.check();
  auto operation = std::make_shared<Operation>(op, size_);
  arm(*operation);
  try {
    stop_source_.check();
    is_point_to_point(op.kind) ? post_message(operation) : post_collective(operation);
  } catch (const Error& error) {
    runtime_->watch.remove_deadline(operation->alarm);
    if (!stop_source_.failure()) throw;
    // Over already; but done is not called before post has returned.
    spawn([this, operation, failure = error.failure()] { complete(operation, failure); });
  } catch (...) {
    runtime_->watch.remove_deadline(operation->alarm);
    throw;
  }
  return operation;
}

// Started under start_mutex_, in the order posted: gloo matches sends and receives of one slot in the order
// in which they were started. A failure is examined on another thread, since finding its cause may take 300
// ms (judge) and post must not block.
void Communicator::post_message(const std::shared_ptr<Operation>& operation) {
  if (operation->op.root == rank_) return post_to_self(operation);
  std::exception_ptr thrown;
  {
    const NoSigpipe quiet;
    const base::MutexLock lock(start_mutex_);
    if (!connected_ || !backlog_.empty()) return post_to_backlog(operation);
    thrown = start_and_queue(operation);
  }
  if (!thrown) return;
  try {
    spawn([this, operation, thrown] { give_up(operation, thrown); });
  } catch (const std::exception& error) {
    // Nobody is left to find out why; some of the message may be under way.
    break_with({.status = LOCKSTEP_RESOURCE, .message = error.what()});
    throw;
  }
}

void Communicator::post_to_backlog(const std::shared_ptr<Operation>& operation) {
  backlog_.push_back(operation);
  if (backlog_.size() > 1) return;
  try {
    spawn([this] { start_backlog(); });
  } catch (...) {
    backlog_.pop_back();
    throw;
  }
}

void Communicator::post_collective(const std::shared_ptr<Operation>& operation) {
  const base::MutexLock lock(mutex_);
  queue_.push_back(operation);
  if (driven_) return;
  try {
    start_draining();
  } catch (...) {
    queue_.pop_back();
    throw;
  }
}

// driven_ and tasks_ are set here, on behalf of the task: nobody may find the communicator idle before it
// begins.
void Communicator::start_draining() {
  driven_ = true;
  ++tasks_;
  try {
    runtime_->pool.run([this] { drain(); });
  } catch (...) {
    driven_ = false;
    --tasks_;
    raise(LOCKSTEP_RESOURCE, "no thread can be started for an operation");
  }
}

// A caller drives only when nothing is queued: otherwise its operation would overtake those posted before.
bool Communicator::try_drive() {
  const base::MutexLock lock(mutex_);
  if (driven_ || !queue_.empty()) return false;
  driven_ = true;
  return true;
}

// What was posted meanwhile goes to the pool: the caller's own operation is over.
void Communicator::stop_driving() {
  {
    const base::MutexLock lock(mutex_);
    driven_ = false;
    idle_.notify_all();
    if (queue_.empty()) return;
    try {
      return start_draining();
    } catch (...) {  // no thread, or no memory for the text that says so
      driven_ = true;
      ++tasks_;
    }
  }
  drain();
}

void Communicator::run(const lockstep_op& op) {
  stop_source_.check();
  if (!is_point_to_point(op.kind) && try_drive()) {
    const NoSigpipe quiet;
    std::optional<Failure> failure;
    try {
      Operation operation(op, size_);
      arm(operation, slow_from_now());
      failure = perform(operation);
    } catch (...) {  // no memory for it: nothing has begun
      stop_driving();
      throw;
    }
    stop_driving();
    if (failure) throw Error(*failure);
    return;
  }
  lockstep_op silent = op;
  silent.done = nullptr;
  const auto operation = post(silent);
  wait(*operation, LOCKSTEP_NEVER);
  const base::MutexLock lock(operation->mutex);
  if (operation->status != LOCKSTEP_OK)
    throw Error({.status = operation->status, .message = operation->error});
}

bool Communicator::wait(Operation& operation, std::int64_t deadline_ns) {
  // Far ahead rather than never: the clock's own range would overflow.
  constexpr std::int64_t kYear = 365LL * 24 * 3600 * 1'000'000'000;
  base::MutexLock lock(operation.mutex);
  const auto over_by = [&](std::int64_t time_ns) LOCKSTEP_REQUIRES(operation.mutex) {
    const auto left = time_ns == LOCKSTEP_NEVER ? kYear : std::min(time_ns - now_ns(), kYear);
    return operation.over.wait_for(
        operation.mutex, std::chrono::nanoseconds(left),
        [&]() LOCKSTEP_REQUIRES(operation.mutex) { return operation.status != LOCKSTEP_PENDING; });
  };
  if (operation.status != LOCKSTEP_PENDING) return true;
  const std::int64_t until_ns = std::min(deadline_ns, operation.op.deadline_ns);
  const std::int64_t lasted_ns = slow_from_now();
  if (lasted_ns < until_ns) {
    if (over_by(lasted_ns)) return true;
    lock.unlock();
    log_line(slow_line(slow_text(operation), until_ns));
    lock.lock();
  }
  return over_by(deadline_ns);
}

void Communicator::drain() {
  for (;;) {
    std::shared_ptr<Operation> operation;
    {
      const base::MutexLock lock(mutex_);
      if (queue_.empty()) {
        driven_ = false;
        --tasks_;
        idle_.notify_all();
        return;
      }
      operation = std::move(queue_.front());
      queue_.pop_front();
    }
    complete(operation, perform(*operation));
  }
}

// The transfers are released before the operation is reported as over: until then gloo may still write into
// the caller's memory.
std::optional<Failure> Communicator::perform(Operation& operation) {
  std::optional<Failure> failure;
  const bool pair = is_point_to_point(operation.op.kind);
  try {
    stop_source_.check();
    if (pair) {
      finish(operation);
    } else {
      connect_for(operation);
      operation.call = describe(operation.op, ++sequence_, size_);
      operation.begun = true;
      // Successive collectives alternate between interfaces; the number is the same on all ranks, hence so is
      // the interface.
      Connections& connections = *connections_[sequence_ % connections_.size()];
      Session session{rank_, size_, stop_source_, *mailbox_, connections};
      run_collective(session, operation);
    }
  } catch (...) {
    try {
      failure = current_failure(operation);
    } catch (...) {
      failure = no_memory();
    }
  }
  runtime_->watch.remove_deadline(operation.alarm);
  if (failure) {
    // After a failure ranks are at different points: there is no way back into step.
    try {
      break_with(*failure);
      if (const auto stop = stop_source_.stop()) failure = stop;
    } catch (const std::bad_alloc&) {
      break_with(no_memory());
    }
  }
  operation.head.reset();
  operation.body.reset();
  return failure;
}

// The status is set under the operation's mutex, which wait() holds; `done` runs after it, on this thread,
// under no lock.
void Communicator::complete(const std::shared_ptr<Operation>& operation,
                            const std::optional<Failure>& failure) {
  {
    const base::MutexLock lock(operation->mutex);
    try {
      if (failure) operation->error = failure->message;
    } catch (const std::bad_alloc&) {
      operation->error = no_memory().message;
    }
    operation->status = failure ? failure->status : LOCKSTEP_OK;
    operation->over.notify_all();
  }
  if (operation->op.done != nullptr) operation->op.done(operation->op.done_context);
}

// The callbacks refer to `operation`: whoever ends it removes the alarm first, and then none of them runs any
// more (Watch).
void Communicator::arm(Operation& operation, std::int64_t lasted_ns) {
  operation.alarm = runtime_->watch.add_deadline(
      operation.op.deadline_ns, [this, &operation] { timed_out(operation); }, lasted_ns,
      [this, &operation] {
        const std::string line = slow_line(slow_text(operation), operation.op.deadline_ns);
        try {
          spawn([this, line] { log_line(line); });  // writing may block
        } catch (const std::exception&) {
          log_line(line);
        }
      });
}

void Communicator::log_line(const std::string& line) const {
  if (host_->log != nullptr) host_->log(host_->context, 1, line.c_str());
}

std::string Communicator::slow_text(const Operation& operation) const {
  return cat("group \"", name_, "\": rank ", rank_, " is in ", context(operation), ": ",
             waits_for(operation));
}

std::string Communicator::context(const Operation& operation) const {
  return text_of(operation.begun ? operation.call : describe(operation.op, 0, size_));
}

}  // namespace lockstep::gloo_plugin
