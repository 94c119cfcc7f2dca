// Names that docs/from-torch.md uses without declaring them.
struct Batch {
  at::Tensor data, target;
};
extern torch::nn::Sequential net;
extern decltype(lockstep::DistributedDataParallel(net)) model;
extern std::vector<Batch> my_part;
