// Shared by the examples: do all ranks hold the same model?
#pragma once

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <vector>

// Collective; the same answer everywhere. Compares bits. No group: all ranks.
inline bool ranks_equal(const torch::nn::Module& module, const lockstep::Group& group = {}) {
  std::vector<at::Tensor> flat;
  for (const auto& parameter : module.parameters()) flat.push_back(parameter.detach().flatten());
  const at::Tensor mine = torch::cat(flat);
  at::Tensor all = torch::empty({lockstep::get_world_size(group), mine.numel()});
  lockstep::all_gather_into_tensor(all, mine, {.group = group});
  return torch::equal(all, mine.expand_as(all));
}
