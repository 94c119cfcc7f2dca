#!/usr/bin/env bash
# Trains the example on every core: one rank each. Arguments go to the example.
set -euo pipefail
cd "$(dirname "$0")/.."
launcher=build/dev/launch/lockstep
example=build/dev/examples/char_gpt
[[ ! -d $example ]] || example=$example/char_gpt
for program in "$launcher" "$example"; do
  [[ -x $program ]] || { echo "run: $program is not built" >&2; exit 1; }
done
exec "$launcher" run -n auto -- "$example" "$@"
