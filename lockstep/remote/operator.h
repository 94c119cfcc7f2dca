// ATen operators by schema, as targets of remote calls: nothing to register, libtorch has them on every
// worker.
//
//   at::Tensor sum = rpc_sync<at::Tensor>("worker1", op("aten::add.Tensor"), {a, b, kw("alpha", 2)});
//   auto [values, indices] = rpc_sync<std::tuple<at::Tensor, at::Tensor>>(1, op("aten::sort"), {a});
//
// Arguments are matched with the operator's schema before anything is sent, and again where it runs:
// positional ones in order, others by name (kw), the rest by their defaults. int is taken for float and
// Scalar, one int for a list of fixed length, text for a device. A mismatch raises kUsage with the schema.
// Results: at::Tensor, std::int64_t, double, bool, at::Scalar, std::vector<at::Tensor>, a std::tuple of these
// for more than one, void for none. Operators that open files are rejected.
// Custom operators (TORCH_LIBRARY) may be called as well, where both programs contain them.
// Thread safety: everything here may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <complex>
#include <concepts>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/rpc/call.h"
#include "lockstep/rpc/function.h"
#include "lockstep/rpc/remote.h"
#include "lockstep/tensor/tensor_object.h"

namespace lockstep::rpc {

// An operator's name with its overload: "aten::add.Tensor". Looked up when it is called.
struct Operator {
  std::string name;
};
inline Operator op(std::string name) {
  return {std::move(name)};
}

// The types that an argument has on the wire. A device is sent as text, a dtype as its number.
using OperatorValue =
    std::variant<std::monostate, at::Tensor, bool, std::int64_t, double, std::complex<double>, std::string,
                 std::vector<at::Tensor>, std::vector<std::int64_t>, std::vector<double>, std::vector<bool>>;

// One argument: a value, and the parameter's name when it is not positional.
struct OperatorArg {
  OperatorArg() = default;
  OperatorArg(std::nullopt_t) {}
  OperatorArg(const at::Tensor& tensor) : value(tensor) {}
  OperatorArg(const at::Scalar& scalar);
  OperatorArg(std::vector<at::Tensor> tensors) : value(std::move(tensors)) {}
  OperatorArg(std::vector<std::int64_t> numbers) : value(std::move(numbers)) {}
  OperatorArg(std::vector<double> numbers) : value(std::move(numbers)) {}
  OperatorArg(std::vector<bool> flags) : value(std::move(flags)) {}
  OperatorArg(at::IntArrayRef numbers) : value(numbers.vec()) {}
  OperatorArg(std::string text) : value(std::move(text)) {}
  OperatorArg(const char* text) : value(std::string(text)) {}
  OperatorArg(at::ScalarType dtype) : value(static_cast<std::int64_t>(dtype)) {}
  OperatorArg(at::Device device) : value(device.str()) {}
  OperatorArg(bool flag) : value(flag) {}
  template <std::integral T>
  OperatorArg(T number) : value(static_cast<std::int64_t>(number)) {}
  template <std::floating_point T>
  OperatorArg(T number) : value(static_cast<double>(number)) {}
  template <class T>
  OperatorArg(const std::optional<T>& held) {
    if (held) value = OperatorArg(*held).value;
  }

  std::string name{};  // "": positional
  OperatorValue value{};
};
inline auto lockstep_fields(SelfOf<OperatorArg> auto& self) {
  return std::tie(self.name, self.value);
}

// By the parameter's name.
template <class T>
OperatorArg kw(std::string name, const T& value) {
  OperatorArg argument(value);
  argument.name = std::move(name);
  return argument;
}

struct OperatorArgs {
  OperatorArgs() = default;
  OperatorArgs(std::initializer_list<OperatorArg> list) : values(list) {}
  explicit OperatorArgs(std::vector<OperatorArg> list) : values(std::move(list)) {}
  std::vector<OperatorArg> values;
};

namespace internal {

// For find_function: the operator of that name, or null when there is none.
std::unique_ptr<FunctionEntry> find_operator(const std::string& name);

// Raises kUsage when there is no such operator or the arguments do not fit. `args` must outlive the call.
OutgoingCall make_operator_call(const Worker& to, const Operator& op, const OperatorArgs& args,
                                CallOptions options);

}  // namespace internal

template <class R = at::Tensor>
Future<R> rpc_async(const Worker& to, const Operator& op, const OperatorArgs& args,
                    CallOptions options = {}) {
  return internal::start_call<R>(internal::make_operator_call(to, op, args, options));
}
template <class R = at::Tensor>
R rpc_sync(const Worker& to, const Operator& op, const OperatorArgs& args, CallOptions options = {}) {
  return rpc_async<R>(to, op, args, options).wait();
}
// The result stays on that worker.
template <class R = at::Tensor>
RRef<R> remote(const Worker& to, const Operator& op, const OperatorArgs& args, CallOptions options = {}) {
  const auto call = internal::make_operator_call(to, op, args, options);
  return RRef<R>(rref_manager(*call.agent).start_remote(call));
}

}  // namespace lockstep::rpc

namespace lockstep::object {

// A number of any kind.
template <>
struct Codec<at::Scalar> {
  static std::string name() { return "number"; }
  static void write(Encoder& encoder, const at::Scalar& scalar);
  static void read(Decoder& decoder, at::Scalar& out);
};

}  // namespace lockstep::object
