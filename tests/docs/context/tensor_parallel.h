// Names that docs/tensor_parallel.md uses without declaring them.
extern at::Tensor input, weight;
struct Net : torch::nn::Module {};
extern std::shared_ptr<Net> net;
extern std::shared_ptr<torch::nn::Module> model;
extern lockstep::DeviceMesh mesh;
