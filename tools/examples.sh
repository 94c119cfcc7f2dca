#!/usr/bin/env bash
# Builds the examples and prints the line that runs each. Needs a configured build only when nothing is to be built:
# examples.sh --list prints the lines alone.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ ${1:-} == --list ]] || tools/build.sh dev lockstep all_examples
folder=$(tools/build_dir.sh dev)
while read -r ranks program; do
  echo "$folder/launch/lockstep run -n $ranks -- $folder/$program"
done <"$folder/examples/list.txt"
