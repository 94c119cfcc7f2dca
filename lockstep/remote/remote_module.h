// A module that lives on another worker, and is used here.
//
//   struct NetImpl : torch::nn::Module {
//     NetImpl(int width, double dropout);
//     at::Tensor forward(const at::Tensor& x);
//   };
//   LOCKSTEP_RPC_MODULE(NetImpl, int, double);  // once, in a source file that both programs contain
//
//   rpc::RemoteModule<NetImpl> net("worker1/cpu", rpc::Args{256, 0.1});  // created there
//   at::Tensor y = net.forward(x);  // runs there; gradients flow in an autograd context
//   rpc::DistributedOptimizer<torch::optim::SGD> optimizer(net.remote_parameters(),
//                                                          rpc::Args{torch::optim::SGDOptions(0.1)});
//
// Of libtorch's own modules these are registered, with plain values for their options (torch_modules.cpp):
// Linear(in, out, bias), Embedding(rows, width, sparse), EmbeddingBag(rows, width, mode, sparse), LSTM(in,
// hidden, layers), LayerNorm(width), ReLU(). Numbers are sent as 64 bits, whatever their type. Everything
// that a module has beside forward and parameters is reached through get_module_rref(), by registered
// methods; RemoteModule has no further methods.
// A value: copies refer to the same module, which is destroyed with the last copy. Can be sent in calls, as
// RRefs can.
// Errors: kUsage for a malformed device and an unknown worker at once; what the constructor threw, at the
// first use.
// Thread safety: as RRef; the module itself is as safe as its class makes it.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/remote/remote_device.h"
#include "lockstep/rpc/remote.h"
#include "lockstep/tensor/tensor_object.h"

namespace lockstep::rpc {

namespace internal {

// NetImpl for NetImpl and for its holder Net.
template <class M>
struct Contained {
  using type = M;
};
template <class M>
requires requires {
  typename M::ContainedType;
}
struct Contained<M> {
  using type = typename M::ContainedType;
};

template <class M>
struct ForwardOf;
template <class R, class C, class... A>
struct ForwardOf<R (C::*)(A...)> {
  using Result = std::decay_t<R>;
  using Inputs = std::tuple<std::decay_t<A>...>;
  using InputArgs = Args<std::decay_t<A>...>;
};
template <class R, class C, class... A>
struct ForwardOf<R (C::*)(A...) const> : ForwardOf<R (C::*)(A...)> {};

// The type of a constructor's argument on the wire.
template <class A>
using Plain =
    std::conditional_t<std::is_same_v<A, bool>, bool,
                       std::conditional_t<std::is_integral_v<A>, std::int64_t,
                                          std::conditional_t<std::is_floating_point_v<A>, double, Sent<A>>>>;
template <class A>
A from_plain(Plain<A> value) {
  if constexpr (std::is_integral_v<A> && !std::is_same_v<A, bool>) {
    if (!std::in_range<A>(value))
      base::raise(ErrorKind::kUsage, base::cat("a module's argument ", value, " is out of range"));
  }
  return static_cast<A>(std::move(value));
}

template <class M>
std::string module_function(const char* what) {
  return base::cat("lockstep.module.", what, " ", typeid(M).name());
}

template <class M, class... A, class Make>
FunctionEntry make_module_entry(std::string name, Make make) {
  using Arguments = std::tuple<std::string, Plain<A>...>;  // the device first
  return {.name = std::move(name),
          .signature = signature<M, std::string, A...>(),
          .result = value_type<M>(),
          .decode = [](object::Decoder& decoder) -> std::shared_ptr<void> {
            return std::make_shared<Arguments>(object::read<Arguments>(decoder));
          },
          .run =
              [make](void* arguments, const FunctionEntry::Done& done) {
                std::apply(
                    [&](std::string& device, auto&... value) {
                      std::shared_ptr<M> module = make(from_plain<A>(std::move(value))...);
                      module->to(at::Device(device));
                      done(std::move(module), nullptr);
                    },
                    *static_cast<Arguments*>(arguments));
              }};
}

template <class M>
std::vector<RRef<at::Tensor>> parameters_of(const RRef<M>& module, bool recurse) {
  std::vector<RRef<at::Tensor>> list;
  for (const at::Tensor& parameter : module.local_value().parameters(recurse)) list.emplace_back(parameter);
  return list;
}

// Registers once; always true.
bool register_torch_modules();

}  // namespace internal

// Other workers may create modules through `make`.
template <class M, class... A>
bool register_module(std::shared_ptr<M> (*make)(A...)) {
  static_assert(std::is_base_of_v<torch::nn::Module, M>, "a RemoteModule is a torch::nn::Module");
  auto name = internal::module_function<M>("make");
  const auto entry = internal::make_module_entry<M, std::decay_t<A>...>(name, make);
  return add_function(entry, name.data(), name.size(), typeid(M)) &&
         register_method(internal::module_function<M>("forward"), &M::forward) &&
         register_function(internal::module_function<M>("parameters"), &internal::parameters_of<M>);
}
template <class Module, class... A>
bool register_module() {
  using M = typename internal::Contained<Module>::type;
  return register_module<M, A...>(
      +[](A... arguments) { return std::make_shared<M>(std::move(arguments)...); });
}

#define LOCKSTEP_RPC_MODULE(...)                                                     \
  [[maybe_unused]] static const bool LOCKSTEP_RPC_JOIN(lockstep_rpc_, __COUNTER__) = \
      ::lockstep::rpc::register_module<__VA_ARGS__>()

template <class Module>
class RemoteModule {
 public:
  using Impl = typename internal::Contained<Module>::type;
  using Forward = internal::ForwardOf<decltype(&Impl::forward)>;

