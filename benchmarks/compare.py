#!/usr/bin/env python3
"""Two builds of lockstep beside each other: before and after a change, in turn, on this machine.

  benchmarks/compare.py --before A/build/release/benchmarks/contenders --after build/release/benchmarks/contenders \
      --suite all_reduce --suite store --turns 6 -- --ranks 2

Each turn runs run.py once with either folder, the other one first every second time, and starts the contenders anew:
a new process may have its memory elsewhere, which moves hot rows by more than most changes do. What follows `--` goes to
run.py. Peers are left out. Prints per row the medians and the ratio after/before: its median over the turns, and quartiles.
A row is marked when its whole middle half is above 1.05.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
SLOWER = 1.05
NAMES_A_ROW = ("suite", "kind", "case", "bytes", "ranks", "clients", "model", "hosts")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--before", required=True, help="folder of contenders")
    parser.add_argument("--after", required=True, help="folder of contenders")
    parser.add_argument("--suite", action="append", required=True, help="may be repeated")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("rest", nargs="*", help="for run.py, after --")
    return parser.parse_args()


def run_once(folder, options):
    """{row: us} of one run."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, os.path.join(HERE, "run.py"), "--contenders", folder, "--out", out, "--rounds", "1"]
        for suite in options.suite:
            command += ["--suite", suite]
        done = subprocess.run(command + options.rest, env={**os.environ, "LOCKSTEP_BENCH_TORCH": "0"},
                              capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"compare: run.py failed with the contenders in {folder}:\n{done.stdout}{done.stderr}")
        with open(os.path.join(out, "results.json"), encoding="utf-8") as results:
            records = json.load(results)
    return {tuple((key, record[key]) for key in NAMES_A_ROW if record.get(key) is not None): record["lockstep"]
            for record in records if record.get("lockstep")}


def summary(before, after):
    """(median before, median after, median ratio, lower and upper quartile of the ratios) over the turns."""
    ratios = sorted(b / a for a, b in zip(before, after))
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return statistics.median(before), statistics.median(after), statistics.median(ratios), quartiles[0], quartiles[2]


def main():
    options = parse_options()
    turns = {"before": [], "after": []}
    for turn in range(options.turns):
        print(f"\rturn {turn + 1} of {options.turns}", end="", file=sys.stderr, flush=True)
        for which in ("before", "after") if turn % 2 == 0 else ("after", "before"):
            turns[which].append(run_once(getattr(options, which), options))
    print(file=sys.stderr)
    slower = 0
    print(f"{'row':58} {'before':>10} {'after':>10}  ratio (middle half)")
    for row in turns["before"][0]:
        if not all(row in answers for answers in turns["before"] + turns["after"]):
            continue
        before, after, ratio, low, high = summary(*([a[row] for a in turns[w]] for w in ("before", "after")))
        slower += low > SLOWER
        words = " ".join(str(value) if key not in ("ranks", "clients") else f"{value} {key}" for key, value in row)
        print(f"{words:58} {before:10.4g} {after:10.4g}  {ratio:.2f} ({low:.2f}..{high:.2f}){'  slower' * (low > SLOWER)}")
    print(f"{slower} rows slower")
    return 0


if __name__ == "__main__":
    sys.exit(main())
