// All tables as one.
#include <algorithm>
#include <unordered_map>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/dtensor/internal/rule.h"

namespace lockstep::dtensor_internal {
namespace {

using Table = std::unordered_map<std::string, Rule>;

const Table& table() {
  static const Table* const all = [] {
    auto* const merged = new Table;
    for (auto* rules :
         {rules::pointwise_rules, rules::reduction_rules, rules::matmul_rules, rules::view_rules,
          rules::nn_rules, rules::indexing_rules, rules::loss_rules, rules::list_rules}) {
      for (auto& rule : rules()) {
        auto name = rule.op;
        if (!merged->try_emplace(std::move(name), std::move(rule)).second) {
          base::raise(ErrorKind::kInternal, base::cat("two rules for one operator: ", rule.op));
        }
      }
    }
    return merged;
  }();
  return *all;
}

}  // namespace

const Rule* find_rule(const std::string& name) {
  const auto found = table().find(name);
  return found == table().end() ? nullptr : &found->second;
}

std::unique_ptr<const Operator> read_operator(const c10::OperatorHandle& handle) {
  auto op = std::make_unique<Operator>(handle);
  op->rule = find_rule(op->name);
  if (!op->rule && op->in_place && op->functional) {
    const auto& schema = op->functional->schema();
    auto name = schema.name();
    if (!schema.overload_name().empty()) name += "." + schema.overload_name();
    op->rule = find_rule(name);
  }
  if (!op->rule || !op->rule->depends_on_number) {
    std::ranges::replace(op->arguments, ArgumentKind::kNumber, ArgumentKind::kOther);
  }
  if (op->rule && op->rule->sizes_argument) op->sizes_argument = op->argument(op->rule->sizes_argument);
  // The default, to run on replicas, would draw other numbers on every rank.
  if (!op->rule && handle.hasTag(at::Tag::nondeterministic_seeded)) op->is_random = true;
  return op;
}

std::vector<const Rule*> all_rules() {
  std::vector<const Rule*> rules;
  for (const auto& [name, rule] : table()) rules.push_back(&rule);
  return rules;
}

}  // namespace lockstep::dtensor_internal
