// Calls between two worker processes, and a backward pass through a layer that lives in the other one. Rank 0
// calls; rank 1 answers from its agent's threads. transport=host: whatever the host offers; transport=tcp:
// TCP over the loopback device.
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>

#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/common/clock.h"
#include "benchmarks/common/fork_link.h"
#include "benchmarks/common/open_store.h"
#include "benchmarks/common/serve.h"
#include "benchmarks/rpc/remote_backward.h"
#include "benchmarks/rpc/samples.h"
#include "lockstep/autograd/autograd.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/tensor/tensor_object.h"

namespace bench {
namespace {

namespace rpc = lockstep::rpc;

const std::string kCallee = "worker1";

at::Tensor echo(const at::Tensor& tensor) {
  return tensor;
}
LOCKSTEP_RPC_FUNCTION(echo, "bench.echo");

void check(const at::Tensor& sent, const at::Tensor& back) {
  if (!at::equal(sent, back)) throw std::runtime_error("the callee's tensor is another one");
}

std::string measure_sync(const Request& request, const at::Tensor& tensor) {
  // Three times: memory that large messages go through is fresh at first.
  for (int k = 0; k < 3; ++k) check(tensor, rpc::rpc_sync(kCallee, echo, {tensor}));
  const std::vector<double> us =
      samples(request, [&] { return timed([&] { rpc::rpc_sync(kCallee, echo, {tensor}); }); });
  std::ostringstream text;
  text << "{\"us\":" << median(us) << ",\"iterations\":" << us.size() << "}";
  return text.str();
}

// As many calls at once as the request's window; the next ones begin when all are answered.
std::string measure_async(const Request& request, const at::Tensor& tensor) {
  const auto window = static_cast<std::size_t>(request.number("window"));
  std::vector<rpc::Future<at::Tensor>> flight;
  const auto fly = [&] {
    flight.clear();
    for (std::size_t k = 0; k < window; ++k) flight.push_back(rpc::rpc_async(kCallee, echo, {tensor}));
    rpc::wait_all(flight);
  };
  fly();
  for (const auto& future : flight) check(tensor, future.result());
  const std::vector<double> flights = samples(request, [&] { return timed(fly); });
  const double n_calls = static_cast<double>(flights.size() * window);
  const double us = std::accumulate(flights.begin(), flights.end(), 0.0) / n_calls;
  std::ostringstream text;
  text.precision(9);
  text << "{\"us\":" << us << ",\"per_s\":" << 1e6 / us << ",\"iterations\":" << n_calls << "}";
  return text.str();
}

std::string measure(const Request& request) {
  const std::string& kind = request.text("kind");
  if (kind == "backward") return measure_backward(request, kCallee);
  const at::Tensor tensor = at::arange(request.number("bytes") / 4, at::kInt);
  if (kind == "sync") return measure_sync(request, tensor);
  if (kind == "async") return measure_async(request, tensor);
  throw std::runtime_error("no kind of measurement named " + kind);
}

int run(const Request& arguments) {
  const std::string transport = arguments.text("transport");
  const auto link = fork_ranks(2);
  return guarded(*link, [&] {
    at::set_num_threads(1);
    rpc::start("worker" + std::to_string(link->rank()), {.rank = link->rank(),
                                                         .world_size = link->size(),
                                                         .store = open_store(*link),
                                                         .tcp_only = transport == "tcp",
                                                         .extensions = {lockstep::autograd::extension}});
    const int code = serve(
        *link, [&](const Request& request) { return link->rank() == 0 ? measure(request) : std::string(); });
    rpc::shutdown();
    return code;
  });
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  return bench::run_main(argc, argv, bench::run);
}
