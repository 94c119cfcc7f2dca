"""The suite growth: what a world and its groups cost by the number of ranks, as processes and as threads."""

from . import rounds
from .suite import Suite

PHASES = ("init", "new_group", "first_all_reduce", "barrier", "destroy", "leave")
TORCH_UP_TO = 32  # ranks; its new_group takes a quarter of a second there


class Growth(Suite):
    name = "growth"

    def parts(self):
        return ["processes", "threads"]

    def commands(self, part):
        commands = {"lockstep": self.program("growth_lockstep")}
        if part == "processes":
            commands["torch"] = self.torch(program="growth/torch_growth.py")
        return commands

    def cases(self, _part):
        return self.options.ranks[self.name]

    def run(self, part, progress):
        for ranks in self.cases(part):
            entries = {"lockstep": self.asker("lockstep", kind=part, ranks=ranks)}
            if ranks <= TORCH_UP_TO:
                entries["torch"] = self.asker("torch", ranks=ranks)
            answers = self.play(f"growth {part}, {ranks} ranks", entries, progress, min(self.options.rounds, 5))
            yield from self._records(part, ranks, answers)

    def _records(self, part, ranks, answers):
        ours, theirs = answers.get("lockstep", []), answers.get("torch", [])
        for phase in PHASES:
            record = {"suite": self.name, "case": phase, "kind": part, "ranks": ranks, "unit": "us"}
            others = {"torch": [{"us": a[phase]} for a in theirs]} if theirs else {}
            rounds.compare(record, [{"us": a[phase]} for a in ours], others)
            if part == "processes":
                record["cpu"] = rounds.round_number(rounds.median_of(ours, f"{phase}_cpu"))
            yield record
        # Not a time: what a rank holds besides.
        for what in ("fds", "kib"):
            yield {"suite": self.name, "case": what, "kind": part, "ranks": ranks, "unit": what,
                   "lockstep": rounds.round_number(rounds.median_of(ours, what)),
                   "torch": rounds.round_number(rounds.median_of(theirs, what)) if theirs and what == "fds" else None}
