#!/usr/bin/env python3
"""Holds that every clone compiles the same: else the compiler cache misses what another clone has compiled.

No -D and no source that the build writes may name the folder of the clone. ccache makes all other paths relative
(cmake/Tools.cmake); what a test must find, lockstep_test_path of cmake/Lockstep.cmake tells it.

  check_clones.py --build DIR    DIR: a configured build tree
"""

import json
import re
import shlex
from pathlib import Path

import complaints

# Two small sources that must know where the tree lies.
ALLOWED = {"LOCKSTEP_BUILT_ENGINES", "CHAR_GPT_TEXT"}


def check(root, entries):
    """Complaints about entries of compile_commands.json."""
    found = []
    for entry in entries:
        source = Path(entry["file"])
        name = source.relative_to(root) if source.is_relative_to(root) else source
        for word in shlex.split(entry["command"]):
            define = re.match(r"-D(\w+)=(.*)", word)
            if define and str(root) in define[2] and define[1] not in ALLOWED:
                found.append(f"{name}: {define[1]} names the clone: {define[2]}")
        if source.is_relative_to(root / "build") and str(root) in source.read_text():
            found.append(f"{name}: its text names the clone")
    return found


def main():
    arguments = complaints.parser(__doc__)
    arguments.add_argument("--build", type=Path, required=True)
    given = arguments.parse_args()
    entries = json.loads((given.build / "compile_commands.json").read_text())
    complaints.finish("check_clones", check(given.root, entries), f"{len(entries)} sources compile alike in every clone")


if __name__ == "__main__":
    main()
