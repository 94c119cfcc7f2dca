// The C table over HierarchicalCommunicator. Nothing is thrown across it.
//
// Two kinds of communicator stand behind one table. When one sub-communicator has all ranks and does
// everything (one host, or one rank per host: sole()), every entry is passed on to its engine unchanged,
// handles included, and costs one branch. Otherwise an operation consists of steps (schedule.h), and its
// handle holds the operation.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/engine/detail/table_calls.h"
#include "lockstep/engine/plugin.h"
#include "lockstep/hierarchy/hierarchy.h"
#include "lockstep/hierarchy/internal/hierarchical_communicator.h"

namespace lockstep::comm {
namespace {

using hierarchy::Operation;
using hierarchy::Setup;
// lockstep_comm and lockstep_handle are never defined here: another engine of the program may have its own.
using Comm = hierarchy::HierarchicalCommunicator;
struct Handle {
  Comm* comm;
  // Exactly one of the two is set, for the handle's whole life.
  lockstep_handle* sole = nullptr;       // of the one sub-communicator that does everything
  std::shared_ptr<Operation> operation;  // otherwise
};

Comm& of(lockstep_comm* comm) {
  return *reinterpret_cast<Comm*>(comm);
}
Handle& of(lockstep_handle* handle) {
  return *reinterpret_cast<Handle*>(handle);
}

// What both engines can do. A mean also needs the sum, for hosts of different sizes.
lockstep_capabilities common(const lockstep_capabilities& local, const lockstep_capabilities& across) {
  lockstep_capabilities all{};
  all.struct_size = sizeof all;
  all.op_kinds = local.op_kinds & across.op_kinds;
  const auto offers = [&](std::initializer_list<lockstep_op_kind> kinds) {
    return std::ranges::all_of(kinds, [&](auto kind) { return all.op_kinds >> kind & 1u; });
  };
  // The kinds that others are made of: a schedule may use any of these on either engine.
  if (!offers({LOCKSTEP_BARRIER, LOCKSTEP_BROADCAST, LOCKSTEP_ALL_REDUCE, LOCKSTEP_REDUCE, LOCKSTEP_SCATTER,
               LOCKSTEP_REDUCE_SCATTER, LOCKSTEP_ALL_GATHER_V})) {
    base::raise(ErrorKind::kUnsupported, "both engines must offer every kind that collectives are made of",
                ErrorFamily::kBackend);
  }
  // Messages and what runs on the flat communicator only need the across engine.
  for (const auto kind :
       {LOCKSTEP_GATHER, LOCKSTEP_ALL_TO_ALL, LOCKSTEP_ALL_TO_ALL_V, LOCKSTEP_SEND, LOCKSTEP_RECV})
    all.op_kinds |= across.op_kinds & 1u << kind;
  // The result of a reduction must not depend on where the ranks run: only what both engines do is offered.
  all.dtypes = local.dtypes & across.dtypes;
  for (int d = 0; d < LOCKSTEP_DTYPES; ++d) {
    all.reduce[d] = local.reduce[d] & across.reduce[d];
    if ((all.reduce[d] >> LOCKSTEP_SUM & 1u) == 0) all.reduce[d] &= ~(1u << LOCKSTEP_AVG);
  }
  all.crosses_hosts = 1;
  all.shared_memory = local.shared_memory;
  all.calls_back = 1;
  return all;
}

// ---- entries that need no engine ----

void comm_leave(lockstep_comm* comm, const char* cause) {
  logged([&] {
    of(comm).leave(cause);
    return LOCKSTEP_OK;
  });
}

// The destructor waits for callbacks and ticks in progress; leave() alone returns at once.
void comm_destroy(lockstep_comm* comm, const char* cause) {
  comm_leave(comm, cause);
  delete &of(comm);
}

void comm_abort(lockstep_comm* comm, const char* reason) {
  logged([&] {
    of(comm).abort(reason != nullptr ? reason : "no reason given");
    return LOCKSTEP_OK;
  });
}

lockstep_status comm_failure(lockstep_comm* comm, char* error, std::size_t capacity, std::int32_t* peer_rank,
                             std::int64_t* peer_pid, char* peer_cause, std::size_t peer_cause_capacity) {
  return logged([&] {
    const auto failure = of(comm).failure();
    put_peer(failure, peer_rank, peer_pid, peer_cause, peer_cause_capacity);
    return failure ? fail(*failure, error, capacity) : LOCKSTEP_OK;
  });
}

lockstep_status alloc(lockstep_comm* comm, std::size_t n_bytes, void** out) {
  *out = nullptr;
  const auto* from = of(comm).memory();
  if (from != nullptr) return from->table().alloc(from->comm(), n_bytes, out);
  // Zeroed and aligned to a page, like the memory of the host engine.
  // This rank is alone on its host, or the local engine has none: ordinary memory.
  *out = std::aligned_alloc(4096, (std::max<std::size_t>(n_bytes, 1) + 4095) / 4096 * 4096);
  if (*out == nullptr) return LOCKSTEP_RESOURCE;
  std::memset(*out, 0, n_bytes);
  return LOCKSTEP_OK;
}

// memory() is constant after construction, so what alloc() took from the engine goes back to the engine.
void free_memory(lockstep_comm* comm, void* memory) {
  const auto* from = of(comm).memory();
  from != nullptr ? from->table().free(from->comm(), memory) : std::free(memory);
}

lockstep_status test(lockstep_handle* handle) {
  Handle& mine = of(handle);
  if (mine.sole != nullptr) return mine.comm->sole()->table().test(mine.sole);
  // `over` is stored last. Until then the mutex is not taken, so polling does not disturb the threads that
  // run the steps.
  if (!mine.operation->over) return LOCKSTEP_PENDING;
  const base::MutexLock lock(mine.operation->mutex);
  return mine.operation->status;
}

lockstep_status wait(lockstep_handle* handle, std::int64_t deadline_ns) {
  Handle& mine = of(handle);
  if (mine.sole != nullptr) return mine.comm->sole()->table().wait(mine.sole, deadline_ns);
  return logged([&] {
    const bool over = mine.comm->wait(mine.operation, Deadline::from_monotonic_ns(deadline_ns));
    return over ? test(handle) : LOCKSTEP_TIMEOUT;
  });
}

void release(lockstep_handle* handle) {
  Handle& mine = of(handle);
  if (mine.sole != nullptr) mine.comm->sole()->table().release(mine.sole);
  delete &mine;
}

void last_error(lockstep_handle* handle, char* error, std::size_t capacity) {
  Handle& mine = of(handle);
  if (mine.sole != nullptr) return mine.comm->sole()->table().last_error(mine.sole, error, capacity);
  const base::MutexLock lock(mine.operation->mutex);
  put(error, capacity, mine.operation->error);
}

lockstep_status post_checked(Comm& comm, const lockstep_op& op, lockstep_handle** out) {
  return logged([&] {
    auto mine = std::make_unique<Handle>(Handle{.comm = &comm});
    if (const auto* sole = comm.sole()) {
      const auto status = sole->table().post(sole->comm(), &op, &mine->sole);
      if (status != LOCKSTEP_OK) return status;
    } else {
      mine->operation = comm.post(op);
    }
    *out = reinterpret_cast<lockstep_handle*>(mine.release());
    return LOCKSTEP_OK;
  });
}

lockstep_status post(lockstep_comm* comm, const lockstep_op* op, lockstep_handle** out) {
  *out = nullptr;
  if (const char* wrong = wrong_with(*op, of(comm).rank(), of(comm).size(), of(comm).capabilities())) {
    base::log(LogLevel::kError, wrong);
    return LOCKSTEP_USAGE;
  }
  return post_checked(of(comm), *op, out);
}

lockstep_status run(lockstep_comm* comm, const lockstep_op* op, char* error, std::size_t capacity) {
  Comm& mine = of(comm);
  if (const auto* sole = mine.sole(); sole != nullptr && sole->table().run != nullptr)
    return sole->table().run(sole->comm(), op, error, capacity);
  put(error, capacity, "");
  if (const char* wrong = wrong_with(*op, mine.rank(), mine.size(), mine.capabilities())) {
    put(error, capacity, wrong);
    return LOCKSTEP_USAGE;
  }
  // The caller is blocked here: it needs no callback, and the table promises that run() makes none.
  lockstep_op quiet = *op;
  quiet.done = nullptr;
  lockstep_handle* handle = nullptr;
  auto status = post_checked(mine, quiet, &handle);
  if (handle == nullptr) return status;
  status = wait(handle, LOCKSTEP_NEVER);
  if (status != LOCKSTEP_OK) last_error(handle, error, capacity);
  release(handle);
  return status;
}

}  // namespace

// Two of the table's functions take no context that tells the engine, so each engine has a slot with
// functions that know it.
struct HierarchicalEngine::Impl {
  static constexpr std::size_t kSlots = 8;
  static inline base::Mutex mutex;
  // A fixed number, since the functions are instantiated at compile time. A program has one engine, tests a
  // few.
  static inline std::array<Impl*, kSlots> slots LOCKSTEP_GUARDED_BY(mutex){};

