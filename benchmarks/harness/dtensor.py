"""The suite dtensor: DTensors beside what a program does without them, and beside PyTorch's."""

from . import rounds
from .suite import MIB, Suite

BLOCK = {"batch": 64, "hidden": 1024, "inner": 4096}
SIDE = 2560  # float32, 25 MiB
MOVES = {"S_R": "S(0) -> R", "P_R": "P -> R", "P_S": "P -> S(0)", "S_S": "S(0) -> S(1)", "C_S": "S(1) -> S(0)",
         "C_R": "S(1) -> R"}


class DTensor(Suite):
    name = "dtensor"

    def commands(self, _part):
        return {"lockstep": self.program("dtensor_lockstep", "ranks=2"),
                "torch": self.torch("ranks=2", program="dtensor/torch_dtensor.py")}

    def cases(self, _part):
        """(kind, move, place)."""
        moves = [("move", move, place) for place in ("shared", "ordinary") for move in MOVES]
        return [("add", "", ""), ("mul_", "", ""), ("mlp", "", "")] + (moves[:4] if self.options.quick else moves)

    def run(self, part, progress):
        for kind, move, place in self.cases(part):
            if kind == "mlp":
                yield self._record(kind, BLOCK, ("hand",), progress)
            elif kind == "move":
                shape = {"move": move, "place": place, "rows": SIDE, "columns": SIDE}
                beside = ("bare", "fresh") + ("copied",) * (move == "P_R")
                record = self._record(kind, shape, beside, progress)
                yield {**record, "case": MOVES[move], "kind": place, "bytes": 25 * MIB}
            else:
                yield self._over_plain(self._record(kind, {}, ("plain",), progress))

    def _record(self, kind, shape, beside, progress):
        """beside: what our contender measures in turns with DTensors, in the same request."""
        # Parts of a step of 20 ms need time; everything else is short.
        budget = self.options.budget_ms * (10 if kind == "mlp" else 3)
        entries = {name: self.asker(name, kind=kind, budget_ms=budget, **shape) for name in ("lockstep", "torch")}
        words = ["dtensor", kind, shape.get("move", ""), shape.get("place", "")]
        answers = self.play(" ".join(word for word in words if word), entries, progress)
        ours, theirs = answers.get("lockstep", []), answers.get("torch", [])
        others = {name: [{"us": a[f"{name}_us"]} for a in ours] for name in beside}
        if "torch" in self.contenders:
            others["torch"] = theirs
        record = {"suite": self.name, "case": kind, "ranks": 2, "unit": "us"}
        rounds.compare(record, ours, others)
        if theirs and "plain_us" in theirs[0]:
            record["torch_plain"] = rounds.round_number(rounds.median_of(theirs, "plain_us"))
        return record

    @staticmethod
    def _over_plain(record):
        """What a DTensor adds to the operator, in microseconds: the median over the rounds."""
        each = [a - b for a, b in zip(record["rounds"]["lockstep"], record["rounds"]["plain"])]
        record["over_plain"] = rounds.round_number(rounds.median_of([{"us": x} for x in each]))
        if record.get("torch") is not None:
            record["torch_over_plain"] = rounds.round_number(record["torch"] - record["torch_plain"])
        return record
