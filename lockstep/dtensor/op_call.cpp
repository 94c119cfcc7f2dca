#include "lockstep/dtensor/internal/op_call.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <bit>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/dtensor/internal/meta.h"

namespace lockstep::dtensor_internal {
namespace {

using MaybeOwned = c10::MaybeOwned<at::Tensor>;

thread_local bool replicate_plain = false;

// An optional argument has the kind of its value; "none" is found when the call is read. Floats are kOther:
// they are passed on and not part of the key.
ArgumentKind kind_of(const c10::Argument& argument) {
  auto type = argument.type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return ArgumentKind::kTensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::BoolType:
      return ArgumentKind::kInteger;
    case c10::TypeKind::NumberType:
      return ArgumentKind::kNumber;
    case c10::TypeKind::ListType: {
      auto element = type->castRaw<c10::ListType>()->getElementType();
      if (const auto optional = element->cast<c10::OptionalType>()) element = optional->getElementType();
      if (element->kind() == c10::TypeKind::TensorType) return ArgumentKind::kTensors;
      if (element->kind() == c10::TypeKind::IntType || element->kind() == c10::TypeKind::SymIntType) {
        return ArgumentKind::kIntegers;
      }
      return ArgumentKind::kOther;
    }
    default:
      return ArgumentKind::kOther;
  }
}

// Operators that take a generator draw random numbers (random.cpp).
bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// The operator with the same arguments that writes to none: without the out= ones, or of the name without its
// underscore.
std::optional<c10::OperatorHandle> find_functional(const c10::FunctionSchema& schema, bool in_place) {
  auto base = schema.name();
  if (in_place) {
    if (!base.ends_with('_')) return std::nullopt;
    base.pop_back();
  }
  // Slow, a walk over all names; done once per operator that writes, when it is first called (Kernel::facts).
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name != base) continue;
    const auto candidate = dispatcher.findSchema(name);
    if (!candidate || candidate->schema().is_mutable()) continue;
    const auto& theirs = candidate->schema().arguments();
    std::size_t n = 0;
    for (const auto& argument : schema.arguments()) {
      if (in_place || !argument.is_out()) ++n;
    }
    // out= arguments are the last ones, so the first n of the schema are those of the functional operator.
    if (theirs.size() != n) continue;
    bool same = true;
    for (std::size_t i = 0; same && i < n; ++i) {
      same = *theirs[i].type() == *schema.arguments()[i].type();
    }
    if (same) return candidate;
  }
  return std::nullopt;
}

// Flags count as integers 0 and 1: a rule depends on them too (keepdim).
std::int64_t integer_of(const c10::IValue& value) {
  if (value.isBool()) return value.toBool() ? 1 : 0;
  return value.toInt();
}

Sizes integers_of(const c10::IValue& value) {
  if (value.isNone()) return {};
  if (value.isInt() || value.isSymInt()) return {value.toInt()};
  return value.toIntVector();
}

}  // namespace

bool implicit_replication() noexcept {
  return replicate_plain;
}
void set_implicit_replication(bool on) noexcept {
  replicate_plain = on;
}

Operator::Operator(const c10::OperatorHandle& operator_handle) : handle(operator_handle) {
  const auto& schema = handle.schema();
  name = schema.name();
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  is_transpose = name == "aten::t";
  is_loss = name.find("_loss") != std::string::npos;
  changes_memory =
      name.starts_with("aten::set_") || name.starts_with("aten::resize_") || name == "aten::as_strided_";
  loops = name.starts_with("aten::_foreach_") &&
          handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
  // The schema says which arguments are written ("a!") and which results share memory with an argument ("a").
  // A result that is a written argument is found by its alias set; a view has an alias set that nobody
  // writes.
  bool shares = false;
  for (const auto& argument : schema.arguments()) {
    arguments.push_back(kind_of(argument));
    const auto* alias = argument.alias_info();
    written.push_back(alias && alias->isWrite());
    writes = writes || written.back();
    in_place = in_place || (written.back() && !argument.is_out());
    shares = shares || (alias && !alias->isWrite());
    is_random = is_random || is_generator(argument);
  }
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    std::optional<std::size_t> is;
    for (std::size_t i = 0; alias && alias->isWrite() && i < written.size(); ++i) {
      const auto* theirs = schema.arguments()[i].alias_info();
      if (written[i] && theirs->afterSets() == alias->afterSets()) is = i;
      if (written[i] && theirs->beforeSets() == alias->beforeSets()) is = i;
    }
    result_is.push_back(is);
    result_is_list.push_back(result.type()->kind() == c10::TypeKind::ListType);
  }
  is_view = shares && !writes;
  if (writes) functional = find_functional(schema, in_place);
  // t_, unsqueeze_: their functional form is a view, so the result has other sizes than the argument.
  if (in_place && functional) reshapes = functional->schema().arguments()[0].alias_info() != nullptr;
}

