// Back ends: which engine works for which device type. A back end is an engine by name: "host" and
// "hierarchical" (built in), "gloo" (a plug-in found by its name), "fake", a plug-in loaded with load_engine (world.h),
// or one that the program registers here.
//
// A group's `backend` is one name ("host": for every device type that engine serves) or one pair per device type
// ("cpu:host,meta:fake"). The device of a call's tensors selects the back end; device types of the same name share one
// communicator.
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

// What a factory is told about the group it works for.
struct BackendOptions {
  std::shared_ptr<Store> store;  // private to this back end of this group
  int rank;
  int size;
  Milliseconds timeout;  // the group's; of one operation: lockstep_op.deadline_ns
  std::string group_name;
  std::vector<int> global_ranks;  // ranks in the world of the group's members
};

// One rank's end of one group, written in C++. Errors are thrown: lockstep::Error keeps its kind.
class Backend {
 public:
  virtual ~Backend() = default;
  // Runs the operation to its end (engine_abi.h says what each kind means). Called by one thread at a time for
  // collectives, in the order they were started; sends run beside them one after another, and so do receives. Must return
  // by op.deadline_ns, and soon after abort(): buffers are in use until it does. What it throws ends the group, but for
  // kUsage and kUnsupported: a refusal on every rank, with nothing sent.
  virtual void run(const lockstep_op& op) = 0;
  // Any thread, at any time: makes run() give up, here and on the other ranks if it can. Later operations are refused.
  virtual void abort(const std::string& reason) = 0;
};
// Collective over the members of a group; throws when it cannot join.
using BackendFactory = std::function<std::unique_ptr<Backend>(const BackendOptions&)>;

struct RegisterBackendOptions {
  std::vector<std::string> devices{"cpu"};  // device types it serves
};
// Makes `name` (any case; letters, digits and _) a back end of this process, for ever. It is also used for groups of
// one. A device type that had no default back end gets this one. Raises kUsage for a name in use, a bad name, an empty
// factory or an unknown device type.
void register_backend(const std::string& name, BackendFactory factory, RegisterBackendOptions options = {});
// The same for a ready engine table, which must live as long as the process. Raises kUnsupported for a bad table.
void register_backend(const lockstep_engine* table, RegisterBackendOptions options = {});

// The object that a registered factory made for `group`, for methods of its own that a program knows by its class. It lives as
// long as someone holds it, also after the group was destroyed. Raises kUsage for a non-member and for a device type that the
// group does not serve, kUnsupported for a back end that is an engine and no Backend.
std::shared_ptr<Backend> get_backend_impl(const Group& group = {}, const std::string& device = "cpu");

// What an empty `backend` means for a device type, there or not: cpu "host", cuda "nccl", xpu "xccl", mps "gloo", meta
// "fake", others what was registered for them. Raises kUsage when there is none.
std::string get_default_backend_for_device(const std::string& device);

}  // namespace lockstep
