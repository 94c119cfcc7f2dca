#!/usr/bin/env bash
# Puts a Python environment with torch into the per-user cache and prints its interpreter: PyTorch with Gloo is one of
# the benchmarks' contenders, and what tools/parity.sh compares with. LOCKSTEP_BENCH_TORCH=0 leaves it out: prints nothing.
# The version is that of libtorch (TORCH=<version>, else the default).
#
# The wheel on PyPI is built for CUDA and `import torch` loads the CUDA libraries it is linked to, GPU or not; they are
# most of the 3.5 GB. What it asks for beyond them (triton, cusolver, ...) is left out.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ ${LOCKSTEP_BENCH_TORCH:-1} != 0 ]] || exit 0

torch=torch==$(tools/torch_version.sh)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/lockstep
place=$cache/bench-${torch/==/-}
stamp=$place/.lockstep-stamp

if [[ ! -f $stamp ]]; then
  mkdir -p "$cache"
  exec 9>"$cache/bench-torch.lock"
  flock 9
fi
if [[ ! -f $stamp ]]; then
  echo "bench: installing $torch into $place, once (3.5 GB, some minutes; LOCKSTEP_BENCH_TORCH=0 goes without)" >&2
  rm -rf "$place"
  pip() { "$place/bin/python" -m pip --disable-pip-version-check "$1" --quiet --no-cache-dir "${@:2}" >&2; }
  # torch comes last: pip would complain about what is left out.
  if python3 -m venv "$place" && pip download --no-deps --dest "$place/wheel" "$torch" &&
     "$place/bin/python" tools/torch_needs.py "$place"/wheel/torch-*.whl >"$place/needs.txt" &&
     pip install --requirement "$place/needs.txt" && pip install --no-deps "$place"/wheel/torch-*.whl; then
    rm -r "$place/wheel"
    touch "$stamp"
  else
    echo "bench: that did not work; PyTorch is left out" >&2
    rm -rf "$place"
    exit 0
  fi
fi
echo "$place/bin/python"
