#!/usr/bin/env bash
# Builds what is installed (libraries, headers, the launcher, plug-ins) and installs it. Usage: install.sh <prefix>
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=${1:-}
[[ $prefix == /* ]] || { echo "install: give an absolute folder: make install PREFIX=/opt/lockstep" >&2; exit 2; }

tools/build.sh dev installed
folder=$(tools/build_dir.sh dev)
cmake --install "$folder" --prefix "$prefix" >"$folder/install.log" || { tail -n 5 "$folder/install.log" >&2; exit 1; }
libtorch=$(sed -n 's/^Libtorch_ROOT_DIR:[A-Z]*=//p' "$folder/CMakeCache.txt")
echo "install: in $prefix; a project finds it and its libtorch with -DCMAKE_PREFIX_PATH=\"$prefix;$libtorch\""
