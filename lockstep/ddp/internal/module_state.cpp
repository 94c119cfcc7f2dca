#include "lockstep/ddp/internal/module_state.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <unordered_set>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/ddp/internal/flat_broadcast.h"
#include "lockstep/tensor/detail/local_shard.h"

namespace lockstep::internal {
namespace {

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Tied weights share one TensorImpl and are kept under their first name, so that each gradient is averaged
// once. Registration order makes the result the same on all ranks.
NamedTensors once_each(const torch::OrderedDict<std::string, at::Tensor>& all,
                       const std::vector<std::string>& ignored) {
  NamedTensors result;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& item : all) {
    if (contains(ignored, item.key()) || !seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    result.names.push_back(item.key());
    result.tensors.push_back(item.value());
  }
  return result;
}

// One line per parameter: everything that must be the same on all ranks.
std::string describe(const NamedTensors& parameters) {
  std::ostringstream text;
  for (std::size_t i = 0; i < parameters.tensors.size(); ++i) {
    const at::Tensor tensor = local_shard(parameters.tensors[i]);
    text << parameters.names[i] << ": " << tensor.scalar_type() << " sizes " << tensor.sizes() << " strides "
         << tensor.strides() << '\n';
  }
  return std::move(text).str();
}

// FNV-1a. Detects mistakes, not attacks.
std::int64_t fingerprint(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return static_cast<std::int64_t>(hash);
}

// What ranks compare first: constant size, so that one small all_gather suffices when they agree. Sent as
// int64 words.
struct Summary {
  std::int64_t count = 0;
  std::int64_t text_bytes = 0;
  std::int64_t hash = 0;
  friend bool operator==(const Summary&, const Summary&) = default;
};

std::vector<Summary> gather(const Summary& mine, const Group& group, std::source_location where) {
  constexpr std::int64_t kWords = sizeof(Summary) / sizeof(std::int64_t);
  at::Tensor input = at::empty({kWords}, at::kLong);
  std::memcpy(input.mutable_data_ptr(), &mine, sizeof mine);
  at::Tensor output = at::empty({group->size(), kWords}, at::kLong);
  all_gather_into_tensor(output, input, {.group = group, .where = where});
  std::vector<Summary> all(static_cast<std::size_t>(group->size()));
  std::memcpy(all.data(), output.const_data_ptr(), output.nbytes());
  return all;
}

// Empty at the end.
std::string next_line(std::istringstream& text) {
  std::string line;
  std::getline(text, line);
  return line;
}

// `mine` and `first` (rank 0's) are descriptions of equally many parameters. On rank 0, and on ranks that
// agree with it, there is no difference to show: their error names `other`, the first rank that differs.
[[noreturn]] void raise_difference(const std::string& mine, const std::string& first, int rank, int other) {
  std::istringstream here(mine);
  std::istringstream there(first);
  for (std::size_t index = 0; here && there; ++index) {
    const std::string a = next_line(here);
    const std::string b = next_line(there);
    if (a == b) continue;
    base::raise(ErrorKind::kUsage,
                base::cat("DistributedDataParallel: parameter ", index, " is \"", a, "\" on rank ", rank,
                          " and \"", b, "\" on rank 0; the module must be built identically on all ranks"));
  }
  base::raise(ErrorKind::kUsage,
              base::cat("DistributedDataParallel: the parameters of rank ", other,
                        " differ from rank 0's in type, size or order; its own error says where"));
}

}  // namespace

std::string describe_parameter(const NamedTensors& parameters, std::size_t index) {
  return base::cat("parameter ", index, " (", parameters.names[index], ")");
}

NamedTensors parameters_of(const ModuleTensors& module, const std::vector<std::string>& ignored) {
  return once_each(module.parameters(), ignored);
}

NamedTensors buffers_of(const ModuleTensors& module, const std::vector<std::string>& ignored) {
  return once_each(module.buffers(), ignored);
}

NamedTensors trainable(const NamedTensors& parameters) {
  NamedTensors result;
  for (std::size_t i = 0; i < parameters.tensors.size(); ++i) {
    if (!parameters.tensors[i].requires_grad()) continue;
    result.names.push_back(parameters.names[i]);
    result.tensors.push_back(parameters.tensors[i]);
  }
  return result;
}

std::vector<bool> sparse_gradients(const ModuleTensors& module, const NamedTensors& parameters) {
  std::vector<bool> sparse(parameters.tensors.size());
  for (const at::Tensor& weight : module.sparse_parameters()) {
    for (std::size_t i = 0; i < sparse.size(); ++i) {
      if (parameters.tensors[i].is_same(weight)) sparse[i] = true;
    }
  }
  return sparse;
}

void check_ignored(const ModuleTensors& module, const std::vector<std::string>& ignored) {
  const auto parameters = module.parameters();
  const auto buffers = module.buffers();
  for (const std::string& name : ignored) {
    if (parameters.contains(name) || buffers.contains(name)) continue;
    base::raise(ErrorKind::kUsage, base::cat("DistributedDataParallel: `ignored` names \"", name,
                                             "\", which is not a parameter or buffer of the module"));
  }
}

void verify_same_on_all_ranks(const NamedTensors& parameters, const Group& group,
                              std::source_location where) {
  // Invariant: every decision below is a function of `all`, which is the same on all ranks. So either all
  // ranks return, or all raise, or all join the broadcast and then raise; none is left waiting.
  const std::string text = describe(parameters);
  const Summary mine{static_cast<std::int64_t>(parameters.tensors.size()),
                     static_cast<std::int64_t>(text.size()), fingerprint(text)};
  const std::vector<Summary> all = gather(mine, group, where);
  const auto first_unlike = [&](auto same_as_first) {
    return static_cast<int>(std::find_if_not(all.begin(), all.end(), same_as_first) - all.begin());
  };

  const int other_count = first_unlike([&](const Summary& s) { return s.count == all[0].count; });
  if (other_count < group->size()) {
    // A rank that agrees with rank 0 names the first one that does not; the others name rank 0.
    const int other = mine.count == all[0].count ? other_count : 0;
    base::raise(ErrorKind::kUsage,
                base::cat("DistributedDataParallel: rank ", group->rank(), " has ", mine.count,
                          " parameters, rank ", other, " has ", all[static_cast<std::size_t>(other)].count,
                          "; the module must be built identically on all ranks"));
  }
  const int other = first_unlike([&](const Summary& s) { return s == all[0]; });
  if (other == group->size()) return;

  // Only on rank 0 does the text matter; on the others the broadcast overwrites it, hence the size of rank
  // 0's.
  std::string first = text;
  first.resize(static_cast<std::size_t>(all[0].text_bytes));
  at::Tensor bytes = at::empty({all[0].text_bytes}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), first.data(), first.size());
  broadcast_from(0, bytes, group, where);
  std::memcpy(first.data(), bytes.const_data_ptr(), first.size());
  raise_difference(text, first, group->rank(), other);
}

}  // namespace lockstep::internal
