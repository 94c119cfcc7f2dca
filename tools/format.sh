#!/usr/bin/env bash
# Formats every tracked C and C++ file; with --check only says which ones differ, and fails.
set -euo pipefail
cd "$(dirname "$0")/.."
# Versions format differently; this one is Debian 12's.
format=$(command -v clang-format-14 || command -v clang-format || true)
if [[ -z $format ]] || ! git rev-parse --git-dir >/dev/null 2>&1; then
  echo "format: needs clang-format and a git checkout" >&2
  [[ -z ${LOCKSTEP_STRICT_CHECKS:-} ]] || exit 1
  exit 77  # ctest counts it as skipped
fi
[[ $($format --version) == *"version 14."* ]] || echo "format: warning: this is not clang-format 14" >&2
files() { git ls-files -z '*.h' '*.cpp' '*.c'; }
if [[ ${1:-} != --check ]]; then
  files | xargs -0 "$format" --style=file -i
  exit
fi
if ! complaints=$(files | xargs -0 "$format" --style=file --dry-run -Werror 2>&1); then
  echo "format: these files are not as .clang-format says; run make format"
  grep -o '^[^ :]*:[0-9]*:[0-9]*: error' <<<"$complaints" | cut -d: -f1,2 | sort -u -t: -k1,1 | sed 's/^/  /'
  exit 1
fi
