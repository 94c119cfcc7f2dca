// Which parameters were used: on this rank since the last reduction, and on any rank, by summing the ranks'
// maps. A parameter that no rank used keeps its previous gradient.
//
// One pass: note() as gradients arrive, start() when the last bucket has been started (on every rank, with or
// without unused parameters), wait(), then anywhere() until the next start(), close().
// Thread safety: none; on the thread that runs backward().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <source_location>
#include <span>
#include <vector>

#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"

namespace lockstep::internal {

class UsageExchange final {
 public:
  // Raises kResource when shared memory cannot be allocated.
  UsageExchange(std::size_t n_parameters, Group group, std::source_location where);

  void note(std::size_t index) { here_[index] = 1; }
  bool here(std::size_t index) const { return here_[index] != 0; }
  // Clears this rank's map.
  void forget_here();

  // Starts summing the maps. `with_zeros`: this rank participates without having used anything.
  void start(bool with_zeros);
  // Blocks; raises the error of the reduction.
  void wait();
  // Valid after the first wait().
  bool anywhere(std::size_t index) const { return anywhere_.const_data_ptr<int>()[index] != 0; }

  // The end of this rank's own pass: compares its unused parameters with the previous pass.
  void close(std::span<const BucketItem> items);
  std::size_t unused_bytes() const { return unused_bytes_; }  // of the last closed pass
  bool has_changed() const { return has_changed_; }           // the unused set differed between passes
  bool is_first() const { return n_closed_ <= 1; }

 private:
  Group group_;
  std::source_location where_;
  std::vector<int> here_;  // 0 or 1, as it is summed
  at::Tensor anywhere_;
  Work work_;
  std::vector<unsigned char> unused_before_;
  std::size_t unused_bytes_ = 0;
  std::size_t n_closed_ = 0;
  bool has_changed_ = false;
};

}  // namespace lockstep::internal
