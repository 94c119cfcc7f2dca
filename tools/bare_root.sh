#!/usr/bin/env bash
# Proves the README's two commands on a bare machine: makes a Debian 12 root with only git, make and python3-pip in
# FOLDER, clones this repository into it, and runs them there, each with its time. Needs root and debootstrap.
#
#   bare_root.sh FOLDER [command...]     default commands: "make run" "make test"
#   KEEP=1 bare_root.sh ...              leaves FOLDER behind for a look
#
# The package clients' own settings (apt sources and keys, pip's, certificates, proxies) come from this machine.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
[[ $# -ge 1 ]] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[[ $EUID -eq 0 ]] || { echo "bare_root: must be root (debootstrap, chroot, mount)" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "bare_root: apt-get install debootstrap" >&2; exit 1; }
# A mount namespace of our own: no mount below reaches this machine's /dev, and none can be left behind.
[[ -n ${LOCKSTEP_BARE_ROOT:-} ]] || LOCKSTEP_BARE_ROOT=1 exec unshare --mount --propagation private -- "$0" "$@"
mkdir -p "$1"
root=$(cd "$1" && pwd)
shift
commands=("$@")
[[ ${#commands[@]} -gt 0 ]] || commands=("make run" "make test")
# The folder is deleted at the end, so it must be ours alone.
[[ -z $(ls -A "$root") ]] || { echo "bare_root: $root is not empty" >&2; exit 1; }

mounted=()
mount_in() { mount "${@:1:$#-1}" "$root/${!#}"; mounted=("$root/${!#}" "${mounted[@]}"); }
clean_up() {
  local code=$? place
  for place in "${mounted[@]}"; do
    umount "$place" || umount -l "$place"
  done
  if [[ -z ${KEEP:-} ]] && ! grep -q " $root/" /proc/mounts; then
    rm -rf --one-file-system "$root"
  fi
  exit "$code"
}
trap clean_up EXIT

# The mirror this machine uses for the suite.
mirror=$(apt-get indextargets --format '$(SITE) $(RELEASE)' 'Created-By: Packages' 2>/dev/null |
  awk '$2 == "bookworm" {print $1; exit}')
seconds=$SECONDS
echo "bare_root: making a Debian 12 root in $root"
debootstrap --variant=minbase --include=git,make,python3,python3-pip,ca-certificates \
  bookworm "$root" "${mirror:-http://deb.debian.org/debian}" >"$root.log" 2>&1 ||
  { tail -n 20 "$root.log" >&2; exit 1; }
rm -f "$root.log"

# Symbolic links in the root point to this machine until chroot: never write through one.
copy() {
  [[ -e $1 ]] || return 0
  mkdir -p "$root$(dirname "$1")"
  cp -aL --remove-destination --no-preserve=ownership "$1" "$root$(dirname "$1")/"
}
rm -f "$root/etc/apt/sources.list"
for path in /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/apt.conf.d /etc/apt/auth.conf.d /etc/apt/trusted.gpg \
            /etc/apt/trusted.gpg.d /etc/apt/keyrings /usr/share/keyrings /etc/pip.conf /root/.config/pip /root/.pip \
            /etc/ssl/certs /usr/local/share/ca-certificates /etc/resolv.conf /etc/hosts; do
  copy "$path"
done
mount_in -t proc proc proc
mount_in -t sysfs -o ro sysfs sys
mount_in --bind /dev dev
mount_in -t devpts devpts dev/pts
mount_in -t tmpfs tmpfs dev/shm
git clone -q --no-local "$repository" "$root/root/lockstep"
echo "bare_root: made in $((SECONDS - seconds)) s, $(du -shx "$root" | cut -f1)"

# A clean environment, but for what the package clients read.
environment=(HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 TERM="${TERM:-dumb}")
while IFS= read -r -d '' variable; do
  case $variable in
    PIP_* | SSL_CERT_* | REQUESTS_CA_BUNDLE=* | [hH][tT][tT][pP]_[pP]* | [hH][tT][tT][pP][sS]_* | [nN][oO]_[pP]*)
      environment+=("$variable") ;;
  esac
done < <(env -0)
code=0
for command in "${commands[@]}"; do
  echo "bare_root: $command"
  seconds=$SECONDS
  env -i "${environment[@]}" chroot "$root" /bin/bash -c "cd /root/lockstep && $command" || code=$?
  echo "bare_root: $command ended with $code after $((SECONDS - seconds)) s"
  [[ $code -eq 0 ]] || break
done
echo "bare_root: $(du -shx "$root" | cut -f1) on disk"
exit "$code"
