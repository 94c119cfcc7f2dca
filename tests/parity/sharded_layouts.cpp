// Views, joining and cutting, and redistribution, on a mesh of two ranks.
#include <torch/torch.h>

#include "tests/parity/sharded_cases.h"

namespace parity {
namespace {

using lockstep::Partial;
using lockstep::Replicate;
using lockstep::Shard;

std::vector<ShardedCase> views() {
  return {
      {"transpose",
       [](ShardedRun& run) {
         run.finish(run.tensor(1, {5, 6}, {Shard(0)}).transpose(0, 1));
       }},
      {"permute",
       [](ShardedRun& run) {
         run.finish(run.tensor(1, {2, 5, 3}, {Shard(1)}).permute({2, 0, 1}));
       }},
      {"view_splits",
       [](ShardedRun& run) {
         run.finish(run.tensor(1, {4, 6}, {Shard(0)}).view({2, 2, 6}));
       }},
      {"view_merges_outer",
       [](ShardedRun& run) {
         run.finish(run.tensor(1, {2, 4, 6}, {Shard(0)}).view({8, 6}));
       }},
      {"view_merges_inner",
       [](ShardedRun& run) {
         run.finish(run.tensor(1, {2, 4, 6}, {Shard(1)}).view({8, 6}));
       }},
      {"cat_columns",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {5, 6}, {Shard(0)}), y = run.leaf(2, {5, 2}, {Shard(0)});
         run.finish(torch::cat({x, y}, 1), {{"x", x}, {"y", y}});
       }},
      {"cat_over_shards",
       [](ShardedRun& run) {
         run.finish(torch::cat({run.tensor(1, {4, 6}, {Shard(0)}), run.tensor(2, {2, 6}, {Shard(0)})}, 0));
       }},
      {"split_columns",
       [](ShardedRun& run) {
         const auto parts = run.tensor(1, {5, 6}, {Shard(0)}).split(2, 1);
         for (std::size_t i = 0; i < parts.size(); ++i) run.see("part" + std::to_string(i), parts[i]);
       }},
      {"select_column",
       [](ShardedRun& run) {
         run.finish(run.tensor(1, {5, 6}, {Shard(0)}).select(1, 2));
       }},
  };
}

std::vector<ShardedCase> moves() {
  return {
      {"shard_to_replicate",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {5, 6}, {Shard(0)});
         run.finish(lockstep::redistribute(x, {Replicate()}), {{"x", x}});
       }},
      {"partial_to_replicate",
       [](ShardedRun& run) {
         run.finish(lockstep::redistribute(run.partial(1, {5, 6}, {Partial()}), {Replicate()}));
       }},
      {"partial_to_shard",
       [](ShardedRun& run) {
         run.finish(lockstep::redistribute(run.partial(1, {5, 6}, {Partial()}), {Shard(0)}));
       }},
      {"max_partial_to_replicate",
       [](ShardedRun& run) {
         const auto x = run.partial(1, {5, 6}, {Partial(lockstep::ReduceOp::kMax)});
         run.finish(lockstep::redistribute(x, {Replicate()}));
       }},
      {"shard_to_shard",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {5, 6}, {Shard(0)});
         run.finish(lockstep::redistribute(x, {Shard(1)}), {{"x", x}});
       }},
      {"replicate_to_shard",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {5, 6}, {Replicate()});
         run.finish(lockstep::redistribute(x, {Shard(0)}), {{"x", x}});
       }},
      {"empty_shard",
       [](ShardedRun& run) {
         run.finish(run.tensor(1, {1, 6}, {Shard(0)}) * 2);
       }},
  };
}

}  // namespace

std::vector<ShardedCase> layout_cases() {
  auto all = views();
  for (const auto& one : moves()) all.push_back(one);
  return all;
}

std::vector<ShardedCase> broken_cases() {
  return {
      {"partial_to_replicate",
       [](ShardedRun& run) {
         const auto part = lockstep::to_local(run.partial(1, {5, 6}, {Partial()}));
         run.finish(lockstep::from_local(part, run.mesh(), {Replicate()}));
       }},
      {"transpose",
       [](ShardedRun& run) {
         const auto right = run.tensor(1, {5, 6}, {Shard(0)}).transpose(0, 1);
         run.finish(lockstep::redistribute(right, {Shard(0)}));
       }},
  };
}

}  // namespace parity
