#include "lockstep/optim/optimizer_state.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <set>
#include <sstream>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/internal/local_state.h"

namespace lockstep {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// ---- values ----

c10::IValue to_ivalue(const NumberTuple& tuple) {
  return c10::ivalue::Tuple::create(std::vector<c10::IValue>(tuple.values.begin(), tuple.values.end()));
}
c10::IValue to_ivalue(std::monostate) {
  return {};
}
template <class T>
c10::IValue to_ivalue(const T& value) {
  return c10::IValue(value);
}

// Of tuples only those of doubles, such as Adam's betas; everything else is refused at the end.
StateValue from_ivalue(const c10::IValue& value, const std::string& key) {
  if (value.isNone()) return std::monostate{};
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return value.toDouble();
  if (value.isString()) return value.toStringRef();
  if (value.isTensor()) return value.toTensor();
  if (value.isDoubleList()) return value.toDoubleVector();
  if (value.isTuple()) {
    NumberTuple tuple;
    for (const auto& element : value.toTupleRef().elements()) {
      if (!element.isDouble()) break;
      tuple.values.push_back(element.toDouble());
    }
    if (tuple.values.size() == value.toTupleRef().elements().size()) return tuple;
  }
  base::raise(ErrorKind::kUnsupported, base::cat("the optimizer keeps ", key, " as ", value.tagKind(),
                                                 ", which a state dict cannot hold"));
}

// ---- archives ----

// The layout that torch::optim writes, and the only one it reads.
constexpr const char* kLayout = "1.5.0";

void write_values(OutputArchive& archive, const StateValues& values) {
  for (const auto& [key, value] : values) {
    archive.write(key, std::visit([](const auto& held) { return to_ivalue(held); }, value));
  }
}

StateValues read_values(InputArchive& archive) {
  StateValues values;
  for (const auto& key : archive.keys()) {
    c10::IValue value;
    archive.read(key, value);
    values.emplace(key, from_ivalue(value, key));
  }
  return values;
}

void write_size(OutputArchive& archive, const std::string& key, std::size_t size) {
  archive.write(key, at::scalar_tensor(static_cast<std::int64_t>(size), at::kLong));
}

std::int64_t read_size(InputArchive& archive, const std::string& key) {
  at::Tensor size;
  archive.read(key, size);
  return size.item<std::int64_t>();
}

// Where an archive's names of parameters (addresses, once) become numbers.
using Numbers = std::map<std::string, std::int64_t>;

// Numbers are given in the order of first appearance over all groups: position, not address, is what two
// processes share.
ParamGroupState read_group(InputArchive& archive, Numbers& numbers) {
  ParamGroupState group;
  const auto size = read_size(archive, "params/size");
  for (std::int64_t i = 0; i < size; ++i) {
    c10::IValue name;
    archive.read(base::cat("params/", i), name);
    const auto number = static_cast<std::int64_t>(numbers.size());
    group.params.push_back(numbers.emplace(name.toStringRef(), number).first->second);
  }
  InputArchive options;
  archive.read("options", options);
  group.options = read_values(options);
  return group;
}

bool is_layout(const std::string& key) {
  return key == "pytorch_version" || key == "state" || key == "param_groups";
}

// An OutputArchive cannot be read; the only way is through its bytes.
void through_bytes(OutputArchive& from, InputArchive& to) {
  std::stringstream bytes;
  from.save_to(bytes);
  to.load_from(bytes);
}

}  // namespace

void write_state_dict(OutputArchive& archive, const OptimizerStateDict& dict) {
  archive.write("pytorch_version", c10::IValue(kLayout));
  OutputArchive states(archive.compilation_unit());
  for (const auto& [number, values] : dict.state) {
    OutputArchive state(archive.compilation_unit());
    write_values(state, values);
    states.write(std::to_string(number), state);
  }
  archive.write("state", states);

  OutputArchive groups(archive.compilation_unit());
  write_size(groups, "param_groups/size", dict.param_groups.size());
  for (std::size_t g = 0; g < dict.param_groups.size(); ++g) {
    const ParamGroupState& from = dict.param_groups[g];
    OutputArchive group(archive.compilation_unit());
    write_size(group, "params/size", from.params.size());
    for (std::size_t i = 0; i < from.params.size(); ++i)
      group.write(base::cat("params/", i), c10::IValue(std::to_string(from.params[i])));
    OutputArchive options(archive.compilation_unit());
    write_values(options, from.options);
    group.write("options", options);
    groups.write(base::cat("param_groups/", g), group);
  }
  archive.write("param_groups", groups);
  write_values(archive, dict.extra);
}

