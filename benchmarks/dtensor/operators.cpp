#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>

#include <stdexcept>

#include "benchmarks/dtensor/cases.h"
#include "benchmarks/dtensor/loops.h"
#include "lockstep/dtensor/dtensor.h"

namespace bench {
namespace {

Loop adding(std::string name, const at::Tensor& x) {
  return {std::move(name), [x](std::int64_t n) {
            for (std::int64_t k = 0; k < n; ++k) at::add(x, x);
          }};
}
// By one: the values stay what they are.
Loop multiplying(std::string name, const at::Tensor& x) {
  return {std::move(name), [x, y = x.clone()](std::int64_t n) {
            for (std::int64_t k = 0; k < n; ++k) y.mul_(x);
          }};
}

}  // namespace

std::string measure_operator(Link& link, const lockstep::DeviceMesh& mesh, const Request& request) {
  const at::NoGradGuard no_grad;
  const auto plain = at::ones({8, 8});
  const auto sharded = lockstep::distribute_tensor(plain, mesh, {lockstep::Shard(0)});
  if (!at::equal(lockstep::full_tensor(at::add(sharded, sharded)), plain + plain))
    throw std::runtime_error("the sum of DTensors is another one");
  const auto make = request.text("kind") == "add" ? adding : multiplying;
  return measure_loops(link, request, {make("", sharded), make("plain", plain)});
}

}  // namespace bench
