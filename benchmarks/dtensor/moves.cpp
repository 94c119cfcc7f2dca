#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include <functional>
#include <stdexcept>
#include <vector>

#include "benchmarks/dtensor/cases.h"
#include "benchmarks/dtensor/loops.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/dtensor/dtensor.h"

namespace bench {
namespace {

using lockstep::Partial;
using lockstep::Placement;
using lockstep::Replicate;
using lockstep::Shard;

using Collective = std::function<void(const at::Tensor& out, const at::Tensor& in)>;

struct Move {
  Placement from, to;
  Collective bare;
};

// The bare collective of the last two moves leaves the pieces one after the other, not side by side: it does
// less than they do.
Move move_of(const std::string& name) {
  const Collective gather = [](const auto& out, const auto& in) { lockstep::all_gather_single(out, in); };
  const Collective exchange = [](const auto& out, const auto& in) { lockstep::all_to_all_single(out, in); };
  if (name == "S_R") return {Shard(0), Replicate(), gather};
  if (name == "C_R") return {Shard(1), Replicate(), gather};
  if (name == "P_R")
    return {Partial(), Replicate(), [](const auto& out, const auto&) { lockstep::all_reduce(out); }};
  if (name == "P_S")
    return {Partial(), Shard(0),
            [](const auto& out, const auto& in) { lockstep::reduce_scatter_single(out, in); }};
  if (name == "S_S") return {Shard(0), Shard(1), exchange};
  if (name == "C_S") return {Shard(1), Shard(0), exchange};
  throw std::runtime_error("no move named " + name);
}

at::Tensor piece(const at::Tensor& whole, const Placement& placement, int rank, int size) {
  if (!placement.is_shard()) return whole;
  const auto length = whole.size(placement.dim()) / size;
  return whole.narrow(placement.dim(), rank * length, length);
}

at::Tensor room(at::IntArrayRef sizes, bool shared) {
  return shared ? lockstep::empty_shared(sizes) : at::empty(sizes);
}

void check(const at::Tensor& moved, const at::Tensor& whole, const Placement& to, const Link& link) {
  if (!at::allclose(lockstep::to_local(moved), piece(whole, to, link.rank(), link.size())))
    throw std::runtime_error("a redistributed tensor has other values");
}

}  // namespace

std::string measure_move(Link& link, const lockstep::DeviceMesh& mesh, const Request& request) {
  const at::NoGradGuard no_grad;
  const Move move = move_of(request.text("move"));
  const bool shared = request.text("place") == "shared";
  const std::int64_t rows = request.number("rows"), columns = request.number("columns");
  const auto whole = at::arange(rows * columns).remainder_(1000).to(at::kFloat).view({rows, columns});
  const auto mine = piece(whole, move.from, link.rank(), link.size());
  const auto local = room(mine.sizes(), shared);
  local.copy_(mine);
  const auto x = lockstep::from_local(local, mesh, {move.from});
  const auto factor = move.from.is_partial() ? static_cast<double>(link.size()) : 1.0;
  check(lockstep::redistribute(x, {move.to}), whole * factor, move.to, link);

  const bool in_place = move.from.is_partial() && move.to.is_replicate();
  const auto sizes = piece(whole, move.to, link.rank(), link.size()).sizes().vec();
  const auto flat = local.view({-1});
  const auto out = room(sizes, in_place ? shared : true).view({-1});
  if (in_place) out.zero_();  // zeros stay zeros when summed
  const auto repeat = [](auto turn) {
    return [turn](std::int64_t n) {
      for (std::int64_t k = 0; k < n; ++k) turn();
    };
  };
  std::vector<Loop> loops{{"", repeat([&] { lockstep::redistribute(x, {move.to}); })},
                          {"bare", repeat([&] { move.bare(out, flat); })},
                          {"fresh", repeat([&] {
                             const auto fresh = in_place ? flat.clone() : at::empty(sizes).view({-1});
                             move.bare(fresh, flat);
                           })}};
  // What an all_reduce in place needs to leave its input alone.
  if (in_place) {
    loops.push_back({"copied", repeat([&] {
                       out.copy_(flat);
                       move.bare(out, flat);
                     })});
  }
  return measure_loops(link, request, loops);
}

}  // namespace bench
