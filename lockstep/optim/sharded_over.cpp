#include "lockstep/optim/detail/sharded_over.h"

#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/group/world.h"
#include "lockstep/tensor/detail/local_shard.h"

namespace lockstep::internal {

void refuse_own_mesh(const char* who, const std::string& name, const at::Tensor& parameter,
                     const Group& group) {
  if (group->size() == 1 || !has_shards(parameter)) return;
  const auto members = get_process_group_ranks(group);
  const auto shared = std::ranges::count_if(sharded_tensors()->ranks(parameter), [&](int rank) {
    return std::ranges::find(members, rank) != members.end();
  });
  if (shared <= 1) return;
  base::raise(ErrorKind::kUsage,
              base::cat(who, ": parameter ", name, " is sharded over a mesh, ", shared,
                        " ranks of which are in group \"", group->name(),
                        "\", so different pieces would be mixed; give the dimension of the mesh along which "
                        "the model is replicated: .device_mesh = mesh[\"dp\"], or .group = "
                        "mesh[\"dp\"].get_group()"));
}

}  // namespace lockstep::internal
