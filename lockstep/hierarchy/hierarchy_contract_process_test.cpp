// The contract suite over the hierarchical engine with ranks as processes that say they are on two hosts:
// what is lost with a process, and who is named.
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/engine_contract.h"
#include "lockstep/hierarchy/hierarchy.h"
#include "lockstep/host/host.h"

namespace lockstep::comm {
namespace {

std::string pretended_host;  // of this process

const lockstep_engine* table() {
  static const Engine host(host_engine(), "built in");
  static const HierarchicalEngine engine(host, host, {.identity = [] { return pretended_host; }});
  return engine.table();
}

INSTANTIATE_TEST_SUITE_P(
    Hierarchy, EngineContract,
    ::testing::Values(EngineKind{
        .name = "processes",
        .table = table,
        .ranks = EngineKind::Ranks::kProcesses,
        .sizes = {3, 4},
        .everything = true,
        .enter = [](int rank, int size) { pretended_host = base::cat("host ", 2 * rank / size); }}),
    kind_name);

}  // namespace
}  // namespace lockstep::comm
