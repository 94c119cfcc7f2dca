/* The engine ABI: how lockstep talks to whatever moves the bytes. Plain C, one exported symbol, one table.
 *
 * A plug-in is a shared object that exports
 *
 *     const lockstep_engine* lockstep_engine_v1(void);
 *
 * and includes only this header and, if it is written in C++, engine/plugin.h. The built-in host engine is
 * reached through the same table.
 *
 * Thread safety: every entry may be called from any thread, except where its comment says otherwise. Nothing
 * may be called for a communicator during or after its comm_destroy.
 *
 * Rules
 *  - Every struct begins with struct_size, set by whoever fills it. A reader accesses only fields within
 *    that size; new fields are added at the end. Entries that may be null say so. An engine table that ends
 *    before `run` is rejected.
 *  - Nothing throws across this interface. Functions return a lockstep_status; last_error gives the message.
 *  - post never blocks: it takes the operation and returns a handle. Collectives of one communicator run in
 *    the order posted. SEND and RECV are outside that order: they wait for their peer only, never for a
 *    collective, and messages of equal (sender, receiver, tag) arrive in the order posted. Operations of
 *    different communicators never wait for each other.
 *  - The engine makes progress without test and wait; these can only speed it up.
 *  - Deadlines are absolute, in nanoseconds of CLOCK_MONOTONIC; LOCKSTEP_NEVER waits without a timeout.
 *  - abort may be called from any thread at any time and ends every posted operation within 100 ms.
 *  - Buffers must stay valid until the operation's handle reports that it has completed (or abort has
 *    returned and release was called).
 *
 * Device memory, for an engine whose capabilities name a device kind
 *  - An operation is on device memory when its device_kind says so; all its buffers are then on op.device, and
 *    op.stream is a stream of that device (CUDA: a cudaStream_t; null is the default stream). The buffers are
 *    read and written after everything that was enqueued in the stream before the post. The stream itself does
 *    not wait for the operation.
 *  - test, wait and done mean what they mean on the host: the operation has completed on the device, and its
 *    results are visible to whatever is enqueued afterwards, in any stream.
 *  - stream_wait orders a stream after the operation without waiting for it. run on device memory is post, and
 *    stream_wait on the operation's own stream: it returns when the order is established, not when the operation
 *    has completed, and it may be called while the stream is being captured where the engine `captures`.
 *  - No stream waits for a dead peer: when an operation fails, streams that wait for it continue, the contents
 *    of its output are undefined, and the failure is reported by the handle, by comm_failure, and by every later
 *    operation of the communicator.
 */
#ifndef LOCKSTEP_ENGINE_ABI_H
#define LOCKSTEP_ENGINE_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LOCKSTEP_ENGINE_ABI_VERSION 1u
#define LOCKSTEP_ENGINE_SYMBOL "lockstep_engine_v1"
#define LOCKSTEP_NEVER INT64_MAX

typedef enum lockstep_status {
  LOCKSTEP_OK = 0,
  LOCKSTEP_PENDING = 1, /* test: not yet */
  LOCKSTEP_USAGE = 2,   /* the error kinds of lockstep, in the same sense */
  LOCKSTEP_TIMEOUT = 3,
  LOCKSTEP_PEER_LOST = 4,
  LOCKSTEP_ABORTED = 5,
  LOCKSTEP_UNSUPPORTED = 6,
  LOCKSTEP_RESOURCE = 7,
  LOCKSTEP_SYSTEM = 8,
  LOCKSTEP_INTERNAL = 9
} lockstep_status;

