#!/usr/bin/env bash
# Draws one training step from its logging data: docs/images/ddp_timeline.svg. Arguments go to benchmarks/timeline.py.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/build.sh release bench_ddp_timeline
exec python3 benchmarks/timeline.py --program "$(tools/build_dir.sh release)/benchmarks/contenders/ddp_timeline" "$@"
