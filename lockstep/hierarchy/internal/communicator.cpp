#include "lockstep/hierarchy/internal/communicator.h"

#include <algorithm>

#include "lockstep/base/base.h"

namespace lockstep::comm::hierarchy {
namespace {

constexpr std::size_t kSharedScratch = 64 << 10;  // smaller blocks come from the heap
constexpr std::size_t kKeptBlocks = 16;

// What an engine's done is given: which step of which operation.
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

constexpr std::size_t kWordsCapacity = 512;  // of what ranks tell each other while they join

std::string key_of(const char* what, int rank) {
  return cat("hierarchy/", what, "/", rank);
}

void tell(const lockstep_comm_config& config, const char* what, const std::string& words) {
  const lockstep_host& host = *config.host;
  if (host.kv_set(host.context, key_of(what, config.rank).c_str(), words.data(), words.size()) != LOCKSTEP_OK)
    raise(ErrorKind::kSystem, "cannot write to the group's store", ErrorFamily::kBackend);
}

std::string hear(const lockstep_comm_config& config, const char* what, int rank) {
  const lockstep_host& host = *config.host;
  char words[kWordsCapacity];
  std::size_t length = 0;
  const auto status =
      host.kv_get(host.context, key_of(what, rank).c_str(), words, sizeof words, &length, config.deadline_ns);
  if (status == LOCKSTEP_OK && length <= sizeof words) return {words, length};
  raise(status == LOCKSTEP_TIMEOUT ? ErrorKind::kTimeout : ErrorKind::kSystem,
        cat("rank ", rank, " did not join the group in time: rank ", config.rank,
            " waited in vain to hear from it"),
        ErrorFamily::kBackend);
}

// While one lives on this thread, a caller is inside post, abort or leave, and may hold locks that its done takes.
thread_local int callers_inside = 0;
struct CallerInside {
  CallerInside() { ++callers_inside; }
  ~CallerInside() { --callers_inside; }
  CallerInside(const CallerInside&) = delete;
};

Failure left_failure() {
  return {.kind = ErrorKind::kAborted,
          .message = "this rank has left the group",
          .family = ErrorFamily::kBackend};
}

}  // namespace

Operation::Operation(Communicator& communicator, const lockstep_op& call, int size)
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

// ---- joining and leaving ----

Communicator::Communicator(Setup& setup, const lockstep_comm_config& config, const Communicator* parent)
    : setup_(setup), topology_(meet(config)) {
  try {
    make_parts(config, parent);
  } catch (...) {
    Failure failure = current_failure();
    tell(config, "joined", failure.message.substr(0, kWordsCapacity));
    raise(std::move(failure));
  }
  // Nobody goes on, and perhaps aborts, while another has a part still to join.
  tell(config, "joined", "");
  for (int r = 0; r < config.size; ++r) {
    if (const std::string words = hear(config, "joined", r); !words.empty())
      raise(ErrorKind::kPeerLost, cat("rank ", r, " could not join the group: ", words),
            ErrorFamily::kBackend);
  }
}

Topology Communicator::meet(const lockstep_comm_config& config) {
  tell(config, "host", setup_.identity());
  std::vector<std::string> identities;
  for (int r = 0; r < config.size; ++r) identities.push_back(hear(config, "host", r));
  return Topology::of(identities, config.rank);
}

Part::Parent Communicator::parent_of(const std::vector<int>& members, const lockstep_comm_config& config,
                                     const Part* part) const {
  if (part == nullptr) return {};
  Part::Parent parent{.comm = part->comm()};
  for (const int r : members) {
    const int place = part->rank_of(config.parent_ranks[r]);
    if (place >= static_cast<int>(part->members().size())) return {};
    parent.ranks.push_back(place);
  }
  return parent;
}

void Communicator::make_parts(const lockstep_comm_config& config, const Communicator* parent) {
  std::vector<int> all(static_cast<std::size_t>(config.size));
  for (int r = 0; r < config.size; ++r) all[static_cast<std::size_t>(r)] = r;
  const Part* const flat = parent != nullptr ? parent->flat_.get() : nullptr;
  const Part* const local = parent != nullptr ? parent->local_.get() : nullptr;
  if (!topology_.one_rank_each() || topology_.one_host()) {
    const auto& members = topology_.neighbours();
    local_ = std::make_unique<Part>(setup_.local, config, cat("local", topology_.host()), members,
                                    parent_of(members, config, local));
  }
  if (!topology_.one_host()) {
    flat_ = std::make_unique<Part>(setup_.across, config, "flat", all, parent_of(all, config, flat));
    if (!topology_.one_rank_each() && topology_.has_lane()) {
      const auto members = topology_.lane();
      lane_ =
          std::make_unique<Part>(setup_.across, config, cat("lane", topology_.even ? topology_.place() : 0),
                                 members, Part::Parent{flat_->comm(), {members.begin(), members.end()}});
    }
  }
  if (topology_.one_host()) sole_ = local_.get();
  if (topology_.one_rank_each() && !topology_.one_host()) sole_ = flat_.get();
}

Communicator::~Communicator() {
  leave(nullptr);
  if (sole_ != nullptr) return;
  setup_.pulse.remove(this);
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [&] { return queue_.empty() && messages_.empty() && users_ == 0; });
  for (const auto& [size, block] : blocks_) local_->table().free(local_->comm(), block);
}

