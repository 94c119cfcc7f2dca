"""What the cases on DTensors share: where tensors come from, and what a rank has seen."""
import torch
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from parity import numbers, scrambled

MESHES = {"line": (2,), "square": (2, 2)}
CASES = {mesh: [] for mesh in MESHES}


def on(mesh):
    def add(case):
        CASES[mesh].append(case)
        return case
    return add


def text_of(placement):
    """As lockstep writes it. torch's own kinds of placements keep its names."""
    if type(placement) is Shard:
        return f"Shard({placement.dim})"
    if type(placement) is Partial:
        return f"Partial({placement.reduce_op})"
    if placement.is_replicate():
        return "Replicate()"
    if placement.is_partial():
        return f"{type(placement).__name__}({placement.reduce_op})"
    return f"{type(placement).__name__}({placement.dim},split_factor={placement.split_factor})"


class Run:
    """One world's cases on one rank: where tensors come from, and what has been seen."""

    def __init__(self, rank, dtype, mesh):
        self.rank = rank
        self.dtype = dtype
        self.mesh = mesh
        self.case = None
        self.values = {}
        self.placements = {}

    def plain(self, tag, *shape):
        return numbers(tag, *shape).to(self.dtype)

    def tensor(self, tag, shape, *placements, grad=False):
        return distribute_tensor(self.plain(tag, *shape), self.mesh, placements).requires_grad_(grad)

    def partial(self, tag, shape, *placements):
        """Each rank has its own part."""
        return DTensor.from_local(self.plain(tag + 50 * (1 + self.rank), *shape), self.mesh, placements, run_check=False)

    def plain_indices(self, tag, shape, below):
        count = torch.Size(shape).numel()
        return torch.tensor([scrambled(tag, i) % below for i in range(count)]).reshape(shape)

    def indices(self, tag, shape, below, *placements):
        return distribute_tensor(self.plain_indices(tag, shape, below), self.mesh, placements)

    @torch.no_grad()
    def see(self, name, tensor, whole=None):
        """`whole`: the full tensor, where it was made already. torch can reduce the result of a sharded table only once."""
        name = f"{self.case}.{name}"
        if isinstance(tensor, DTensor):
            self.placements[name] = [text_of(p) for p in tensor.placements]
            self.values[f"{name}.local"] = tensor.to_local().double().clone()
            whole = tensor.full_tensor() if whole is None else whole
        else:
            self.placements[name] = ["plain"]
            whole = tensor
        self.values[f"{name}.full"] = whole.double().clone()

    def finish(self, out, **leaves):
        """The result, and the gradients of the leaves when every element of the result has a weight of its own."""
        whole = out.full_tensor()
        self.see("out", out, whole)
        if leaves:
            (whole * self.plain(900, *out.shape)).sum().backward()
        for name, leaf in leaves.items():
            self.see(f"grad.{name}", leaf.grad)
