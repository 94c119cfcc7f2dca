"""Which machine the numbers belong to, and how busy it was with something else."""

import os
import platform
import subprocess
import time


def _busy_share(seconds=1.0):
    """Share of all cores' time spent on anything but idling."""
    def read():
        with open("/proc/stat", encoding="utf-8") as stat:
            fields = [int(x) for x in stat.readline().split()[1:]]
        return sum(fields), fields[3] + fields[4]
    total, idle = read()
    time.sleep(seconds)
    total_after, idle_after = read()
    spent = total_after - total
    return 1 - (idle_after - idle) / spent if spent else 0.0


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
            "kernel": platform.release(), "openmpi": _first_line(["mpirun", "--version"]),
            "busy_before": round(_busy_share(), 3)}
