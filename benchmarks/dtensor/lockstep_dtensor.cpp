// DTensors beside what a program does without them: a small operator beside the plain one, a tensor-parallel
// block beside one with collectives written by hand, redistributions beside the bare collective. Ranks are
// processes on one core each.
#include <ATen/Parallel.h>

#include <stdexcept>
#include <string>

#include "benchmarks/common/fork_link.h"
#include "benchmarks/common/join_world.h"
#include "benchmarks/common/place_rank.h"
#include "benchmarks/common/serve.h"
#include "benchmarks/ddp_step/malloc_thresholds.h"
#include "benchmarks/dtensor/cases.h"

namespace bench {
namespace {

std::string measure(Link& link, const lockstep::DeviceMesh& mesh, const Request& request) {
  const std::string& kind = request.text("kind");
  if (kind == "add" || kind == "mul_") return measure_operator(link, mesh, request);
  if (kind == "mlp") return measure_mlp(link, mesh, request);
  if (kind == "move") return measure_move(link, mesh, request);
  throw std::runtime_error("no kind of measurement named " + kind);
}

int run(const Request& arguments) {
  raise_malloc_thresholds();
  const auto link = fork_ranks(static_cast<int>(arguments.number("ranks")));
  return guarded(*link, [&] {
    place_rank(arguments, *link);
    at::set_num_threads(1);
    join_world(*link);
    int code = 0;
    {
      const auto mesh = lockstep::init_device_mesh("cpu", {link->size()});
      code = serve(*link, [&](const Request& request) { return measure(*link, mesh, request); });
    }
    lockstep::destroy_process_group();
    return code;
  });
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  return bench::run_main(argc, argv, bench::run);
}
