#!/usr/bin/env bash
# Draws one training step from its logging data: docs/images/ddp_timeline.svg, or of a program of the user's own (--data).
# Arguments go to benchmarks/timeline.py. A build that is there is used: the program is timed by its own clock, and most of
# a step is libtorch's.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ${1:-} == --data ]]; then
  exec python3 benchmarks/timeline.py "$@"
fi
preset=release
[[ -f $(tools/build_dir.sh release)/build.ninja ]] || preset=dev
tools/build.sh "$preset" bench_ddp_timeline
exec python3 benchmarks/timeline.py --program "$(tools/build_dir.sh "$preset")/benchmarks/contenders/ddp_timeline" "$@"
