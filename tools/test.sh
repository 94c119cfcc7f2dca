#!/usr/bin/env bash
# Builds one or more presets, then runs the tests of all of them in one ctest, so that its summary at the end counts
# everything. Fails when a test is skipped that tools/skips.txt does not expect. Usage: test.sh [--strict] <preset>...
#   --strict   fails as well when an engine plug-in was not built or a check could not run (.ci/run)
set -euo pipefail
cd "$(dirname "$0")/.."
strict=no
if [[ ${1:-} == --strict ]]; then
  strict=yes
  export LOCKSTEP_STRICT_CHECKS=1  # tools/format.sh
  shift
fi

for preset in "$@"; do
  tools/build.sh "$preset"
done

# One ctest over the trees. Every GoogleTest program writes a report; the last test reads them for skipped cases.
folder=build/all
rm -rf "$folder/reports"
mkdir -p "$folder/reports"
export GTEST_OUTPUT=xml:$PWD/$folder/reports/
check=("$PWD/tools/check_skips.py" "$PWD/$folder/reports")
trees=()
for preset in "$@"; do
  trees+=("$PWD/$(tools/build_dir.sh "$preset")")
done
[[ $strict == no ]] || check+=(--plugins "${trees[@]}")
printf 'subdirs("%s")\n' "${trees[@]}" >"$folder/CTestTestfile.cmake"
names=$(ctest --test-dir "$folder" -N | sed -n 's/^ *Test *#[0-9]*: //p' | paste -sd ';')
{
  printf 'add_test(skips python3'
  printf ' "%s"' "${check[@]}"
  printf ')\nset_tests_properties(skips PROPERTIES DEPENDS "%s")\n' "$names"  # the check must come last
} >>"$folder/CTestTestfile.cmake"

# g++ 12's TSan cannot place its shadow memory where the kernel randomises more address bits than this.
ctest=(ctest)
bits=$(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 28)
if [[ " $* " == *" tsan "* && $bits -gt 28 ]] && setarch -R true 2>/dev/null; then
  ctest=(setarch -R ctest)
fi
# Tests of the configuration "long" build the library once more.
[[ -z ${LOCKSTEP_TEST_LONG:-} ]] || ctest+=(-C long)
echo "test: running the tests of $*"
# Side by side, two for every core: most of a test is waiting.
exec "${ctest[@]}" -j "$(($(nproc) * 2))" --test-dir "$folder" --output-on-failure --no-label-summary
