"""The suite ddp_step: a training step with DDP beside the same step without, and beside PyTorch's."""

from . import rounds
from .suite import Suite

# By name: Linear layers of hidden x hidden, how many, rows of the batch, with a bias or not.
MODELS = {
    "256x8": {"hidden": 256, "layers": 8, "batch": 32, "bias": 1},
    "1024x8": {"hidden": 1024, "layers": 8, "batch": 32, "bias": 1},
    "2048x8": {"hidden": 2048, "layers": 8, "batch": 16, "bias": 1},
    "32x200": {"hidden": 32, "layers": 200, "batch": 32, "bias": 0},
}
MODES = ("views", "copies")


def parameter_bytes(shape):
    return 4 * shape["layers"] * shape["hidden"] * (shape["hidden"] + shape["bias"])


class DdpStep(Suite):
    name = "ddp_step"

    def parts(self):
        return self.options.ranks[self.name]

    def commands(self, part):
        return {"lockstep": self.program("ddp_step", f"ranks={part}"),
                "torch": self.torch(f"ranks={part}", program="ddp_step/torch_ddp.py")}

    def cases(self, part):
        """Two ranks: every model, and Adam with its state in shares; with more, the one in the middle."""
        if part != 2:
            return ["1024x8"]
        return ["256x8", "1024x8", "zero"] if self.options.quick else [*MODELS, "zero"]

    def run(self, part, progress):
        for case in self.cases(part):
            yield from (self._zero(part, progress) if case == "zero" else self._steps(case, part, progress))

    def _steps(self, model, ranks, progress):
        entries = {f"{who} {mode}": self.asker(who, mode=mode, **MODELS[model])
                   for who in ("lockstep", "torch") for mode in ("local", *MODES)}
        answers = self.play(f"ddp_step {model}, {ranks} ranks", entries, progress)
        for mode in MODES:
            ours, theirs = answers.get(f"lockstep {mode}", []), answers.get(f"torch {mode}", [])
            record = {"suite": self.name, "case": f"{model}_{mode}", "ranks": ranks,
                      "bytes": parameter_bytes(MODELS[model]), "unit": "us"}
            others = {"local": answers.get("lockstep local", [])}
            if "torch" in self.contenders:
                others |= {"torch": theirs, "torch_local": answers.get("torch local", [])}
            rounds.compare(record, ours, others)
            record["torch_slowdown"] = rounds.round_number(rounds.ratio(theirs, others.get("torch_local", []))[0])
            if ours:
                record["extra_bytes"] = ours[-1]["extra_bytes"]
                record["extra_gradients"] = rounds.round_number(ours[-1]["extra_bytes"] / ours[-1]["gradient_bytes"])
            yield record

    def _zero(self, ranks, progress):
        shape = MODELS["1024x8"]
        entries = {mode: self.asker("lockstep", mode=mode, **shape) for mode in ("zero", "adam")}
        answers = self.play(f"ddp_step 1024x8 with Adam, {ranks} ranks", entries, progress)
        zero, adam = answers.get("zero", []), answers.get("adam", [])
        record = {"suite": self.name, "case": "1024x8_zero_adam", "ranks": ranks, "bytes": parameter_bytes(shape),
                  "unit": "us"}
        rounds.compare(record, zero, {"adam": adam})
        if zero and adam:
            record["state_bytes"], record["adam_state_bytes"] = zero[-1]["state_bytes"], adam[-1]["state_bytes"]
            record["state_share"] = rounds.round_number(record["state_bytes"] / record["adam_state_bytes"])
        yield record
