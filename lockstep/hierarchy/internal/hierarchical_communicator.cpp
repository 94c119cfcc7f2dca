// Joining, leaving and failure, and what is kept between operations.
#include "lockstep/hierarchy/internal/hierarchical_communicator.h"

#include <algorithm>
#include <charconv>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::comm::hierarchy {
namespace {

constexpr std::size_t kSharedScratch = 64 << 10;  // smaller blocks come from the heap
constexpr std::size_t kKeptBlocks = 16;

constexpr std::size_t kTextCapacity = 512;  // of what ranks publish while they join

std::string key_of(const char* what, int rank) {
  return base::cat("hierarchy/", what, "/", rank);
}

void publish(const lockstep_comm_config& config, const char* what, const std::string& text) {
  const lockstep_host& host = *config.host;
  if (host.kv_set(host.context, key_of(what, config.rank).c_str(), text.data(), text.size()) != LOCKSTEP_OK)
    base::raise(ErrorKind::kSystem, "cannot write to the group's store", ErrorFamily::kBackend);
}

// In two reads, so that a slow wait can be logged once in between; the second one waits until the deadline.
std::string read_from(const lockstep_comm_config& config, const char* what, int rank,
                      std::size_t capacity = kTextCapacity) {
  const lockstep_host& host = *config.host;
  const auto deadline = Deadline::from_monotonic_ns(config.deadline_ns);
  std::string text(capacity, '\0');
  std::size_t length = 0;
  base::SlowWait slow(deadline);
  const auto get = [&] {
    return host.kv_get(host.context, key_of(what, rank).c_str(), text.data(), text.size(), &length,
                       slow.next().monotonic_ns());
  };
  auto status = get();
  if (status == LOCKSTEP_TIMEOUT && !deadline.expired()) {
    slow.say_if_due([&] {
      return base::cat("rank ", config.rank, " joins group \"", config.name != nullptr ? config.name : "",
                       "\": it waits for rank ", rank);
    });
    status = get();
  }
  if (status == LOCKSTEP_OK && length <= text.size()) return text.substr(0, length);
  base::raise(status == LOCKSTEP_TIMEOUT ? ErrorKind::kTimeout : ErrorKind::kSystem,
              base::cat("rank ", rank, " did not join the group in time: rank ", config.rank,
                        " received nothing from it"),
              ErrorFamily::kBackend);
}

// By rank 0: what all ranks published, as one value that the others wait for.
void publish_all(const lockstep_comm_config& config, const char* what, const std::vector<std::string>& text) {
  base::ByteWriter out;
  for (const auto& one : text) out.sized(one);
  publish(config, base::cat(what, "/all").c_str(), to_text(out.take()));
}

// What every rank published, on every rank. Rank 0 reads all and publishes them together: a few requests per
// rank, not one per pair.
std::vector<std::string> gather(const lockstep_comm_config& config, const char* what,
                                const std::string& mine) {
  const auto n = static_cast<std::size_t>(config.size);
  const std::string all_key = base::cat(what, "/all");
  std::vector<std::string> text;
  if (config.rank != 0) {
    publish(config, what, mine);
    const std::string all =
        read_from(config, all_key.c_str(), 0, n * (kTextCapacity + sizeof(std::uint64_t)));
    base::ByteReader in({reinterpret_cast<const std::uint8_t*>(all.data()), all.size()});
    while (const auto one = in.sized()) text.push_back(to_text(*one));
    if (text.size() == n) return text;
    base::raise(ErrorKind::kInternal, "rank 0 published the values of another number of ranks",
                ErrorFamily::kBackend);
  }
  for (int r = 0; r < config.size; ++r) text.push_back(r == 0 ? mine : read_from(config, what, r));
  publish_all(config, what, text);
  return text;
}

// Long enough for a remote store; the key exists since the rank joined.
constexpr Milliseconds kAskPatience{50};

// The collective in which `rank` announced that it is stuck, 0 when it never was; nothing when the store does
// not answer.
std::optional<std::uint64_t> entered_by(const lockstep_host& host, int rank, Deadline deadline) {
  char text[24];
  std::size_t length = 0;
  if (host.kv_get(host.context, key_of("entered", rank).c_str(), text, sizeof text, &length,
                  deadline.monotonic_ns()) != LOCKSTEP_OK ||
      length > sizeof text)
    return std::nullopt;
  std::uint64_t number = 0;
  std::from_chars(text, text + length, number);
  return number;
}

Failure left_failure() {
  return {.kind = ErrorKind::kAborted,
          .message = "this rank has left the group",
          .family = ErrorFamily::kBackend};
}

}  // namespace

