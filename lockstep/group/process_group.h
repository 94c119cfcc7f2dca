// A set of ranks that communicate: rank, size, name and one engine's communicator per device type. Held by
// shared_ptr (Group), since operations in flight and reducers must outlive the caller's handle. Created by
// init_process_group (world.h) and new_group and its relatives (groups.h); no other class derives from it.
// Thread safety: every method may be called from any thread; operations may be started from any thread, but
// all ranks must start them in the same order.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/store/store.h"

namespace lockstep {

class ProcessGroup;
// Null means the default group of this process, or of this rank thread.
using Group = std::shared_ptr<ProcessGroup>;

// 30 minutes, as in torch for every back end but NCCL.
inline constexpr Milliseconds kDefaultGroupTimeout{30 * 60 * 1000};

// A completed operation, as passed to a completion hook.
struct WorkInfo {
  const char* op;  // "all_reduce"; static
  std::uint64_t sequence_number;
  std::chrono::steady_clock::time_point started;   // when the caller started it
  std::chrono::steady_clock::time_point finished;  // when a thread of this rank saw its completion
  const Failure* failure;                          // null when it succeeded; valid during the call
};
using CompletionHook = std::function<void(const WorkInfo&)>;

class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;
  // Both -1 for a group that this rank is not a member of.
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Ranks in the world of its members, ascending: entry r is group rank r. Empty for a non-member's handle.
  virtual const std::vector<int>& ranks() const = 0;
  // "0" for the default group; see groups.h. Unique in its world.
  virtual const std::string& name() const = 0;
  // A human-readable description; "default_pg" for the default group, "undefined" until set.
  virtual std::string desc() const = 0;
  virtual void set_desc(std::string desc) = 0;
  // "host" for the built-in engine, "none" in a group of one; "cpu:host,meta:fake" when devices differ.
  virtual std::string backend() const = 0;
  // Always by device: "cpu:host".
  virtual std::string backend_config() const = 0;
  // Of operations that have none of their own; kNoTimeout: they wait forever.
  virtual Milliseconds timeout() const = 0;
  virtual void set_timeout(Milliseconds timeout) = 0;
  // The group's own part of the rendezvous store; null in a world of one without a store.
  virtual std::shared_ptr<Store> store() const = 0;
  // Number of the last collective, including refused ones; 0 before the first. Messages are numbered
  // separately.
  virtual std::uint64_t sequence_number() const = 0;
  // Breaks the group on every rank: pending and later operations raise kAborted with `reason`. Not
  // collective; may be called from any thread; returns immediately.
  virtual void abort(const std::string& reason) = 0;

  // Records Work::duration() from now on; no overhead while disabled.
  virtual void enable_collectives_timing() = 0;
  virtual bool collectives_timing() const = 0;
  // `hook` is called once for every later operation that completes, by the thread that sees its completion
  // and under no lock; it must not block and must not throw (what it throws is logged). One hook per group:
  // raises kUsage when there is one already.
  virtual void register_on_completion_hook(CompletionHook hook) = 0;
};

}  // namespace lockstep
