#!/usr/bin/env bash
# Trains the cases of tests/parity with python torch and with lockstep, and compares what both saw. Installs python torch
# (the benchmarks' environment) when it is missing. Arguments go to tests/parity/parity.py:
#   tools/parity.sh --goldens tests/parity/goldens      also writes the goldens of `make test` anew
set -euo pipefail
cd "$(dirname "$0")/.."

tools/build.sh dev parity
python=$(tools/bench_torch.sh)
if [[ -z $python ]]; then
  echo "parity: there is no python torch to compare with (LOCKSTEP_BENCH_TORCH=0, or it could not be installed)" >&2
  exit 1
fi
# torch's PowerSGD draws its seeds with numpy.
if ! "$python" -c 'import numpy' 2>/dev/null; then
  "$python" -m pip --disable-pip-version-check install --quiet --no-cache-dir numpy
fi

echo "parity: python torch trains"
rm -rf build/parity
"$python" tests/parity/parity.py build/parity/torch "$@"
echo "parity: lockstep trains"
"$(tools/build_dir.sh dev)/tests/parity/parity" build/parity/torch build/parity/lockstep
