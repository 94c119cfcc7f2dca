#include "tests/cuda/staged_engine.h"

#include <sys/mman.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engines/cuda/resources.h"
#include "lockstep/engine/plugin.h"
#include "lockstep/host/host.h"

namespace lockstep::cuda {
namespace {

using comm::put;
using comm::size_of;

const lockstep_engine& inner() {
  return *comm::host_engine();
}

bool fault(const char* name) {
  const char* const set = std::getenv("LOCKSTEP_STAGED_FAULT");
  return set != nullptr && std::strcmp(set, name) == 0;
}

const Driver& driver() {
  std::string why;
  const Driver* const found = Driver::find(&why);
  if (found == nullptr) throw std::runtime_error(why);
  return *found;
}

// Calls in order, on a thread of its own.
class Line {
 public:
  Line() : thread_([this] { work(); }) {}
  ~Line() { end(); }
  // Makes the calls that are left, which may use the line, and no more.
  void end() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  // For the calls: a stream for their copies.
  Stream stream(const PrimaryContext& context) {
    if (!copies_) copies_ = create_stream(context, Priority::kLeast);
    return copies_.get();
  }
  void push(std::function<void()> call) {
    const std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
    changed_.notify_all();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return closed_ || !calls_.empty(); });
      if (calls_.empty()) return;
      const auto call = std::move(calls_.front());
      calls_.pop_front();
      lock.unlock();
      call();
      lock.lock();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> calls_;
  bool closed_ = false;
  OwnedStream copies_;
  std::thread thread_;
};

// Words that streams wait for, one per operation, in one page of registered memory; each is used once.
class Flags {
 public:
  static Flags& of(const PrimaryContext& context) {
    static std::mutex mutex;
    static std::vector<std::unique_ptr<Flags>>* const all = new std::vector<std::unique_ptr<Flags>>;
    const std::lock_guard lock(mutex);
    for (const auto& one : *all) {
      if (one->device_ == context.device()) return *one;
    }
    all->emplace_back(new Flags(context));
    return *all->back();
  }
  std::uint64_t* take() { return words_ + next_++; }
  DevicePtr address_of(const std::uint64_t* word) const { return registered_.address_of(word); }

