// The contract suite over the hierarchical engine: rank threads of one process that say they are on two or
// three hosts, evenly and not; the host engine plays both roles.
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/engine_contract.h"
#include "lockstep/hierarchy/hierarchy.h"
#include "lockstep/host/host.h"

namespace lockstep::comm {
namespace {

thread_local std::string pretended_host;  // of this rank

const lockstep_engine* table() {
  static const Engine host(host_engine(), "built in");
  static const HierarchicalEngine engine(host, host, {.identity = [] { return pretended_host; }});
  return engine.table();
}

// Which host a rank is on: neighbours together, or dealt out like cards.
EngineKind kind(const std::string& name, std::vector<int> sizes,
                std::function<int(int rank, int size)> host_of) {
  return {
      .name = name,
      .table = table,
      .sizes = std::move(sizes),
      .everything = true,
      .enter = [host_of](int rank, int size) { pretended_host = base::cat("host ", host_of(rank, size)); }};
}

std::vector<EngineKind> kinds() {
  const auto dealt = [](int r, int) { return r % 2; };
  const auto halves = [](int r, int n) { return 2 * r / n; };
  // Races do not depend on how ranks are shared out.
  if (long_testing::kUnderTsan) return {kind("halves", {2, 7}, halves), kind("dealt", {3}, dealt)};
  return {kind("halves", contract_sizes(), halves), kind("dealt", {3, 4}, dealt),
          kind("thirds", {7}, [](int r, int n) { return 3 * r / n; }),
          kind("together", {2}, [](int, int) { return 0; })};
}

INSTANTIATE_TEST_SUITE_P(Hierarchy, EngineContract, ::testing::ValuesIn(kinds()), kind_name);

}  // namespace
}  // namespace lockstep::comm
