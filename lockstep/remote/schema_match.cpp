#include "lockstep/remote/internal/schema_match.h"

#include <optional>
#include <sstream>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::rpc::internal {
namespace {

using c10::IValue;
using c10::TypeKind;

bool is_number(const IValue& value) {
  return value.isInt() || value.isDouble() || value.isComplexDouble() || value.isBool();
}

bool is_empty_list(const IValue& value) {
  return value.isList() && value.toListRef().empty();
}

// The list with `element` as its type; nothing when an entry does not convert. An int becomes a float, never
// the other way round. An undefined tensor is None where elements are optional.
std::optional<IValue> converted_list(const IValue& value, const c10::TypePtr& element) {
  const auto list = value.toListRef();
  c10::impl::GenericList out(element);
  out.reserve(list.size());
  for (const auto& entry : list) {
    if (element->kind() == TypeKind::FloatType && entry.isInt()) {
      out.push_back(static_cast<double>(entry.toInt()));
    } else if (element->kind() == TypeKind::NumberType && is_number(entry)) {
      out.push_back(entry);
    } else if (element->kind() == TypeKind::OptionalType && entry.isTensor()) {
      out.push_back(entry.toTensor().defined() ? entry : IValue());
    } else {
      return std::nullopt;
    }
  }
  return IValue(out);
}

std::optional<IValue> fit_list(const IValue& value, const c10::TypePtr& element, std::optional<int> length) {
  // A length comes from a schema such as int[2]: one number there means that number for each of the entries.
  const auto kind = element->kind() == TypeKind::SymIntType ? TypeKind::IntType : element->kind();
  if (length && kind == TypeKind::IntType && value.isInt()) {
    return IValue(std::vector<std::int64_t>(static_cast<std::size_t>(*length), value.toInt()));
  }
  if (length && kind == TypeKind::FloatType && (value.isDouble() || value.isInt())) {
    const double number = value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
    return IValue(std::vector<double>(static_cast<std::size_t>(*length), number));
  }
  // The element type of an empty list says nothing: {} may be meant for any of them, but the kernel needs the
  // right one.
  if (is_empty_list(value)) return IValue(c10::impl::GenericList(element));
  if (!value.isList()) return std::nullopt;
  const bool fits = (kind == TypeKind::IntType && value.isIntList()) ||
                    (kind == TypeKind::FloatType && value.isDoubleList()) ||
                    (kind == TypeKind::BoolType && value.isBoolList()) ||
                    (kind == TypeKind::TensorType && value.isTensorList());
  return fits ? std::optional(value) : converted_list(value, element);
}

// Text that names no device fits nothing.
std::optional<IValue> fit_device(const std::string& text) {
  try {
    return IValue(at::Device(text));
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

// `value` as `type`, or nothing when it is something else.
std::optional<IValue> fit(const IValue& value, const c10::TypePtr& type, std::optional<int> length) {
  const auto as_is = [&](bool fits) { return fits ? std::optional(value) : std::nullopt; };
  switch (type->kind()) {
    case TypeKind::OptionalType:
      if (value.isNone()) return value;
      return fit(value, type->expectRef<c10::OptionalType>().getElementType(), length);
    case TypeKind::TensorType:
      return as_is(value.isTensor());
    case TypeKind::NumberType:
      return as_is(is_number(value));
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      return as_is(value.isInt());
    case TypeKind::FloatType:
      if (value.isInt()) return IValue(static_cast<double>(value.toInt()));
      return as_is(value.isDouble());
    // Strict where C++ would convert: true is no int and 1 no bool.
    case TypeKind::BoolType:
      return as_is(value.isBool());
    case TypeKind::StringType:
      return as_is(value.isString());
    case TypeKind::DeviceObjType:
      return value.isString() ? fit_device(value.toStringRef()) : as_is(value.isDevice());
    case TypeKind::ListType:
      return fit_list(value, type->expectRef<c10::ListType>().getElementType(), length);
    default:
      return std::nullopt;
  }
}

[[noreturn]] void refuse(const c10::FunctionSchema& schema, const std::string& why) {
  base::raise(ErrorKind::kUsage, base::cat(why, "; the operator is ", schema_text(schema)));
}

IValue as_ivalue(const OperatorValue& value) {
  return std::visit(
      [](const auto& held) -> IValue {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return {};
        } else if constexpr (std::is_same_v<T, std::complex<double>>) {
          return c10::complex<double>(held);
        } else {
          return held;
        }
      },
      value);
}

IValue fitted(const c10::FunctionSchema& schema, const c10::Argument& parameter, const IValue& value) {
  // ScalarType, Layout and SymInt are numbers here, as they are for the kernel.
  auto value_there = fit(value, parameter.type(), parameter.N());
  if (!value_there) {
    refuse(schema, base::cat("\"", parameter.name(), "\" is ", parameter.type()->str(),
                             ", which a value of type ", value.tagKind(), " does not fit"));
  }
  return *std::move(value_there);
}

std::size_t index_of(const c10::FunctionSchema& schema, const std::string& name) {
  const auto index = schema.argumentIndexWithName(name);
  if (!index) refuse(schema, base::cat("there is no parameter \"", name, "\""));
  return static_cast<std::size_t>(*index);
}

}  // namespace

std::string schema_text(const c10::FunctionSchema& schema) {
  std::ostringstream text;
  text << schema;
  return text.str();
}

torch::jit::Stack match_schema(const c10::FunctionSchema& schema, const std::vector<OperatorArg>& args) {
  const auto& parameters = schema.arguments();
  std::vector<std::optional<IValue>> given(parameters.size());
  // Positional arguments fill parameters from the left; one that a name has filled already is then given
  // twice.
  std::size_t next = 0;
  for (const auto& argument : args) {
    const auto at = argument.name.empty() ? next++ : index_of(schema, argument.name);
    if (at >= parameters.size() || (argument.name.empty() && parameters[at].kwarg_only())) {
      refuse(schema, base::cat("argument ", at + 1,
                               " has no place: parameters after a * are given by name, kw(name, value)"));
    }
    if (given[at]) refuse(schema, base::cat("\"", parameters[at].name(), "\" is given twice"));
    given[at] = fitted(schema, parameters[at], as_ivalue(argument.value));
  }
  torch::jit::Stack stack;
  stack.reserve(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    // Schema order, complete: callBoxed() takes arguments by position only.
    if (!given[i]) given[i] = parameters[i].default_value();
    if (!given[i]) refuse(schema, base::cat("\"", parameters[i].name(), "\" is missing"));
    stack.push_back(*std::move(given[i]));
  }
  return stack;
}

}  // namespace lockstep::rpc::internal
