#!/usr/bin/env python3
"""Trains a model on two ranks, takes the logging data of one step and draws it.

  timeline.py --out docs/images/ddp_timeline.svg
  timeline.py --data folder        rank0.json, rank1.json ... that a program wrote: model->logging_data().to_json()

Needs Python's own library and, without --data, the program of `ninja bench_ddp_timeline`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from harness import timeline

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def parse_options():
    parser = argparse.ArgumentParser(description="Draw one training step of DistributedDataParallel.")
    parser.add_argument("--out", help="the picture; default: docs/images/ddp_timeline.svg, or timeline.svg beside --data")
    parser.add_argument("--data", help="folder with rank<N>.json of a step of your own; nothing is run")
    parser.add_argument("--program", default=os.path.join(ROOT, "build/release/benchmarks/contenders/ddp_timeline"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024, help="Linear layers of hidden x hidden")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--cap-mb", type=float, default=4, help="bucket_cap_mb")
    parser.add_argument("--steps", type=int, default=60, help="train so many; the median of the later half is drawn")
    parser.add_argument("--keep", help="folder for the logging data")
    return parser.parse_args()


def record(options, folder):
    words = {"out": folder, "ranks": options.ranks, "hidden": options.hidden, "layers": options.layers,
             "batch": options.batch, "bias": 1, "cap_mb": options.cap_mb, "steps": options.steps}
    subprocess.run([options.program, *(f"{key}={value}" for key, value in words.items())], check=True, timeout=600)
    return load(folder, options.ranks)


def load(folder, n=None):
    """The data of ranks 0 to n - 1; without n, of all that are there. Exits naming the file that is missing or wrong."""
    ranks = []
    while n is None or len(ranks) < n:
        path = os.path.join(folder, f"rank{len(ranks)}.json")
        if n is None and ranks and not os.path.exists(path):
            break
        try:
            with open(path, encoding="utf-8") as data:
                ranks.append(json.load(data))
        except (OSError, ValueError) as error:
            sys.exit(f"timeline: {path}: {error}")
    return ranks


def main():
    options = parse_options()
    if options.data:
        ranks = load(options.data)
        out = options.out or os.path.join(options.data, "timeline.svg")
        try:
            timeline.draw(ranks, out, f"One step, {len(ranks)} rank{'s' if len(ranks) > 1 else ''}")
        except KeyError as error:
            sys.exit(f"timeline: {options.data}: {error} is missing; write model->logging_data().to_json() of a step "
                     "whose times are recorded")
    else:
        out = options.out or os.path.join(ROOT, "docs/images/ddp_timeline.svg")
        with tempfile.TemporaryDirectory() as scratch:
            if options.keep:
                os.makedirs(options.keep, exist_ok=True)
            ranks = record(options, options.keep or scratch)
        timeline.draw(ranks, out,
                      f"One step of an MLP {options.hidden}x{options.layers}, batch {options.batch}, "
                      f"{options.ranks} ranks, buckets of {options.cap_mb:g} MiB")
    print(f"written: {os.path.relpath(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