 private:
  static constexpr std::size_t kBytes = std::size_t{1} << 24;
  explicit Flags(const PrimaryContext& context) : device_(context.device()) {
    void* const memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    words_ = static_cast<std::uint64_t*>(memory);
    registered_ = RegisteredMemory(context, memory, kBytes);
  }
  const int device_;
  std::uint64_t* words_ = nullptr;
  RegisteredMemory registered_;
  std::atomic<std::size_t> next_{0};
};

// The table's opaque types are the built-in engine's in this program; ours are cast to them.
struct Comm {
  lockstep_comm* host = nullptr;
  int rank = 0, size = 0;
  bool left = false;
  std::atomic<int> n_inner{0};  // operations that the built-in engine has
  // Input of collectives, and of messages, in the order posted; results, in any order.
  Line collectives, messages, results;
  // The first operation that failed, also a message, which leaves the built-in engine well.
  std::mutex mutex;
  lockstep_status failed = LOCKSTEP_OK;
  std::string why;
};

// Shared by the caller, until release, and the operation, until it has completed.
struct Handle {
  Comm* comm = nullptr;
  lockstep_op op{};
  std::vector<std::uint64_t> send_counts, recv_counts;
  std::string where;
  const PrimaryContext* context = nullptr;
  OwnedEvent before;
  std::vector<std::uint8_t> send, recv;
  std::uint64_t* flag = nullptr;
  std::mutex mutex;
  std::condition_variable changed;
  lockstep_status status = LOCKSTEP_PENDING;
  char error[512] = "";
  std::shared_ptr<Handle> self;  // the caller's
};
using Op = std::shared_ptr<Handle>;

Line& line_of(Comm& comm, lockstep_op_kind kind) {
  return comm::is_point_to_point(kind) ? comm.messages : comm.collectives;
}

Comm& ours(lockstep_comm* comm) {
  return *reinterpret_cast<Comm*>(comm);
}
Handle& ours(lockstep_handle* handle) {
  return *reinterpret_cast<Handle*>(handle);
}

void copy(Line& line, const Handle& handle, void* to, const void* from, std::size_t n_bytes) {
  if (n_bytes == 0) return;
  const ContextScope scope(*handle.context);
  const Stream stream = line.stream(*handle.context);
  check(driver(),
        driver().memcpy_async(reinterpret_cast<DevicePtr>(to), reinterpret_cast<DevicePtr>(from), n_bytes,
                              stream),
        "cuMemcpyAsync");
  check(driver(), driver().stream_synchronize(stream), "cuStreamSynchronize");
}

std::uint64_t total(const std::vector<std::uint64_t>& counts) {
  std::uint64_t sum = 0;
  for (const auto count : counts) sum += count;
  return sum;
}

// Elements that this rank's buffers hold.
std::pair<std::uint64_t, std::uint64_t> elements(const Handle& handle) {
  const lockstep_op& op = handle.op;
  const auto n = static_cast<std::uint64_t>(handle.comm->size);
  switch (op.kind) {
    case LOCKSTEP_BARRIER:
      return {0, 0};
    case LOCKSTEP_ALL_GATHER:
    case LOCKSTEP_GATHER:
      return {op.count, op.count * n};
    case LOCKSTEP_REDUCE_SCATTER:
    case LOCKSTEP_SCATTER:
      return {op.count * n, op.count};
    case LOCKSTEP_ALL_TO_ALL:
      return {op.count * n, op.count * n};
    case LOCKSTEP_ALL_TO_ALL_V:
      return {total(handle.send_counts), total(handle.recv_counts)};
    case LOCKSTEP_ALL_GATHER_V:
      return {handle.recv_counts[static_cast<std::size_t>(handle.comm->rank)], total(handle.recv_counts)};
    default:
      return {op.count, op.count};
  }
}

void complete(const Op& op, lockstep_status status) {
  if (status != LOCKSTEP_OK) {  // known before any stream continues
    const std::lock_guard lock(op->comm->mutex);
    if (op->comm->failed == LOCKSTEP_OK) op->comm->why = op->error;
    if (op->comm->failed == LOCKSTEP_OK) op->comm->failed = status;
  }
  {
    const std::lock_guard lock(op->mutex);
    op->status = status;
  }
  if (status == LOCKSTEP_OK || !fault("holds_streams")) __atomic_store_n(op->flag, 1, __ATOMIC_RELEASE);
  op->changed.notify_all();
  const auto done = op->op.done;
  void* const context = op->op.done_context;
  if (done != nullptr) done(context);
}

// On the thread of results: the inner operation is over.
void finish(const Op& op, lockstep_handle* inner_handle) {
  const lockstep_status status = inner().wait(inner_handle, LOCKSTEP_NEVER);
  if (status != LOCKSTEP_OK) inner().last_error(inner_handle, op->error, sizeof op->error);
  inner().release(inner_handle);
  --op->comm->n_inner;
  if (status == LOCKSTEP_OK && op->op.recv != nullptr)
    copy(op->comm->results, *op, op->op.recv, op->recv.data(), op->recv.size());
  complete(op, status);
}

bool is_root(const Handle& op) {
  return op.op.root == op.comm->rank;
}

// On a thread of inputs: waits for the stream, copies, and hands over to the built-in engine, whose done comes
// on another thread.
void start(const Op& op) {
  if (!fault("reads_early")) driver().event_synchronize(op->before.get());
  lockstep_op host = op->op;
  Line& line = line_of(*op->comm, host.kind);
  const auto [n_send, n_recv] = elements(*op);
  const std::size_t width = size_of(host.dtype);
  const bool one_buffer = host.send == host.recv;
  op->recv.resize(n_recv * width + 1);
  op->recv.resize(n_recv * width);
  const bool sends = host.send != nullptr && (host.kind != LOCKSTEP_SCATTER || is_root(*op));
  if (sends) {
    op->send.resize(n_send * width + 1);
    op->send.resize(n_send * width);
    copy(line, *op, op->send.data(), host.send, op->send.size());
  }
  // What is not written keeps its value.
  if (host.recv != nullptr && (host.kind != LOCKSTEP_GATHER || is_root(*op)))
    copy(line, *op, op->recv.data(), host.recv, op->recv.size());
  if (host.kind == LOCKSTEP_GATHER && !is_root(*op)) op->op.recv = nullptr;
  if (host.kind == LOCKSTEP_SEND) op->op.recv = nullptr;
  host.send =
      sends ? (one_buffer && host.kind == LOCKSTEP_BROADCAST ? op->recv.data() : op->send.data()) : nullptr;
  host.recv = host.recv != nullptr ? op->recv.data() : nullptr;
  host.send_counts = op->send_counts.data();
  host.recv_counts = op->recv_counts.data();
  host.where = op->where.c_str();
  host.device_kind = LOCKSTEP_HOST_MEMORY;
  host.stream = nullptr;
  // The inner handle is known when post returns; done may come before.
  struct Posted {
    Op op;
    std::atomic<lockstep_handle*> handle{nullptr};
  };
  auto* const posted = new Posted{.op = op};
  host.done_context = posted;
  host.done = [](void* context) {
    auto* const me = static_cast<Posted*>(context);
    me->op->comm->results.push([me] {
      while (me->handle == nullptr) std::this_thread::yield();
      finish(me->op, me->handle);
      delete me;
    });
  };
  lockstep_handle* handle = nullptr;
  ++op->comm->n_inner;
  const auto status = inner().post(op->comm->host, &host, &handle);
  if (status == LOCKSTEP_OK) {
    posted->handle = handle;
    return;
  }
  --op->comm->n_inner;
  delete posted;
  std::int32_t peer = -1;
  std::int64_t pid = -1;
  char cause[64];
  inner().comm_failure(op->comm->host, op->error, sizeof op->error, &peer, &pid, cause, sizeof cause);
  complete(op, status);
}

// ---- the table ----

const lockstep_capabilities& all_capabilities() {
  static const lockstep_capabilities all = [] {
    lockstep_capabilities made{};
    made.struct_size = sizeof made;
    inner().capabilities(&made);
    made.compares_members = 0;
    made.takes_rows = 0;
    made.device_kinds = 1u << LOCKSTEP_CUDA;
    return made;
  }();
  return all;
}

lockstep_status capabilities(lockstep_capabilities* out) {
  return comm::give_capabilities(all_capabilities(), out);
}

lockstep_status comm_create(const lockstep_comm_config* config, lockstep_comm** out, char* error,
                            std::size_t capacity) {
  lockstep_comm_config host = *config;
  if (host.parent != nullptr) host.parent = ours(host.parent).host;
  host.engine = &inner();
  host.device_kind = LOCKSTEP_HOST_MEMORY;
  auto made = std::make_unique<Comm>();
  const auto status = inner().comm_create(&host, &made->host, error, capacity);
  if (status != LOCKSTEP_OK) return status;
  made->rank = config->rank;
  made->size = config->size;
  *out = reinterpret_cast<lockstep_comm*>(made.release());
  return LOCKSTEP_OK;
}

void comm_leave(lockstep_comm* comm, const char* cause) {
  ours(comm).left = true;
  inner().comm_leave(ours(comm).host, cause);
}

void comm_destroy(lockstep_comm* comm, const char* cause) {
  const std::unique_ptr<Comm> gone(&ours(comm));
  if (!gone->left) inner().comm_leave(gone->host, cause);  // ends what is pending
  gone->collectives.end();
  gone->messages.end();
  while (gone->n_inner > 0) std::this_thread::yield();  // their done comes from another thread
  gone->results.end();
  inner().comm_destroy(gone->host, cause);
}

void comm_abort(lockstep_comm* comm, const char* reason) {
  inner().comm_abort(ours(comm).host, reason);
}

lockstep_status comm_failure(lockstep_comm* comm, char* error, std::size_t capacity, std::int32_t* rank,
                             std::int64_t* pid, char* cause, std::size_t cause_capacity) {
  const auto status =
      inner().comm_failure(ours(comm).host, error, capacity, rank, pid, cause, cause_capacity);
  if (status != LOCKSTEP_OK) return status;
  const std::lock_guard lock(ours(comm).mutex);
  put(error, capacity, ours(comm).why);
  return ours(comm).failed;
}

// What post and run share. An empty error: the call is accepted.
std::string accept(Comm& comm, const lockstep_op& op, Op& out) {
  if (const char* const wrong = comm::wrong_with(op, comm.rank, comm.size, all_capabilities())) return wrong;
  out = std::make_shared<Handle>();
  out->comm = &comm;
  out->op = op;
  const auto size = static_cast<std::size_t>(comm.size);
  if (op.send_counts != nullptr) out->send_counts.assign(op.send_counts, op.send_counts + size);
  if (op.recv_counts != nullptr) out->recv_counts.assign(op.recv_counts, op.recv_counts + size);
  out->where = op.where == nullptr ? "" : op.where;
  try {
    out->context = &PrimaryContext::of(driver(), op.device);
    Flags& flags = Flags::of(*out->context);
    out->flag = flags.take();
    const ContextScope scope(*out->context);
    auto* const stream = static_cast<Stream>(op.stream);
    out->before = create_event(*out->context);
    check(driver(), driver().event_record(out->before.get(), stream), "cuEventRecord");
    if (fault("blocks_stream"))
      driver().stream_wait_value64(stream, flags.address_of(out->flag), 1, kWaitValueGeq);
  } catch (const std::exception& error) {
    return error.what();
  }
  out->self = out;
  line_of(comm, op.kind).push([posted = out] { start(posted); });
  return "";
}

lockstep_status post(lockstep_comm* comm, const lockstep_op* op, lockstep_handle** out) {
  Op made;
  if (!accept(ours(comm), *op, made).empty()) return LOCKSTEP_USAGE;
  *out = reinterpret_cast<lockstep_handle*>(made.get());
  return LOCKSTEP_OK;
}

lockstep_status test(lockstep_handle* handle) {
  const std::lock_guard lock(ours(handle).mutex);
  return ours(handle).status;
}

lockstep_status wait(lockstep_handle* handle, std::int64_t deadline_ns) {
  Handle& op = ours(handle);
  std::unique_lock lock(op.mutex);
  const auto over = [&] { return op.status != LOCKSTEP_PENDING; };
  if (deadline_ns == LOCKSTEP_NEVER) {
    op.changed.wait(lock, over);
  } else {
    const std::chrono::steady_clock::time_point until{std::chrono::nanoseconds(deadline_ns)};
    if (!op.changed.wait_until(lock, until, over)) return LOCKSTEP_TIMEOUT;
  }
  return op.status;
}

void release(lockstep_handle* handle) {
  const Op gone = std::move(ours(handle).self);
}

void last_error(lockstep_handle* handle, char* error, std::size_t capacity) {
  const std::lock_guard lock(ours(handle).mutex);
  put(error, capacity, ours(handle).error);
}

lockstep_status stream_wait(lockstep_handle* handle, void* stream) {
  Handle& op = ours(handle);
  const lockstep_status status = test(handle);
  if (status == LOCKSTEP_OK || fault("no_stream_wait")) return LOCKSTEP_OK;
  if (status != LOCKSTEP_PENDING) return status;
  const ContextScope scope(*op.context);
  const Result result = driver().stream_wait_value64(
      static_cast<Stream>(stream), Flags::of(*op.context).address_of(op.flag), 1, kWaitValueGeq);
  return result == kSuccess ? LOCKSTEP_OK : LOCKSTEP_SYSTEM;
}

lockstep_status run(lockstep_comm* comm, const lockstep_op* op, char* error, std::size_t capacity) {
  lockstep_op copy = *op;
  copy.done = nullptr;
  Op made;
  if (const std::string wrong = accept(ours(comm), copy, made); !wrong.empty()) {
    put(error, capacity, wrong);
    return LOCKSTEP_USAGE;
  }
  auto* const handle = reinterpret_cast<lockstep_handle*>(made.get());
  const lockstep_status status =
      fault("run_waits") ? wait(handle, LOCKSTEP_NEVER) : stream_wait(handle, op->stream);
  if (status != LOCKSTEP_OK) last_error(handle, error, capacity);
  release(handle);
  return status;
}

// Kept until the process ends: cuMemFree would wait for the streams of other ranks.
lockstep_status alloc_on(lockstep_comm*, lockstep_device_kind, std::int32_t device, std::size_t n_bytes,
                         void** out) {
  const PrimaryContext& context = PrimaryContext::of(driver(), device);
  const ContextScope scope(context);
  DevicePtr memory = 0;
  if (driver().mem_alloc(&memory, n_bytes) != kSuccess) return LOCKSTEP_RESOURCE;
  *out = reinterpret_cast<void*>(memory);
  return LOCKSTEP_OK;
}
void free_nothing(lockstep_comm*, void*) {}

}  // namespace

const lockstep_engine* staged_engine() {
  static const lockstep_engine table{.struct_size = sizeof(lockstep_engine),
                                     .abi_version = LOCKSTEP_ENGINE_ABI_VERSION,
                                     .name = "staged",
                                     .capabilities = capabilities,
                                     .comm_create = comm_create,
                                     .comm_destroy = comm_destroy,
                                     .comm_abort = comm_abort,
                                     .comm_failure = comm_failure,
                                     .alloc = nullptr,
                                     .free = free_nothing,
                                     .post = post,
                                     .test = test,
                                     .wait = wait,
                                     .release = release,
                                     .last_error = last_error,
                                     .run = run,
                                     .comm_leave = comm_leave,
                                     .stream_wait = stream_wait,
                                     .alloc_on = alloc_on};
  return &table;
}

}  // namespace lockstep::cuda
