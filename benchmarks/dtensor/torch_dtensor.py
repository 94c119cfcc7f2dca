#!/usr/bin/env python3
"""PyTorch's DTensor with Gloo: the requests of lockstep_dtensor.cpp."""

import os
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "common"))
import torch_ranks  # noqa: E402

PARTS = 9


class TorchDTensor:
    def __init__(self, torch, ranks):
        from torch.distributed import device_mesh, tensor
        self.torch, self.ranks, self.dt = torch, ranks, tensor
        self.mesh = device_mesh.init_device_mesh("cpu", (ranks.size,))

    def measure(self, request):
        kind = request["kind"]
        loops = self._operator(kind) if kind in ("add", "mul_") else getattr(self, "_" + kind)(request)
        return self._measure(request, loops)

    def _measure(self, request, loops):
        """As measure_loops of loops.cpp. loops: {name in the answer: a turn}."""
        goal = int(request["budget_ms"]) / 1e3 / PARTS / len(loops)
        turns = {name: self._turns_for(turn, goal) for name, turn in loops.items()}
        us = {name: [] for name in loops}
        for _ in range(PARTS):
            for name, turn in loops.items():
                us[name].append(repeat(turn, turns[name]) / turns[name] * 1e6)
        return {**{name: statistics.median(each) for name, each in us.items()}, "iterations": turns["us"] * PARTS}

    def _turns_for(self, turn, goal):
        repeat(turn, 3)
        n = 1
        while True:
            took = self.ranks.tell(min(repeat(turn, n), repeat(turn, n)))
            if took * 4 >= goal:
                return max(1, int(goal * n / took))
            n *= 4

    def _operator(self, kind):
        plain = self.torch.ones(8, 8)
        sharded = self.dt.distribute_tensor(plain, self.mesh, [self.dt.Shard(0)])
        if kind == "add":
            return {"us": lambda: self.torch.add(sharded, sharded), "plain_us": lambda: self.torch.add(plain, plain)}
        mine, other = sharded.clone(), plain.clone()
        return {"us": lambda: mine.mul_(sharded), "plain_us": lambda: other.mul_(plain)}

    def _mlp(self, request):
        from torch.distributed.tensor import parallel
        torch, nn = self.torch, self.torch.nn
        batch, hidden, inner = (int(request[key]) for key in ("batch", "hidden", "inner"))
        torch.manual_seed(1)
        mlp = nn.Sequential(nn.Linear(hidden, inner), nn.ReLU(), nn.Linear(inner, hidden))
        parallel.parallelize_module(mlp, self.mesh, {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()})
        x, gradient = torch.randn(batch, hidden, requires_grad=True), torch.randn(batch, hidden)
        parameters = list(mlp.parameters())

        def step():
            for leaf in (*parameters, x):
                leaf.grad = None
            with torch.enable_grad():
                mlp(x).backward(gradient)
        return {"us": step}

    def _move(self, request):
        torch, dt = self.torch, self.dt
        placements = {"S": dt.Shard(0), "C": dt.Shard(1), "R": dt.Replicate(), "P": dt.Partial()}
        start, end = request["move"].split("_")
        to = placements["C" if start == "S" and end == "S" else end]
        sizes = [int(request["rows"]), int(request["columns"])]
        if start in "SC":
            sizes["SC".index(start)] //= self.ranks.size
        x = dt.DTensor.from_local(torch.zeros(sizes), self.mesh, [placements[start]], run_check=False)
        return {"us": lambda: x.redistribute(placements=[to])}


def repeat(turn, n):
    """Seconds for n turns."""
    start = time.monotonic()
    for _ in range(n):
        turn()
    return time.monotonic() - start


def prepare(arguments, ranks):
    torch_ranks.raise_malloc_thresholds()
    torch_ranks.place_rank(arguments, ranks)

    def make(torch, _dist):
        torch.set_grad_enabled(False)
        return TorchDTensor(torch, ranks).measure
    return make


if __name__ == "__main__":
    torch_ranks.run(prepare)
