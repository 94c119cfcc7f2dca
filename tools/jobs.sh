#!/usr/bin/env bash
# Prints how many compile jobs to run: one per core, but no more than memory holds at 2 GiB each, which is what a
# file that includes libtorch takes. LOCKSTEP_JOBS replaces the answer.
set -euo pipefail
if [[ -n ${LOCKSTEP_JOBS:-} ]]; then
  echo "$LOCKSTEP_JOBS"
  exit
fi
jobs=$(nproc)
gib=$(awk '/^MemAvailable:/ {print int($2 / 1048576)}' /proc/meminfo)
limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
[[ $limit == max || $((limit >> 30)) -ge $gib ]] || gib=$((limit >> 30))
by_memory=$((gib / 2))
[[ $by_memory -ge $jobs ]] || jobs=$by_memory
[[ $jobs -ge 1 ]] || jobs=1
echo "$jobs"