  // Empty; only valid() may be called.
  RemoteModule() = default;
  // Constructs Module(arguments...) there; the arguments are those that LOCKSTEP_RPC_MODULE names. Does not
  // wait for it.
  template <class... A>
  explicit RemoteModule(std::string_view remote_device, const Args<A...>& arguments = {},
                        CallOptions options = {}) {
    const auto where = RemoteDevice::parse(remote_device);
    device_ = where.device().str();
    const auto values = std::apply(
        [&](const A&... value) { return std::tuple<std::string, internal::Plain<A>...>(device_, value...); },
        arguments.values);
    const Worker worker = where.worker().value_or(current_agent("RemoteModule")->self());
    module_ = internal::start_remote<Impl>(worker, internal::module_function<Impl>("make"), values, options);
  }
  // A module that exists already, on that device of its owner. Raises kUsage when the worker is not its
  // owner.
  static RemoteModule init_from_module_rref(std::string_view remote_device, RRef<Impl> module) {
    const auto where = RemoteDevice::parse(remote_device);
    const auto agent = current_agent("RemoteModule");
    if (agent->find(where.worker().value_or(agent->self())) != module.owner()) {
      base::raise(ErrorKind::kUsage, base::cat("RemoteModule: \"", remote_device, "\" is not on ",
                                               module.owner_name(), ", which owns the module"));
    }
    RemoteModule made;
    made.device_ = where.device().str();
    made.module_ = std::move(module);
    return made;
  }

  // The module's own forward. Omitted trailing inputs are empty, such as an undefined tensor.
  template <class... A>
  typename Forward::Result forward(const A&... inputs) const {
    return forward_async(inputs...).wait();
  }
  template <class... A>
  Future<typename Forward::Result> forward_async(const A&... inputs) const {
    typename Forward::Inputs all{};
    static_assert(sizeof...(A) <= std::tuple_size_v<typename Forward::Inputs>,
                  "forward() takes fewer inputs");
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      ((std::get<I>(all) = inputs), ...);
    }
    (std::index_sequence_for<A...>());
    return module_.rpc_async(&Impl::forward,
                             std::make_from_tuple<typename Forward::InputArgs>(std::move(all)));
  }

  // For DistributedOptimizer. `recurse`: of submodules too.
  std::vector<RRef<at::Tensor>> remote_parameters(bool recurse = true) const {
    return rpc_sync(module_.owner(),
                    function<std::vector<RRef<at::Tensor>>(RRef<Impl>, bool)>(
                        internal::module_function<Impl>("parameters")),
                    {module_, recurse});
  }
  const RRef<Impl>& get_module_rref() const { return module_; }
  // On its owner.
  const std::string& device() const { return device_; }
  bool valid() const { return module_.valid(); }

  friend auto lockstep_fields(SelfOf<RemoteModule> auto& self) {
    return std::tie(self.device_, self.module_);
  }

 private:
  std::string device_;
  RRef<Impl> module_;
};

}  // namespace lockstep::rpc
