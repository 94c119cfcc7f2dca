#include "lockstep/autograd/autograd.h"

#include "lockstep/autograd/internal/service.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"

namespace lockstep::autograd {
namespace {

using internal::AutogradService;

}  // namespace

DistAutogradContext::DistAutogradContext() : agent_(rpc::current_agent("an autograd context")) {
  auto& current = rpc::this_call().autograd_context;
  if (current != 0) {
    base::raise(ErrorKind::kUsage, base::cat("autograd context ", current,
                                             " is current in this thread already; contexts do not nest"));
  }
  id_ = agent_->service<AutogradService>().open_context();
  current = id_;
}

DistAutogradContext::~DistAutogradContext() {
  rpc::this_call().autograd_context = 0;
  try {
    agent_->service<AutogradService>().release(id_);
  } catch (...) {
    base::log(LogLevel::kError,
              "an autograd context could not be released: " + base::current_failure().message);
  }
}

std::uint64_t get_context_id() {
  const auto id = rpc::this_call().autograd_context;
  if (id == 0)
    base::raise(ErrorKind::kUsage,
                "no autograd context is current in this thread; make one with autograd::context()");
  return id;
}

std::shared_ptr<Context> current_context() {
  const auto id = rpc::this_call().autograd_context;
  const auto agent = id == 0 ? nullptr : rpc::current_agent_if_any();
  return agent && !agent->closed() ? agent->service<AutogradService>().find_or_make(id) : nullptr;
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

Gradients get_gradients(std::uint64_t context) {
  const auto agent = rpc::current_agent("get_gradients");
  const auto state = agent->service<AutogradService>().find(context);
  if (!state)
    base::raise(ErrorKind::kUsage,
                base::cat("get_gradients: this worker knows no autograd context ", context,
                          ": nothing of it came here yet (call backward first), or it was released"));
  return state->gradients();
}

void backward(std::uint64_t context, const std::vector<at::Tensor>& roots, const BackwardOptions& options) {
  rpc::current_agent("autograd::backward")->service<AutogradService>().backward(context, roots, options);
}

}  // namespace lockstep::autograd
