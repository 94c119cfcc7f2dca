// Names that docs/rpc.md uses without declaring them.
using namespace lockstep;
struct NetImpl : torch::nn::Module {
  NetImpl(int width, double dropout);
  at::Tensor forward(at::Tensor x);
};
extern rpc::RemoteModule<NetImpl> net;
extern at::Tensor a, b, x, y;
at::Tensor loss_fn(at::Tensor output, at::Tensor target);
