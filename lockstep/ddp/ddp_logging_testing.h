// For tests of what a model records about its steps.
#pragma once

#include "lockstep/ddp/ddp_testing.h"

namespace lockstep::ddp_testing {

template <class Model>
void train(Model& model, int n_steps, int rank) {
  for (int step = 0; step < n_steps; ++step) {
    model->zero_grad();
    model->forward(input_of(step, rank)).square().sum().backward();
  }
}

}  // namespace lockstep::ddp_testing
