// Names that docs/optim.md uses without declaring them.
struct Net : torch::nn::Module {
  at::Tensor forward(at::Tensor x);
};
struct Batch {
  at::Tensor data, target;
};
extern std::shared_ptr<Net> net;
extern std::vector<Batch> loader;
extern torch::optim::Adam adam;
extern std::vector<at::Tensor> parameters;
extern at::Tensor loss;
at::Tensor loss_fn(at::Tensor output, at::Tensor target);
