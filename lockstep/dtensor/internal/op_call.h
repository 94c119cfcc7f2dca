// One call of an operator, as its rule sees it: the schema's facts, which never change, and the arguments of
// this call. Thread safety: an Operator is immutable; an OpCall belongs to the thread that makes it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/MaybeOwned.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/dtensor/internal/mesh_context.h"

namespace lockstep::dtensor_internal {

struct Rule;

// kNumber: a Scalar on which the rule depends (Rule::depends_on_number).
enum class ArgumentKind : std::uint8_t { kTensor, kTensors, kInteger, kIntegers, kNumber, kOther };

// What is known of an operator before it is called.
struct Operator {
  explicit Operator(const c10::OperatorHandle& handle);

  c10::OperatorHandle handle;
  std::string name;  // "aten::add.Tensor"
  std::vector<ArgumentKind> arguments;
  std::vector<bool> written;  // per argument: in-place and out= arguments
  bool writes = false;
  bool is_view = false;  // a result shares memory with an argument that is not written
  bool is_random = false;
  bool is_transpose = false;  // aten::t
  bool is_loss = false;
  // Changes what memory a tensor has, which a sharded tensor cannot follow: set_, resize_.
  bool changes_memory = false;
  // The argument that the rule names as the result's sizes; -1: none.
  int sizes_argument = -1;
  // Per result: the written argument that it is, or none.
  std::vector<std::optional<std::size_t>> result_is;
  std::vector<bool> result_is_list;
  const Rule* rule = nullptr;  // null: the default
  // Of an operator that writes: the one that returns the result instead. None when there is none.
  std::optional<c10::OperatorHandle> functional;
  // In place, and changes the sizes of its argument: t_, unsqueeze_.
  bool reshapes = false;
  // _foreach_*: one kernel of it, made for any device, calls the operator of one tensor for every item of the
  // lists. Sharded tensors then meet that operator's rule, item by item.
  bool loops = false;
  // False for an operator whose written arguments come last and are not read (out=).
  bool in_place = false;

  // The argument's place by the schema's name for it; -1 when there is none.
  int argument(const char* argument_name) const;
};

// One tensor among the arguments.
struct Input {
  // Keeps `sizes` alive. Borrowed from the stack until that holds local tensors, then owned.
  c10::MaybeOwned<at::Tensor> tensor;
  at::Tensor local;
  at::IntArrayRef sizes;  // global
  const Layout* layout = nullptr;
  int argument = 0;
  int item = 0;  // in a list of tensors
  bool written = false;
  bool plain = false;  // not sharded: taken as replicated
  bool lost_base = false;

  std::int64_t ndim() const { return static_cast<std::int64_t>(sizes.size()); }
};

class OpCall {
 public:
  // `arguments` are the operator's last arguments on the stack. Raises kUsage when tensors cannot be used
  // together.
  OpCall(const Operator& op, const c10::IValue* arguments);

  const Operator& op() const { return op_; }
  const std::shared_ptr<const MeshContext>& mesh() const { return mesh_; }
  using Inputs = c10::SmallVector<Input, 3>;
  const Inputs& inputs() const { return inputs_; }
  Inputs& inputs() { return inputs_; }
  // The place of an argument's tensor among inputs(); -1 when it is none or undefined.
  int input_of(int argument, int item = 0) const;
  int input_of(const char* argument_name) const { return input_of(op_.argument(argument_name)); }

  // Arguments that are no tensors, by place or name. `integers` also takes a single one; none: empty.
  const c10::IValue& value(int argument) const { return arguments_[argument]; }
  bool has(const char* argument_name) const;
  std::int64_t integer(const char* argument_name, std::int64_t otherwise = 0) const;
  bool flag(const char* argument_name) const;
  Sizes integers(const char* argument_name) const;
  // The dimensions named by argument "dim" of a tensor of `ndim`, counted from the front; all when it is none
  // or empty.
  std::vector<bool> dims(const char* argument_name, std::int64_t ndim) const;

  // Counts references to the tensors, for what overwrites or consumes the stack's slots and reads sizes
  // afterwards.
  void own_tensors();
  // Copies the arguments, for what reads them after the operator has taken them off the stack.
  void keep_arguments();

  // What the rule's answer depends on.
  DecisionCache::Key key() const;
  // "aten::mm(Shard(0) [4, 6], plain [6, 3])"
  std::string describe() const;

 private:
  void add(c10::MaybeOwned<at::Tensor> tensor, int argument, int item);
  // Raise kUsage. Both are called once every input is known, so that the text names them all.
  void check_sharded(const Input& input) const;
  void check_plain(const Input& input) const;

  const Operator& op_;
  const c10::IValue* arguments_;
  std::vector<c10::IValue> kept_;
  std::shared_ptr<const MeshContext> mesh_;
  Inputs inputs_;
};

// Plain tensors beside sharded ones are taken as replicated while one of these lives, on its thread.
bool implicit_replication() noexcept;
void set_implicit_replication(bool on) noexcept;

}  // namespace lockstep::dtensor_internal