// ---- joining and leaving ----

HierarchicalCommunicator::HierarchicalCommunicator(Setup& setup, const lockstep_comm_config& config,
                                                   const HierarchicalCommunicator* parent)
    : setup_(setup),
      host_(config.host),
      name_(config.name != nullptr ? config.name : ""),
      topology_(meet(config, parent)) {
  try {
    make_sub_communicators(config, parent);
  } catch (...) {
    Failure failure = base::current_failure();
    std::vector<std::string> text(static_cast<std::size_t>(config.size));
    text.front() = failure.message.substr(0, kTextCapacity);
    if (config.rank == 0) {
      publish_all(config, "joined", text);
    } else {
      publish(config, "joined", text.front());
    }
    base::raise(std::move(failure));
  }
  // The key must exist before anybody asks for it (missing_in): a read of a missing key would wait.
  publish(config, "entered", "0");
  // No rank continues, and perhaps aborts, while another has still to join a sub-communicator.
  const auto text = gather(config, "joined", "");
  for (std::size_t r = 0; r < text.size(); ++r) {
    if (!text[r].empty())
      base::raise(ErrorKind::kPeerLost, base::cat("rank ", r, " could not join the group: ", text[r]),
                  ErrorFamily::kBackend);
  }
}

// Ranks on one host have equal identities; which text it is does not matter. A child takes its parent's host
// numbers for it, without another exchange.
Topology HierarchicalCommunicator::meet(const lockstep_comm_config& config,
                                        const HierarchicalCommunicator* parent) {
  if (parent == nullptr) return Topology::of(gather(config, "host", setup_.identity()), config.rank);
  // The parent knows where all of its ranks are.
  std::vector<std::string> identities;
  for (int r = 0; r < config.size; ++r) {
    const auto rank = static_cast<std::size_t>(config.parent_ranks[r]);
    identities.push_back(std::to_string(parent->topology_.host_of.at(rank)));
  }
  return Topology::of(identities, config.rank);
}

// The engine can build a child cheaply when all members are in one communicator of it already. None: some
// member is not in the parent's sub-communicator, and the engine joins through the store instead.
SubCommunicator::Parent HierarchicalCommunicator::parent_of(const std::vector<int>& members,
                                                            const lockstep_comm_config& config,
                                                            const SubCommunicator* sub) const {
  if (sub == nullptr) return {};
  SubCommunicator::Parent parent{.comm = sub->comm()};
  for (const int r : members) {
    const int place = sub->rank_of(config.parent_ranks[r]);
    if (place >= static_cast<int>(sub->members().size())) return {};
    parent.ranks.push_back(place);
  }
  return parent;
}

//                      local                   lane                             flat
//   one host           all ranks: sole         -                                -
//   one rank per host  -                       -                                all ranks: sole
//   otherwise          the ranks of the host   ranks of equal place, or leaders all ranks
//
// Created in the order local, flat, lane, which is a child of flat. A rank that is in no lane (hosts of
// different sizes, not the leader) skips that one.
void HierarchicalCommunicator::make_sub_communicators(const lockstep_comm_config& config,
                                                      const HierarchicalCommunicator* parent) {
  std::vector<int> all(static_cast<std::size_t>(config.size));
  for (int r = 0; r < config.size; ++r) all[static_cast<std::size_t>(r)] = r;
  const SubCommunicator* const flat = parent != nullptr ? parent->flat_.get() : nullptr;
  const SubCommunicator* const local = parent != nullptr ? parent->local_.get() : nullptr;
  if (!topology_.one_rank_each() || topology_.one_host()) {
    const auto& members = topology_.neighbours();
    local_ = std::make_unique<SubCommunicator>(setup_.local, config, base::cat("local", topology_.host()),
                                               members, parent_of(members, config, local));
  }
  if (!topology_.one_host()) {
    flat_ =
        std::make_unique<SubCommunicator>(setup_.across, config, "flat", all, parent_of(all, config, flat));
    if (!topology_.one_rank_each() && topology_.has_lane()) {
      const auto members = topology_.lane();
      lane_ = std::make_unique<SubCommunicator>(
          setup_.across, config, base::cat("lane", topology_.even ? topology_.place() : 0), members,
          SubCommunicator::Parent{flat_->comm(), {members.begin(), members.end()}});
    }
  }
  if (topology_.one_host()) sole_ = local_.get();
  if (topology_.one_rank_each() && !topology_.one_host()) sole_ = flat_.get();
}

