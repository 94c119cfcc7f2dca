// Averaging or copying the pieces of a sharded parameter over ranks of its own mesh would mix different values.
// Thread safety: any thread. Local.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lockstep/group/process_group.h"

namespace lockstep::internal {

// Raises kUsage when two ranks of the mesh of `parameter` are in `group`; nothing for a plain one. `who` and
// `name` are for the message.
void refuse_own_mesh(const char* who, const std::string& name, const at::Tensor& parameter,
                     const Group& group);

}  // namespace lockstep::internal
