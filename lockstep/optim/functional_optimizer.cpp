#include "lockstep/optim/functional_optimizer.h"

#include <c10/core/GradMode.h>

#include <map>
#include <mutex>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

// Undefined gradients pass: they skip their parameter.
void check_gradient(const at::Tensor& parameter, const at::Tensor& gradient, const std::string& which) {
  if (!gradient.defined()) return;
  if (gradient.layout() != at::kStrided) {
    base::raise(ErrorKind::kUnsupported,
                base::cat("FunctionalOptimizer: ", which, " is a ", gradient.layout(),
                          " tensor; only dense ones can be used"));
  }
  if (gradient.sizes() != parameter.sizes()) {
    base::raise(ErrorKind::kUsage, base::cat("FunctionalOptimizer: ", which, " has sizes ", gradient.sizes(),
                                             ", its parameter ", parameter.sizes()));
  }
}

// The cast is safe: the table maps the dynamic type of `options` to the instance for that type.
template <class Options>
std::unique_ptr<FunctionalOptimizer> make(std::vector<at::Tensor> parameters,
                                          const torch::optim::OptimizerOptions& options,
                                          FunctionalOptions functional) {
  return std::make_unique<Functional<Options>>(std::move(parameters), static_cast<const Options&>(options),
                                               functional);
}

template <class... Options>
std::map<std::type_index, MakeFunctional> table_of() {
  return {{std::type_index(typeid(Options)), make<Options>}...};
}

// Process-wide, as the classes it names are.
struct Registry {
  std::mutex mutex;
  std::map<std::type_index, MakeFunctional> table =
      table_of<torch::optim::SGDOptions, torch::optim::AdamOptions, torch::optim::AdamWOptions,
               torch::optim::AdagradOptions, torch::optim::RMSpropOptions, AdadeltaOptions, RpropOptions,
               AdamaxOptions>();
};
Registry& registry() {
  static Registry only;
  return only;
}

}  // namespace

FunctionalOptimizer::FunctionalOptimizer(std::vector<at::Tensor> parameters, FunctionalOptions options)
    : parameters_(std::move(parameters)), options_(options) {
  if (parameters_.empty() && !options_.allow_empty_param_list) {
    base::raise(ErrorKind::kUsage, "FunctionalOptimizer: there are no parameters");
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].defined())
      base::raise(ErrorKind::kUsage,
                  base::cat("FunctionalOptimizer: parameter ", i, " is an undefined tensor"));
  }
}

void FunctionalOptimizer::step(const std::vector<at::Tensor>& gradients) {
  if (gradients.size() != parameters_.size()) {
    base::raise(ErrorKind::kUsage,
                base::cat("FunctionalOptimizer: ", gradients.size(), " gradients for ", parameters_.size(),
                          " parameters; give an undefined tensor for those to skip"));
  }
  // All checks before the first update: a step that is refused changes no parameter.
  for (std::size_t i = 0; i < gradients.size(); ++i)
    check_gradient(parameters_[i], gradients[i], base::cat("gradient ", i));
  for (std::size_t i = 0; i < gradients.size(); ++i) step_param(parameters_[i], gradients[i]);
}

void FunctionalOptimizer::step_param(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (!parameter.defined())
    base::raise(ErrorKind::kUsage, "FunctionalOptimizer: the parameter is an undefined tensor");
  check_gradient(parameter, gradient, "the gradient");
  if (!gradient.defined()) return;
  const at::NoGradGuard no_grad;
  // By identity, as torch::optim: detached copies of a parameter would have a state of their own.
  Entry& entry = state_[parameter.unsafeGetTensorImpl()];
  entry.parameter = parameter;
  // Detached, so that update() can write in place although the parameter is a leaf; the version counter is
  // shared.
  update(parameter.detach(), options_.maximize ? gradient.detach().neg() : gradient.detach(), entry.values);
}

const StateValues& FunctionalOptimizer::state_of(const at::Tensor& parameter) const {
  static const StateValues kNone;
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  return found == state_.end() ? kNone : found->second.values;
}

std::unique_ptr<FunctionalOptimizer> as_functional_optim(std::vector<at::Tensor> parameters,
                                                         const torch::optim::OptimizerOptions& options,
                                                         FunctionalOptions functional) {
  // Called without the mutex: a user's function may register or look up another one.
  MakeFunctional found;
  {
    const std::lock_guard lock(registry().mutex);
    const auto entry = registry().table.find(std::type_index(typeid(options)));
    if (entry != registry().table.end()) found = entry->second;
  }
  if (!found) {
    base::raise(ErrorKind::kUsage,
                base::cat("as_functional_optim: there is no functional optimizer for ",
                          c10::demangle(typeid(options).name()), "; add one by register_functional_optim"));
  }
  return found(std::move(parameters), options, functional);
}

void register_functional_optim(std::type_index options_class, MakeFunctional make_functional) {
  const std::lock_guard lock(registry().mutex);
  if (!registry().table.emplace(options_class, std::move(make_functional)).second) {
    base::raise(ErrorKind::kUsage, base::cat("register_functional_optim: there is one for ",
                                             c10::demangle(options_class.name()), " already"));
  }
}

}  // namespace lockstep
