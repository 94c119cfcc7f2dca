// Operators on a mesh of two ranks, and on one of two by two.
#include <torch/torch.h>

#include "tests/parity/sharded_cases.h"

namespace parity {
namespace {

using lockstep::Partial;
using lockstep::Replicate;
using lockstep::Shard;

std::vector<ShardedCase> pointwise() {
  return {
      {"gelu_uneven",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {5, 6}, {Shard(0)});
         run.finish(torch::gelu(x), {{"x", x}});
       }},
      {"add_shard_replicate",
       [](ShardedRun& run) {
         run.finish(run.tensor(1, {5, 6}, {Shard(0)}) + run.tensor(2, {5, 6}, {Replicate()}));
       }},
      {"add_two_shards",
       [](ShardedRun& run) {
         run.finish(run.tensor(1, {4, 6}, {Shard(0)}) + run.tensor(2, {4, 6}, {Shard(1)}));
       }},
      {"add_partials",
       [](ShardedRun& run) {
         run.finish(run.partial(1, {4, 6}, {Partial()}) + run.partial(2, {4, 6}, {Partial()}));
       }},
      {"add_partial_replicate",
       [](ShardedRun& run) {
         run.finish(run.partial(1, {4, 6}, {Partial()}) + run.tensor(2, {4, 6}, {Replicate()}));
       }},
      {"mul_broadcast",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {5, 6}, {Shard(1)}), row = run.leaf(2, {6}, {Shard(0)});
         run.finish(x * row, {{"x", x}, {"row", row}});
       }},
      {"mul_partial_by_number",
       [](ShardedRun& run) {
         run.finish(run.partial(1, {4, 6}, {Partial()}) * 3);
       }},
      {"tanh_of_partial",
       [](ShardedRun& run) {
         run.finish(torch::tanh(run.partial(1, {4, 6}, {Partial()})));
       }},
      {"where",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {5, 6}, {Shard(0)}), y = run.leaf(2, {5, 6}, {Shard(0)});
         run.finish(torch::where(x > y, x, y * 2), {{"x", x}, {"y", y}});
       }},
  };
}

std::vector<ShardedCase> products() {
  return {
      {"mm_rows",
       [](ShardedRun& run) {
         const auto a = run.leaf(1, {5, 4}, {Shard(0)}), b = run.leaf(2, {4, 6}, {Replicate()});
         run.finish(torch::mm(a, b), {{"a", a}, {"b", b}});
       }},
      {"mm_contracted",
       [](ShardedRun& run) {
         const auto a = run.leaf(1, {5, 4}, {Shard(1)}), b = run.leaf(2, {4, 6}, {Shard(0)});
         run.finish(torch::mm(a, b), {{"a", a}, {"b", b}});
       }},
      {"addmm_columns",
       [](ShardedRun& run) {
         const auto bias = run.leaf(1, {6}, {Shard(0)}), a = run.leaf(2, {5, 4}, {Replicate()});
         const auto b = run.leaf(3, {4, 6}, {Shard(1)});
         run.finish(torch::addmm(bias, a, b), {{"bias", bias}, {"a", a}, {"b", b}});
       }},
      {"bmm_batch",
       [](ShardedRun& run) {
         const auto a = run.leaf(1, {4, 3, 5}, {Shard(0)}), b = run.leaf(2, {4, 5, 2}, {Shard(0)});
         run.finish(torch::bmm(a, b), {{"a", a}, {"b", b}});
       }},
      {"matmul_heads",
       [](ShardedRun& run) {
         run.finish(
             torch::matmul(run.tensor(1, {2, 4, 3, 5}, {Shard(1)}), run.tensor(2, {2, 4, 5, 3}, {Shard(1)})));
       }},
      {"attention_heads",
       [](ShardedRun& run) {
         const auto q = run.leaf(1, {2, 4, 3, 8}, {Shard(1)}), k = run.leaf(2, {2, 4, 3, 8}, {Shard(1)});
         const auto v = run.leaf(3, {2, 4, 3, 8}, {Shard(1)});
         run.finish(at::scaled_dot_product_attention(q, k, v), {{"q", q}, {"k", k}, {"v", v}});
       }},
  };
}

std::vector<ShardedCase> linears() {
  return {
      {"linear_columns",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {2, 4, 6}, {Replicate()}), w = run.leaf(2, {8, 6}, {Shard(0)});
         const auto b = run.leaf(3, {8}, {Shard(0)});
         run.finish(torch::linear(x, w, b), {{"x", x}, {"w", w}, {"b", b}});
       }},
      {"linear_rows",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {2, 4, 6}, {Shard(2)}), w = run.leaf(2, {8, 6}, {Shard(1)});
         run.finish(torch::linear(x, w), {{"x", x}, {"w", w}});
       }},
      {"linear_batch",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {4, 3, 6}, {Shard(0)}), w = run.leaf(2, {8, 6}, {Replicate()});
         const auto b = run.leaf(3, {8}, {Replicate()});
         run.finish(torch::linear(x, w, b), {{"x", x}, {"w", w}, {"b", b}});
       }},
  };
}