typedef enum lockstep_op_kind {
  LOCKSTEP_BARRIER = 0,
  LOCKSTEP_BROADCAST = 1,      /* send = recv = the buffer, count elements */
  LOCKSTEP_ALL_REDUCE = 2,     /* send = recv (in place) or separate */
  LOCKSTEP_ALL_GATHER = 3,     /* send count, recv count * size elements */
  LOCKSTEP_REDUCE_SCATTER = 4, /* send count * size, recv count elements */
  LOCKSTEP_REDUCE = 5,         /* send count; recv count on root, unused elsewhere; send = recv allowed */
  LOCKSTEP_GATHER = 6,         /* send count; recv count * size on root, unused elsewhere */
  LOCKSTEP_SCATTER = 7,        /* send count * size on root, unused elsewhere; recv count */
  LOCKSTEP_ALL_TO_ALL = 8,     /* send and recv count * size; block i goes to rank i, into its block `rank` */
  LOCKSTEP_ALL_TO_ALL_V = 9,   /* as ALL_TO_ALL, with send_counts and recv_counts; count is unused */
  LOCKSTEP_ALL_GATHER_V = 10,  /* send recv_counts[rank], recv the sum of recv_counts, alike on every rank */
  LOCKSTEP_SEND = 11,          /* send count elements to rank `root` under `tag` */
  LOCKSTEP_RECV = 12, /* recv that from rank `root` (-1: any) under `tag`; another dtype or count breaks */
  LOCKSTEP_OP_KINDS = 13
} lockstep_op_kind;

typedef enum lockstep_dtype {
  LOCKSTEP_U8 = 0,
  LOCKSTEP_I8 = 1,
  LOCKSTEP_I16 = 2,
  LOCKSTEP_I32 = 3,
  LOCKSTEP_I64 = 4,
  LOCKSTEP_F16 = 5,
  LOCKSTEP_BF16 = 6,
  LOCKSTEP_F32 = 7,
  LOCKSTEP_F64 = 8,
  LOCKSTEP_BOOL = 9, /* one byte, 0 or 1; sum is or, product is and */
  LOCKSTEP_DTYPES = 10
} lockstep_dtype;

/* The numbers of torch's ReduceOp. */
typedef enum lockstep_reduce_op {
  LOCKSTEP_SUM = 0,
  LOCKSTEP_AVG = 1, /* sum / size, folded into the reduction; floating types only */
  LOCKSTEP_PRODUCT = 2,
  LOCKSTEP_MIN = 3,
  LOCKSTEP_MAX = 4,
  LOCKSTEP_BAND = 5,
  LOCKSTEP_BOR = 6,
  LOCKSTEP_BXOR = 7,
  LOCKSTEP_REDUCE_OPS = 8
} lockstep_reduce_op;

/* Where the buffers of an operation are. */
typedef enum lockstep_device_kind {
  LOCKSTEP_HOST_MEMORY = 0,
  LOCKSTEP_CUDA = 1,
  LOCKSTEP_DEVICE_KINDS = 2
} lockstep_device_kind;

/* Bits of lockstep_op.flags. */
/* Another operation of the same call follows at once: an engine may start them together. */
#define LOCKSTEP_OP_MORE_FOLLOW 1u

typedef struct lockstep_comm lockstep_comm;     /* a communicator: one rank's end of a group */
typedef struct lockstep_handle lockstep_handle; /* a posted operation */

/* What lockstep lends to the engine for the life of a communicator. All may be called from any thread. */
typedef struct lockstep_host {
  size_t struct_size;
  void* context;
  /* level: 0 error, 1 warn, 2 info, 3 debug. */
  void (*log)(void* context, int level, const char* text);
  /* A key-value space private to this communicator, shared by its ranks. set overwrites. get waits until
   * the key exists or the deadline passes (LOCKSTEP_TIMEOUT); with a deadline in the past it checks once.
   * It writes at most capacity bytes, and always the full length to *length. Keys that begin with "/"
   * address the job's whole store instead, for what others publish there: "/lockstep/exit/<rank in this
   * communicator>" holds text on how a rank ended, set by the launcher or spawn when they started it;
   * where neither did, nobody will ever set it, and get gives LOCKSTEP_UNSUPPORTED at once. */
  lockstep_status (*kv_set)(void* context, const char* key, const void* value, size_t length);
  lockstep_status (*kv_get)(void* context, const char* key, void* value, size_t capacity, size_t* length,
                            int64_t deadline_ns);
} lockstep_host;

struct lockstep_engine;

