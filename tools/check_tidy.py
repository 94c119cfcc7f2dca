#!/usr/bin/env python3
"""Runs clang-tidy (.clang-tidy) over the sources of the comm band and of the plug-ins, and over the headers of the tree that
they include: its checks, and clang's own analysis of which mutex guards what (lockstep/base/detail/mutex.h), in one pass.

Sources are taken folder by folder, in batches that are one translation unit each, since most of the time goes into headers.
What was clean once is not looked at again: the per-user cache has an empty file per clean batch, named after all that it was
made of (clang-tidy, .clang-tidy, flags, the text of the sources and of every header of the tree that they reach).

  check_tidy.py --build DIR [--jobs N]    DIR: a configured build tree; the flags are read from it

Not the tensor band: clang 14 has no std::source_location, which its headers use.
Exit code 77 (ctest: skipped) where there is no clang-tidy, unless LOCKSTEP_STRICT_CHECKS is set.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import check_layers
import complaints

BATCH = 8
CACHE_DAYS = 30
# .clang-tidy chooses among the compiler's warnings too, but does not turn them on.
WARNINGS = ["-Wthread-safety"]
# A file that includes itself once per instruction set cannot share a translation unit.
ALONE = re.compile(r"foreach_target\.h")
# Clang 14 does not know this feature of a processor.
UNREADABLE = re.compile(r'__builtin_cpu_supports\("f16c"\)')
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)


def find_tidy():
    # Versions find different things; this one is Debian 12's.
    return shutil.which("clang-tidy-14") or shutil.which("clang-tidy")


def flags_of(command):
    """What the compiler must know to read a source: definitions, folders and the standard. Each is a tuple of words."""
    words = shlex.split(command)
    for at, word in enumerate(words):
        if word in ("-D", "-I", "-isystem") and at + 1 < len(words):
            yield (word, words[at + 1])
        elif re.match(r"-[DI].|-std=", word):
            yield (word,)


class Batch:
    def __init__(self, root, sources, flags):
        self.root, self.sources, self.flags = root, sources, flags

    def text(self):
        # clang-tidy minds included sources; these are meant.
        return "".join(f'#include "{self.root / source}"  // NOLINT\n' for source in self.sources)

    def reached(self):
        """The sources and the headers of the tree that they include, sorted."""
        reached, todo = set(), list(self.sources)
        while todo:
            name = todo.pop()
            path = self.root / name
            if name not in reached and path.is_file():
                reached.add(name)
                todo += INCLUDE.findall(path.read_text(errors="replace"))
        return sorted(reached)

    def key(self, version, rules):
        digest = hashlib.sha256()
        # Another clone finds what this one has seen.
        flags = " ".join(self.flags).replace(str(self.root), "")
        for part in (version, rules, *WARNINGS, flags, *self.sources):
            digest.update(part.encode() + b"\0")
        for name in self.reached():
            digest.update(name.encode() + b"\0" + (self.root / name).read_bytes() + b"\0")
        return digest.hexdigest()


def sources_of(tree):
    """(folder, sources) of each library of the comm band, then of each plug-in."""
    for name in tree.order:
        if name in tree.libraries and name in tree.below:
            library = tree.libraries[name]
            yield str(library.folder), [str(library.folder / source) for source in library.arguments.get("SOURCES", [])]
    for path in sorted((tree.root / "engines").glob("*/CMakeLists.txt")):
        folder = path.parent.relative_to(tree.root)
        for names in re.findall(r"add_library\(lockstep_\w+ MODULE([^)]*)\)", check_layers.strip_comments(path.read_text())):
            yield str(folder), [str(folder / source) for source in names.split()]


def batches_of(tree, database):
    """The batches of all libraries of the comm band and of the plug-ins. Raises KeyError when the build tree does not have one of them."""
    flags = {}  # of each folder, in order: all that one of its sources is compiled with
    for entry in database:
        match = re.search(r"((?:lockstep|engines)/(\w+))/CMakeFiles/lockstep_\2\.dir/", entry["command"])
        if match:
            flags.setdefault(match.group(1), {}).update(dict.fromkeys(flags_of(entry["command"])))
    for folder, sources in sources_of(tree):
        if folder.startswith("engines/") and folder not in flags:
            continue  # not built here
        text = {name: (tree.root / name).read_text() for name in sources if name.endswith(".cpp")}
        alone = [name for name in text if ALONE.search(text[name])]
        shared = [name for name in text if name not in alone and not UNREADABLE.search(text[name])]
        for names in [shared[at:at + BATCH] for at in range(0, len(shared), BATCH)] + [[name] for name in alone]:
            yield Batch(tree.root, names, [word for flag in flags[folder] for word in flag])


class Runner:
    def __init__(self, root, tidy):
        self.root, self.tidy = root, tidy
        self.version = subprocess.run([tidy, "--version"], capture_output=True, text=True, check=True).stdout
        self.rules = (root / ".clang-tidy").read_text()
        self.cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep" / "tidy"
        self.cache.mkdir(parents=True, exist_ok=True)
        self.n_run = 0
        for old in self.cache.iterdir():
            if old.stat().st_mtime < time.time() - CACHE_DAYS * 86400:
                old.unlink(missing_ok=True)

    def run(self, batch):
        """What clang-tidy has to say about one batch; "" when it is clean."""
        seen = self.cache / batch.key(self.version, self.rules)
        if seen.exists():
            os.utime(seen)
            return ""
        self.n_run += 1
        with tempfile.TemporaryDirectory() as scratch:
            unit = Path(scratch) / "batch.cpp"
            unit.write_text(batch.text())
            done = subprocess.run(
                [self.tidy, "--quiet", f"--config-file={self.root / '.clang-tidy'}",
                 f"--header-filter=^{re.escape(str(self.root))}/(lockstep|engines)/", str(unit), "--", *batch.flags, *WARNINGS],
                capture_output=True, text=True, check=False)
        if done.returncode == 0:
            seen.touch()
            return ""
        return (done.stdout or done.stderr).replace(f"{self.root}/", "").strip() or f"clang-tidy ended with {done.returncode}"


def main():
    parser = complaints.parser(__doc__)
    parser.add_argument("--build", type=Path, required=True, help="a configured build tree")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    tidy = find_tidy()
    if tidy is None:
        print("tidy: needs clang-tidy (Debian: clang-tidy)", file=sys.stderr)
        sys.exit(1 if os.environ.get("LOCKSTEP_STRICT_CHECKS") else 77)
    database = json.loads((arguments.build / "compile_commands.json").read_text())
    try:
        batches = list(batches_of(check_layers.Tree(arguments.root), database))
    except KeyError as folder:
        sys.exit(f"tidy: {arguments.build} has no target of folder {folder}; configure it anew")
    runner = Runner(arguments.root, tidy)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = list(filter(None, pool.map(runner.run, batches)))
    complaints.finish("tidy", found, f"{len(batches)} batches of the comm band and the plug-ins, {runner.n_run} of them new, all clean",
                      "batches with findings")


if __name__ == "__main__":
    main()
