// The modules of libtorch that any program can make on other workers.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include "lockstep/base/detail/raise.h"
#include "lockstep/remote/remote_module.h"

namespace lockstep::rpc::internal {
namespace {

using namespace torch::nn;

// Functions of plain values: the options classes of libtorch's modules cannot be encoded. Options that are no
// parameter here keep their defaults.
std::shared_ptr<LinearImpl> linear(std::int64_t in, std::int64_t out, bool bias) {
  return std::make_shared<LinearImpl>(LinearOptions(in, out).bias(bias));
}

std::shared_ptr<EmbeddingImpl> embedding(std::int64_t rows, std::int64_t width, bool sparse) {
  return std::make_shared<EmbeddingImpl>(EmbeddingOptions(rows, width).sparse(sparse));
}

std::shared_ptr<EmbeddingBagImpl> embedding_bag(std::int64_t rows, std::int64_t width,
                                                const std::string& mode, bool sparse) {
  auto options = EmbeddingBagOptions(rows, width).sparse(sparse);
  if (mode == "sum") {
    options.mode(torch::kSum);
  } else if (mode == "mean") {
    options.mode(torch::kMean);
  } else if (mode == "max") {
    options.mode(torch::kMax);
  } else {
    base::raise(ErrorKind::kUsage,
                base::cat("EmbeddingBag: the mode is sum, mean or max, not \"", mode, "\""));
  }
  return std::make_shared<EmbeddingBagImpl>(options);
}

std::shared_ptr<LSTMImpl> lstm(std::int64_t in, std::int64_t hidden, std::int64_t layers) {
  return std::make_shared<LSTMImpl>(LSTMOptions(in, hidden).num_layers(layers));
}

std::shared_ptr<LayerNormImpl> layer_norm(std::int64_t width) {
  return std::make_shared<LayerNormImpl>(LayerNormOptions({width}));
}

std::shared_ptr<ReLUImpl> relu() {
  return std::make_shared<ReLUImpl>();
}

}  // namespace

bool register_torch_modules() {
  // Called by remote_extension: the linker would leave out an initialiser here together with this file, when
  // lockstep is a static library.
  static const bool registered = register_module(linear) && register_module(embedding) &&
                                 register_module(embedding_bag) && register_module(lstm) &&
                                 register_module(layer_norm) && register_module(relu);
  return registered;
}

}  // namespace lockstep::rpc::internal
