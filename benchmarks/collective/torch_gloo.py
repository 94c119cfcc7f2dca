#!/usr/bin/env python3
"""PyTorch's collectives and messages with Gloo; arguments, requests and answers as the other contenders' (common/request.h).

What is sent and received, and how often, is defined in collective/case.h. The loop is that of measure.h.
"""

import os
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "common"))
import torch_ranks  # noqa: E402

PARTS = 5
PERIOD = 1021


class Gloo:
    """Runs one kind of operation; `operations` is how many a turn has, `expected` what must be received."""

    def __init__(self, torch, dist, ranks):
        self.torch, self.dist, self.ranks = torch, dist, ranks
        self.key = None

    def prepare(self, kind, n_bytes, n_buffers):
        if self.key == (kind, n_bytes, n_buffers):
            return
        self.key, self.kind = (kind, n_bytes, n_buffers), kind
        self.partner = (self.ranks.rank + self.ranks.size // 2) % self.ranks.size
        self.operations = 2 if kind == "send_recv" else 1
        whole, root = n_bytes // 4, self.ranks.rank == 0
        self.block = max(1, whole // self.ranks.size)
        in_place = kind in ("broadcast", "all_reduce", "reduce")
        sizes = {"all_gather": (self.block, whole), "gather": (self.block, whole * root),
                 "reduce_scatter": (whole, self.block), "scatter": (whole * root, self.block)}.get(kind, (whole, whole))

        def made(n):
            return [self.torch.empty(n).zero_() for _ in range(n_buffers)]  # written, so that the pages are there
        self.send = made(sizes[0])
        self.recv = self.send if in_place else made(sizes[1])

    def run(self, i):
        getattr(self, "_" + self.kind)(self.send[i], self.recv[i])

    def _barrier(self, _send, _recv):
        self.dist.barrier()

    def _broadcast(self, send, _recv):
        self.dist.broadcast(send, 0)

    def _all_reduce(self, send, _recv):
        self.dist.all_reduce(send)

    def _reduce(self, send, _recv):
        self.dist.reduce(send, 0)

    def _all_gather(self, send, recv):
        self.dist.all_gather_into_tensor(recv, send)

    def _reduce_scatter(self, send, recv):
        self.dist.reduce_scatter_tensor(recv, send)

    def _all_to_all(self, send, recv):
        self.dist.all_to_all_single(recv, send)

    def _gather(self, send, recv):
        self.dist.gather(send, list(recv.split(self.block)) if self.ranks.rank == 0 else None, 0)

    def _scatter(self, send, recv):
        self.dist.scatter(recv, list(send.split(self.block)) if self.ranks.rank == 0 else None, 0)

    def _send_recv(self, send, recv):
        first = self.ranks.rank < self.partner
        if first:
            self.dist.send(send, self.partner)
        self.dist.recv(recv, self.partner)
        if not first:
            self.dist.send(send, self.partner)

    def _exchange(self, send, recv):
        sending = self.dist.isend(send, self.partner)
        self.dist.recv(recv, self.partner)
        sending.wait()

    def _sent_by(self, rank, begin, n):
        i = self.torch.arange(begin, begin + n)
        return ((i * 7 + rank * 13) % PERIOD).float()

    def _expected(self):
        rank, size, n = self.ranks.rank, self.ranks.size, self.recv[0].numel()
        if self.kind == "all_reduce" or (self.kind == "reduce" and rank == 0):
            return sum(self._sent_by(r, 0, n) for r in range(size))
        if self.kind == "reduce_scatter":
            return sum(self._sent_by(r, rank * n, n) for r in range(size))
        if self.kind in ("all_gather", "gather"):
            return self.torch.cat([self._sent_by(r, 0, self.block)[:n] for r in range(size)])
        if self.kind == "all_to_all":
            return self.torch.cat([self._sent_by(r, rank * self.block, self.block) for r in range(size)])
        if self.kind == "scatter":
            return self._sent_by(0, rank * n, n)
        if self.kind == "broadcast":
            return self._sent_by(0, 0, n)
        if self.kind in ("send_recv", "exchange"):
            return self._sent_by(self.partner, 0, n)
        return self.recv[0]

    def check(self):
        self.recv[0].fill_(-1)
        self.send[0].copy_(self._sent_by(self.ranks.rank, 0, self.send[0].numel()))
        self.run(0)
        expected = self._expected()
        if not self.ranks.all(self.recv[0].numel() == 0 or bool(self.torch.equal(self.recv[0], expected))):
            raise RuntimeError(f"{self.kind} gave a wrong result")
        for tensor in (self.send[0], self.recv[0]):
            tensor.zero_()


def measure(gloo, ranks, request):
    gloo.prepare(request["kind"], int(request["bytes"]), int(request["buffers"]))
    gloo.check()
    n_buffers = len(gloo.send)

    def loop(count):
        # The pipes end it, not dist.barrier, which takes Gloo as long as an operation.
        start = time.monotonic()
        for k in range(count):
            gloo.run(k % n_buffers)
        ranks.all(True)
        return time.monotonic() - start

    goal = int(request["budget_ms"]) / 1000 / PARTS
    count = 1
    if ranks.tell(loop(n_buffers) < 4 * goal * n_buffers):
        count = ranks.tell(max(1, int(2 * goal / min(loop(2), loop(2)))))
    times = [loop(count) / (count * gloo.operations) * 1e6 for _ in range(PARTS)]
    return {"us": statistics.median(times), "iterations": count * PARTS}


def prepare(arguments, ranks):
    torch_ranks.place_rank(arguments, ranks)

    def make_handler(torch, dist):
        gloo = Gloo(torch, dist, ranks)
        return lambda request: measure(gloo, ranks, request)
    return make_handler


if __name__ == "__main__":
    torch_ranks.run(prepare)
