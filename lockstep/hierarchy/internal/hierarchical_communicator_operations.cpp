// Operations: queued, cut into steps, carried out step by step, waited for.
#include <algorithm>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/hierarchy/internal/hierarchical_communicator.h"

namespace lockstep::comm::hierarchy {
namespace {

// The context of an engine's `done`: which step of which operation.
struct StepContext {
  std::shared_ptr<Operation> operation;
  std::size_t step;
};

bool is_message(lockstep_op_kind kind) {
  return kind == LOCKSTEP_SEND || kind == LOCKSTEP_RECV;
}

std::vector<std::uint64_t> copy_counts(const std::uint64_t* counts, bool used, int size) {
  return used && counts != nullptr ? std::vector<std::uint64_t>(counts, counts + size)
                                   : std::vector<std::uint64_t>();
}

// Per thread: only the thread that is inside a caller's frame must not run callbacks.
thread_local int callers_inside = 0;

}  // namespace

CallerInside::CallerInside() {
  ++callers_inside;
}

CallerInside::~CallerInside() {
  --callers_inside;
}

Operation::Operation(HierarchicalCommunicator& communicator, const lockstep_op& call, int size)
    : owner(communicator),
      where(call.where != nullptr ? call.where : ""),
      send_counts(copy_counts(call.send_counts, call.kind == LOCKSTEP_ALL_TO_ALL_V, size)),
      recv_counts(copy_counts(
          call.recv_counts, call.kind == LOCKSTEP_ALL_TO_ALL_V || call.kind == LOCKSTEP_ALL_GATHER_V, size)),
      op(call) {
  op.where = where.c_str();
  op.send_counts = send_counts.empty() ? nullptr : send_counts.data();
  op.recv_counts = recv_counts.empty() ? nullptr : recv_counts.data();
}

// users_ is raised together with the insertion: from then on a callback may complete the operation, and a
// thread that destroys the communicator waits for this call to exit().
std::shared_ptr<Operation> HierarchicalCommunicator::post(const lockstep_op& op) {
  const CallerInside inside;
  auto operation = std::make_shared<Operation>(*this, op, size());
  const bool message = is_message(op.kind);
  {
    const base::MutexLock lock(mutex_);
    if (message) {
      messages_.push_back(operation);
    } else {
      operation->number = ++n_collectives_;
      queue_.push_back(operation);
    }
    ++users_;
  }
  setup_.ticker.add(this);
  message ? advance(operation) : drive_queue();
  exit();
  return operation;
}

// Advances the head of the queue as far as possible, and the next when it is over. One thread at a time: a
// thread that comes meanwhile increments drives_ and returns, and the first thread repeats until the count
// has not changed. advance() works alike, per operation: so no step that ends in between is missed, and no
// lock is held while engines are called.
void HierarchicalCommunicator::drive_queue() {
  if (drives_.fetch_add(1) != 0) return;
  std::uint32_t seen = 0;
  do {
    seen = drives_.load();
    for (;;) {
      std::shared_ptr<Operation> head;
      {
        const base::MutexLock lock(mutex_);
        if (!queue_.empty() && queue_.front()->over) queue_.pop_front();
        if (queue_.empty()) {
          idle_.notify_all();
          break;
        }
        head = queue_.front();
      }
      advance(head);
      if (!head->over) break;
    }
  } while (!drives_.compare_exchange_strong(seen, 0));
}

void HierarchicalCommunicator::advance(const std::shared_ptr<Operation>& operation) {
  if (operation->calls.fetch_add(1) != 0) return;
  std::uint32_t seen = 0;
  do {
    seen = operation->calls.load();
    if (!operation->over) advance_once(operation);
  } while (!operation->calls.compare_exchange_strong(seen, 0));
}

// An operation that failed is not over until its posted steps are: the engines may use its buffers until
// then. `running` is a deque, so its entries stay where callbacks find them.
void HierarchicalCommunicator::advance_once(const std::shared_ptr<Operation>& operation) {
  Operation& now = *operation;
  collect(now);
  if (!now.failure) now.failure = stopped();
  try {
    if (!now.failure && !now.started) {
      Schedule schedule = make_schedule(now.op, topology_, [this](std::size_t n) { return scratch(n); });
      const base::MutexLock lock(now.mutex);
      now.started = true;
      now.schedule = std::move(schedule);
      for (std::size_t i = 0; i < now.schedule.steps.size(); ++i) now.running.emplace_back();
    }
    if (!now.failure) post_steps(operation);
  } catch (...) {
    now.failure = break_with(base::current_failure());
  }
  const bool all = now.started && now.n_over == now.schedule.steps.size();
  if (now.failure ? now.n_over == now.n_posted : all) return finish(operation);
  const base::MutexLock lock(now.mutex);
  ++now.version;
  now.changed.notify_all();
}

// Counts the steps that are over. Only by the thread that advances the operation.
void HierarchicalCommunicator::collect(Operation& operation) {
  for (std::size_t i = 0; i < operation.running.size(); ++i) {
    auto& running = operation.running[i];
    if (!running.posted || running.counted || !running.over) continue;
    running.counted = true;
    ++operation.n_over;
    const SubCommunicator& where = sub_communicator(operation.schedule.steps[i].where);
    const auto status = where.table().test(running.handle.get());
    if (status != LOCKSTEP_OK && !operation.failure) {
      char text[kErrorCapacity] = "";
      where.table().last_error(running.handle.get(), text, sizeof text);
      text[sizeof text - 1] = '\0';
      const auto broken = where.failure();
      Failure failure = broken ? *broken : where.explain(status, text);
      // A message that failed by itself leaves the group intact.
      operation.failure = broken || !is_message(operation.op.kind) ? break_with(std::move(failure)) : failure;
    }
    const base::MutexLock lock(operation.mutex);
    running.handle.reset();
  }
}

// counted, not over: the failure of a step has been seen when it is counted.
bool HierarchicalCommunicator::ready(const Operation& operation, const Step& step) const {
  return std::ranges::all_of(step.needs,
                             [&](int i) { return operation.running[static_cast<std::size_t>(i)].counted; });
}

// A cursor per sub-communicator, since the order within each must be the same on all of its ranks: a step
// that is not ready holds back those after it in the same sub-communicator, and no others. `before` moves
// bytes that earlier steps have produced.
void HierarchicalCommunicator::post_steps(const std::shared_ptr<Operation>& operation) {
  auto& steps = operation->schedule.steps;
  for (int p = 0; p < kSubCommunicators; ++p) {
    const SubCommunicator* const where = p == 0 ? local_.get() : p == 1 ? lane_.get() : flat_.get();
    std::size_t& cursor = operation->cursor[static_cast<std::size_t>(p)];
    for (; cursor < steps.size(); ++cursor) {
      Step& step = steps[cursor];
      if (static_cast<int>(step.where) != p) continue;
      if (!ready(*operation, step)) break;
      if (step.before) step.before();
      auto& running = operation->running[cursor];
      step.op.done = step_over;
      step.op.done_context = new StepContext{operation, cursor};
      lockstep_handle* handle = nullptr;
      // The callback may run before this returns, on another thread. It then only increments `calls`
      // (advance()), since this thread is inside advance_once(); `posted` and the handle are set before it is
      // counted.
      const auto status = where->table().post(where->comm(), &step.op, &handle);
      if (status != LOCKSTEP_OK) {
        delete static_cast<StepContext*>(step.op.done_context);
        const auto broken = where->failure();
        operation->failure =
            break_with(broken ? *broken : where->explain(status, "the engine refused a step"));
        return;
      }
      const base::MutexLock lock(operation->mutex);
      running.handle = std::shared_ptr<lockstep_handle>(
          handle, [where](lockstep_handle* h) { where->table().release(h); });
      running.posted = true;
      ++operation->n_posted;
    }
  }
}

// Called by the engines, from any thread. users_ keeps the communicator alive meanwhile.
void HierarchicalCommunicator::step_over(void* context) {
  const std::unique_ptr<StepContext> mine(static_cast<StepContext*>(context));
  HierarchicalCommunicator& owner = mine->operation->owner;
  {
    const base::MutexLock lock(owner.mutex_);
    ++owner.users_;
  }
  mine->operation->running[mine->step].over = true;
  owner.advance(mine->operation);
  if (mine->operation->over) owner.drive_queue();
  owner.exit();
}

// The schedule is destroyed outside the operation's mutex: freeing scratch takes mutex_, and the two are
// never held together.
void HierarchicalCommunicator::finish(const std::shared_ptr<Operation>& operation) {
  Operation& now = *operation;
  if (!now.failure && now.schedule.at_end) now.schedule.at_end();
  const auto done = now.op.done;
  void* const context = now.op.done_context;
  Schedule spent;
  {
    const base::MutexLock lock(now.mutex);
    std::swap(spent, now.schedule);
    now.status = now.failure ? status_of(now.failure->kind) : LOCKSTEP_OK;
    if (now.failure) now.error = now.failure->message;
    now.over = true;
    now.changed.notify_all();
  }
  spent = {};
  if (is_message(now.op.kind)) {
    const base::MutexLock lock(mutex_);
    std::erase(messages_, operation);
    idle_.notify_all();
  }
  if (done == nullptr) return;
  if (callers_inside == 0) return done(context);
  {
    const base::MutexLock lock(mutex_);
    ++users_;
  }
  setup_.ticker.call_soon([this, done, context] {
    done(context);
    exit();
  });
}

bool HierarchicalCommunicator::wait(const std::shared_ptr<Operation>& operation, Deadline deadline) {
  Operation& now = *operation;
  base::SlowWait slow(deadline);
  bool said = false;
  base::MutexLock lock(now.mutex);
  while (!now.over) {
    // A sub-communicator begins its wait after this one, so that its own log line is never due.
    const Deadline until = said ? std::min(deadline, Deadline::after(slow.quiet_slice())) : slow.next();
    const std::uint64_t version = now.version;
    std::shared_ptr<lockstep_handle> step;
    const SubCommunicator* where = nullptr;
    for (std::size_t i = 0; i < now.running.size() && step == nullptr; ++i) {
      if (now.running[i].posted && !now.running[i].over && now.running[i].handle) {
        step = now.running[i].handle;
        where = &sub_communicator(now.schedule.steps[i].where);
      }
    }
    if (step != nullptr) {
      lock.unlock();
      where->table().wait(step.get(), until.monotonic_ns());
      step.reset();
      lock.lock();
    }
    // The step's callback advances the operation; until then there is nothing to do here.
    const bool moved = now.changed.wait_until(
        now.mutex, until.time_point(),
        [&]() LOCKSTEP_REQUIRES(now.mutex) { return now.over || now.version != version; });
    if (moved) continue;
    if (deadline.expired()) return now.over;
    lock.unlock();
    slow.say_if_due([&] {
      said = true;
      return awaited(now);
    });
    lock.lock();
  }
  return true;
}

}  // namespace lockstep::comm::hierarchy
