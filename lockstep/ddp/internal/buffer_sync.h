// Synchronises buffers (such as running statistics) around each synced forward pass: rank 0's are broadcast,
// or the user's hook runs instead.
//
//   due --before_forward()--> the buffers are rank `root`'s --after_forward(synced)--> due; not due after an unsynced one
//
// Thread safety: none; called sequentially by the model's forward passes. Ownership: keeps group, module and
// chunk memory.
#pragma once

#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/ddp_options.h"
#include "lockstep/ddp/detail/module_tensors.h"
#include "lockstep/ddp/internal/flat_broadcast.h"

namespace lockstep::internal {

class BufferSync final {
 public:
  struct Options {
    std::shared_ptr<const ModuleTensors> tensors{};
    std::vector<std::string> ignored{};
    bool broadcasts = true;
    BufferHook hook{};  // instead of the broadcast; empty: none
    Group group{};
    std::source_location where = std::source_location::current();
  };
  explicit BufferSync(Options options);

  void set_hook(BufferHook hook) { options_.hook = std::move(hook); }

  // Collective when the buffers are due. `root` is called only if something is sent; it may block. Returns
  // the futures of the hook: the gradient reduction waits for them, too.
  std::vector<GradFuture> before_forward(const std::function<int()>& root);
  std::vector<GradFuture> after_forward(bool synced);
  // Blocks until the tensors hold the values of rank `root` of the group.
  void send(const std::vector<at::Tensor>& tensors, int root) { broadcast_.run(tensors, root); }

 private:
  bool has_hook(BufferHook::When when) const { return options_.hook.run && options_.hook.when == when; }
  std::vector<GradFuture> run_hook() const;

  Options options_;
  FlatBroadcast broadcast_;
  bool due_ = true;
};

}  // namespace lockstep::internal
