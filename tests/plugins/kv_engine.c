/* The smallest engine that really works, in C, with nothing but engine_abi.h: every rank publishes what it
 * sends in the key-value space lockstep lends, and reads the others' parts when it is asked to test or wait.
 * Slow on purpose; it shows that the ABI is enough, and the tests run groups over it.
 *
 * Unlike a real engine it moves only inside test and wait, and an abort stays on its own rank.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "lockstep/engine/engine_abi.h"

static const size_t kWidth[LOCKSTEP_DTYPES] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1};

struct lockstep_comm {
  const lockstep_host* host;
  int32_t rank, size;
  uint64_t posted;
  atomic_int status; /* the first failure, LOCKSTEP_OK while well */
  char words[256];
};

struct lockstep_handle {
  lockstep_comm* comm;
  lockstep_op op;
  uint64_t sequence;
  lockstep_status status;
  char words[256];
};

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void say(char* to, size_t capacity, const char* words) {
  if (capacity > 0) snprintf(to, capacity, "%s", words);
}

static lockstep_status kv_capabilities(lockstep_capabilities* out) {
  out->op_kinds = (1u << (LOCKSTEP_REDUCE_SCATTER + 1)) - 1;
  out->dtypes = (1u << LOCKSTEP_DTYPES) - 1;
  memset(out->reduce, 0, sizeof out->reduce);
  out->reduce[LOCKSTEP_F32] = 1u << LOCKSTEP_SUM | 1u << LOCKSTEP_AVG | 1u << LOCKSTEP_MAX;
  out->reduce[LOCKSTEP_I64] = 1u << LOCKSTEP_SUM | 1u << LOCKSTEP_MAX;
  out->crosses_hosts = 1;
  out->shared_memory = 0;
  return LOCKSTEP_OK;
}

static lockstep_status kv_comm_create(const lockstep_comm_config* config, lockstep_comm** out, char* error,
                                      size_t error_capacity) {
  *out = NULL;
  lockstep_comm* comm = calloc(1, sizeof *comm);
  if (comm == NULL) {
    say(error, error_capacity, "out of memory");
    return LOCKSTEP_RESOURCE;
  }
  comm->host = config->host;
  comm->rank = config->rank;
  comm->size = config->size;
  char key[64];
  snprintf(key, sizeof key, "joined/%d", (int)config->rank);
  lockstep_status status = config->host->kv_set(config->host->context, key, "", 0);
  for (int32_t r = 0; status == LOCKSTEP_OK && r < config->size; ++r) {
    size_t length = 0;
    snprintf(key, sizeof key, "joined/%d", (int)r);
    status = config->host->kv_get(config->host->context, key, NULL, 0, &length, config->deadline_ns);
    if (status != LOCKSTEP_OK) {
      char words[128];
      snprintf(words, sizeof words, "rank %d has not joined", (int)r);
      say(error, error_capacity, words);
    }
  }
  if (status != LOCKSTEP_OK) {
    free(comm);
    return status;
  }
  config->host->log(config->host->context, 3, "kv engine: joined");
  *out = comm;
  return LOCKSTEP_OK;
}

static void kv_comm_destroy(lockstep_comm* comm, const char* cause) {
  (void)cause;
  free(comm);
}

static void kv_comm_abort(lockstep_comm* comm, const char* reason) {
  int well = LOCKSTEP_OK;
  say(comm->words, sizeof comm->words, reason);
  atomic_compare_exchange_strong(&comm->status, &well, LOCKSTEP_ABORTED);
}

static lockstep_status kv_comm_failure(lockstep_comm* comm, char* error, size_t error_capacity,
                                       int32_t* peer_rank, int64_t* peer_pid, char* peer_cause,
                                       size_t peer_cause_capacity) {
  *peer_rank = -1;
  *peer_pid = -1;
  say(peer_cause, peer_cause_capacity, "");
  const lockstep_status status = (lockstep_status)atomic_load(&comm->status);
  if (status != LOCKSTEP_OK) say(error, error_capacity, comm->words);
  return status;
}

#define REDUCE(T)                                              \
  for (uint64_t i = 0; i < n; ++i) {                           \
    T* a = (T*)into + i;                                       \
    const T b = ((const T*)from)[i];                           \
    *a = op == LOCKSTEP_MAX ? (*a > b ? *a : b) : (T)(*a + b); \
  }

static void reduce(void* into, const void* from, uint64_t n, lockstep_dtype dtype, lockstep_reduce_op op) {
  if (dtype == LOCKSTEP_F32) REDUCE(float)
  if (dtype == LOCKSTEP_I64) REDUCE(int64_t)
}

/* Bytes that every rank publishes for the operation. */
static size_t part_size(const lockstep_comm* comm, const lockstep_op* op) {
  const size_t bytes = (size_t)op->count * kWidth[op->dtype];
  if (op->kind == LOCKSTEP_BARRIER) return 0;
  return op->kind == LOCKSTEP_REDUCE_SCATTER ? bytes * (size_t)comm->size : bytes;
}

/* Puts rank r's part where the operation wants it. */
static void take(lockstep_handle* handle, int32_t r, const char* part) {
  const lockstep_op* op = &handle->op;
  const size_t bytes = (size_t)op->count * kWidth[op->dtype];
  if (op->kind == LOCKSTEP_BROADCAST && r == op->root) memcpy(op->recv, part, bytes);
  if (op->kind == LOCKSTEP_ALL_GATHER) memcpy((char*)op->recv + bytes * (size_t)r, part, bytes);
  if (op->kind != LOCKSTEP_ALL_REDUCE && op->kind != LOCKSTEP_REDUCE_SCATTER) return;
  if (op->kind == LOCKSTEP_REDUCE_SCATTER) part += bytes * (size_t)handle->comm->rank;
  if (r == 0) {
    memcpy(op->recv, part, bytes);
  } else {
    reduce(op->recv, part, op->count, op->dtype, op->reduce);
  }
  if (r == handle->comm->size - 1 && op->reduce == LOCKSTEP_AVG) {
    for (uint64_t i = 0; i < op->count; ++i) ((float*)op->recv)[i] /= (float)handle->comm->size;
  }
}