// remove() guarantees that the ticker does not enter again; users_ counts the threads that are inside
// already, from callbacks of the engines or from a tick. Only then may the sub-communicators be destroyed,
// which the members' destructors do.
HierarchicalCommunicator::~HierarchicalCommunicator() {
  leave(nullptr);
  if (sole_ != nullptr) return;
  setup_.ticker.remove(this);
  const base::MutexLock lock(mutex_);
  idle_.wait(mutex_,
             [&]() LOCKSTEP_REQUIRES(mutex_) { return queue_.empty() && messages_.empty() && users_ == 0; });
  for (const auto& [size, block] : blocks_) local_->table().free(local_->comm(), block);
}

void HierarchicalCommunicator::leave(const char* cause) {
  const CallerInside inside;
  {
    const base::MutexLock lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  for (const SubCommunicator* one : {flat_.get(), local_.get(), lane_.get()}) {
    if (one != nullptr) one->leave(cause);
  }
  if (sole_ != nullptr) return;
  drive_stopped();
}

// ---- failure ----

SubCommunicator& HierarchicalCommunicator::sub_communicator(Where where) const {
  return where == Where::kLocal ? *local_ : where == Where::kLane ? *lane_ : *flat_;
}

Failure HierarchicalCommunicator::break_with(Failure failure) {
  {
    const base::MutexLock lock(mutex_);
    if (first_) return *first_;
    if (closed_) return left_failure();
  }
  // All ranks are in the flat sub-communicator: its first failure is the group's first failure.
  if (failure.kind == ErrorKind::kTimeout && !flat_->failure()) name_missing(failure);
  flat_->abort(failure);
  failure = flat_->failure().value_or(failure);
  {
    const base::MutexLock lock(mutex_);
    if (!first_) first_ = failure;
    failure = *first_;
  }
  for (const SubCommunicator* one : {local_.get(), lane_.get()}) {
    if (one != nullptr) one->abort(failure);
  }
  return failure;
}

// Only what is at the head at two ticks in a row counts as stuck, and is announced once: the store gets no
// traffic from collectives that make progress.
void HierarchicalCommunicator::announce() {
  std::uint64_t number = 0;
  {
    const base::MutexLock lock(mutex_);
    const std::uint64_t before = std::exchange(seen_ahead_, queue_.empty() ? 0 : queue_.front()->number);
    if (seen_ahead_ == 0 || seen_ahead_ != before || announced_ == before) return;
    number = announced_ = before;
  }
  const std::string text = base::cat(number);
  host_->kv_set(host_->context, key_of("entered", rank()).c_str(), text.data(), text.size());
}

// One deadline for all ranks. A rank whose answer does not come in time is not named: naming it wrongly would
// be worse.
std::string HierarchicalCommunicator::missing_in(std::uint64_t number) {
  constexpr int kMostNamed = 8;
  const Deadline patience = Deadline::after(kAskPatience);
  std::string names;
  int n_missing = 0;
  for (int r = 0; r < size(); ++r) {
    const auto entered = r == rank() ? number : entered_by(*host_, r, patience);
    if (!entered || *entered >= number || ++n_missing > kMostNamed) continue;
    names += base::cat(names.empty() ? "" : ", ", "rank ", r);
  }
  if (n_missing > kMostNamed) names += base::cat(" and ", n_missing - kMostNamed, " more");
  return names;
}

base::Awaited HierarchicalCommunicator::awaited(const Operation& operation) {
  const lockstep_op& op = operation.op;
  std::string text = base::cat("group \"", name_, "\": rank ", rank(), " is in ");
  if (op.kind == LOCKSTEP_SEND) {
    text += base::cat("a send to rank ", op.root);
  } else if (op.kind == LOCKSTEP_RECV) {
    text += base::cat("a receive from ", op.root < 0 ? "any rank" : base::cat("rank ", op.root));
  } else {
    text += base::cat("collective #", op.tag != 0 ? op.tag : static_cast<std::int64_t>(operation.number));
  }
  text += base::cat(" at ", operation.where);
  const std::string names = operation.number == 0 ? "" : missing_in(operation.number);
  if (!names.empty()) text += base::cat(": it waits for ", names, ", which has not been seen to enter it");
  return {.text = std::move(text), .deadline = Deadline::from_monotonic_ns(op.deadline_ns)};
}

void HierarchicalCommunicator::name_missing(Failure& failure) {
  std::shared_ptr<Operation> head;
  {
    const base::MutexLock lock(mutex_);
    if (!queue_.empty()) head = queue_.front();
  }
  if (head == nullptr) return;
  const std::string names = missing_in(head->number);
  if (names.empty()) return;
  failure.message = base::cat("rank ", rank(), " ran out of time in collective #",
                              head->op.tag != 0 ? head->op.tag : head->number, " at ", head->where,
                              ": it waits for ", names, ", which had not entered it; ", failure.message);
}

std::optional<Failure> HierarchicalCommunicator::stopped() {
  const base::MutexLock lock(mutex_);
  if (first_) return first_;
  if (closed_) return left_failure();
  return std::nullopt;
}

// The engines do not call back for a failure as such, so it is polled for: by callers, by callbacks of steps,
// and at every tick.
std::optional<Failure> HierarchicalCommunicator::failure() {
  if (sole_ != nullptr) return sole_->failure();
  {
    const base::MutexLock lock(mutex_);
    if (first_ || closed_) return first_;
  }
  for (const SubCommunicator* one : {flat_.get(), local_.get(), lane_.get()}) {
    if (one == nullptr) continue;
    if (auto failure = one->failure()) return break_with(std::move(*failure));
  }
  return std::nullopt;
}

void HierarchicalCommunicator::abort(const std::string& reason) {
  const CallerInside inside;
  if (sole_ != nullptr) return sole_->table().comm_abort(sole_->comm(), reason.c_str());
  break_with({.kind = ErrorKind::kAborted,
              .message = base::cat("rank ", rank(), " aborted the group: ", reason),
              .family = ErrorFamily::kBackend});
  drive_stopped();
}

// ---- the ticker, and scratch ----

// Called under the ticker's lock (ticker.h): takes this communicator's, which never takes the ticker's.
bool HierarchicalCommunicator::enter() {
  const base::MutexLock lock(mutex_);
  if (queue_.empty() && messages_.empty()) return false;
  ++users_;
  return true;
}

void HierarchicalCommunicator::exit() {
  const base::MutexLock lock(mutex_);
  --users_;
  idle_.notify_all();
}

void HierarchicalCommunicator::tick() {
  announce();
  drive_stopped();
}

// Checks for failures, ends what is late, and completes the operations of a broken communicator.
void HierarchicalCommunicator::drive_stopped() {
  failure();
  std::vector<std::shared_ptr<Operation>> under_way;
  std::optional<Failure> late;
  {
    const base::MutexLock lock(mutex_);
    // The head of the queue has the deadlines of its steps; the operations behind it have not begun, so
    // nobody else checks theirs.
    under_way = messages_;
    for (std::size_t i = 1; i < queue_.size(); ++i) {
      if (!Deadline::from_monotonic_ns(queue_[i]->op.deadline_ns).expired()) continue;
      late = Failure{.kind = ErrorKind::kTimeout,
                     .message = base::cat("rank ", rank(), " ran out of time in an operation at ",
                                          queue_[i]->where, ", which waits for the ones posted before it"),
                     .family = ErrorFamily::kBackend};
    }
  }
  if (late) break_with(std::move(*late));
  if (!stopped()) return;
  for (const auto& operation : under_way) advance(operation);
  drive_queue();
}

// Blocks are kept for the next operation: returning pages to the kernel takes longer than most collectives.
std::shared_ptr<void> HierarchicalCommunicator::scratch(std::size_t n_bytes) {
  SubCommunicator* const from = n_bytes >= kSharedScratch ? memory() : nullptr;
  if (from == nullptr) return {::operator new(n_bytes), [](void* p) { ::operator delete(p); }};
  std::pair<std::size_t, void*> block{n_bytes, nullptr};
  {
    const base::MutexLock lock(mutex_);
    const auto fits = std::ranges::find_if(
        blocks_, [&](const auto& one) { return one.first >= n_bytes && one.first <= 4 * n_bytes; });
    if (fits != blocks_.end()) {
      block = *fits;
      blocks_.erase(fits);
    }
  }
  if (block.second == nullptr && from->table().alloc(from->comm(), n_bytes, &block.second) != LOCKSTEP_OK)
    base::raise(ErrorKind::kResource, base::cat("no room for ", n_bytes, " bytes of scratch"),
                ErrorFamily::kBackend);
  return {block.second, [this, from, size = block.first](void* p) {
            {
              const base::MutexLock lock(mutex_);
              if (blocks_.size() < kKeptBlocks) {
                blocks_.emplace_back(size, p);
                return;
              }
            }
            from->table().free(from->comm(), p);
          }};
}

}  // namespace lockstep::comm::hierarchy
