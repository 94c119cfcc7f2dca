"""Which machine the numbers belong to, and how busy it was with something else."""

import os
import platform
import resource
import subprocess


class Disturbance:
    """How much of the machine others used: all processor time spent, less what our finished children spent."""

    def __init__(self):
        self.start = self._read()

    @staticmethod
    def _read():
        with open("/proc/stat", encoding="utf-8") as stat:
            ticks = [int(x) for x in stat.readline().split()[1:9]]
        second = os.sysconf("SC_CLK_TCK")
        children, own = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
        ours = sum(u.ru_utime + u.ru_stime for u in (children, own))
        total = sum(ticks) / second
        return total, total - (ticks[3] + ticks[4]) / second - ours

    def share(self):
        """Since the start, as a share of all cores' time. Call when the contenders have ended."""
        total, others = (now - before for now, before in zip(self._read(), self.start))
        return max(0.0, round(others / total, 3)) if total else 0.0


def _cpu_name():
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _last_level_cache():
    best = "unknown"
    folder = "/sys/devices/system/cpu/cpu0/cache"
    if os.path.isdir(folder):
        for index in sorted(os.listdir(folder)):
            path = os.path.join(folder, index, "size")
            if os.path.exists(path):
                with open(path, encoding="utf-8") as size:
                    best = size.read().strip()
    return best


def _first_line(command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.split("\n")[0]
    except OSError:
        return None


def describe():
    return {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "last_level_cache": _last_level_cache(),
            "kernel": platform.release(), "openmpi": _first_line(["mpirun", "--version"])}