typedef struct lockstep_comm_config {
  size_t struct_size;
  const lockstep_host* host; /* outlives the communicator */
  int32_t rank;
  int32_t size;
  const char* name;    /* of the group, for messages */
  int64_t deadline_ns; /* for the creation itself */
  /* A communicator of the same engine that all ranks of this one are members of, and their ranks there, in
   * the order of the ranks here; or null. The engine may build on what the parent has set up; the parent
   * may be destroyed before this one. */
  lockstep_comm* parent;
  const int32_t* parent_ranks;
  /* The table comm_create was called through, as the plug-in gave it: for tables made at run time. */
  const struct lockstep_engine* engine;
  /* With a parent: distinguishes this communicator from all others ever created on that parent, identical
   * on all of its ranks; or null. With it an engine can let the ranks find each other in what the parent
   * has set up, without the key-value space. */
  const char* key;
  /* The device that this rank will use, when the caller bound one: an engine may set up what it needs there
   * now instead of with the first operation. LOCKSTEP_HOST_MEMORY: none was bound. */
  lockstep_device_kind device_kind;
  int32_t device;
  /* Settings of this engine, "name=value" separated by spaces; or null. Unknown names are an error. */
  const char* options;
} lockstep_comm_config;

typedef struct lockstep_op {
  size_t struct_size;
  lockstep_op_kind kind;
  lockstep_dtype dtype;
  lockstep_reduce_op reduce;
  int32_t root;
  const void* send;
  void* recv;
  uint64_t count;      /* elements; see lockstep_op_kind */
  int64_t deadline_ns; /* of the operation itself: past it the communicator is broken on every rank (a SEND or
                          RECV that no peer has matched yet may be withdrawn instead) */
  const char* where;   /* caller's file:line; copied by post; may be null */
  int32_t tag; /* SEND, RECV: not negative. Collectives: the caller's number, identical on all ranks; or 0 */
  /* ALL_TO_ALL_V, ALL_GATHER_V: elements per peer, in rank order and packed in that order; copied by post. */
  const uint64_t* send_counts;
  const uint64_t* recv_counts;
  /* RECV: receives the sender's rank before the operation completes; may be null. */
  int32_t* source;
  /* Called once when a posted operation has completed, from any thread, with no lock held; not called by
   * run, nor when post fails. It must not block. It may call test and last_error of the handle, also while
   * another thread is inside wait for it, and release it when none is; and post, comm_abort and
   * comm_failure of any communicator that is not being destroyed. Null: no call. */
  void (*done)(void* done_context);
  void* done_context;
  /* For an engine whose capabilities say takes_rows. Of the buffer that holds a part per peer: the rows of
   * the matrix that it is. Every row has its share of each peer's part, in rank order: a tensor cut along
   * an inner dimension. Every part is a multiple of the rows. 0 and 1: the parts lie one after the other.
   * send_rows: ALL_TO_ALL_V. recv_rows: ALL_TO_ALL_V, ALL_GATHER_V and ALL_GATHER. Each rank has its own. */
  uint64_t send_rows;
  uint64_t recv_rows;
  /* Device memory: see the rules above. A kind that the engine's capabilities do not name is an error. A
   * BARRIER has no buffers; with a device kind it orders the stream after the arrival of every rank's. */
  lockstep_device_kind device_kind;
  int32_t device; /* index, as the process numbers its devices */
  void* stream;
  uint32_t flags; /* LOCKSTEP_OP_... */
} lockstep_op;

/* Capabilities are data. A bit mask over the enums above, per operation. */
typedef struct lockstep_capabilities {
  size_t struct_size;
  uint32_t op_kinds;                /* bit k: lockstep_op_kind k is offered */
  uint32_t dtypes;                  /* bit d: moves dtype d */
  uint32_t reduce[LOCKSTEP_DTYPES]; /* bit r: reduces dtype d with op r */
  uint32_t crosses_hosts;           /* 0: ranks of one host only */
  uint32_t shared_memory;           /* 1: alloc returns memory that is reduced in place */
  uint32_t calls_back; /* 1: lockstep_op.done is called; 0: lockstep waits on a thread of its own */
  uint32_t
      compares_members; /* 1: comm_create with a parent and a key fails on every rank with LOCKSTEP_USAGE when
                           the ranks were given different members; 0: lockstep compares them in the store */
  uint32_t takes_rows;  /* 1: lockstep_op.send_rows and recv_rows may be set; 0: lockstep packs */
  uint32_t device_kinds; /* bit k: takes memory of lockstep_device_kind k. 0: host memory only */
  uint32_t captures;     /* 1: run may be called while op.stream is being captured into a graph */
} lockstep_capabilities;

