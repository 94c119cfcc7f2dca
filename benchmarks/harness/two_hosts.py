"""Two hosts: network namespaces joined by a link of 1 Gbit/s, two ranks in each."""

import os
import shutil
import subprocess

from . import rounds
from .suite import MIB, Suite

RATE = "1gbit"
PREFIX = "lockstep-bench-"
INTERFACE = "eth0"
ADDRESSES = ("10.213.7.1", "10.213.7.2")
RANKS = 4


def why_not():
    """Why namespaces cannot be made here, or None."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found (Debian: iproute2)" if missing else None


def _do(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """Two namespaces and the link between them, there from make() to remove()."""

    def __init__(self):
        self.names = [f"{PREFIX}{os.getpid()}-{letter}" for letter in "ab"]

    def make(self):
        self._remove_left_over()
        try:
            for name in self.names:
                _do("ip", "netns", "add", name)
            _do("ip", "-n", self.names[0], "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns",
                self.names[1])
            for name, address in zip(self.names, ADDRESSES):
                _do("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
                for device in ("lo", INTERFACE):
                    _do("ip", "-n", name, "link", "set", device, "up")
                # A burst of two milliseconds: enough for the largest packets a virtual link carries, too little to matter.
                _do("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", RATE, "burst", "256kb",
                    "latency", "50ms")
        except OSError:
            self.remove()
            raise

    def remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)

    @staticmethod
    def _remove_left_over():
        """Those of runs that were killed."""
        for line in _do("ip", "netns", "list").splitlines():
            name = line.split()[0]
            if name.startswith(PREFIX) and not os.path.exists(f"/proc/{name[len(PREFIX):].split('-')[0]}"):
                subprocess.run(["ip", "netns", "delete", name], check=False)


class TwoHosts(Suite):
    """all_reduce over four ranks: hierarchical, flat over our Gloo plug-in and over PyTorch's, beside the bare link."""

    name = "two_hosts"
    backends = {"hierarchical": "hierarchical", "flat": "gloo"}  # by case

    def __init__(self, options):
        super().__init__(options)
        self.hosts = None

    def parts(self):
        return [RANKS]

    def cases(self, _part):
        return [MIB if self.options.quick else 25 * MIB]

    def start(self, part):
        reason = why_not()
        try:
            if reason is None:
                self.hosts = Hosts()
                self.hosts.make()
                super().start(part)
        except OSError as error:
            reason = str(error)
        if reason:
            self.missing["all of it"] = reason

    def stop(self):
        super().stop()
        if self.hosts:
            self.hosts.remove()
            self.hosts = None

    def commands(self, part):
        where = [f"ranks={part}", f"namespaces={','.join(self.hosts.names)}", f"address={ADDRESSES[0]}"]
        made = {"probe": self.program("two_hosts_probe", *where), "torch": self.torch(*where)}
        for case, backend in self.backends.items():
            made[case] = self.program("collective_lockstep_tensor", *where, f"backend={backend}")
        # As a launcher would set it; and what PyTorch needs to know about the link.
        environment = {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": INTERFACE}
        return {name: (command, environment if command else why) for name, (command, why) in made.items()}

    def run(self, part, progress):
        for n_bytes in self.cases(part):
            lane = {"kind": "exchange", "bytes": n_bytes // (part // 2)}
            entries = {name: self.asker(name, place="staged", buffers=1,
                                        **(lane if name == "probe" else {"kind": "all_reduce", "bytes": n_bytes}))
                       for name in ("probe", "torch", *self.backends)}
            # An operation takes longer than the whole budget, so a round is a dozen of them: fewer rounds will do.
            answers = self.play("all_reduce on two hosts", entries, progress, min(self.options.rounds, 3))
            for case in self.backends:
                if case not in self.contenders:
                    continue
                record = {"suite": self.name, "kind": "all_reduce", "case": case, "ranks": part, "bytes": n_bytes,
                          "unit": "us"}
                others = {name: answers.get(name, []) for name in ("probe", "torch") if name in self.contenders}
                if case != "flat" and "flat" in self.contenders:
                    others["flat"] = answers.get("flat", [])
                yield rounds.compare(record, answers.get(case, []), others)
