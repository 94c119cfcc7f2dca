#!/usr/bin/env python3
"""PyTorch's collectives and messages with Gloo; arguments, requests and answers as the other contenders' (common/request.h).

What is sent and received, and how often, is defined in collective/case.h. The loop is that of measure.h.
"""

import ctypes
import json
import os
import statistics
import sys
import tempfile
import time

PARTS = 5
PERIOD = 1021
CLONE_NEWNET = 0x40000000


class Ranks:
    """The forked ranks of this program, with pipes from rank 0 to each of the others and back."""

    def __init__(self, size):
        self.size, self.rank, self._to, self._from = size, 0, [], []
        for rank in range(1, size):
            there, back = os.pipe(), os.pipe()
            if os.fork() == 0:
                self.rank = rank
                self._to, self._from = [os.fdopen(back[1], "w")], [os.fdopen(there[0])]
                os.close(there[1])
                os.close(back[0])
                return
            self._to.append(os.fdopen(there[1], "w"))
            self._from.append(os.fdopen(back[0]))
            os.close(there[0])
            os.close(back[1])

    def tell(self, value):
        """Rank 0's value, on every rank; None when rank 0 is gone."""
        if self.rank != 0:
            return json.loads(self._from[0].readline() or "null")
        for pipe in self._to:
            print(json.dumps(value), file=pipe, flush=True)
        return value

    def all(self, mine):
        """On rank 0 whether every rank said true; waits for all of them. On the others what they said."""
        if self.rank != 0:
            print(json.dumps(mine), file=self._to[0], flush=True)
            return mine
        return all([json.loads(pipe.readline() or "false") for pipe in self._from] + [mine])


def place_rank(arguments, ranks):
    """As common/place_rank.h; but Gloo has a thread of its own, so a rank is bound only where no core is to spare."""
    names = [name for name in arguments.get("namespaces", "").split(",") if name]
    if not names:
        cores = sorted(os.sched_getaffinity(0))
        if ranks.size >= len(cores):
            os.sched_setaffinity(0, {cores[ranks.rank % len(cores)]})
        return
    with open(f"/run/netns/{names[ranks.rank * len(names) // ranks.size]}", encoding="utf-8") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter the namespace")


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


def main():
    arguments = dict(word.split("=", 1) for word in sys.argv[1:])
    with tempfile.TemporaryDirectory() as meeting:
        ranks = Ranks(int(arguments["ranks"]))
        try:
            serve(arguments, ranks, meeting)
        except Exception as error:  # the harness is told, whatever it is
            if ranks.rank == 0:
                print(json.dumps({"error": str(error)}), flush=True)
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            if ranks.rank != 0:
                os._exit(0)  # the folder is rank 0's to remove
        while True:
            try:
                os.wait()  # so that the ranks' processor time counts as this contender's
            except ChildProcessError:
                break


def serve(arguments, ranks, meeting):
    place_rank(arguments, ranks)
    import torch  # after the fork: its threads would not survive one
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=ranks.rank, world_size=ranks.size)
    gloo = Gloo(torch, dist, ranks)
    if ranks.rank == 0:
        print(json.dumps({"ready": True}), flush=True)
    while True:
        line = ranks.tell(sys.stdin.readline() if ranks.rank == 0 else None)
        if not line:
            break
        answer = measure(gloo, ranks, dict(word.split("=", 1) for word in line.split()))
        if ranks.rank == 0:
            print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
