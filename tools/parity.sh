#!/usr/bin/env bash
# Runs the cases of tests/parity with python torch and with lockstep, and compares what both saw. Installs python torch
# (the benchmarks' environment) when it is missing. Usage: parity.sh [ddp|sharded [<arguments of its script>]]
#   ddp       training by DistributedDataParallel (parity.py); sharded: operators on DTensors and tensor parallelism
#             (sharded.py); neither: both
#   tools/parity.sh ddp --goldens tests/parity/goldens                  also write the goldens of `make test` anew
#   tools/parity.sh sharded --goldens tests/parity/sharded_goldens
set -euo pipefail
cd "$(dirname "$0")/.."

parts=(ddp sharded)
if [[ $# -gt 0 ]]; then
  case $1 in
    ddp|sharded) parts=("$1"); shift ;;
    *) echo "parity: no part named $1 (ddp, sharded)" >&2; exit 2 ;;
  esac
fi

tools/build.sh dev parity sharded_parity
python=$(tools/bench_torch.sh)
if [[ -z $python ]]; then
  echo "parity: there is no python torch to compare with (LOCKSTEP_BENCH_TORCH=0, or it could not be installed)" >&2
  exit 1
fi
# torch's PowerSGD draws its seeds with numpy.
if ! "$python" -c 'import numpy' 2>/dev/null; then
  "$python" -m pip --disable-pip-version-check install --quiet --no-cache-dir numpy
fi

programs=$(tools/build_dir.sh dev)/tests/parity
status=0
for part in "${parts[@]}"; do
  script=parity.py program=parity
  [[ $part == ddp ]] || { script=sharded.py; program=sharded_parity; }
  echo "parity: $part, python torch"
  rm -rf "build/parity/$part"
  "$python" "tests/parity/$script" "build/parity/$part/torch" "$@"
  echo "parity: $part, lockstep"
  "$programs/$program" "build/parity/$part/torch" "build/parity/$part/lockstep" || status=1
done
exit $status
