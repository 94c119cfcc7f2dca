"""What the checkers of this folder have in common: where they look, and how they end."""

import argparse
import sys
from pathlib import Path


def parser(doc):
    """For a checker of the tree; its docstring's first line is the description."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--root", type=lambda text: Path(text).resolve(), default=Path(__file__).resolve().parent.parent)
    return made


def finish(name, complaints, fine, kind="complaints"):
    """Prints every complaint and exits with their number; or, when there are none, says that all is fine."""
    for complaint in complaints:
        print(complaint)
    if complaints:
        sys.exit(f"{name}: {len(complaints)} {kind}")
    print(f"{name}: {fine}")