OptimizerStateDict read_state_dict(InputArchive& archive) {
  InputArchive states;
  InputArchive groups;
  if (!archive.try_read("state", states) || !archive.try_read("param_groups", groups)) {
    base::raise(ErrorKind::kUsage, "the archive holds no optimizer in torch::optim's layout");
  }
  OptimizerStateDict dict;
  Numbers numbers;
  const auto n_groups = read_size(groups, "param_groups/size");
  for (std::int64_t g = 0; g < n_groups; ++g) {
    InputArchive group;
    groups.read(base::cat("param_groups/", g), group);
    dict.param_groups.push_back(read_group(group, numbers));
  }
  for (const auto& name : states.keys()) {
    const auto number = numbers.find(name);
    if (number == numbers.end()) continue;  // of a parameter that has left the optimizer
    InputArchive state;
    states.read(name, state);
    dict.state.emplace(number->second, read_values(state));
  }
  for (const auto& key : archive.keys()) {
    if (is_layout(key)) continue;
    c10::IValue value;
    archive.read(key, value);
    dict.extra.emplace(key, from_ivalue(value, key));
  }
  return dict;
}

// Through the archive that every optimizer of libtorch can write, since their options and state have no
// common interface: any of them can be read this way, also ones that this file does not know.
OptimizerStateDict get_optimizer_state_dict(const torch::optim::Optimizer& optimizer) try {
  // While it lives, the state holds this rank's pieces: an archive cannot hold a sharded tensor.
  const internal::LocalState local(optimizer);
  OutputArchive saved;
  optimizer.save(saved);
  InputArchive archive;
  through_bytes(saved, archive);
  return read_state_dict(archive);
} catch (const c10::Error& error) {
  base::raise(ErrorKind::kUnsupported,
              base::cat("this optimizer does not save itself: ", error.what_without_backtrace()));
}

void check_state_dict_fits(const torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict) {
  const auto& groups = optimizer.param_groups();
  constexpr const char* kWho = "loading an optimizer's state: ";
  if (groups.size() != dict.param_groups.size()) {
    base::raise(ErrorKind::kUsage, base::cat(kWho, "the state dict has ", dict.param_groups.size(),
                                             " parameter groups, the optimizer ", groups.size()));
  }
  std::set<std::int64_t> numbers;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].params().size() != dict.param_groups[g].params.size()) {
      base::raise(ErrorKind::kUsage,
                  base::cat(kWho, "group ", g, " of the state dict has ", dict.param_groups[g].params.size(),
                            " parameters, the optimizer's ", groups[g].params().size()));
    }
    for (const auto number : dict.param_groups[g].params) {
      if (number < 0 || !numbers.insert(number).second)
        base::raise(ErrorKind::kUsage,
                    base::cat(kWho, "parameter number ", number, " is negative or stands there twice"));
    }
  }
  for (const auto& [number, values] : dict.state) {
    if (!numbers.contains(number))
      base::raise(ErrorKind::kUsage,
                  base::cat(kWho, "there is a state of parameter ", number, ", which is in no group"));
  }
}

// The old state is restored when loading fails half-way.
void set_optimizer_state_dict(torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict) {
  check_state_dict_fits(optimizer, dict);
  OutputArchive written;
  write_state_dict(written, dict);
  InputArchive archive;
  through_bytes(written, archive);
  // Emptied first: entries that the dict does not have must be gone afterwards. Options are not restored
  // after a failure.
  auto before = std::exchange(optimizer.state(), {});
  try {
    optimizer.load(archive);
    internal::shard_loaded_state(optimizer);
  } catch (const Error&) {
    optimizer.state() = std::move(before);
    throw;
  } catch (const std::exception& error) {
    optimizer.state() = std::move(before);
    base::raise(ErrorKind::kUsage,
                base::cat("loading an optimizer's state: it is not of this optimizer: ", error.what()));
  }
}

}  // namespace lockstep
