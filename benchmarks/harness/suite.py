"""What the suites have in common."""

import os
import shutil

from . import rounds
from .aims import size_text
from .contender import Contender, ContenderError

MIB = 1 << 20
# Rotating rows go through this much memory, all ranks together, and at least three buffers per rank, so that what one
# operation touched has left the caches before it is touched again.
ROTATE_BYTES = 512 * MIB


class Suite:
    """Contenders that could be started are in self.contenders; those that could not, in self.missing with the reason.

    A suite has parts, each with contenders of its own: start(part), run(part, progress), stop().
    """

    name = ""
    start_timeout_s = 120

    def __init__(self, options):
        self.options = options
        self.contenders = {}
        self.missing = {}

    def parts(self):
        return [""]

    def n_steps(self):
        return sum(len(list(self.cases(part))) for part in self.parts())

    def start(self, part):
        for name, (command, environment) in self.commands(part).items():
            label = " ".join(str(word) for word in (name, part) if word)
            if command is None:
                self.missing[label] = environment
                continue
            log = os.path.join(self.options.out, f"{self.name}_{label.replace(' ', '_')}.log")
            contender = Contender(name, command, log, environment)
            try:
                contender.start(self.start_timeout_s)
                self.contenders[name] = contender
            except (ContenderError, OSError) as error:
                self.missing[label] = str(error)
                contender.stop()

    def stop(self):
        for contender in self.contenders.values():
            contender.stop()
        self.contenders = {}

    def program(self, name, *arguments):
        """(command, environment), or (None, why) when it was not built."""
        path = os.path.join(self.options.contenders, name)
        return ([path, *arguments], {}) if os.path.exists(path) else (None, f"{name} was not built")

    def torch(self, *arguments, program="collective/torch_gloo.py"):
        if not self.options.python_torch:
            return None, "no Python with torch here (tools/bench_torch.sh)"
        here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        return [self.options.python_torch, os.path.join(here, program), *arguments], {}

    def asker(self, contender, **request):
        """A callable that measures once; None when the contender is not there."""
        if contender not in self.contenders:
            return None
        request.setdefault("budget_ms", self.options.budget_ms)
        return lambda: self.contenders[contender].measure(**request)

    def play(self, label, entries, progress, n_rounds=None):
        """Alternating rounds over the entries that are there; failures are told once and remembered."""
        entries = {key: ask for key, ask in entries.items() if ask is not None}
        progress.show(label)
        if not entries:
            progress.step()
            return {}
        answers, failures = rounds.alternate(entries, n_rounds or self.options.rounds, lambda _: None)
        for key, words in failures.items():
            self.missing.setdefault(f"{key} at {label}", words)
        progress.step()
        return answers


class RankSuite(Suite):
    """Suites whose parts are numbers of ranks on this machine.

    peers: contenders beside lockstep. ours: {case: (contender, place)}. budget: share of the time per measurement.
    cases(ranks): (kind, bytes, rotating).
    """

    peers = ()
    ours = {}
    budget = 1.0

    def parts(self):
        return self.options.ranks[self.name]

    def commands(self, part):
        names = list(self.peers) + [contender for contender, _ in self.ours.values()]
        return {name: self.command(name, part) for name in dict.fromkeys(names)}

    def command(self, name, ranks):
        if name == "openmpi":
            return self._openmpi(ranks)
        if name == "torch":
            return self.torch(f"ranks={ranks}")
        return self.program(f"collective_{name}", f"ranks={ranks}")

    def _openmpi(self, ranks):
        command, environment = self.program("collective_openmpi")
        if command is None or shutil.which("mpirun") is None:
            return None, "Open MPI is not here (Debian: openmpi-bin, libopenmpi-dev)"
        launch = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
        if os.geteuid() == 0:
            launch.insert(1, "--allow-run-as-root")
        return launch + command, environment

    def run(self, part, progress):
        for kind, n_bytes, rotating in self.cases(part):
            n_buffers = max(3, -(-ROTATE_BYTES // part // n_bytes)) if rotating else 1
            shape = {"kind": kind, "bytes": n_bytes, "buffers": n_buffers,
                     "budget_ms": max(10, round(self.budget * self.options.budget_ms))}
            entries = {name: self.asker(name, place="any", **shape) for name in self.peers}
            for case, (contender, place) in self.ours.items():
                entries[case] = self.asker(contender, place=place, **shape)
            words = [kind, f"{part} ranks"] + [size_text(n_bytes)] * (n_bytes > 0) + ["rotating"] * rotating
            answers = self.play(" ".join(words), entries, progress)
            others = {name: answers.get(name, []) for name in self.peers if name in self.contenders}
            for case, (contender, _) in self.ours.items():
                if contender in self.contenders:
                    record = {"suite": self.name, "kind": kind, "case": case + "_rotating" * rotating, "ranks": part,
                              "bytes": n_bytes, "unit": "us", "buffers": n_buffers}
                    yield rounds.compare(record, answers.get(case, []), others)
