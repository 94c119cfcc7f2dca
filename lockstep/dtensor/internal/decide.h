// Chooses, for one call of an operator, how every input must be placed and how the results will be. A pure
// function of the call's layouts, sizes and integer arguments, so that all ranks decide alike; remembered per
// mesh (DecisionCache). Thread safety: pure functions.
#pragma once

#include <memory>
#include <vector>

#include "lockstep/dtensor/internal/rule.h"

namespace lockstep::dtensor_internal {

struct Decision {
  // Per input. The written ones keep theirs.
  std::vector<const Layout*> inputs;
  bool redistributes = false;
  // The operator cannot run on the pieces in their layout: lists without a rule go item by item; of an
  // operator in place the functional one runs and its result is copied, or it runs on copies of the whole.
  bool by_copy = false;
  // Per result: as the operator leaves it, and after the reduction that Rule::finish asks for.
  std::vector<const Layout*> raw_results;
  std::vector<const Layout*> results;
  // Per result and dimension: the input whose dimension it is; input -1: the dimension is not sharded.
  struct Source {
    int input = -1;
    int dim = 0;
  };
  std::vector<std::vector<Source>> sources;
  // Ranks work on pieces of different sizes, or on pieces of one element along a dimension: see strides.h.
  bool pieces_differ = false;
  bool pieces_of_one = false;
  bool elementwise = false;
  // Of operators that are given their result's sizes: the sizes of the whole, and those of this rank's piece.
  Sizes result_sizes;
  Sizes local_result_sizes;
  Sizes result_strides;  // of the whole, where they are given too
};

std::unique_ptr<const Decision> decide(const OpCall& call);

}  // namespace lockstep::dtensor_internal
