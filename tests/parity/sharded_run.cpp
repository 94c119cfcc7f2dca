#include "tests/parity/models.h"
#include "tests/parity/sharded_cases.h"

namespace parity {
namespace {

void put(Record& values, const std::string& name, const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(torch::kDouble).contiguous();
  values[name].emplace(flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel());
}

}  // namespace

at::Tensor ShardedRun::plain(std::uint32_t tag, at::IntArrayRef shape) const {
  return numbers(tag, shape).to(dtype_);
}

at::Tensor ShardedRun::tensor(std::uint32_t tag, at::IntArrayRef shape,
                              lockstep::Placements placements) const {
  return lockstep::distribute_tensor(plain(tag, shape), mesh_, std::move(placements));
}

at::Tensor ShardedRun::leaf(std::uint32_t tag, at::IntArrayRef shape, lockstep::Placements placements) const {
  return tensor(tag, shape, std::move(placements)).requires_grad_();
}

at::Tensor ShardedRun::partial(std::uint32_t tag, at::IntArrayRef shape,
                               lockstep::Placements placements) const {
  const auto own = 50 * (1 + static_cast<std::uint32_t>(rank_));
  return lockstep::from_local(plain(tag + own, shape), mesh_, std::move(placements));
}

at::Tensor ShardedRun::plain_indices(std::uint32_t tag, at::IntArrayRef shape, std::uint32_t below) {
  at::Tensor values = torch::empty(shape, torch::kLong);
  for (std::int64_t i = 0; i < values.numel(); ++i)
    values.data_ptr<std::int64_t>()[i] = scrambled(tag, static_cast<std::uint32_t>(i)) % below;
  return values;
}

at::Tensor ShardedRun::indices(std::uint32_t tag, at::IntArrayRef shape, std::uint32_t below,
                               lockstep::Placements placements) const {
  return lockstep::distribute_tensor(plain_indices(tag, shape, below), mesh_, std::move(placements));
}

void ShardedRun::see(const std::string& name, const at::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  const std::string full_name = case_ + "." + name;
  if (!lockstep::is_dtensor(tensor)) {
    seen_.placements[full_name] = "plain";
    put(seen_.values, full_name + ".full", tensor);
    return;
  }
  seen_.placements[full_name] = text_of(lockstep::placements(tensor));
  put(seen_.values, full_name + ".full", lockstep::full_tensor(tensor));
  const auto* listed = difference_of(full_name);
  const auto theirs = theirs_.find(full_name);
  if (!listed || listed->kind == Difference::Kind::kSameLayout || theirs == theirs_.end()) {
    put(seen_.values, full_name + ".local", lockstep::to_local(tensor));
  } else if (const auto wanted = reachable(theirs->second)) {
    put(seen_.values, full_name + ".local", lockstep::to_local(lockstep::redistribute(tensor, *wanted)));
  }
}

void ShardedRun::finish(const at::Tensor& out,
                        const std::vector<std::pair<std::string, at::Tensor>>& leaves) {
  see("out", out);
  if (!leaves.empty()) (lockstep::full_tensor(out) * plain(900, out.sizes())).sum().backward();
  for (const auto& [name, leaf] : leaves) see("grad." + name, leaf.grad());
}

int ShardedWorld::n_ranks() const {
  return static_cast<int>(c10::multiply_integers(shape));
}

const std::vector<ShardedWorld>& sharded_worlds() {
  static const std::vector<ShardedWorld> all = [] {
    auto line = operator_cases();
    for (const auto& one : layout_cases()) line.push_back(one);
    for (const auto& one : transformer_cases()) line.push_back(one);
    return std::vector<ShardedWorld>{{"line", {2}, line}, {"square", {2, 2}, square_cases()}};
  }();
  return all;
}

Sighting run_sharded(const ShardedWorld& world, const std::vector<ShardedCase>& cases, int rank,
                     at::ScalarType dtype, const PlacementTexts& theirs) {
  ShardedRun run(rank, dtype, lockstep::init_device_mesh("cpu", world.shape), theirs);
  for (const auto& one : cases) {
    if (dtype == at::kFloat && !one.in_f32) continue;
    run.begin(one.name);
    one.run(run);
  }
  return run.take();
}

}  // namespace parity
