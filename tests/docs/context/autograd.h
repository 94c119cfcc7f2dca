// Names that docs/autograd.md uses without declaring them.
using namespace lockstep;
at::Tensor layer(const at::Tensor& input);
at::Tensor criterion(const at::Tensor& output);
extern at::Tensor input;
