#!/usr/bin/env python3
"""Prints what a torch wheel needs for `import torch` and CPU tensors, one requirement per line, as pip reads them.

Usage: torch_needs.py <wheel>. What the wheel asks for beyond that is left out: the compiler (triton) and the CUDA
libraries that are loaded at first use only.
"""

import re
import sys
import zipfile

LEFT_OUT = {"triton", "cuda-bindings", "setuptools"}
LEFT_OUT_OF_CUDA = {"cusolver", "nvrtc", "nvtx"}  # extras of cuda-toolkit


def needs(metadata):
    for line in metadata.splitlines():
        if not line.startswith("Requires-Dist: "):
            continue
        requirement, _, marker = line.removeprefix("Requires-Dist: ").partition(";")
        name, extras, version = re.fullmatch(r"([\w.-]+)(?:\[([^]]*)\])?\s*(.*)", requirement.strip()).groups()
        if "extra ==" in marker or name.lower() in LEFT_OUT:
            continue
        kept = [extra for extra in (extras or "").split(",") if extra and extra not in LEFT_OUT_OF_CUDA]
        bracket = f"[{','.join(kept)}]" if kept else ""
        yield f"{name}{bracket}{version}" + (f" ;{marker}" if marker else "")


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: torch_needs.py <wheel>")
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        name = next(n for n in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        metadata = wheel.read(name).decode()
    print("\n".join(needs(metadata)))


if __name__ == "__main__":
    main()
