#!/usr/bin/env bash
# Everything that needs a GPU, in one command, with a report: the tests labelled gpu, without and with MPS, compute-sanitizer
# where it is installed, and the benchmarks beside python torch. Usage: gpu_check.sh [option...]
#   --build DIR          the build folder (gpu_tests.txt), or the folder that tools/pack_gpu.sh made; default: where this script
#                        is, else build/gpu, build/dev
#   --output FILE        the report, Markdown; default: gpu_report.md in the build folder
#   --only REGEX         programs whose name matches
#   --filter PATTERN     --gtest_filter of the tests
#   --skip PART          mps, sanitizer or benchmarks; may be given several times
#   --minutes N          stops starting programs after N minutes; default 60
# Needs neither a compiler nor CMake. Every program runs under a time limit. Exit code 1: something failed.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
build='' output='' only=. filter='*' minutes=60 skip=' '
while [[ $# -gt 0 ]]; do
  case $1 in
    --build) build=$2 ;;
    --output) output=$2 ;;
    --only) only=$2 ;;
    --filter) filter=$2 ;;
    --skip) skip+="$2 " ;;
    --minutes) minutes=$2 ;;
    *) echo "gpu_check: no option $1 (see the first lines of $0)" >&2; exit 2 ;;
  esac
  shift 2
done
for folder in "$here" "$here/../build/gpu" "$here/../build/dev"; do
  [[ -z $build && -f $folder/gpu_tests.txt ]] && build=$folder
done
[[ -f ${build:-}/gpu_tests.txt ]] || { echo "gpu_check: no gpu_tests.txt in ${build:-a build folder}; build first" >&2; exit 2; }
build=$(cd "$build" && pwd)
output=$(realpath -m "${output:-$build/gpu_report.md}")
work=$(mktemp -d)
mps_pipe=''
stop_mps() {
  [[ -z $mps_pipe ]] && return
  echo quit | timeout 20 nvidia-cuda-mps-control >/dev/null 2>&1 || true
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  mps_pipe=''
}
trap 'stop_mps; rm -rf "$work"' EXIT
cd "$build"  # the list's paths and arguments are from here
deadline=$((SECONDS + minutes * 60))
failed=0

# Where programs find libraries: given, packed, torch's and the NCCL that came with it. Not for python, which has its own.
torch_lib=$(timeout 60 python3 -c 'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "lib"))' 2>/dev/null || true)
libraries=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$build/needed${torch_lib:+:$torch_lib:$torch_lib/../../nvidia/nccl/lib}
with=(env "LD_LIBRARY_PATH=$libraries" "LOCKSTEP_ENGINE_PATH=$build/lib/lockstep/engines")
# An NCCL that was carried along (tools/prune_nccl.py): two ranks on one GPU need a newer one than torch's.
if [[ -f libnccl.so.2.xz && -z ${LOCKSTEP_NCCL_LIBRARY:-} ]]; then
  python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"), 1 << 20)' \
    libnccl.so.2.xz "$work/libnccl.so.2"
  export LOCKSTEP_NCCL_LIBRARY=$work/libnccl.so.2
fi

# run <name> <seconds> <command...>: its output in $work/<name>.log; sets `verdict` and `took`.
run() {
  local name=$1 seconds=$2 code=0 begin=$SECONDS
  shift 2
  if ((SECONDS >= deadline)); then verdict='not run: out of time' took=0; return; fi
  timeout -k 10 "$seconds" "$@" >"$work/$name.log" 2>&1 || code=$?
  took=$((SECONDS - begin))
  case $code in
    0) verdict=passed ;;
    77) verdict="skipped: $(sed -n 's/^skipped: //p' "$work/$name.log" | head -1)" ;;
    124|137) verdict="**timed out after $seconds s**" failed=1 ;;
    *) verdict="**failed ($code)**" failed=1 ;;
  esac
  local counts
  counts=$(grep -oE '^\[  (PASSED|SKIPPED|FAILED) +\] [0-9]+ test' "$work/$name.log" | grep -oE '(PASSED|FAILED|SKIPPED)|[0-9]+' |
           paste -sd ' ' | tr '[:upper:]' '[:lower:]' || true)
  [[ -z $counts ]] || verdict+=" ($counts)"
  echo "$name: $verdict, $took s"
}
# What a failed program said last, for the report.
quote_failure() {
  [[ $2 == *'**'* ]] || return 0
  printf '\n<details><summary>%s</summary>\n\n```\n' "$1"
  grep -E 'Failure|FAILED|rror|Which is|expected|skipped:' "$work/$1.log" | head -40 || true
  echo ...
  tail -n 15 "$work/$1.log"
  printf '```\n</details>\n'
}
programs() { awk -v kind="$1" '$1 == kind' gpu_tests.txt | grep -E -- "$only" || true; }

run_tests() {  # run_tests <suffix>: a table of all tests
  printf '| test | result | s |\n|---|---|---|\n' >>"$work/report"
  while read -r _ program seconds _; do
    local name
    name=$(basename "$program")$1
    run "$name" "$seconds" "${with[@]}" "./$program" --gtest_brief=1 "--gtest_filter=$filter"
    echo "| $name | $verdict | $took |" >>"$work/report"
    quote_failure "$name" "$verdict" >>"$work/failures"
  done < <(programs test)
  # Each rank of these is a process of the launcher; "1" is a world of one.
  while read -r _ program seconds numbers; do
    for n in $numbers; do
      local name
      name=$(basename "$program")-$n$1
      run "$name" "$seconds" "${with[@]}" launch/lockstep run -n "$n" -- "./$program" --gtest_brief=1 "--gtest_filter=$filter"
      echo "| $(basename "$program")$1, $n ranks | $verdict | $took |" >>"$work/report"
      quote_failure "$name" "$verdict" >>"$work/failures"
    done
  done < <(programs ranks)
}

