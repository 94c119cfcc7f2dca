#!/usr/bin/env bash
# Configures a preset when needed and builds it. Usage: build.sh <preset> [target...]
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
shift

if [[ ! -f build/$preset/build.ninja || CMakePresets.json -nt build/$preset/build.ninja ]]; then
  echo "build: configuring build/$preset"
  mkdir -p "build/$preset"
  log=build/$preset/configure.log
  cmake --preset "$preset" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
fi

jobs=$(tools/jobs.sh)
echo "build: build/$preset with $jobs jobs"
targets=()
[[ $# -eq 0 ]] || targets=(--target "$@")
cmake --build "build/$preset" -j "$jobs" "${targets[@]}"
