#!/usr/bin/env python3
"""Runs the benchmarks: contenders take turns, results go to results.json, a table and pictures.

Needs the programs of `ninja lockstep_benchmarks` and Python's own library. docs/performance.md says what is measured.
"""

import argparse
import json
import os
import signal
import subprocess
import sys

from harness import aims, machine, plot, progress, table
from harness.suites import SUITES, default_ranks

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def parse_options():
    parser = argparse.ArgumentParser(description="Run lockstep's benchmarks.")
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="only this suite; may be repeated")
    parser.add_argument("--ranks", type=numbers, help="ranks per contender, such as 2,4 (default: by the number of cores)")
    parser.add_argument("--rounds", type=int, help="rounds per case (default 7, with --quick 3)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: a trial, not a measurement")
    parser.add_argument("--budget-ms", type=int, help="time per contender and round (default 150, with --quick 40)")
    parser.add_argument("--contenders", default=os.path.join(ROOT, "build/release/benchmarks/contenders"),
                        help="folder of the built contenders")
    parser.add_argument("--out", default=os.path.join(ROOT, "build/bench"), help="folder for results and pictures")
    options = parser.parse_args()
    options.suite = options.suite or list(SUITES)
    options.rounds = options.rounds or (3 if options.quick else 7)
    options.budget_ms = options.budget_ms or (40 if options.quick else 150)
    defaults = default_ranks(len(os.sched_getaffinity(0)))
    options.ranks = {suite: options.ranks or ranks for suite, ranks in defaults.items()}
    options.python_torch = find_python_torch()
    return options


def numbers(text):
    return [int(word) for word in text.split(",")]


def find_python_torch():
    """LOCKSTEP_BENCH_PYTHON (tools/bench.sh sets it) or this Python, when it has torch with Gloo; else None."""
    probe = "import torch.distributed as d, sys; sys.exit(0 if d.is_gloo_available() else 1)"
    if os.environ.get("LOCKSTEP_BENCH_TORCH") == "0":
        return None
    for python in (os.environ.get("LOCKSTEP_BENCH_PYTHON"), sys.executable):
        if python and subprocess.run([python, "-c", probe], stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return python
    return None


def run_suites(options):
    suites = [SUITES[name](options) for name in options.suite]
    bar = progress.Progress(sum(suite.n_steps() for suite in suites))
    records, missing = [], {}
    for suite in suites:
        for part in suite.parts():
            bar.show(f"{suite.name}: starting the contenders")
            try:
                suite.start(part)
                records += suite.run(part, bar)
            finally:
                suite.stop()
        missing.update({f"{suite.name}: {key}": why for key, why in suite.missing.items()})
    bar.close()
    return records, missing


def report(records, missing, about, options):
    print(f"\n{about['cpu']}, {about['cores']} cores, last level cache {about['last_level_cache']}, "
          f"kernel {about['kernel']}; {options.rounds} rounds")
    if about["used_by_others"] > 0.03:
        print(f"WARNING: others used {100 * about['used_by_others']:.0f} % of the machine meanwhile; "
              "these numbers are noisy.")
    for suite in options.suite:
        rows = [r for r in records if r["suite"] == suite]
        if rows:
            print(f"\n{suite}\n{table.suite_table(suite, rows)}")
    print(f"\nAims\n{table.aims_table(aims.hold_against(records, about['cores']))}")
    for key, why in missing.items():
        print(f"left out: {key}: {why}")


def main():
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that contenders and namespaces go too
    os.makedirs(options.out, exist_ok=True)
    about = machine.describe()
    disturbance = machine.Disturbance()
    records, missing = run_suites(options)
    about["used_by_others"] = disturbance.share()
    results = os.path.join(options.out, "results.json")
    with open(results, "w", encoding="utf-8") as out:
        out.write("[\n" + ",\n".join(json.dumps(r) for r in records) + "\n]\n")
    with open(os.path.join(options.out, "machine.json"), "w", encoding="utf-8") as out:
        json.dump({**about, "rounds": options.rounds, "left_out": missing}, out, indent=1)
    pictures = plot.draw(records, options.out)
    report(records, missing, about, options)
    print("\nwritten: " + " ".join(os.path.relpath(p) for p in [results] + pictures))
    return 0 if records else 1


if __name__ == "__main__":
    sys.exit(main())