void Communicator::leave(const char* cause) {
  const CallerInside inside;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  for (const Part* one : {flat_.get(), local_.get(), lane_.get()}) {
    if (one != nullptr) one->leave(cause);
  }
  if (sole_ != nullptr) return;
  beat();
}

// ---- failure ----

Part& Communicator::part(Where where) const {
  return where == Where::kLocal ? *local_ : where == Where::kLane ? *lane_ : *flat_;
}

Failure Communicator::break_with(Failure failure) {
  {
    const std::lock_guard lock(mutex_);
    if (first_) return *first_;
    if (closed_) return left_failure();
  }
  // All ranks share the flat part: what it heard first is what failed first.
  flat_->abort(failure);
  failure = flat_->failure().value_or(failure);
  {
    const std::lock_guard lock(mutex_);
    if (!first_) first_ = failure;
    failure = *first_;
  }
  for (const Part* one : {local_.get(), lane_.get()}) {
    if (one != nullptr) one->abort(failure);
  }
  return failure;
}

std::optional<Failure> Communicator::stopped() {
  const std::lock_guard lock(mutex_);
  if (first_) return first_;
  if (closed_) return left_failure();
  return std::nullopt;
}

std::optional<Failure> Communicator::failure() {
  if (sole_ != nullptr) return sole_->failure();
  {
    const std::lock_guard lock(mutex_);
    if (first_ || closed_) return first_;
  }
  for (const Part* one : {flat_.get(), local_.get(), lane_.get()}) {
    if (one == nullptr) continue;
    if (auto failure = one->failure()) return break_with(std::move(*failure));
  }
  return std::nullopt;
}

void Communicator::abort(const std::string& reason) {
  const CallerInside inside;
  if (sole_ != nullptr) return sole_->table().comm_abort(sole_->comm(), reason.c_str());
  break_with({.kind = ErrorKind::kAborted,
              .message = cat("rank ", rank(), " aborted the group: ", reason),
              .family = ErrorFamily::kBackend});
  beat();
}

// ---- operations ----

std::shared_ptr<Operation> Communicator::post(const lockstep_op& op) {
  const CallerInside inside;
  auto operation = std::make_shared<Operation>(*this, op, size());
  const bool message = is_message(op.kind);
  {
    const std::lock_guard lock(mutex_);
    if (message) {
      messages_.push_back(operation);
    } else {
      queue_.push_back(operation);
    }
    ++users_;
  }
  setup_.pulse.add(this);
  message ? advance(operation) : pump();
  exit();
  return operation;
}