int Operator::argument(const char* argument_name) const {
  const auto index = handle.schema().argumentIndexWithName(argument_name);
  return index ? *index : -1;
}

// In two passes: plain inputs need the mesh, which the first sharded one has, wherever it is among the
// arguments.
OpCall::OpCall(const Operator& op, const c10::IValue* arguments) : op_(op), arguments_(arguments) {
  for (std::size_t i = 0; i < op.arguments.size(); ++i) {
    const auto& value = arguments[i];
    const auto argument = static_cast<int>(i);
    if (op.arguments[i] == ArgumentKind::kTensor) {
      if (value.isTensor()) add(MaybeOwned::borrowed(value.toTensor()), argument, 0);
    } else if (op.arguments[i] == ArgumentKind::kTensors && !value.isNone()) {
      int item = 0;
      if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector())
          add(MaybeOwned::owned(at::Tensor(tensor)), argument, item++);
      } else {
        for (const auto& element : value.toListRef()) {
          if (element.isTensor()) add(MaybeOwned::owned(at::Tensor(element.toTensor())), argument, item);
          ++item;
        }
      }
    }
  }
  if (!mesh_) return;  // the kernel refuses the call
  for (auto& input : inputs_) {
    if (!input.plain) {
      check_sharded(input);
      continue;
    }
    check_plain(input);
    // A plain tensor is a replica: every rank has the same values, which is the caller's promise.
    input.layout = mesh_->layout(Placements(mesh_->ndim()));
  }
}

void OpCall::check_sharded(const Input& input) const {
  const auto& mesh = *input.layout->mesh;
  if (&mesh != mesh_.get()) {
    base::raise(
        ErrorKind::kUsage,
        base::cat(describe(), ": tensors on two meshes, ", mesh_->describe(), " and ", mesh.describe(),
                  ". Values do not move between meshes, and two calls of init_device_mesh make two: "
                  "use one mesh and its slices, or take full_tensor() of one and distribute it on the "
                  "other's mesh"));
  }
  if (input.written && input.lost_base) {
    base::raise(ErrorKind::kUsage,
                base::cat(describe(),
                          ": in-place write to a view whose base was redistributed to make it: the write "
                          "would not reach the base. Clone the view first, or redistribute the base so that "
                          "the view needs no communication"));
  }
}

void OpCall::check_plain(const Input& input) const {
  // Numbers that became tensors, and the zeros that autograd makes for gradients that nothing produced.
  // A fused optimizer counts its steps in plain tensors of one element.
  const bool counter = op_.arguments[static_cast<std::size_t>(input.argument)] == ArgumentKind::kTensors;
  const bool scalar = input.sizes.empty() && (!input.written || counter);
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (!scalar && !in_backward && !implicit_replication()) {
    base::raise(
        ErrorKind::kUsage,
        base::cat(describe(), ": a plain tensor of ", input.ndim(),
                  " dimensions beside a sharded one. Distribute it (distribute_tensor, from_local), take the "
                  "other's to_local(), or allow it as a replica with ImplicitReplicationScope"));
  }
}