typedef struct lockstep_engine {
  size_t struct_size;
  uint32_t abi_version; /* LOCKSTEP_ENGINE_ABI_VERSION the plug-in was built with */
  const char* name;     /* "host", "gloo", ... */
  lockstep_status (*capabilities)(lockstep_capabilities* out);

  /* Collective over the ranks; returns when all have joined. On failure *out is null and error holds the
   * message. */
  lockstep_status (*comm_create)(const lockstep_comm_config* config, lockstep_comm** out, char* error,
                                 size_t error_capacity);
  /* Leaves the group. Pending operations end with LOCKSTEP_ABORTED. Handles must be released first.
   * cause: null for an orderly leave; else why this rank gives up; the others report it as a lost peer. */
  void (*comm_destroy)(lockstep_comm* comm, const char* cause);
  /* Breaks the communicator on every rank. */
  void (*comm_abort)(lockstep_comm* comm, const char* reason);
  /* The first failure of the communicator: LOCKSTEP_OK while it is healthy. Message as in last_error;
   * *peer_rank and *peer_pid are -1 when no peer is to blame. peer_cause gets text such as "killed by
   * SIGKILL". */
  lockstep_status (*comm_failure)(lockstep_comm* comm, char* error, size_t error_capacity, int32_t* peer_rank,
                                  int64_t* peer_pid, char* peer_cause, size_t peer_cause_capacity);

  /* Memory that the engine reduces in place. Null entries: the engine has none. alloc is local, not
   * collective. */
  lockstep_status (*alloc)(lockstep_comm* comm, size_t n_bytes, void** out);
  void (*free)(lockstep_comm* comm, void* memory);

  lockstep_status (*post)(lockstep_comm* comm, const lockstep_op* op, lockstep_handle** out);
  lockstep_status (*test)(lockstep_handle* handle); /* LOCKSTEP_PENDING, LOCKSTEP_OK or the failure */
  /* Waits until the operation completes or the deadline passes (LOCKSTEP_TIMEOUT; the operation continues,
   * and test returns LOCKSTEP_PENDING). One thread at a time waits for a handle. test and last_error may
   * be called from any thread meanwhile; release is the last call, made when no other call of the handle
   * is in progress. */
  lockstep_status (*wait)(lockstep_handle* handle, int64_t deadline_ns);
  /* Releases the handle, completed or not. A pending operation continues; its buffers must stay valid. */
  void (*release)(lockstep_handle* handle);
  /* Message of the last failure of this handle. */
  void (*last_error)(lockstep_handle* handle, char* error, size_t error_capacity);

  /* Post and wait in one call, on the caller's thread where the engine can: the fast path for small blocking
   * operations. Null: lockstep posts and waits. Failure messages come from comm_failure or error. */
  lockstep_status (*run)(lockstep_comm* comm, const lockstep_op* op, char* error, size_t error_capacity);

  /* The first half of comm_destroy: leaves the group (cause as there) and ends pending operations with
   * LOCKSTEP_ABORTED, those of threads inside run too; memory from alloc stays mapped. Any thread, returns at
   * once, at most once. Afterwards post and run give LOCKSTEP_ABORTED, and release, free and comm_destroy are
   * still called. May be null or beyond struct_size: then the group is left in comm_destroy. */
  void (*comm_leave)(lockstep_comm* comm, const char* cause);

  /* For an engine that takes device memory; else null. Everything enqueued in `stream` (of the operation's
   * device) after this call runs after the operation has completed. Returns as soon as that order is
   * established; it may block until the engine has submitted the operation to the device, but not beyond the
   * operation's deadline. Returns the operation's failure when it is known already. From any thread; release
   * may follow at once. */
  lockstep_status (*stream_wait)(lockstep_handle* handle, void* stream);
  /* As alloc, on a device; freed by `free`. May be null. */
  lockstep_status (*alloc_on)(lockstep_comm* comm, lockstep_device_kind device_kind, int32_t device,
                              size_t n_bytes, void** out);
  /* Text that identifies a physical device: ranks of one host whose text is equal share it. May be null. */
  lockstep_status (*device_identity)(lockstep_device_kind device_kind, int32_t device, char* out,
                                     size_t capacity);
} lockstep_engine;

typedef const lockstep_engine* (*lockstep_engine_entry)(void);

#ifdef __cplusplus
}
#endif

#endif /* LOCKSTEP_ENGINE_ABI_H */
