#!/usr/bin/env bash
# Collects what a machine with a GPU needs to run tools/gpu_check.sh, into one folder that can be copied there: the tests
# labelled gpu, the benchmarks, the plug-ins, and the shared libraries they need beyond the C and C++ runtimes and torch.
# Nothing has to be installed or compiled there. Usage: pack_gpu.sh [--build DIR] [--output DIR] [--limit MIB]
#   --build    default build/gpu, which is configured (release, without the tensor band) and built when it is not given
#   --output   default build/gpu-pack
#   --limit    fails when the result is larger; default 18
set -euo pipefail
cd "$(dirname "$0")/.."
build='' output=build/gpu-pack limit=18
while [[ $# -gt 0 ]]; do
  case $1 in
    --build) build=$2 ;;
    --output) output=$2 ;;
    --limit) limit=$2 ;;
    *) echo "pack_gpu: no option $1" >&2; exit 2 ;;
  esac
  shift 2
done
if [[ -z $build ]]; then
  build=build/gpu
  cmake --preset release -DLOCKSTEP_TORCH=OFF -B "$build" >/dev/null
  cmake --build "$build" -j "$(tools/jobs.sh)" --target gpu_programs
fi

rm -rf "$output"
mkdir -p "$output/needed"
# Programs find plug-ins by their place in the build folder: the pack has the same places.
place() {
  [[ -f $build/$1 ]] || { echo "pack_gpu: $build/$1 was not built (cmake --build $build --target gpu_programs)" >&2; exit 1; }
  mkdir -p "$output/$(dirname "$1")"
  strip --strip-unneeded -o "$output/$1" "$build/$1"
}
while read -r program; do
  place "$program"
done < <(awk 'NF {print $2}' "$build/gpu_tests.txt" | sort -u)
for plugin in "$build"/lib/lockstep/engines/lockstep_*.so; do
  [[ $plugin == *_gloo.so ]] || place "${plugin#"$build"/}"
done

# Every machine has these, or must bring its own.
theirs='linux-vdso|ld-linux|libc|libm|libdl|libpthread|librt|libstdc\+\+|libgcc_s|libtorch[a-z_]*|libc10[a-z_]*|libcuda|libcudart|libcupti|libnccl|libgomp'
find "$output" -type f -perm -u+x -print0 | xargs -0 ldd 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  while read -r library; do
    name=$(basename "$library")
    [[ ! $name =~ ^($theirs)(-[0-9.]+)?\.so ]] || continue
    strip --strip-unneeded -o "$output/needed/$name" "$library"
  done

cp "$build/gpu_tests.txt" tools/gpu_check.sh "$output/"
cp benchmarks/gpu/torch_all_reduce.py "$output/gpu_torch.py"
{ git rev-parse --short HEAD 2>/dev/null || echo unknown; git diff --quiet HEAD 2>/dev/null || echo "and changes"; } | paste -sd ' ' >"$output/commit"
size=$(du -sk --apparent-size "$output" | cut -f1)
echo "pack_gpu: $output, $((size / 1024)).$((size % 1024 * 10 / 1024)) MiB; on the machine: $(basename "$output")/gpu_check.sh --output report.md"
((size <= limit * 1024)) || { echo "pack_gpu: that is more than $limit MiB" >&2; exit 1; }
