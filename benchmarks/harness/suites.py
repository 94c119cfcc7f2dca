"""The three suites: which contenders, which cases, which requests."""

import os
import shutil

from . import rounds
from .aims import size_text
from .contender import Contender, ContenderError

MIB = 1 << 20
# Rotating rows go through this much memory per rank, at least three buffers: with two ranks 512 MiB and more, so
# that what one all-reduce touched has left the caches before it is touched again.
ROTATE_BYTES = 256 * MIB


class Suite:
    """Contenders that could be started are in self.contenders; those that could not, in self.missing with the reason."""

    name = ""

    def __init__(self, options):
        self.options = options
        self.contenders = {}
        self.missing = {}

    def start(self):
        for name, (command, environment) in self.commands().items():
            if command is None:
                self.missing[name] = environment
                continue
            contender = Contender(name, command, os.path.join(self.options.out, f"{self.name}_{name}.log"), environment)
            try:
                contender.start()
                self.contenders[name] = contender
            except (ContenderError, OSError) as error:
                self.missing[name] = str(error)
                contender.stop()

    def stop(self):
        for contender in self.contenders.values():
            contender.stop()
        self.contenders = {}

    def program(self, name):
        """(command, environment), or (None, why) when it was not built."""
        path = os.path.join(self.options.contenders, name)
        return ([path], {}) if os.path.exists(path) else (None, f"{name} was not built")

    def asker(self, contender, **request):
        """A callable that measures once; None when the contender is not there."""
        if contender not in self.contenders:
            return None
        budget = self.options.budget_ms
        return lambda: self.contenders[contender].measure(budget_ms=budget, **request)

    def play(self, label, entries, progress):
        """Alternating rounds over the entries that are there; failures are told once and remembered."""
        entries = {key: ask for key, ask in entries.items() if ask is not None}
        progress.show(label)
        if not entries:
            progress.step()
            return {}
        answers, failures = rounds.alternate(entries, self.options.rounds, lambda _: None)
        for key, words in failures.items():
            self.missing.setdefault(f"{key} at {label}", words)
        progress.step()
        return answers


class AllReduce(Suite):
    name = "all_reduce"

    def commands(self):
        return {"limit": self.program("all_reduce_limit"), "openmpi": self._openmpi(),
                "lockstep": self.program("all_reduce_lockstep"),
                "lockstep_tensor": self.program("all_reduce_lockstep_tensor"), "torch": self._torch()}

    def _openmpi(self):
        command, environment = self.program("all_reduce_openmpi")
        if command is None or shutil.which("mpirun") is None:
            return None, "Open MPI is not here (Debian: openmpi-bin, libopenmpi-dev)"
        launch = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2"]
        if os.geteuid() == 0:
            launch.insert(1, "--allow-run-as-root")
        return launch + command, environment

    def _torch(self):
        if not self.options.python_torch:
            return None, "python torch is not importable here"
        here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        return [self.options.python_torch, os.path.join(here, "all_reduce", "torch_gloo.py")], {}

    def cases(self):
        """(bytes, number of buffers, suffix of the case)"""
        sizes = [4, 4096, 65536, MIB, 25 * MIB, 100 * MIB]
        if self.options.quick:
            sizes = [4096, MIB]
        for n_bytes in sizes:
            yield n_bytes, 1, ""
            if n_bytes >= MIB:
                yield n_bytes, max(3, -(-ROTATE_BYTES // n_bytes)), "_rotating"

    def n_steps(self):
        return len(list(self.cases()))

    def run(self, progress):
        places = [(case, contender, place) for contender, tail in (("lockstep", ""), ("lockstep_tensor", "_tensor"))
                  for place in ("zero_copy", "staged") for case in [place + tail]]
        for n_bytes, n_buffers, suffix in self.cases():
            shape = {"bytes": n_bytes, "buffers": n_buffers}
            entries = {name: self.asker(name, place="any", **shape) for name in ("limit", "openmpi", "torch")}
            for case, contender, place in places:
                entries[case] = self.asker(contender, place=place, **shape)
            answers = self.play(f"all_reduce {size_text(n_bytes)}{suffix.replace('_', ' ')}", entries, progress)
            for case, contender, _ in places:
                if contender == "lockstep_tensor" and contender not in self.contenders:
                    continue
                record = {"suite": self.name, "case": case + suffix, "ranks": 2, "bytes": n_bytes, "unit": "us",
                          "buffers": n_buffers}
                others = {name: answers.get(name, []) for name in ("limit", "openmpi", "torch")
                          if name != "torch" or name in self.contenders}
                yield rounds.compare(record, answers.get(case, []), others)


class Store(Suite):
    name = "store"

    def commands(self):
        return {"lockstep": self.program("store_lockstep"), "torch": self.program("store_torch")}

    def cases(self):
        return [(op, clients) for op in ("get", "set", "add") for clients in (1, 4)]

    def n_steps(self):
        return len(self.cases())

    def run(self, progress):
        for op, clients in self.cases():
            entries = {name: self.asker(name, op=op, clients=clients) for name in ("lockstep", "torch")}
            answers = self.play(f"store {op}, {clients} client{'s' * (clients > 1)}", entries, progress)
            record = {"suite": self.name, "case": op, "clients": clients, "unit": "us"}
            rounds.compare(record, answers.get("lockstep", []), {"torch": answers.get("torch", [])})
            for name in ("lockstep", "torch"):
                record[f"{name}_per_s"] = rounds.round_number(rounds.median_of(answers.get(name, []), "per_s"))
            yield record


class DdpStep(Suite):
    name = "ddp_step"

    def commands(self):
        return {"ddp_step": self.program("ddp_step")}

    def cases(self):
        return [(256, 8), (1024, 8)] if self.options.quick else [(256, 8), (1024, 8), (2048, 8)]

    def n_steps(self):
        return len(self.cases())

    def run(self, progress):
        for hidden, layers in self.cases():
            entries = {mode: self.asker("ddp_step", mode=mode, hidden=hidden, layers=layers)
                       for mode in ("local", "views", "copies")}
            answers = self.play(f"ddp_step {hidden}x{layers}", entries, progress)
            for mode in ("views", "copies"):
                record = {"suite": self.name, "case": f"{hidden}x{layers}_{mode}", "ranks": 2,
                          "bytes": 4 * layers * (hidden * hidden + hidden), "unit": "us"}
                yield rounds.compare(record, answers.get(mode, []), {"local": answers.get("local", [])})


SUITES = {suite.name: suite for suite in (AllReduce, Store, DdpStep)}
