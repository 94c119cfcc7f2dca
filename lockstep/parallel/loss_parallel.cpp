#include "lockstep/parallel/loss_parallel.h"

#include "lockstep/dtensor/detail/loss_flag.h"

namespace lockstep {

LossParallelScope::LossParallelScope() : before_(dtensor_internal::set_loss_parallel(true)) {}
LossParallelScope::~LossParallelScope() {
  dtensor_internal::set_loss_parallel(before_);
}

}  // namespace lockstep
