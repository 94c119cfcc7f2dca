// Names that docs/gpu.md uses without declaring them.
struct Net : torch::nn::Module {
  at::Tensor forward(at::Tensor x);
};
extern at::Tensor x, y;
extern c10::Stream other;
