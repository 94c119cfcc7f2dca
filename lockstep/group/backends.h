// Back ends: which engine serves which device type. A back end is an engine selected by name: "host" and
// "hierarchical" (built in), "gloo" (a plug-in found by its name), "fake", a plug-in loaded with load_engine
// (world.h), or one that the program registers here.
//
// A group's `backend` is one name ("host": for every device type that engine serves) or one pair per device
// type ("cpu:host,meta:fake"). The device of a call's tensors selects the back end; device types with the
// same back end share one communicator.
// Thread safety: every function may be called from any thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/group/process_group.h"
#include "lockstep/store/store.h"

namespace lockstep {

// What a factory gets to know about the group it creates a back end for.
struct BackendOptions {
  std::shared_ptr<Store> store;  // private to this back end of this group
  int rank;
  int size;
  Milliseconds timeout;           // the group's; of one operation: lockstep_op.deadline_ns
  std::string name;               // of the group
  std::vector<int> global_ranks;  // ranks in the world of the group's members
};

// One rank's end of one group, written in C++. Errors are thrown: lockstep::Error keeps its kind.
class Backend {
 public:
  virtual ~Backend() = default;
  // Runs the operation to completion (engine_abi.h defines each kind). For collectives it is called by one
  // thread at a time, in the order they were started; sends run concurrently with them, one after another,
  // and so do receives. Must return by op.deadline_ns, and soon after abort(): buffers are in use until it
  // does. An exception breaks the group, except kUsage and kUnsupported, which mean a refusal on every rank
  // with nothing sent.
  virtual void run(const lockstep_op& op) = 0;
  // Any thread, at any time: makes run() return early, here and on the other ranks if possible. Later
  // operations are refused.
  virtual void abort(const std::string& reason) = 0;
};
// Collective over the members of a group; throws when it cannot join.
using BackendFactory = std::function<std::unique_ptr<Backend>(const BackendOptions&)>;

struct RegisterBackendOptions {
  std::vector<std::string> devices{"cpu"};  // device types it serves
};
// Registers `name` (any case; letters, digits and _) as a back end of this process, permanently. It is also
// used for groups of one. A device type that had no default back end gets this one. Raises kUsage for a name
// in use, a bad name, an empty factory or an unknown device type.
void register_backend(const std::string& name, BackendFactory factory, RegisterBackendOptions options = {});
// The same for an existing engine table, which must live as long as the process. Raises kUnsupported for a
// bad table.
void register_backend(const lockstep_engine* table, RegisterBackendOptions options = {});

// The object that a registered factory created for `group`, for access to methods of its concrete class. It
// lives as long as it is referenced, even after the group was destroyed. Raises kUsage for a non-member and
// for a device type that the group does not serve, kUnsupported for a back end that is an engine and not a
// Backend.
std::shared_ptr<Backend> get_backend_impl(const Group& group = {}, const std::string& device = "cpu");

// What an empty `backend` means for a device type, whether or not that back end is available: cpu "host",
// cuda "nccl", xpu "xccl", mps "gloo", meta "fake", others what was registered for them. Raises kUsage when
// there is none.
std::string get_default_backend_for_device(const std::string& device);

}  // namespace lockstep
