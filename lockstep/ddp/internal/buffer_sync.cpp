#include "lockstep/ddp/internal/buffer_sync.h"

#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/ddp/internal/module_state.h"

namespace lockstep::internal {

BufferSync::BufferSync(Options options)
    : options_(std::move(options)), broadcast_(options_.group, options_.where) {}

// Buffers are collected anew each time: users may rebind them.
std::vector<GradFuture> BufferSync::before_forward(const std::function<int()>& root) {
  if (!due_ || options_.group->size() == 1) return {};
  if (options_.hook.run) {
    return has_hook(BufferHook::When::kBeforeForward) ? run_hook() : std::vector<GradFuture>{};
  }
  if (!options_.broadcasts) return {};
  const std::vector<at::Tensor> buffers = buffers_of(*options_.tensors, options_.ignored).tensors;
  if (buffers.empty()) return {};
  try {
    send(buffers, root());
  } catch (const Error& error) {
    raise_forward_alone(error);
  }
  return {};
}

std::vector<GradFuture> BufferSync::after_forward(bool synced) {
  due_ = synced;
  if (!synced || options_.group->size() == 1 || !has_hook(BufferHook::When::kAfterForward)) return {};
  return run_hook();
}

std::vector<GradFuture> BufferSync::run_hook() const {
  const NamedTensors named = buffers_of(*options_.tensors, options_.ignored);
  torch::OrderedDict<std::string, at::Tensor> buffers;
  for (std::size_t i = 0; i < named.names.size(); ++i) buffers.insert(named.names[i], named.tensors[i]);
  return options_.hook.run(buffers);
}

}  // namespace lockstep::internal
