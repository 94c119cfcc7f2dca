#!/usr/bin/env python3
"""Makes a small libnccl.so.2 for one GPU architecture, to carry it to a machine that has an older NCCL and no network.

A developer's tool: nothing of lockstep needs its result, and NCCL is never part of the tree. Two ranks on one GPU need
NCCL 2.30 or newer, while torch 2.11 brings 2.28.9. The library is 344 MB because it has code for eight architectures. The
code of all but one is overwritten with zeros; nothing moves, so that the driver, which picks its own architecture, finds
what it would have found. Compressed the result is small.

  prune_nccl.py [--wheel FILE] [--arch 90] [--output build/nccl-pruned]

Without --wheel the pinned version is fetched from PyPI (305 MB). Writes libnccl.so.2.xz; use: xz -d, then
LOCKSTEP_NCCL_LIBRARY=<folder>/libnccl.so.2.
"""

import argparse
import lzma
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

PIN = ("nvidia-nccl-cu13==2.32.3 "
       "--hash=sha256:1459723080ac889d73a26edfa3e04383a7928ab31ac8f0ec43b3ea9548b04ff3")
MEMBER = "nvidia/nccl/lib/libnccl.so.2"
SECTIONS = {b".nv_fatbin", b"__nv_relfatbin"}

# A fatbin is a header and entries, one per architecture:
#   u32 magic, u16 version, u16 size of this header, u64 size of all entries
#   u16 kind (1 PTX, 2 machine code), u16 version, u32 size of this header, u64 size of the payload, then at 28 u32 architecture
MAGIC = 0xBA55ED50
REGION = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQ")
ARCH_AT = 28


def fetch(folder):
    requirements = folder / "requirements.txt"
    requirements.write_text(PIN + "\n")
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir",
                    "--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", str(requirements),
                    "--dest", str(folder)], check=True)
    return next(folder.glob("*.whl"))


def sections(image):
    """(offset, size) of the sections that hold fatbins, from a 64-bit little-endian ELF file."""
    table, = struct.unpack_from("<Q", image, 0x28)
    width, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * width) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, size in headers:
        text = image[strings + name:image.index(b"\0", strings + name)]
        if bytes(text) in SECTIONS:
            yield offset, size


def prune(image, arch):
    """Zeroes payloads of other architectures in place; (kept, removed), bytes by architecture."""
    kept, removed = Counter(), Counter()
    for offset, size in sections(image):
        at, end = offset, offset + size
        while at + REGION.size <= end:
            magic, _, header, length = REGION.unpack_from(image, at)
            if magic != MAGIC:  # padding between fatbins
                at += 8
                continue
            entry, at = at + header, at + header + length
            while entry < at:
                _, _, entry_header, payload = ENTRY.unpack_from(image, entry)
                of, = struct.unpack_from("<I", image, entry + ARCH_AT)
                first, entry = entry + entry_header, entry + entry_header + payload
                if entry > at:
                    sys.exit("prune_nccl: an entry is longer than its fatbin: the format is another one")
                (kept if of == arch else removed)[of] += payload
                if of != arch:
                    image[first:entry] = bytes(payload)
    return kept, removed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="90: H100, H200; 80: A100")
    parser.add_argument("--output", type=Path, default=Path("build/nccl-pruned"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        wheel = arguments.wheel or fetch(Path(scratch))
        image = bytearray(zipfile.ZipFile(wheel).read(MEMBER))
    kept, removed = prune(image, arguments.arch)
    if not kept:
        sys.exit(f"prune_nccl: there is no code for sm_{arguments.arch}; there is for {sorted(removed)}")
    print(f"kept {sum(kept.values()) >> 20} MB of sm_{arguments.arch}, removed {sum(removed.values()) >> 20} MB of "
          f"{sorted(removed)}", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    result = arguments.output / "libnccl.so.2.xz"
    result.write_bytes(lzma.compress(image, preset=6))
    print(f"{result}: {result.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
