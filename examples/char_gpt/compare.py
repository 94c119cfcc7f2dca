#!/usr/bin/env python3
"""Measures what ranks are worth: the same training by one thread, by one rank with all cores, and by one rank per core.

The three take turns for a few rounds, so that whatever else the machine does falls on all of them alike; the speed-up
is the median of the rounds' ratios. One rank with all cores gets the batch of all ranks together, the same work per
step; one thread gets the batch of one rank, since its speed does not depend on it.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def measure(command, threads, seconds, batch):
    """Tokens per second of one short run."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        subprocess.run([*command, "--quiet", "--seconds", str(seconds), "--batch", str(batch), "--json", str(figures)],
                       env={**os.environ, "OMP_NUM_THREADS": str(threads)}, check=True)
        return json.loads(figures.read_text())["tokens_per_second"]


class OtherWork:
    """How much of the machine others use from now on; nothing where the kernel does not tell."""

    def __init__(self):
        self.start = self.read()

    @staticmethod
    def read():
        try:
            ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        except OSError:
            return None
        # All but idle and waiting for disks; the last two are parts of the first two.
        busy = (sum(ticks[:8]) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return time.monotonic(), busy - own

    def cores(self):
        now = self.read()
        return max(0.0, (now[1] - self.start[1]) / (now[0] - self.start[0])) if now and self.start else 0.0


def ratio_text(ours, theirs):
    ratios = [a / b for a, b in zip(ours, theirs)]
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launcher", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--trained", type=Path, required=True, help="figures of the run whose ranks to compare")
    parser.add_argument("--out", type=Path, required=True, help="file for the figures of the comparison")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each run")
    arguments = parser.parse_args()

    trained = json.loads(arguments.trained.read_text())
    ranks, batch = trained["ranks"], trained["batch"]
    if ranks == 1:
        print("speed-up: none to show, this machine has one core")
        return
    alone = ["env", "RANK=0", "WORLD_SIZE=1", arguments.program]  # on purpose: no warning
    contenders = {
        "1 rank, 1 thread": (alone, 1, batch),
        f"1 rank, {ranks} threads": (alone, ranks, batch * ranks),
        f"{ranks} ranks, 1 thread each": ([arguments.launcher, "run", "-n", str(ranks), "--", arguments.program], 1,
                                          batch),
    }
    print(f"\nspeed: {arguments.rounds} rounds of {len(contenders)} runs, {arguments.seconds:g} s each", flush=True)
    rates = {name: [] for name in contenders}
    others = OtherWork()
    for number in range(1, arguments.rounds + 1):
        for name, (command, threads, size) in contenders.items():
            rates[name].append(measure(command, threads, arguments.seconds, size))
        print(f"  round {number}: " + ", ".join(f"{name} {rates[name][-1]:,.0f}" for name in rates) + " tokens/s",
              flush=True)

    one_thread, all_cores, ours = rates.values()
    for name, values in rates.items():
        print(f"  {name:<24} {statistics.median(values):>10,.0f} tokens/s")
    print(f"speed-up of {ranks} ranks: {ratio_text(ours, one_thread)} over one rank with one thread,\n"
          f"                     {ratio_text(ours, all_cores)} over one rank with {ranks} threads")
    busy = others.cores()
    if busy > 0.1:
        print(f"the machine was not idle: others used {busy:.1f} of its {os.cpu_count()} cores meanwhile")
    figures = {"ranks": ranks, "tokens_per_second": rates, "cores_used_by_others": round(busy, 2)}
    arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"compare: {' '.join(error.cmd)} ended with {error.returncode}")
