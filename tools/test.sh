#!/usr/bin/env bash
# Builds one or more presets, then runs the tests of all of them in one ctest, so that its summary at the end counts
# everything. Usage: test.sh <preset>...
set -euo pipefail
cd "$(dirname "$0")/.."

for preset in "$@"; do
  tools/build.sh "$preset"
done

if [[ $# -eq 1 ]]; then
  folder=build/$1
else
  folder=build/all
  mkdir -p "$folder"
  for preset in "$@"; do
    echo "subdirs(\"$PWD/build/$preset\")"
  done >"$folder/CTestTestfile.cmake"
fi

# g++ 12's TSan cannot place its shadow memory where the kernel randomises more address bits than this.
ctest=(ctest)
bits=$(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 28)
if [[ " $* " == *" tsan "* && $bits -gt 28 ]] && setarch -R true 2>/dev/null; then
  ctest=(setarch -R ctest)
fi
echo "test: running the tests of $*"
exec "${ctest[@]}" --test-dir "$folder" --output-on-failure --no-label-summary
