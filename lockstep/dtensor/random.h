// Random numbers on sharded tensors. Thread safety: any thread; all ranks of a mesh run their random
// operators in the same order.
#pragma once

#include <cstdint>

#include "lockstep/mesh/device_mesh.h"

namespace lockstep {

// Seeds the random operators (dropout, normal_, rand) on tensors of this mesh. Every rank of the mesh calls
// it with the same seed. They then give the numbers that one process with torch::manual_seed(seed) gets,
// whatever the placements: each rank draws the numbers of the whole tensor and keeps its piece. Without it
// they raise kUsage. Local.
void manual_seed(std::uint64_t seed, const DeviceMesh& mesh);

}  // namespace lockstep
