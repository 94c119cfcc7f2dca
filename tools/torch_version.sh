#!/usr/bin/env bash
# Prints the version of torch that is asked for: TORCH in the environment, else the default of cmake/FindLibtorch.cmake.
# Usage: torch_version.sh [--default]
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ${1:-} != --default && -n ${TORCH:-} ]]; then
  echo "$TORCH"
else
  sed -n 's/^set(LIBTORCH_DEFAULT_VERSION \([0-9.]*\)).*/\1/p' cmake/FindLibtorch.cmake
fi
