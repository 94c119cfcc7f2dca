#!/usr/bin/env python3
"""Fails when a test was skipped that tools/skips.txt does not expect, or an engine plug-in was not built.

A GoogleTest program with skipped cases passes, and ctest shows nothing of it: a suite can stop testing unnoticed. So
tools/test.sh makes every program write its report (GTEST_OUTPUT) and runs this as the last test.

  check_skips.py REPORTS [--plugins BUILD_TREE...]

A line of tools/skips.txt:  program  Suite.Name  when  reason     (blanks between them; * matches anything)
  when    always         the case does not apply there
          unless-root    only where the tests are not run as root
          no-namespaces  only where network and pid namespaces cannot be made (root, the ip tool)
          no-hostname    only where the machine cannot resolve its own name
          no-ipv6        only where there is no ::1
          no-cuda        only where there is no CUDA driver, or it has no device
  reason  how the skip's message begins; the test says why in those words
"""

import argparse
import fnmatch
import os
import shutil
import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ALLOWED = Path(__file__).resolve().parent / "skips.txt"
PLUGINS = ("lockstep_gloo.so", "lockstep_cuda_ipc.so", "lockstep_nccl.so")


def namespaces_can_be_made():
    try:
        made = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True)
        return made.returncode == 0 and shutil.which("ip") is not None
    except OSError:
        return False


def hostname_resolves():
    try:
        return bool(socket.getaddrinfo(socket.gethostname(), None))
    except OSError:
        return False


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


def has_cuda():
    """As the tests ask, in a process of its own: a driver may do anything."""
    ask = ("import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); n = ctypes.c_int(); "
           "raise SystemExit(cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(n)) != 0 or n.value == 0)")
    return subprocess.run([sys.executable, "-c", ask], capture_output=True).returncode == 0


CONDITIONS = {
    "always": lambda: True,
    "unless-root": lambda: os.geteuid() != 0,
    "no-namespaces": lambda: not namespaces_can_be_made(),
    "no-hostname": lambda: not hostname_resolves(),
    "no-ipv6": lambda: not has_ipv6(),
    "no-cuda": lambda: not has_cuda(),
}


class Allowed:
    def __init__(self, line, place):
        words = line.split(None, 3)
        if len(words) != 4 or words[2] not in CONDITIONS:
            sys.exit(f"{place}: expected: program Suite.Name {'|'.join(CONDITIONS)} reason")
        self.program, self.test, self.when, self.reason = words

    def covers(self, program, test, message):
        return (fnmatch.fnmatchcase(program, self.program) and fnmatch.fnmatchcase(test, self.test)
                and fnmatch.fnmatchcase(message, self.reason + "*") and CONDITIONS[self.when]())


def read_allowed(path):
    lines = path.read_text().splitlines()
    return [Allowed(line, f"{path.name}:{number}") for number, line in enumerate(lines, 1)
            if line.strip() and not line.startswith("#")]


def bare(classname, name):
    """Suite.Name without the instance and the parameter: Host/EngineContract.Meets/2 is EngineContract.Meets."""
    return f"{classname.rsplit('/', 1)[-1]}.{name.split('/', 1)[0]}"


def skipped_in(report):
    """(Suite.Name, message) of every case that did not run."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        test = bare(case.get("classname"), case.get("name"))
        skips = case.findall("skipped")
        if skips:
            # The message begins with a line of its own for file and line number.
            message = (skips[0].get("message") or "").partition("\n")[2] or skips[0].get("message") or ""
            yield test, message.strip()
        elif case.get("status") == "notrun":
            yield test, "disabled"


def check(reports, allowed):
    """(complaints, number of expected skips)."""
    files = sorted(reports.glob("*.xml"))
    if not files:
        return [f"there are no reports in {reports}: did the tests run without GTEST_OUTPUT?"], 0
    complaints, expected = [], 0
    for report in files:
        program = program_of(report)
        if report.stat().st_size == 0:  # GoogleTest makes the file first and writes it last
            complaints.append(f"{program} ended before it wrote its report")
            continue
        for test, message in skipped_in(report):
            if any(line.covers(program, test, message) for line in allowed):
                expected += 1
            else:
                complaints.append(f"{program}: {test} was skipped: {message}")
    return complaints, expected


def program_of(report):
    """The program's name: GoogleTest adds _1, _2 when several trees have one of that name."""
    stem, _, number = report.stem.rpartition("_")
    return stem if number.isdigit() else report.stem


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", type=Path)
    parser.add_argument("--plugins", nargs="*", type=Path, default=[], help="build trees that must hold every plug-in")
    arguments = parser.parse_args()
    complaints, expected = check(arguments.reports, read_allowed(ALLOWED))
    for tree in arguments.plugins:
        for plugin in PLUGINS:
            if not (tree / "lib/lockstep/engines" / plugin).exists():
                complaints.append(f"{tree}: {plugin} was not built; build/<preset>/configure.log says why")
    for complaint in complaints:
        print(complaint)
    if complaints:
        sys.exit(f"skips: {len(complaints)} tests did not run that should have (tools/skips.txt lists those that may)")
    print(f"skips: {expected} cases were skipped, each as tools/skips.txt expects")


if __name__ == "__main__":
    main()
