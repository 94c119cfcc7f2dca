// Products of matrices and vectors, as sums over a letter.
#include "lockstep/dtensor/internal/rule.h"

namespace lockstep::dtensor_internal::rules {
namespace {

// beta * self + alpha * product: `self` broadcasts into the result, and where the product is a partial sum it
// must be one.
Rule sum_and_product(const char* op, const char* spec) {
  return {.op = op, .letters = [product = einsum(spec)](const OpCall& call, Letters& letters) {
            product(call, letters);
            const auto& result = letters.results[0];
            const auto& self = call.inputs()[0].sizes;
            const auto lead = result.size() - std::min(result.size(), self.size());
            for (std::size_t d = 0; d < self.size(); ++d) {
              letters.inputs[0][d] = self[d] == 1 ? Letters::kNone : result[lead + d];
            }
            letters.added[0] = true;
          }};
}

}  // namespace

std::vector<Rule> matmul_rules() {
  return {
      {.op = "aten::mm", .letters = einsum("mk,kn->mn"), .linear = Linear::kEach},
      {.op = "aten::bmm", .letters = einsum("bmk,bkn->bmn"), .linear = Linear::kEach},
      {.op = "aten::mv", .letters = einsum("mk,k->m"), .linear = Linear::kEach},
      {.op = "aten::dot", .letters = einsum("k,k->"), .linear = Linear::kEach},
      {.op = "aten::vdot", .letters = einsum("k,k->"), .linear = Linear::kEach},
      {.op = "aten::ger", .letters = einsum("m,n->mn"), .linear = Linear::kEach},
      sum_and_product("aten::addmm", "**,mk,kn->mn"),
      sum_and_product("aten::baddbmm", "***,bmk,bkn->bmn"),
      sum_and_product("aten::addbmm", "**,bmk,bkn->mn"),
      sum_and_product("aten::addmv", "*,mk,k->m"),
      sum_and_product("aten::addr", "**,m,n->mn"),
  };
}

}  // namespace lockstep::dtensor_internal::rules
