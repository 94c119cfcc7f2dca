#!/usr/bin/env bash
# Configures a preset when needed and builds it, in the folder that tools/build_dir.sh prints. Usage: build.sh <preset>
# [target...]
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
shift

folder=$(tools/build_dir.sh "$preset")
# A libtorch of the user's own can be another one than last time.
if [[ ! -f $folder/build.ninja || CMakePresets.json -nt $folder/build.ninja || $folder == *-own-torch ]]; then
  echo "build: configuring $folder"
  mkdir -p "$folder"
  log=$folder/configure.log
  version=-ULIBTORCH_VERSION  # the default
  [[ $folder != *-torch-* ]] || version=-DLIBTORCH_VERSION=$TORCH
  cmake --preset "$preset" -B "$folder" "$version" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
fi

jobs=$(tools/jobs.sh)
echo "build: $folder with $jobs jobs"
targets=()
[[ $# -eq 0 ]] || targets=(--target "$@")
cmake --build "$folder" -j "$jobs" "${targets[@]}"
