// Strides of a result of which ranks hold pieces of different sizes. The strides of a piece with one row, or
// none, do not tell in which order its dimensions are in memory, so that ranks that read them off their
// pieces would disagree; and formulas of libtorch choose operators by strides (the gradient of mm), so that
// such ranks would call different collectives. These are derived from the strides of the whole inputs, which
// all ranks agree on. Where they differ from the order of the pieces in memory, that costs a copy at most.
// Thread safety: pure functions.
#pragma once

#include "lockstep/dtensor/internal/decide.h"

namespace lockstep::dtensor_internal {

// Whether `layout` cuts a tensor of these sizes into pieces of different sizes.
bool cuts_unequally(const Layout& layout, at::IntArrayRef sizes);
// Whether a piece has one element along a dimension of which the whole has more: its strides say nothing about
// that dimension, on any rank.
bool cuts_to_one(const Layout& layout, at::IntArrayRef sizes);

// Whether agreed_strides knows those of one process: the results of views and of elementwise operators lie as
// their input does.
bool lies_as_input(const OpCall& call, const Decision& decision);

// Of result `r` of the call, of `sizes`.
Sizes agreed_strides(const OpCall& call, const Decision& decision, std::size_t r, at::IntArrayRef sizes);

}  // namespace lockstep::dtensor_internal
