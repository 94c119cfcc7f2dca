"""Takes files out of wheels on PyPI into a folder of the per-user cache: for fetch_libtorch.py and fetch_cuda.py.

Wheels are downloaded with pip (hashes checked; nothing is installed into any Python), and the finished folder is renamed
into place. A stamp file holds a hash of what was asked for, so that a second run returns at once, and a changed pin, or
another choice of files, fetches again. Safe to run concurrently.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

STAMP = ".lockstep-stamp"
# The one wheel per package that the hashes name; pip does not derive the older manylinux names by itself.
TAGS = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "none"]
for platform in ("manylinux_2_28", "manylinux_2_25", "manylinux_2_17", "manylinux2014", "manylinux_2_12", "manylinux2010"):
    TAGS += ["--platform", platform + "_x86_64"]


def cache_folder():
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lockstep"


@dataclass
class Fetch:
    name: str  # in messages
    target: Path
    pins: list  # as pip reads them
    place_of: Callable[[str], Path | None]  # where a member of a wheel goes below the target
    required: frozenset  # members that must be there; they are made executable
    download_mb: int
    unpacked_mb: int
    advice: str  # what to do when it cannot be had

    def say(self, text):
        print(f"{self.name}: {text}", flush=True)

    def stamp(self):
        return hashlib.sha256("\n".join([*self.pins, *sorted(self.required)]).encode()).hexdigest()

    def is_complete(self):
        try:
            return (self.target / STAMP).read_text().strip() == self.stamp()
        except OSError:
            return False

    def ensure(self):
        """Returns when the target is complete; leaves the program when it cannot be had."""
        if self.is_complete():
            return
        cache = self.target.parent
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / "fetch.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.say("another run is fetching; waiting")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.is_complete():
                self.fetch(cache)

    def fetch(self, cache):
        free_mb = shutil.disk_usage(cache).free >> 20
        need_mb = 2 * self.download_mb + self.unpacked_mb  # pip keeps its download twice for a moment
        if free_mb < need_mb:
            sys.exit(f"{self.name}: {cache} has {free_mb} MB left and {need_mb} are needed for a moment; "
                     "free some, or set XDG_CACHE_HOME to a larger place")
        with tempfile.TemporaryDirectory(prefix="fetch.", dir=cache) as scratch:
            wheels = Path(scratch) / "wheels"
            unpacked = Path(scratch) / "unpacked"
            wheels.mkdir()
            unpacked.mkdir()
            self.say(f"downloading {self.download_mb} MB, once, into {self.target}")
            self.download(wheels)
            self.say("unpacking")
            self.unpack(sorted(wheels.glob("*.whl")), unpacked)
            (unpacked / STAMP).write_text(self.stamp() + "\n")
            replace(unpacked, self.target)
        self.say(f"ready in {self.target}")

    def download(self, folder):
        """Runs pip, telling how far it is: its own progress bar shows only at a terminal."""
        temporary = folder / "tmp"
        temporary.mkdir()
        requirements = folder / "requirements.txt"
        requirements.write_text("\n".join(self.pins) + "\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir",
                   "--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", str(requirements),
                   "--dest", str(folder), *TAGS]
        started = last = time.monotonic()
        pip = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)})
        while pip.poll() is None:
            time.sleep(0.2)
            if time.monotonic() - last >= 3:
                last = time.monotonic()
                self.say(f"{min(size_mb(temporary), self.download_mb)} of {self.download_mb} MB")
        if pip.returncode != 0:
            sys.exit(f"{self.name}: pip could not download it. Is python3-pip installed, and PyPI or your registry "
                     f"reachable? {self.advice}")
        shutil.rmtree(temporary)
        self.say(f"downloaded and checked in {time.monotonic() - started:.0f} s")

    def unpack(self, wheels, folder):
        found = set()
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.infolist():
                    place = None if member.is_dir() else self.place_of(member.filename)
                    if place is None:
                        continue
                    path = folder / place
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(member) as source, open(path, "wb") as sink:
                        shutil.copyfileobj(source, sink, 1 << 20)
                    if member.filename in self.required:
                        path.chmod(0o755)
                        found.add(member.filename)
            wheel.unlink()  # not needed again
        if found != self.required:
            sys.exit(f"{self.name}: the wheels lack {', '.join(sorted(self.required - found))}")


def size_mb(folder):
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            pass  # pip moves its files about
    return total >> 20


def replace(new, target):
    """Puts `new` where `target` is; a reader sees the old folder or the new one."""
    old = target.with_name(f"{target.name}.old.{os.getpid()}")
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)
