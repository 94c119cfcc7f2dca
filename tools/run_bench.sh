#!/usr/bin/env bash
# Runs the benchmarks of the release tree. Arguments go to the benchmark program.
set -euo pipefail
cd "$(dirname "$0")/.."
bench=build/release/benchmarks/lockstep_bench
[[ -x $bench ]] || { echo "bench: $bench is not built" >&2; exit 1; }
mkdir -p build/bench
exec "$bench" --out build/bench/results.json "$@"