std::vector<ShardedCase> layers() {
  return {
      {"softmax_of_rows",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {5, 6}, {Shard(0)});
         run.finish(torch::softmax(x, 1), {{"x", x}});
       }},
      {"softmax_over_shards",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {5, 6}, {Shard(1)});
         run.finish(torch::softmax(x, 1), {{"x", x}});
       }},
      {"layer_norm_rows",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {2, 5, 6}, {Shard(1)}), w = run.leaf(2, {6}, {Replicate()});
         const auto b = run.leaf(3, {6}, {Replicate()});
         run.finish(torch::layer_norm(x, {6}, w, b), {{"x", x}, {"w", w}, {"b", b}});
       }},
      {"embedding_rows",
       [](ShardedRun& run) {
         const auto table = run.leaf(1, {7, 4}, {Shard(0)});
         run.finish(torch::embedding(table, run.indices(2, {2, 3}, 7, {Replicate()})), {{"table", table}});
       }},
      {"embedding_columns",
       [](ShardedRun& run) {
         const auto table = run.leaf(1, {7, 4}, {Shard(1)});
         run.finish(torch::embedding(table, run.indices(2, {2, 3}, 7, {Replicate()})), {{"table", table}});
       }},
      {"embedding_batch",
       [](ShardedRun& run) {
         const auto table = run.leaf(1, {7, 4}, {Replicate()});
         run.finish(torch::embedding(table, run.indices(2, {4, 3}, 7, {Shard(0)})), {{"table", table}});
       }},
  };
}

std::vector<ShardedCase> losses() {
  return {
      {"cross_entropy_over_shards",
       [](ShardedRun& run) {
         const auto logits = run.leaf(1, {6, 8}, {Shard(1)});
         const auto loss = at::cross_entropy_loss(logits, run.indices(2, {6}, 8, {Replicate()}));
         run.see("out", loss);
         loss.backward();
         run.see("grad.logits", logits.grad());
       }},
      {"cross_entropy_of_rows",
       [](ShardedRun& run) {
         const auto logits = run.leaf(1, {6, 5}, {Shard(0)});
         const auto targets = run.indices(2, {6}, 5, {Shard(0)});
         run.finish(at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum), {{"logits", logits}});
       }},
  };
}

std::vector<ShardedCase> reductions() {
  return {
      {"sum_all",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {5, 6}, {Shard(0)});
         run.finish(x.sum(), {{"x", x}});
       }},
      {"sum_of_rows",
       [](ShardedRun& run) {
         run.finish(run.tensor(1, {5, 6}, {Shard(0)}).sum(1, true));
       }},
      {"sum_over_shards",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {5, 6}, {Shard(0)});
         run.finish(x.sum(0), {{"x", x}});
       }},
      {"mean_over_shards",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {4, 6}, {Shard(0)});
         run.finish(x.mean(0), {{"x", x}});
       }},
      {"mean_uneven",
       [](ShardedRun& run) {
         run.finish(run.tensor(1, {5, 6}, {Shard(0)}).mean(0));
       }},
      {"amax_over_shards",
       [](ShardedRun& run) {
         run.finish(run.tensor(1, {5, 6}, {Shard(0)}).amax(0));
       }},
      {"max_of_rows",
       [](ShardedRun& run) {
         const auto [values, indices] = run.tensor(1, {5, 6}, {Shard(0)}).max(1);
         run.see("values", values);
         run.see("indices", indices);
       }},
      {"norm_over_shards",
       [](ShardedRun& run) {
         run.finish(torch::linalg_vector_norm(run.tensor(1, {5, 6}, {Shard(0)})));
       }},
  };
}

}  // namespace

std::vector<ShardedCase> operator_cases() {
  std::vector<ShardedCase> all;
  for (auto* const part : {&pointwise, &products, &linears, &layers, &losses, &reductions}) {
    for (const auto& one : (*part)()) all.push_back(one);
  }
  return all;
}

std::vector<ShardedCase> square_cases() {
  return {
      {"twice_sharded",
       [](ShardedRun& run) {
         run.finish(torch::tanh(run.tensor(1, {7, 6}, {Shard(0), Shard(0)})));
       }},
      {"moved_2d",
       [](ShardedRun& run) {
         const auto x = run.tensor(1, {5, 6}, {Shard(0), Shard(1)});
         run.finish(lockstep::redistribute(x, {Shard(1), Replicate()}));
       }},
      {"reduced_and_gathered_2d",
       [](ShardedRun& run) {
         const auto x = run.partial(1, {3, 6}, {Partial(), Shard(0)});
         run.finish(lockstep::redistribute(x, {Replicate(), Replicate()}));
       }},
      {"mm_2d",
       [](ShardedRun& run) {
         const auto a = run.leaf(1, {5, 4}, {Shard(0), Replicate()});
         const auto b = run.leaf(2, {4, 6}, {Replicate(), Shard(1)});
         run.finish(torch::mm(a, b), {{"a", a}, {"b", b}});
       }},
      {"linear_2d",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {4, 3, 6}, {Shard(0), Replicate()});
         const auto w = run.leaf(2, {8, 6}, {Replicate(), Shard(0)});
         const auto b = run.leaf(3, {8}, {Replicate(), Shard(0)});
         run.finish(torch::linear(x, w, b), {{"x", x}, {"w", w}, {"b", b}});
       }},
      {"sum_2d",
       [](ShardedRun& run) {
         run.finish(run.tensor(1, {5, 6}, {Shard(0), Shard(1)}).sum(0));
       }},
      {"layer_norm_2d",
       [](ShardedRun& run) {
         const auto x = run.leaf(1, {4, 6, 8}, {Shard(0), Shard(1)});
         const auto w = run.leaf(2, {8}, {Replicate(), Replicate()});
         const auto b = run.leaf(3, {8}, {Replicate(), Replicate()});
         run.finish(torch::layer_norm(x, {8}, w, b), {{"x", x}, {"w", w}, {"b", b}});
       }},
  };
}

}  // namespace parity
