// Names that docs/collectives.md uses without declaring them.
extern at::Tensor gradient, tensor;
extern std::vector<at::Tensor> many;
extern int rank, size;
void compute_something_else();
