#!/usr/bin/env bash
# Builds the benchmarks' contenders (preset release) and runs them. Arguments go to benchmarks/run.py:
#   tools/bench.sh --quick
#   tools/bench.sh --suite store --rounds 11
set -euo pipefail
cd "$(dirname "$0")/.."
tools/build.sh release lockstep_benchmarks
LOCKSTEP_BENCH_PYTHON=$(tools/bench_torch.sh)
export LOCKSTEP_BENCH_PYTHON
exec python3 benchmarks/run.py --contenders "$(tools/build_dir.sh release)/benchmarks/contenders" "$@"
