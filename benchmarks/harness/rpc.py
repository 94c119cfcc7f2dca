"""The suite rpc: calls and backward passes between two processes, beside PyTorch's RPC."""

from . import rounds
from .aims import size_text
from .suite import MIB, Suite

WINDOW = 1000  # calls in flight
LINEAR = {"batch": 32, "hidden": 256}
MODES = ("smart", "fast")  # ours; PyTorch has the second


class Rpc(Suite):
    name = "rpc"

    def parts(self):
        """How messages may travel: whatever the host offers, or TCP over the loopback device only."""
        return ["host", "tcp"]

    def commands(self, part):
        return {"lockstep": self.program("rpc_lockstep", f"transport={part}"),
                "torch": self.torch("ranks=2", f"transport={part}", program="rpc/torch_rpc.py")}

    def cases(self, part):
        """(kind, bytes)."""
        if part == "tcp":
            return [("sync", 4)]
        return [("sync", 4), ("sync", MIB), ("sync", 16 * MIB), ("async", 4),
                ("backward", 4 * LINEAR["batch"] * LINEAR["hidden"])]

    def run(self, part, progress):
        for kind, n_bytes in self.cases(part):
            yield from getattr(self, "_" + kind)(n_bytes, part, progress)

    def _record(self, case, n_bytes, ours, theirs):
        record = {"suite": self.name, "case": case, "ranks": 2, "bytes": n_bytes, "unit": "us"}
        return rounds.compare(record, ours, {"torch": theirs} if "torch" in self.contenders else {})

    def _sync(self, n_bytes, part, progress):
        entries = {name: self.asker(name, kind="sync", bytes=n_bytes) for name in ("lockstep", "torch")}
        answers = self.play(f"rpc_sync {size_text(n_bytes)}, {part}", entries, progress)
        case = "sync" if part == "host" else "sync_tcp"
        yield self._record(case, n_bytes, answers.get("lockstep", []), answers.get("torch", []))

    def _async(self, n_bytes, _part, progress):
        entries = {name: self.asker(name, kind="async", bytes=n_bytes, window=WINDOW) for name in ("lockstep", "torch")}
        answers = self.play(f"rpc_async {size_text(n_bytes)}", entries, progress)
        record = self._record("async", n_bytes, answers.get("lockstep", []), answers.get("torch", []))
        for name in ("lockstep", "torch"):
            record[f"{name}_per_s"] = rounds.round_number(rounds.median_of(answers.get(name, []), "per_s"))
        yield record

    def _backward(self, n_bytes, _part, progress):
        """What a remote layer costs a backward pass beyond the same layer here; with both times it is the difference of."""
        entries = {mode: self.asker("lockstep", kind="backward", mode=mode, **LINEAR) for mode in MODES}
        entries["torch"] = self.asker("torch", kind="backward", **LINEAR)
        answers = self.play("rpc backward", entries, progress)
        for mode in MODES:
            both = {"lockstep": answers.get(mode, []), "torch": answers.get("torch", [])}
            record = self._record(f"backward_{mode}", n_bytes, both["lockstep"], both["torch"])
            for name, each in both.items():
                for part in ("local", "whole"):
                    record[f"{name}_{part}"] = rounds.round_number(rounds.median_of(each, f"{part}_us"))
            yield record
