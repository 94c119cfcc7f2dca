// Ranks made by fork, with a socket between rank 0 and each of the others. Call fork_ranks first thing in
// main, while the process has one thread.
#pragma once

#include <memory>

#include "benchmarks/common/link.h"

namespace bench {

// Returns once in every rank. Ranks other than 0 have no standard input and die with rank 0.
std::unique_ptr<Link> fork_ranks(int n);

// How many cores the calling process may use.
int n_cores();

// Binds the calling process to the rank-th of the cores it may use, modulo their number, as every contender
// with ranks does.
void bind_to_core(int rank);

}  // namespace bench