void OpCall::add(MaybeOwned held, int argument, int item) {
  if (!held->defined()) return;
  auto& input = inputs_.emplace_back();
  input.tensor = std::move(held);
  const at::Tensor& tensor = *input.tensor;
  input.sizes = tensor.sizes();
  input.argument = argument;
  input.item = item;
  input.written = op_.written[static_cast<std::size_t>(argument)];
  if (!is_sharded(tensor)) {
    input.local = tensor;
    input.plain = true;
    return;
  }
  const auto& meta = meta_of(tensor);
  // Waits for a redistribution that still writes it.
  input.local = meta.local();
  input.layout = meta.layout();
  input.lost_base = meta.lost_base();
  if (!mesh_) mesh_ = meta.mesh();
}

void OpCall::own_tensors() {
  for (auto& input : inputs_) input.tensor = MaybeOwned::owned(at::Tensor(*input.tensor));
}

// The stack's slots are overwritten by local tensors and then by the results; what is read afterwards needs a
// copy.
void OpCall::keep_arguments() {
  kept_.assign(arguments_, arguments_ + op_.arguments.size());
  arguments_ = kept_.data();
}

int OpCall::input_of(int argument, int item) const {
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (inputs_[i].argument == argument && inputs_[i].item == item) return static_cast<int>(i);
  }
  return -1;
}

bool OpCall::has(const char* argument_name) const {
  const auto at = op_.argument(argument_name);
  return at >= 0 && !arguments_[at].isNone();
}
std::int64_t OpCall::integer(const char* argument_name, std::int64_t otherwise) const {
  return has(argument_name) ? integer_of(arguments_[op_.argument(argument_name)]) : otherwise;
}
bool OpCall::flag(const char* argument_name) const {
  return integer(argument_name) != 0;
}
Sizes OpCall::integers(const char* argument_name) const {
  return has(argument_name) ? integers_of(arguments_[op_.argument(argument_name)]) : Sizes{};
}

// Out of range is ignored here: the operator itself raises for it, with torch's own message.
std::vector<bool> OpCall::dims(const char* argument_name, std::int64_t ndim) const {
  const auto given = integers(argument_name);
  std::vector<bool> chosen(static_cast<std::size_t>(ndim), given.empty());
  for (const auto dim : given) {
    const auto at = dim < 0 ? dim + ndim : dim;
    if (at >= 0 && at < ndim) chosen[static_cast<std::size_t>(at)] = true;
  }
  return chosen;
}

// Pointers are keys because Operator and Layout objects are interned and live as long as the cache. Lists
// begin with their length, so that two calls with different lists cannot have equal words. Types are part of
// it: a mask is not an index, and the costs are in bytes.
DecisionCache::Key OpCall::key() const {
  DecisionCache::Key key;
  key.push_back(reinterpret_cast<std::int64_t>(&op_));
  for (const auto& input : inputs_) {
    key.push_back(reinterpret_cast<std::int64_t>(input.layout));
    key.push_back((static_cast<std::int64_t>(input.local.scalar_type()) << 56) |
                  (static_cast<std::int64_t>(input.argument) << 40) |
                  (static_cast<std::int64_t>(input.item) << 8) | input.ndim());
    key.append(input.sizes.begin(), input.sizes.end());
  }
  for (std::size_t i = 0; i < op_.arguments.size(); ++i) {
    const auto& value = arguments_[i];
    if (op_.arguments[i] == ArgumentKind::kInteger) {
      key.push_back(value.isNone() ? INT64_MIN : integer_of(value));
    } else if (op_.arguments[i] == ArgumentKind::kIntegers) {
      const auto list = integers_of(value);
      key.push_back(value.isNone() ? INT64_MIN : static_cast<std::int64_t>(list.size()));
      key.append(list.begin(), list.end());
    } else if (op_.arguments[i] == ArgumentKind::kNumber) {
      key.push_back(value.isNone() ? INT64_MIN : std::bit_cast<std::int64_t>(value.toScalar().to<double>()));
    }
  }
  return key;
}

std::string OpCall::describe() const {
  std::string text = op_.name + "(";
  for (const auto& input : inputs_) {
    if (text.back() != '(') text += ", ";
    text += input.plain ? "plain" : to_string(input.layout->placements);
    text += base::cat(" ", input.sizes);
  }
  return text + ")";
}

}  // namespace lockstep::dtensor_internal
