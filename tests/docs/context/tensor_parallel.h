// Names that docs/tensor_parallel.md uses without declaring them.
extern at::Tensor x, weight;
extern std::shared_ptr<torch::nn::Module> model;
extern lockstep::DeviceMesh mesh;
