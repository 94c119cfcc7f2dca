// Names that docs/ddp.md uses without declaring them.
struct Net : torch::nn::Module {
  at::Tensor forward(at::Tensor x);
};
struct Batch {
  at::Tensor data, target;
};
extern decltype(torch::data::datasets::MNIST("").map(torch::data::transforms::Stack<>())) data;
extern std::shared_ptr<Net> net;
extern decltype(lockstep::DistributedDataParallel(net)) model;
extern lockstep::ZeroRedundancyOptimizer<torch::optim::Adam> optimizer;
extern std::vector<Batch> my_batches;
extern Batch first, second;
extern at::Tensor input, target;
at::Tensor loss_fn(at::Tensor output, at::Tensor target);
void train_on(const Batch& batch);
