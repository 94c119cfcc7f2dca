// The hierarchical engine: ranks on several hosts, made of two other engines. Inside a host the local engine
// moves the bytes (the host engine's shared memory), between hosts the across engine does (any that crosses
// hosts).
//
// Ranks of one host form a local communicator. When every host has the same number of ranks, those with the
// same local rank form a lane, an across-communicator: each local rank reduces a part inside its host and
// carries it over its own lane. Otherwise the first rank of each host, its leader, carries everything. A
// third, flat across-communicator joins all ranks: all-to-all, gather, scatter and messages run on it, so
// that a receive from any source is matched in one place. It also propagates a failure of any
// sub-communicator to every rank within 100 ms.
// If all ranks are on one host, or each rank is on a host of its own, a single communicator does everything.
//
// Results have the same bits on every rank and in every run: the order of operands is that of the
// sub-communicators. Collectives run one after the other; inside one, chunks overlap local steps with the
// network.
//
// Files, in reading order: internal/topology.h (who is where), internal/schedule.h (which steps an operation
// is made of), internal/sub_communicator.h (a communicator of one of the engines),
// internal/hierarchical_communicator.h (the queue, steps, failure).
// Thread safety: engines may be created and destroyed from any thread, and every entry of the table may be
// called from any thread.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "lockstep/engine/engine.h"

namespace lockstep::comm {

struct HierarchyOptions {
  // Ranks for which it returns the same text share a host. Null: host_identity() of base.
  std::function<std::string()> identity = nullptr;
};

// Owns a table; it must outlive the communicators made through it. `local` and `across` must outlive this.
// Both must call back (capabilities), else kUnsupported. At most eight exist at a time.
class HierarchicalEngine {
 public:
  HierarchicalEngine(const Engine& local, const Engine& across, HierarchyOptions options = {});
  ~HierarchicalEngine();
  HierarchicalEngine(const HierarchicalEngine&) = delete;

  // What comm_create and the others are called through; named "hierarchical".
  const lockstep_engine* table() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::comm
