#include "lockstep/remote/operator.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/remote/internal/schema_match.h"

namespace lockstep::rpc::internal {

// Results that no type of ours describes; a tuple of them travels.
struct Results {
  std::vector<c10::IValue> values;
};

namespace {

void write_result(object::Encoder& encoder, const c10::IValue& value) {
  if (value.isNone()) {
    object::write(encoder, std::monostate());
  } else if (value.isTensor()) {
    object::write(encoder, value.toTensor());
  } else if (value.isScalar()) {
    object::write(encoder, value.toScalar());
  } else if (value.isString()) {
    object::write(encoder, value.toStringRef());
  } else if (value.isIntList()) {
    object::write(encoder, value.toIntVector());
  } else if (value.isDoubleList()) {
    object::write(encoder, value.toDoubleVector());
  } else if (value.isTensorList()) {
    object::write(encoder, value.toTensorVector());
  } else {
    base::raise(ErrorKind::kUnsupported,
                base::cat("an operator's result of type ", value.tagKind(), " cannot be sent"));
  }
}

}  // namespace
}  // namespace lockstep::rpc::internal

namespace lockstep::object {

// Only written: the caller decodes into the type that it asked for, and a mismatch is an error there. One
// result goes without a tuple around it, as a C++ function's would.
template <>
struct Codec<rpc::internal::Results> {
  static std::string name() { return "results of an operator"; }
  static void write(Encoder& encoder, const rpc::internal::Results& results) {
    if (results.values.size() == 1) return rpc::internal::write_result(encoder, results.values[0]);
    encoder.code(Code::kTuple).put(static_cast<std::uint32_t>(results.values.size()));
    const Encoder::Deeper deeper(encoder);
    for (const auto& value : results.values) rpc::internal::write_result(encoder, value);
  }
};

void Codec<at::Scalar>::write(Encoder& encoder, const at::Scalar& scalar) {
  if (scalar.isBoolean()) {
    object::write(encoder, scalar.toBool());
  } else if (scalar.isIntegral(/*includeBool=*/false)) {
    object::write(encoder, scalar.toLong());
  } else if (scalar.isFloatingPoint()) {
    object::write(encoder, scalar.toDouble());
  } else {
    object::write(encoder, std::complex<double>(scalar.toComplexDouble()));
  }
}

void Codec<at::Scalar>::read(Decoder& decoder, at::Scalar& out) {
  // The default reads a double and lets its codec refuse any other code, with the path in the message.
  switch (decoder.peek()) {
    case Code::kBool:
      out = object::read<bool>(decoder);
      break;
    case Code::kI64:
      out = object::read<std::int64_t>(decoder);
      break;
    case Code::kC128:
      out = c10::complex<double>(object::read<std::complex<double>>(decoder));
      break;
    default:
      out = object::read<double>(decoder);
  }
}

}  // namespace lockstep::object

namespace lockstep::rpc {

OperatorArg::OperatorArg(const at::Scalar& scalar) {
  if (scalar.isBoolean()) {
    value = scalar.toBool();
  } else if (scalar.isIntegral(/*includeBool=*/false)) {
    value = scalar.toLong();
  } else if (scalar.isFloatingPoint()) {
    value = scalar.toDouble();
  } else {
    value = std::complex<double>(scalar.toComplexDouble());
  }
}

}  // namespace lockstep::rpc

