#include "launch/env_command.h"

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/rendezvous/rendezvous.h"

namespace lockstep::launch {
namespace {

std::string number_or_dash(std::optional<int> value) {
  return value ? base::cat(*value) : "-";
}

std::string source_text(const std::string& source) {
  if (source == "none") return "none (a world of one)";
  if (source != "torchrun") return source;
  return base::environment(base::EnvVar::kLockstepLauncher) ? "lockstep run (torchrun's variables)"
                                                            : "torchrun's variables";
}

std::string cluster_text() {
  try {
    const Cluster found = detect_cluster();
    return base::cat(
        "cluster      ", source_text(found.source), "\n",  //
        "rank         ", number_or_dash(found.rank), " of ", number_or_dash(found.world_size), "\n",
        "local rank   ", number_or_dash(found.local_rank), " of ", number_or_dash(found.local_world_size),
        "\n", "host         ", number_or_dash(found.node_rank), " of ", number_or_dash(found.n_nodes), "\n",
        "store        ",
        found.master_addr.empty() ? "-"
                                  : base::cat(found.master_addr, ":", number_or_dash(found.master_port)),
        found.agent_store ? " (held by the launcher)" : "", "\n");
  } catch (const Error& error) {
    return base::cat("cluster      unknown: ", error.what(), "\n");
  }
}

}  // namespace

std::string environment_report() {
  std::string text = cluster_text();
  text += base::cat("cores        ", base::available_cores(), "\n");
  text += "\nvariables that are set:\n";
  bool any = false;
  for (const base::EnvVarInfo& info : base::environment_table()) {
    const auto value = base::environment(info.var);
    if (!value) continue;
    any = true;
    text += base::cat("  ", info.name, "=", *value, "   (", info.meaning, ")\n");
  }
  if (!any) text += "  none\n";
  return text;
}

}  // namespace lockstep::launch
