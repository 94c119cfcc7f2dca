// Which parameters were used: on this rank since the last reduction, and on any rank, which the ranks find out by summing
// their maps. A parameter that nobody used keeps the gradient it had.
//
// One pass: note() as gradients arrive, start() when the last bucket has been started (every rank does, with unused
// parameters or without), wait(), then anywhere() until the next start(), close().
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
  // Raises kResource when shared memory is not to be had.
  UsageExchange(std::size_t n_parameters, Group group, std::source_location where);

  void note(std::size_t index) { here_[index] = 1; }
  bool here(std::size_t index) const { return here_[index] != 0; }
  // Nothing of this rank is known any more.
  void forget_here();

  // Starts to sum the maps. `with_zeros`: this rank takes part without having used anything.
  void start(bool with_zeros);
  // Blocks; raises what the reduction failed with.
  void wait();
  // Meaningful after the first wait().
  bool anywhere(std::size_t index) const { return anywhere_.const_data_ptr<int>()[index] != 0; }

  // The end of a pass of this rank's own: compares what was unused with the pass before.
  void close(std::span<const BucketItem> items);
  std::size_t unused_bytes() const { return unused_bytes_; }  // of the last closed pass
  bool has_changed() const { return has_changed_; }           // passes differed in what they left unused
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