namespace lockstep::rpc::internal {
namespace {

using torch::jit::Stack;

c10::OperatorName split(const std::string& name) {
  const auto dot = name.find('.');
  if (dot == std::string::npos) return {name, ""};
  return {name.substr(0, dot), name.substr(dot + 1)};
}

// What a peer may not have run here: it would read or write files of this worker's. By the name without its
// overload, so that every overload is covered. Checked by the caller, too, for an early error, but what
// counts is the check where the operator would run.
bool touches_files(const c10::OperatorName& name) {
  return name.name == "aten::from_file" || name.name == "aten::save" || name.name == "aten::load";
}

// "; there are aten::add.Tensor, aten::add.Scalar", or nothing. Walks all operators; for error messages only.
std::string overloads(const std::string& base) {
  std::vector<std::string> names;
  for (const auto& other : c10::Dispatcher::singleton().getAllOpNames()) {
    if (other.name == base)
      names.push_back(other.overload_name.empty() ? base : base::cat(base, ".", other.overload_name));
  }
  std::ranges::sort(names);
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "; there are " : ", ") + name;
  return list;
}

// Null when nothing is called so. Raises when something nearly is, or when it is not for others.
std::optional<c10::OperatorHandle> find_handle(const std::string& name) {
  const auto parts = split(name);
  if (touches_files(parts))
    base::raise(ErrorKind::kUsage, base::cat(name, " opens files, so it is not run for other workers"));
  auto handle = c10::Dispatcher::singleton().findSchema(parts);
  if (!handle) {
    const auto others = overloads(parts.name);
    if (!others.empty())
      base::raise(ErrorKind::kUsage, base::cat("no operator is called \"", name, "\"", others));
  }
  return handle;
}

template <class T>
std::shared_ptr<void> held(T value) {
  return std::make_shared<T>(std::move(value));
}

template <std::size_t... I>
auto tensors_of(Stack& stack, std::index_sequence<I...>) {
  return std::tuple{std::move(stack[I]).toTensor()...};
}

// How an operator's results are called, and how they are taken from the stack. The result is held as the C++
// type that a program names in RRef<T>, so that its owner can use it, too; Results can only be encoded.
struct ResultForm {
  const ValueType* type;
  std::function<std::shared_ptr<void>(Stack&)> take;
};

template <class T>
ResultForm single(T (*take)(c10::IValue&&)) {
  return {.type = value_type<T>(), .take = [take](Stack& stack) { return held(take(std::move(stack[0]))); }};
}

template <std::size_t N>
ResultForm several() {
  using Tuple = decltype(tensors_of(std::declval<Stack&>(), std::make_index_sequence<N>()));
  return {.type = value_type<Tuple>(),
          .take = [](Stack& stack) { return held(tensors_of(stack, std::make_index_sequence<N>())); }};
}

ResultForm single_form(const c10::TypePtr& type) {
  using c10::IValue;
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return single<at::Tensor>([](IValue&& value) { return std::move(value).toTensor(); });
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return single<std::int64_t>([](IValue&& value) { return value.toInt(); });
    case c10::TypeKind::FloatType:
      return single<double>([](IValue&& value) { return value.toDouble(); });
    case c10::TypeKind::BoolType:
      return single<bool>([](IValue&& value) { return value.toBool(); });
    case c10::TypeKind::NumberType:
      return single<at::Scalar>([](IValue&& value) { return value.toScalar(); });
    default:
      if (type->isSubtypeOf(*c10::ListType::ofTensors())) {
        return single<std::vector<at::Tensor>>([](IValue&& value) { return value.toTensorVector(); });
      }
      return {.type = value_type<Results>(),
              .take = [](Stack& stack) { return held(Results{std::move(stack)}); }};
  }
}

ResultForm form_of(const std::vector<c10::Argument>& returns) {
  if (returns.empty()) return {.type = value_type<Nothing>(), .take = [](Stack&) { return held(Nothing{}); }};
  if (returns.size() == 1) return single_form(returns[0].type());
  const bool tensors = std::ranges::all_of(
      returns, [](const auto& result) { return result.type()->kind() == c10::TypeKind::TensorType; });
  if (tensors && returns.size() == 2) return several<2>();
  if (tensors && returns.size() == 3) return several<3>();
  return {.type = value_type<Results>(),
          .take = [](Stack& stack) { return held(Results{std::move(stack)}); }};
}

}  // namespace

// A source of functions for RPC (register_function_source): to the layers below an operator is a registered
// function whose arguments are matched with the schema instead of a C++ signature.
std::unique_ptr<FunctionEntry> find_operator(const std::string& name) {
  // Asked for every name that is not registered; operators are recognised by their namespace.
  if (name.find("::") == std::string::npos) return nullptr;
  const auto found = find_handle(name);
  if (!found) return nullptr;
  const auto handle = *found;
  const auto form = form_of(handle.schema().returns());
  return std::make_unique<FunctionEntry>(
      FunctionEntry{.name = name,
                    .signature = schema_text(handle.schema()),
                    .result = form.type,
                    // The peer's program has matched the arguments, but bytes of a peer are input: matched
                    // again here, against this worker's schema, before the kernel sees them.
                    .decode = [handle](object::Decoder& decoder) -> std::shared_ptr<void> {
                      const auto args = object::read<std::vector<OperatorArg>>(decoder);
                      return std::make_shared<Stack>(match_schema(handle.schema(), args));
                    },
                    .run =
                        [handle, take = form.take](void* arguments, const FunctionEntry::Done& done) {
                          auto& stack = *static_cast<Stack*>(arguments);
                          // Replaces the arguments on the stack by the results. What the kernel throws goes
                          // to the caller of run(), which answers with it; done() is then not called.
                          handle.callBoxed(stack);
                          done(take(stack), nullptr);
                        }});
}

OutgoingCall make_operator_call(const Worker& to, const Operator& op, const OperatorArgs& args,
                                CallOptions options) {
  const auto handle = find_handle(op.name);
  if (!handle) {
    base::raise(ErrorKind::kUsage, base::cat("no operator is called \"", op.name,
                                             "\"; names look like aten::mm or aten::add.Tensor"));
  }
  // For the error only; what is sent are the arguments as given.
  match_schema(handle->schema(), args.values);
  const auto agent = current_agent("a remote call");
  return {.agent = agent,
          .to = agent->find(to),
          .function = op.name,
          // A reference: the function that starts the call encodes before it returns.
          .encode = [&args](object::Encoder& encoder) { object::write(encoder, args.values); },
          .timeout = agent->timeout_or_default(options.timeout)};
}

}  // namespace lockstep::rpc::internal
