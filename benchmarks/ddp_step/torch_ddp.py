#!/usr/bin/env python3
"""PyTorch's DistributedDataParallel with Gloo: the step of ddp_step.cpp, in the same modes and on the same shapes.

The models are models.h's, the loop is ddp_step.cpp's.
"""

import math
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "common"))
import torch_ranks  # noqa: E402


class TorchStep:
    def __init__(self, torch, ranks):
        self.torch, self.ranks = torch, ranks
        self.shape, self.trainings = None, {}

    def prepare(self, shape):
        if shape == self.shape:
            return
        self.shape, self.trainings = shape, {}
        self.torch.manual_seed(100 + self.ranks.rank)
        hidden, _, batch, _ = shape
        self.input = self.torch.randn(batch, hidden)
        self.target = self.torch.randn(batch, hidden)
        self.ranks.all(True)
        self.ranks.tell("prepared")

    def training(self, mode):
        if mode in self.trainings:
            return self.trainings[mode]
        nn, torch = self.torch.nn, self.torch
        hidden, layers, _, bias = self.shape
        torch.manual_seed(1)
        model = nn.Sequential(*(layer for _ in range(layers)
                                for layer in (nn.Linear(hidden, hidden, bias=bias), nn.ReLU())))
        if mode in ("views", "copies"):
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=mode == "views")
        elif mode != "local":
            raise ValueError(f"no mode named {mode}")
        self.trainings[mode] = model, torch.optim.SGD(model.parameters(), lr=1e-3)
        return self.trainings[mode]

    def timed(self, training):
        model, optimizer = training
        start = time.monotonic()
        optimizer.zero_grad()
        loss = self.torch.nn.functional.mse_loss(model(self.input), self.target)
        loss.backward()
        optimizer.step()
        if not math.isfinite(loss.item()):
            raise RuntimeError("the loss is not a number")
        return time.monotonic() - start

    def measure(self, request):
        self.prepare(tuple(int(request[key]) for key in ("hidden", "layers", "batch", "bias")))
        training = self.training(request["mode"])
        for _ in range(3):
            self.timed(training)
        one = self.timed(training)
        self.ranks.all(True)
        count = self.ranks.tell(max(5, int(int(request["budget_ms"]) / 1000 / one)))
        mine = statistics.median(self.timed(training) for _ in range(count))
        return {"us": self.ranks.mean(mine) * 1e6, "iterations": count}


def prepare(_arguments, ranks):
    torch_ranks.raise_malloc_thresholds()
    return lambda torch, _dist: TorchStep(torch, ranks).measure


if __name__ == "__main__":
    torch_ranks.run(prepare)
