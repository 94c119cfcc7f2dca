#include "lockstep/autograd/autograd.h"

#include "lockstep/autograd/internal/service.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"

namespace lockstep::autograd {
namespace {

using internal::AutogradService;

std::uint64_t open_unless_nested(rpc::Agent& agent) {
  if (const auto current = rpc::this_call().autograd_context; current != 0) {
    base::raise(ErrorKind::kUsage, base::cat("autograd context ", current,
                                             " is current in this thread already; contexts do not nest"));
  }
  return agent.service<AutogradService>().open_context();
}

}  // namespace

DistAutogradContext::DistAutogradContext() : DistAutogradContext(rpc::current_agent("an autograd context")) {}

DistAutogradContext::DistAutogradContext(std::shared_ptr<rpc::Agent> agent)
    : Context(open_unless_nested(*agent)), agent_(std::move(agent)) {
  rpc::this_call().autograd_context = id();
}

DistAutogradContext::~DistAutogradContext() {
  rpc::this_call().autograd_context = 0;
  try {
    agent_->service<AutogradService>().release(id());
  } catch (...) {
    base::log(LogLevel::kError,
              "an autograd context could not be released: " + base::current_failure().message);
  }
}

std::optional<Context> current_context() {
  const auto id = rpc::this_call().autograd_context;
  return id == 0 ? std::nullopt : std::optional<Context>(id);
}

at::Tensor Gradients::find(const at::Tensor& tensor) const {
  const auto place = places_.find(tensor.unsafeGetTensorImpl());
  return place == places_.end() ? at::Tensor() : entries_[place->second].gradient;
}

void Gradients::add(Entry entry) {
  const auto [place, fresh] = places_.try_emplace(entry.tensor.unsafeGetTensorImpl(), entries_.size());
  if (fresh) {
    entries_.push_back(std::move(entry));
  } else {
    entries_[place->second].gradient = std::move(entry.gradient);
  }
}

Gradients Context::gradients() const {
  const auto agent = rpc::current_agent("the gradients of an autograd context");
  const auto state = agent->service<AutogradService>().find(id_);
  if (!state)
    base::raise(ErrorKind::kUsage,
                base::cat("this worker has no autograd context ", id_,
                          ": nothing of it has arrived here yet (call backward first), or it was released"));
  return state->gradients();
}

void backward(const Context& context, const std::vector<at::Tensor>& roots, const BackwardOptions& options) {
  rpc::current_agent("autograd::backward")->service<AutogradService>().backward(context.id(), roots, options);
}

}  // namespace lockstep::autograd
