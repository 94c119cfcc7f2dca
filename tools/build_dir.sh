#!/usr/bin/env bash
# Prints the folder that a preset is built in: every libtorch has its own, so that their objects never mix. Usage:
# build_dir.sh <preset>
#   build/<preset>                    the default libtorch, and presets without libtorch
#   build/<preset>-torch-<version>    TORCH=<version> in the environment, or `make <command> TORCH=<version>`
#   build/<preset>-own-torch          LIBTORCH_ROOT or Torch_DIR in the environment
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1

case $preset in
  asan|tsan|fuzz) echo "build/$preset"; exit ;;
esac
if [[ -n ${LIBTORCH_ROOT:-}${Torch_DIR:-} ]]; then
  echo "build/$preset-own-torch"
elif [[ $(tools/torch_version.sh) == "$(tools/torch_version.sh --default)" ]]; then
  echo "build/$preset"
else
  echo "build/$preset-torch-$TORCH"
fi