// Runs the head of the queue as far as it goes, and the next when it is over. One thread at a time; who comes meanwhile
// leaves a mark and the first goes round again.
void Communicator::pump() {
  if (pumps_.fetch_add(1) != 0) return;
  std::uint32_t seen = 0;
  do {
    seen = pumps_.load();
    for (;;) {
      std::shared_ptr<Operation> head;
      {
        const std::lock_guard lock(mutex_);
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
  } while (!pumps_.compare_exchange_strong(seen, 0));
}

void Communicator::advance(const std::shared_ptr<Operation>& operation) {
  if (operation->calls.fetch_add(1) != 0) return;
  std::uint32_t seen = 0;
  do {
    seen = operation->calls.load();
    if (!operation->over) advance_once(operation);
  } while (!operation->calls.compare_exchange_strong(seen, 0));
}

void Communicator::advance_once(const std::shared_ptr<Operation>& operation) {
  Operation& now = *operation;
  collect(now);
  if (!now.failure) now.failure = stopped();
  try {
    if (!now.failure && !now.started) {
      Schedule schedule = make_schedule(now.op, topology_, [this](std::size_t n) { return scratch(n); });
      const std::lock_guard lock(now.mutex);
      now.started = true;
      now.schedule = std::move(schedule);
      for (std::size_t i = 0; i < now.schedule.steps.size(); ++i) now.running.emplace_back();
    }
    if (!now.failure) post_steps(operation);
  } catch (...) {
    now.failure = break_with(current_failure());
  }
  const bool all = now.started && now.n_over == now.schedule.steps.size();
  if (now.failure ? now.n_over == now.n_posted : all) return finish(operation);
  const std::lock_guard lock(now.mutex);
  ++now.version;
  now.changed.notify_all();
}

// Takes note of the steps that are over.
void Communicator::collect(Operation& operation) {
  for (std::size_t i = 0; i < operation.running.size(); ++i) {
    auto& running = operation.running[i];
    if (!running.posted || running.counted || !running.over) continue;
    running.counted = true;
    ++operation.n_over;
    const Part& where = part(operation.schedule.steps[i].where);
    const auto status = where.table().test(running.handle.get());
    if (status != LOCKSTEP_OK && !operation.failure) {
      char words[kErrorCapacity] = "";
      where.table().last_error(running.handle.get(), words, sizeof words);
      words[sizeof words - 1] = '\0';
      const auto broken = where.failure();
      Failure failure = broken ? *broken : where.explain(status, words);
      // A message that failed by itself leaves the group well.
      operation.failure = broken || !is_message(operation.op.kind) ? break_with(std::move(failure)) : failure;
    }
    const std::lock_guard lock(operation.mutex);
    running.handle.reset();
  }
}

bool Communicator::ready(const Operation& operation, const Step& step) const {
  return std::ranges::all_of(step.needs,
                             [&](int i) { return operation.running[static_cast<std::size_t>(i)].counted; });
}

void Communicator::post_steps(const std::shared_ptr<Operation>& operation) {
  auto& steps = operation->schedule.steps;
  for (int p = 0; p < kParts; ++p) {
    const Part* const where = p == 0 ? local_.get() : p == 1 ? lane_.get() : flat_.get();
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
      const auto status = where->table().post(where->comm(), &step.op, &handle);
      if (status != LOCKSTEP_OK) {
        delete static_cast<StepContext*>(step.op.done_context);
        const auto broken = where->failure();
        operation->failure =
            break_with(broken ? *broken : where->explain(status, "the engine refused a step"));
        return;
      }
      const std::lock_guard lock(operation->mutex);
      running.handle = std::shared_ptr<lockstep_handle>(
          handle, [where](lockstep_handle* h) { where->table().release(h); });
      running.posted = true;
      ++operation->n_posted;
    }
  }
}

// Called by the engines, from any thread.
void Communicator::step_over(void* context) {
  const std::unique_ptr<StepContext> mine(static_cast<StepContext*>(context));
  Communicator& owner = mine->operation->owner;
  {
    const std::lock_guard lock(owner.mutex_);
    ++owner.users_;
  }
  mine->operation->running[mine->step].over = true;
  owner.advance(mine->operation);
  if (mine->operation->over) owner.pump();
  owner.exit();
}

void Communicator::finish(const std::shared_ptr<Operation>& operation) {
  Operation& now = *operation;
  if (!now.failure && now.schedule.at_end) now.schedule.at_end();
  const auto done = now.op.done;
  void* const context = now.op.done_context;
  Schedule spent;
  {
    const std::lock_guard lock(now.mutex);
    std::swap(spent, now.schedule);
    now.status = now.failure ? status_of(now.failure->kind) : LOCKSTEP_OK;
    if (now.failure) now.error = now.failure->message;
    now.over = true;
    now.changed.notify_all();
  }
  spent = {};
  if (is_message(now.op.kind)) {
    const std::lock_guard lock(mutex_);
    std::erase(messages_, operation);
    idle_.notify_all();
  }
  if (done == nullptr) return;
  if (callers_inside == 0) return done(context);
  {
    const std::lock_guard lock(mutex_);
    ++users_;
  }
  setup_.pulse.call_soon([this, done, context] {
    done(context);
    exit();
  });
}

bool Communicator::wait(const std::shared_ptr<Operation>& operation, Deadline deadline) {
  Operation& now = *operation;
  std::unique_lock lock(now.mutex);
  while (!now.over) {
    const std::uint64_t version = now.version;
    std::shared_ptr<lockstep_handle> step;
    const Part* where = nullptr;
    for (std::size_t i = 0; i < now.running.size() && step == nullptr; ++i) {
      if (now.running[i].posted && !now.running[i].over && now.running[i].handle) {
        step = now.running[i].handle;
        where = &part(now.schedule.steps[i].where);
      }
    }
    if (step != nullptr) {
      lock.unlock();
      where->table().wait(step.get(), deadline.monotonic_ns());
      step.reset();
      lock.lock();
    }
    // The step's own callback carries on; until then there is nothing to do here.
    const bool moved = now.changed.wait_until(lock, deadline.time_point(),
                                              [&] { return now.over || now.version != version; });
    if (!moved) return now.over;
  }
  return true;
}

// ---- the pulse ----

bool Communicator::enter() {
  const std::lock_guard lock(mutex_);
  if (queue_.empty() && messages_.empty()) return false;
  ++users_;
  return true;
}

void Communicator::exit() {
  const std::lock_guard lock(mutex_);
  --users_;
  idle_.notify_all();
}

void Communicator::beat() {
  failure();
  std::vector<std::shared_ptr<Operation>> under_way;
  std::optional<Failure> late;
  {
    const std::lock_guard lock(mutex_);
    under_way = messages_;
    for (std::size_t i = 1; i < queue_.size(); ++i) {
      if (!Deadline::from_monotonic_ns(queue_[i]->op.deadline_ns).expired()) continue;
      late = Failure{.kind = ErrorKind::kTimeout,
                     .message = cat("rank ", rank(), " ran out of time in an operation at ", queue_[i]->where,
                                    ", which waits for the ones posted before it"),
                     .family = ErrorFamily::kBackend};
    }
  }
  if (late) break_with(std::move(*late));
  if (!stopped()) return;
  for (const auto& operation : under_way) advance(operation);
  pump();
}

// Blocks are kept for the next: giving pages back to the kernel takes longer than most collectives.
std::shared_ptr<void> Communicator::scratch(std::size_t n_bytes) {
  Part* const from = n_bytes >= kSharedScratch ? memory() : nullptr;
  if (from == nullptr) return {::operator new(n_bytes), [](void* p) { ::operator delete(p); }};
  std::pair<std::size_t, void*> block{n_bytes, nullptr};
  {
    const std::lock_guard lock(mutex_);
    const auto fits = std::ranges::find_if(
        blocks_, [&](const auto& one) { return one.first >= n_bytes && one.first <= 4 * n_bytes; });
    if (fits != blocks_.end()) {
      block = *fits;
      blocks_.erase(fits);
    }
  }
  if (block.second == nullptr && from->table().alloc(from->comm(), n_bytes, &block.second) != LOCKSTEP_OK)
    raise(ErrorKind::kResource, cat("no room for ", n_bytes, " bytes of scratch"), ErrorFamily::kBackend);
  return {block.second, [this, from, size = block.first](void* p) {
            {
              const std::lock_guard lock(mutex_);
              if (blocks_.size() < kKeptBlocks) {
                blocks_.emplace_back(size, p);
                return;
              }
            }
            from->table().free(from->comm(), p);
          }};
}

}  // namespace lockstep::comm::hierarchy
