#!/usr/bin/env python3
"""Puts a CUDA compiler into the per-user cache, where cmake/FindNvcc.cmake looks for it. Usage: fetch_cuda.py

For machines without a CUDA toolkit: what nvcc needs to compile kernels to fatbins, out of the wheels that tools/cuda.txt pins
(tools/wheels.py). Nothing of it is needed at run time.
"""

import sys
from pathlib import Path

import wheels

PINS = Path(__file__).resolve().parent / "cuda.txt"
ROOT = "nvidia/cu13/"
PROGRAMS = frozenset(ROOT + name for name in ("bin/nvcc", "bin/cudafe++", "bin/fatbinary", "bin/ptxas", "nvvm/bin/cicc"))
FOLDERS = ("bin/", "include/", "nvvm/")
LEFT_OUT = {"bin/nvlink", "bin/bin2c", "bin/__nvcc_device_query"}  # of separate compilation; a third of the size


def read_pins(text):
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def version_of(pins):
    """13.0.88: of the compiler."""
    return next(line.split("==")[1].split()[0] for line in pins if line.startswith("nvidia-cuda-nvcc=="))


def place_of(name):
    """Where a wheel's member goes below the target, or None."""
    below = name.removeprefix(ROOT)
    wanted = name.startswith(ROOT) and below.startswith(FOLDERS) and below not in LEFT_OUT
    return Path(below) if wanted else None


def main():
    if len(sys.argv) != 1:
        sys.exit("usage: fetch_cuda.py")
    pins = read_pins(PINS.read_text())
    wheels.Fetch(name="cuda", target=wheels.cache_folder() / f"cuda-{version_of(pins)}", pins=pins, place_of=place_of,
                 required=PROGRAMS, download_mb=100, unpacked_mb=190,
                 advice="With a CUDA toolkit of your own, put its nvcc on PATH or set CUDA_HOME.").ensure()


if __name__ == "__main__":
    main()
