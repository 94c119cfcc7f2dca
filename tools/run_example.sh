#!/usr/bin/env bash
# Trains the example on every core, one rank each, then measures what the ranks were worth. Arguments go to the example.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(tools/build_dir.sh dev)
launcher=$folder/launch/lockstep
example=$folder/examples/char_gpt/char_gpt
for program in "$launcher" "$example"; do
  [[ -x $program ]] || { echo "run: $program is not built" >&2; exit 1; }
done

out=build/run
mkdir -p "$out"
echo "run: examples/char_gpt learns the project's documents, one rank per core, and is compared with one rank; 1.5 minutes"
"$launcher" run -n cpu --no-prefix -- "$example" --out "$out" --json "$out/train.json" "$@"
python3 examples/char_gpt/compare.py --launcher "$launcher" --program "$example" \
  --trained "$out/train.json" --out "$out/speed.json"
echo "run: the loss curve is in $out/loss.svg, the sample in $out/sample.txt"