/* Breaks the communicator for this rank; every later operation gives the same. */
static lockstep_status fail(lockstep_handle* handle, lockstep_status status, const char* words) {
  handle->status = status;
  say(handle->words, sizeof handle->words, words);
  int well = LOCKSTEP_OK;
  if (atomic_compare_exchange_strong(&handle->comm->status, &well, (int)status)) {
    say(handle->comm->words, sizeof handle->comm->words, words);
  }
  return status;
}

static lockstep_status collect(lockstep_handle* handle, char* scratch, int64_t deadline_ns) {
  lockstep_comm* comm = handle->comm;
  const size_t expected = part_size(comm, &handle->op);
  for (int32_t r = 0; r < comm->size; ++r) {
    char key[64], words[128];
    snprintf(key, sizeof key, "%llu/%d", (unsigned long long)handle->sequence, (int)r);
    size_t length = 0;
    const lockstep_status status =
        comm->host->kv_get(comm->host->context, key, scratch, expected, &length, deadline_ns);
    if (status == LOCKSTEP_TIMEOUT) {
      if (now_ns() < handle->op.deadline_ns) return LOCKSTEP_PENDING;
      snprintf(words, sizeof words, "timed out waiting for rank %d", (int)r);
      return fail(handle, LOCKSTEP_TIMEOUT, words);
    }
    if (status != LOCKSTEP_OK) return fail(handle, status, "the key-value space failed");
    if (length != expected) {
      snprintf(words, sizeof words, "rank %d sent %zu bytes where rank %d sent %zu", (int)r, length,
               (int)comm->rank, expected);
      return fail(handle, LOCKSTEP_USAGE, words);
    }
    take(handle, r, scratch);
  }
  return handle->status = LOCKSTEP_OK;
}

static lockstep_status kv_post(lockstep_comm* comm, const lockstep_op* op, lockstep_handle** out) {
  *out = NULL;
  if (atomic_load(&comm->status) != LOCKSTEP_OK) return (lockstep_status)atomic_load(&comm->status);
  lockstep_handle* handle = calloc(1, sizeof *handle);
  if (handle == NULL) return LOCKSTEP_RESOURCE;
  handle->comm = comm;
  handle->op = *op;
  handle->sequence = ++comm->posted;
  handle->status = LOCKSTEP_PENDING;
  char key[64];
  snprintf(key, sizeof key, "%llu/%d", (unsigned long long)handle->sequence, (int)comm->rank);
  comm->host->kv_set(comm->host->context, key, op->send, part_size(comm, op));
  *out = handle;
  return LOCKSTEP_OK;
}

static lockstep_status kv_wait(lockstep_handle* handle, int64_t deadline_ns) {
  if (handle->status != LOCKSTEP_PENDING) return handle->status;
  const size_t n_bytes = part_size(handle->comm, &handle->op);
  char* scratch = malloc(n_bytes + 1);
  if (scratch == NULL) return fail(handle, LOCKSTEP_RESOURCE, "out of memory");
  lockstep_status status = LOCKSTEP_PENDING;
  while (status == LOCKSTEP_PENDING) { /* in slices, so that an abort is seen */
    const int64_t now = now_ns();
    int64_t slice = now + 20 * 1000000;
    if (slice > handle->op.deadline_ns) slice = handle->op.deadline_ns;
    if (slice > deadline_ns) slice = deadline_ns;
    if (atomic_load(&handle->comm->status) != LOCKSTEP_OK) {
      status = fail(handle, (lockstep_status)atomic_load(&handle->comm->status), handle->comm->words);
    } else {
      status = collect(handle, scratch, slice);
    }
    if (status == LOCKSTEP_PENDING && now >= deadline_ns) break;
  }
  free(scratch);
  return status == LOCKSTEP_PENDING ? LOCKSTEP_TIMEOUT : status;
}

static lockstep_status kv_test(lockstep_handle* handle) {
  const lockstep_status status = kv_wait(handle, 0);
  return status == LOCKSTEP_TIMEOUT && handle->status == LOCKSTEP_PENDING ? LOCKSTEP_PENDING : status;
}

static void kv_release(lockstep_handle* handle) {
  free(handle);
}

static void kv_last_error(lockstep_handle* handle, char* error, size_t error_capacity) {
  say(error, error_capacity, handle->words);
}

__attribute__((visibility("default"))) const lockstep_engine* lockstep_engine_v1(void);

const lockstep_engine* lockstep_engine_v1(void) {
  static const lockstep_engine table = {
      .struct_size = sizeof(lockstep_engine),
      .abi_version = LOCKSTEP_ENGINE_ABI_VERSION,
      .name = "kv",
      .capabilities = kv_capabilities,
      .comm_create = kv_comm_create,
      .comm_destroy = kv_comm_destroy,
      .comm_abort = kv_comm_abort,
      .comm_failure = kv_comm_failure,
      .post = kv_post,
      .test = kv_test,
      .wait = kv_wait,
      .release = kv_release,
      .last_error = kv_last_error,
  };
  return &table;
}
