// Names that docs/nn.md uses without declaring them.
extern std::vector<torch::nn::Sequential> blocks;
extern torch::nn::Sequential net;