  Impl(const Engine& local, const Engine& across, HierarchyOptions options);
  ~Impl() {
    const base::MutexLock lock(mutex);
    slots[slot] = nullptr;
  }

  // Not locked: the entry is written before its table is handed out, and cleared when nobody uses the table
  // any more.
  static Impl& at(std::size_t i) LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS { return *slots[i]; }
  template <std::size_t I>
  static lockstep_status capabilities(lockstep_capabilities* out) {
    return give_capabilities(at(I).setup.capabilities, out);
  }
  template <std::size_t I>
  static lockstep_status comm_create(const lockstep_comm_config* config, lockstep_comm** out, char* error,
                                     std::size_t capacity) {
    return at(I).create(*config, out, error, capacity);
  }
  template <std::size_t... I>
  void fill(std::index_sequence<I...>) {
    constexpr decltype(table.capabilities) all_capabilities[] = {capabilities<I>...};
    constexpr decltype(table.comm_create) all_creates[] = {comm_create<I>...};
    table.capabilities = all_capabilities[slot];
    table.comm_create = all_creates[slot];
  }
  lockstep_status create(const lockstep_comm_config& config, lockstep_comm** out, char* error,
                         std::size_t capacity);

  Setup setup;
  lockstep_engine table{.struct_size = sizeof(lockstep_engine),
                        .abi_version = LOCKSTEP_ENGINE_ABI_VERSION,
                        .name = "hierarchical",
                        .comm_destroy = comm_destroy,
                        .comm_abort = comm_abort,
                        .comm_failure = comm_failure,
                        .alloc = alloc,
                        .free = free_memory,
                        .post = post,
                        .test = test,
                        .wait = wait,
                        .release = release,
                        .last_error = last_error,
                        .run = run,
                        .comm_leave = comm_leave};
  std::size_t slot = 0;
};

HierarchicalEngine::Impl::Impl(const Engine& local, const Engine& across, HierarchyOptions options)
    : setup{local,
            across,
            common(local.capabilities(), across.capabilities()),
            std::move(options.identity),
            {}} {
  if (local.capabilities().calls_back == 0 || across.capabilities().calls_back == 0) {
    base::raise(ErrorKind::kUnsupported,
                base::cat("the hierarchical engine needs engines that call back; ", local.name(), " and ",
                          across.name(), " do not both"),
                ErrorFamily::kBackend);
  }
  if (setup.identity == nullptr) setup.identity = base::host_identity;
  // Finding the free slot and taking it is one step under the lock. fill() comes before the table is
  // published by table().
  const base::MutexLock lock(mutex);
  slot = static_cast<std::size_t>(std::ranges::find(slots, nullptr) - slots.begin());
  if (slot == kSlots)
    base::raise(ErrorKind::kResource, "too many hierarchical engines", ErrorFamily::kBackend);
  fill(std::make_index_sequence<kSlots>());
  slots[slot] = this;
}

lockstep_status HierarchicalEngine::Impl::create(const lockstep_comm_config& config, lockstep_comm** out,
                                                 char* error, std::size_t capacity) {
  *out = nullptr;
  const auto join = [&] {
    if (config.size < 1 || config.rank < 0 || config.rank >= config.size)
      base::raise(ErrorKind::kUsage,
                  base::cat("rank ", config.rank, " of ", config.size, " is not possible"));
    // A caller built against an older header has a shorter struct.
    const bool knows_parent = config.struct_size > offsetof(lockstep_comm_config, parent_ranks);
    const Comm* const parent =
        knows_parent && config.parent != nullptr ? reinterpret_cast<const Comm*>(config.parent) : nullptr;
    *out = reinterpret_cast<lockstep_comm*>(new Comm(setup, config, parent));
    return LOCKSTEP_OK;
  };
  return reported(error, capacity, join);
}

HierarchicalEngine::HierarchicalEngine(const Engine& local, const Engine& across, HierarchyOptions options)
    : impl_(std::make_unique<Impl>(local, across, std::move(options))) {}
HierarchicalEngine::~HierarchicalEngine() = default;

const lockstep_engine* HierarchicalEngine::table() const {
  return &impl_->table;
}

}  // namespace lockstep::comm
