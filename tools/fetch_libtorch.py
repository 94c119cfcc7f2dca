#!/usr/bin/env python3
"""Puts libtorch into the per-user cache, where cmake/FindLibtorch.cmake looks for it. Usage: fetch_libtorch.py <version>

Every version has a folder of its own there.
Downloads the wheels that tools/libtorch.txt pins for it with pip (hashes checked; nothing is installed into any Python),
takes the headers and five libraries out of them, and renames the finished folder into place. A stamp file holds the
hash of the pins, so a second run returns at once, and a changed pin fetches again. Safe to run concurrently.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PINS = Path(__file__).resolve().parent / "libtorch.txt"
STAMP = ".lockstep-stamp"
DOWNLOAD_MB = 553
UNPACKED_MB = 520
# The one wheel per package that the hashes name; pip does not derive the older manylinux names by itself.
TAGS = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "none"]
for platform in ("manylinux_2_28", "manylinux_2_25", "manylinux_2_17", "manylinux2014"):
    TAGS += ["--platform", platform + "_x86_64"]
LIBRARIES = {
    "torch/lib/libtorch_cpu.so",
    "torch/lib/libc10.so",
    "torch/lib/libgomp.so.1",
    "nvidia/cu13/lib/libcudart.so.13",
    "nvidia/cu13/lib/libcupti.so.13",
}


def say(text):
    print(f"libtorch: {text}", flush=True)


def cache_folder():
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lockstep"


def read_pins(text):
    """{version: the lines of its wheels, as pip reads them}, in the order of the file"""
    sections = {}
    lines = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        heading = re.fullmatch(r"\[(\S+)\]", line)
        if heading:
            lines = sections.setdefault(heading.group(1), [])
        else:
            lines.append(line)
    return sections


def pins_of(version):
    sections = read_pins(PINS.read_text())
    if version not in sections:
        sys.exit(f"libtorch: no hashes are kept for version {version}; tools/libtorch.txt has "
                 f"{', '.join(sections)}. For a libtorch of your own, set LIBTORCH_ROOT to its folder.")
    return sections[version]


def is_complete(target, stamp):
    try:
        return (target / STAMP).read_text().strip() == stamp
    except OSError:
        return False


def size_mb(folder):
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            pass  # pip moves its files about
    return total >> 20


def download(pins, folder):
    """Runs pip, telling how far it is: its own progress bar shows only at a terminal."""
    temporary = folder / "tmp"
    temporary.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(pins) + "\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir",
               "--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", str(requirements),
               "--dest", str(folder), *TAGS]
    started = last = time.monotonic()
    pip = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)})
    while pip.poll() is None:
        time.sleep(0.2)
        if time.monotonic() - last >= 3:
            last = time.monotonic()
            say(f"{min(size_mb(temporary), DOWNLOAD_MB)} of {DOWNLOAD_MB} MB")
    if pip.returncode != 0:
        sys.exit("libtorch: pip could not download it. Is python3-pip installed, and PyPI or your registry "
                 "reachable? With a libtorch of your own, set LIBTORCH_ROOT to its folder.")
    shutil.rmtree(temporary)
    say(f"downloaded and checked in {time.monotonic() - started:.0f} s")


def destination(name):
    """Where a wheel's member goes below the target, or None."""
    if name.startswith("torch/include/") and not name.endswith("/"):
        return Path("include") / Path(name).relative_to("torch/include")
    if name in LIBRARIES:
        return Path("lib") / Path(name).name
    return None


def unpack(wheels, target):
    found = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                place = destination(member.filename)
                if place is None:
                    continue
                path = target / place
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, open(path, "wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
                if member.filename in LIBRARIES:
                    path.chmod(0o755)
                    found.add(member.filename)
        wheel.unlink()  # half a gigabyte that is not needed again
    if found != LIBRARIES:
        sys.exit(f"libtorch: the wheels lack {', '.join(sorted(LIBRARIES - found))}")


def replace(new, target):
    """Puts `new` where `target` is; a reader sees the old folder or the new one."""
    old = target.with_name(f"{target.name}.old.{os.getpid()}")
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def fetch(cache, target, pins, stamp):
    free_mb = shutil.disk_usage(cache).free >> 20
    need_mb = 2 * DOWNLOAD_MB + UNPACKED_MB  # pip keeps its download twice for a moment
    if free_mb < need_mb:
        sys.exit(f"libtorch: {cache} has {free_mb} MB left and {need_mb} are needed for a moment; "
                 "free some, or set XDG_CACHE_HOME to a larger place")
    with tempfile.TemporaryDirectory(prefix="fetch.", dir=cache) as scratch:
        wheels = Path(scratch) / "wheels"
        unpacked = Path(scratch) / "libtorch"
        wheels.mkdir()
        unpacked.mkdir()
        say(f"downloading {DOWNLOAD_MB} MB, once, into {target}")
        download(pins, wheels)
        say("unpacking")
        unpack(sorted(wheels.glob("*.whl")), unpacked)
        (unpacked / STAMP).write_text(stamp + "\n")
        replace(unpacked, target)
    say(f"ready in {target}")


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: fetch_libtorch.py <version>")
    version = sys.argv[1]
    pins = pins_of(version)
    stamp = hashlib.sha256("\n".join(pins).encode()).hexdigest()
    cache = cache_folder()
    target = cache / f"libtorch-{version}"
    if is_complete(target, stamp):
        return
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "fetch.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is fetching it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_complete(target, stamp):
            fetch(cache, target, pins, stamp)


if __name__ == "__main__":
    main()
