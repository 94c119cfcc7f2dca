// Names that docs/debugging.md uses without declaring them.
void train(int rank);