query() { timeout 20 nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | paste -sd ';' || true; }
{
  echo "# GPU check"
  echo
  echo "| | |"
  echo "|---|---|"
  echo "| date | $(date -u '+%Y-%m-%d %H:%M UTC') |"
  echo "| commit | $(cat commit 2>/dev/null || git -C "$here" rev-parse --short HEAD 2>/dev/null || echo unknown) |"
  echo "| device | $(query name), $(query memory.total) |"
  echo "| driver | $(query driver_version) |"
  echo "| cores | $(nproc) |"
  echo "| torch | $(timeout 60 python3 -c 'import torch; print(torch.__version__, "NCCL", ".".join(map(str, torch.cuda.nccl.version())))' 2>/dev/null || echo none) |"
  echo "| NCCL for the plug-in | ${LOCKSTEP_NCCL_LIBRARY:-the one that is found} |"
} >"$work/report"
: >"$work/failures"

printf '\n## Tests\n\n' >>"$work/report"
run_tests ''

# Over NCCL, with two ranks: what an NCCL that shares a GPU can do without MPS.
if [[ -n ${LOCKSTEP_NCCL_LIBRARY:-} ]]; then
  printf '\n## Tests over NCCL\n\n| test | result | s |\n|---|---|---|\n' >>"$work/report"
  nccl=("${with[@]}" GPU_TEST_BACKEND=cpu:host,cuda:nccl NCCL_MULTI_RANK_GPU_ENABLE=1)
  while read -r _ program seconds _; do
    name=$(basename "$program")@nccl
    run "$name" "$seconds" "${nccl[@]}" launch/lockstep run -n 2 -- "./$program" --gtest_brief=1 "--gtest_filter=$filter"
    echo "| $name, 2 ranks | $verdict | $took |" >>"$work/report"
    quote_failure "$name" "$verdict" >>"$work/failures"
  done < <(programs ranks)
fi

if [[ $skip != *' mps '* ]]; then
  printf '\n## Tests under MPS\n\n' >>"$work/report"
  if ! command -v nvidia-cuda-mps-control >/dev/null; then
    echo "Not run: there is no nvidia-cuda-mps-control." >>"$work/report"
  else
    mps_pipe=$work/mps
    mkdir -p "$mps_pipe/log"
    export CUDA_MPS_PIPE_DIRECTORY=$mps_pipe CUDA_MPS_LOG_DIRECTORY=$mps_pipe/log
    if timeout 20 nvidia-cuda-mps-control -d >"$work/mps.log" 2>&1; then
      run_tests @mps
    else
      echo "Not run: the MPS control daemon did not start: $(head -1 "$work/mps.log")" >>"$work/report"
    fi
    stop_mps
  fi
fi

if [[ $skip != *' sanitizer '* ]]; then
  printf '\n## compute-sanitizer\n\n' >>"$work/report"
  sanitizer=$(command -v compute-sanitizer /usr/local/cuda/bin/compute-sanitizer | head -1 || true)
  if [[ -z $sanitizer ]]; then
    echo "Not run: there is no compute-sanitizer." >>"$work/report"
  else
    printf '| tool | program | result | s |\n|---|---|---|---|\n' >>"$work/report"
    while read -r _ program seconds arguments; do
      for tool in memcheck racecheck; do
        name=$(basename "$program")@$tool
        # shellcheck disable=SC2086
        run "$name" "$seconds" "$sanitizer" --tool "$tool" --error-exitcode 9 --target-processes all "${with[@]}" "./$program" $arguments
        echo "| $tool | $(basename "$program") | $verdict, $(grep -o 'ERROR SUMMARY.*' "$work/$name.log" | tail -1 || true) | $took |" >>"$work/report"
        quote_failure "$name" "$verdict" >>"$work/failures"
      done
    done < <(programs sanitize)
  fi
fi

if [[ $skip != *' benchmarks '* ]]; then
  printf '\n## Benchmarks\n' >>"$work/report"
  number=0
  while read -r _ program seconds arguments; do
    number=$((number + 1))
    name=$(basename "$program")-$number
    # shellcheck disable=SC2086
    run "$name" "$seconds" "${with[@]}" "./$program" $arguments
    printf '\n`%s %s`: %s\n\n```\n%s\n```\n' "$(basename "$program")" "$arguments" "$verdict" "$(head -n 60 "$work/$name.log")" >>"$work/report"
  done < <(programs benchmark)
  script=$build/gpu_torch.py
  [[ -f $script ]] || script=$here/../benchmarks/gpu/torch_all_reduce.py
  if [[ -n $torch_lib && -f $script ]]; then
    run python-torch 180 python3 "$script"
    printf '\n`python torch`: %s\n\n```\n%s\n```\n' "$verdict" "$(grep -v Warning "$work/python-torch.log" | head -n 30)" >>"$work/report"
  fi
fi

[[ ! -s $work/failures ]] || { printf '\n## Failures\n'; cat "$work/failures"; } >>"$work/report"
mkdir -p "$(dirname "$output")"
cp "$work/report" "$output"
echo "gpu_check: the report is $output"
exit "$failed"
