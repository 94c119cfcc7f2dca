#!/usr/bin/env python3
"""Puts libtorch into the per-user cache, where cmake/FindLibtorch.cmake looks for it. Usage: fetch_libtorch.py <version>

Every version has a folder of its own there: the headers and the libraries out of the wheels that tools/libtorch.txt pins for
it (tools/wheels.py).
"""

import re
import sys
from pathlib import Path

import wheels

PINS = Path(__file__).resolve().parent / "libtorch.txt"
LIBRARIES = frozenset({
    "torch/lib/libtorch_cpu.so",
    "torch/lib/libc10.so",
    "torch/lib/libc10_cuda.so",
    "torch/lib/libgomp.so.1",
    "nvidia/cu13/lib/libcudart.so.13",
    "nvidia/cu13/lib/libcupti.so.13",
})


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


def place_of(name):
    """Where a wheel's member goes below the target, or None."""
    if name.startswith("torch/include/"):
        return Path("include") / Path(name).relative_to("torch/include")
    if name in LIBRARIES:
        return Path("lib") / Path(name).name
    return None


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: fetch_libtorch.py <version>")
    version = sys.argv[1]
    wheels.Fetch(name="libtorch", target=wheels.cache_folder() / f"libtorch-{version}", pins=pins_of(version),
                 place_of=place_of, required=LIBRARIES, download_mb=553, unpacked_mb=520,
                 advice="With a libtorch of your own, set LIBTORCH_ROOT to its folder.").ensure()


if __name__ == "__main__":
    main()
