// Checks of the public calls' arguments, before anything is sent. Each raises kUsage with the name of the
// function.
#pragma once

#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/internal/mesh_context.h"

namespace lockstep::dtensor_internal {

// One placement per mesh dimension (none given: all Replicate), dimensions counted from the front and in
// range, partial ones with one operation.
Placements checked_placements(const char* function, const MeshContext& mesh, std::int64_t ndim,
                              Placements placements);
void refuse_partial(const char* function, const Placements& placements);

// The sizes of the whole of which `local` is a piece.
Sizes global_sizes(const char* function, const MeshContext& mesh, const at::Tensor& local,
                   const Placements& placements, const FromLocalOptions& options);
// Collective: types, sizes and the options of all ranks fit, and replicas get the values of the first rank.
// All ranks raise the same kUsage, which names the rank at fault, or none does: so it comes before every check
// of what ranks may have given differently. `placements` as given to the function.
void check_locals(const char* function, const MeshContext& mesh, const at::Tensor& local,
                  const Placements& placements, const FromLocalOptions& options);

}  // namespace lockstep::dtensor_internal
