// An NCCL without a GPU: libnccl.so.2 for tests, over the fake driver (tests/fake_cuda). Ranks are threads of one process.
//
// It has NCCL's binary interface as far as lockstep uses it, and behaves as NCCL does where code comes to rely on it:
//  - Communicators do not block (blocking = 0 is demanded). Making one is in progress until all ranks have joined; so is the
//    first operation of each kind, which is launched only when it has settled. A call meanwhile is an error.
//  - An operation is a kernel that waits for its peers: for ever, when one does not come. ncclCommAbort and ncclCommRevoke
//    end the kernels of their own rank only; nobody is told that a peer is gone.
//  - Sends and receives match in the order issued, per pair and direction, and know no tags. Those of one group progress
//    together; others wait for what is ahead of them in their stream.
// What it does not do: blocking communicators, splitting, windows. Calls that do not fit together end the process.
//
// Environment, read once: FAKE_NCCL_VERSION (22809): what ncclGetVersion gives. FAKE_NCCL_ALONE=1: making a communicator does
// not wait for the other ranks, which may be other processes; its operations hang.
#pragma once

#include <cstddef>
#include <cstdint>

#define FAKE_NCCL_EXPORT extern "C" __attribute__((visibility("default")))

// The nth call from now on (1: the next) of an entry gives `result` and does nothing else.
FAKE_NCCL_EXPORT void fake_nccl_fail(const char* entry, int nth, int result);
// How many calls of an entry there were.
FAKE_NCCL_EXPORT std::uint64_t fake_nccl_calls(const char* entry);
// From now on ncclCommGetAsyncError of rank `rank` of every communicator gives this; 0: as usual.
FAKE_NCCL_EXPORT void fake_nccl_async_error(int rank, int result);
// The config of the communicator that was made last, as its caller gave it; at most n_bytes.
FAKE_NCCL_EXPORT void fake_nccl_last_config(void* out, std::size_t n_bytes);
// Communicators that exist.
FAKE_NCCL_EXPORT int fake_nccl_comms();
