#!/usr/bin/env python3
"""PyTorch's RPC (TensorPipe) and distributed autograd: the requests of lockstep_rpc.cpp.

transport=host lets TensorPipe choose, transport=tcp leaves it TCP only.
"""

import contextlib
import functools
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "common"))
import torch_ranks  # noqa: E402

CALLEE = "worker1"
linear = None  # the callee's, since functions travel by name


def echo(tensor):
    return tensor


def make_linear(hidden):
    """The same numbers in every process."""
    import torch
    global linear
    torch.manual_seed(1)
    linear = torch.nn.Linear(hidden, hidden)
    return True


def forward(tensor):
    return linear(tensor)


@contextlib.contextmanager
def workers(arguments, _torch, dist, ranks, meeting):
    from torch.distributed import rpc
    only_tcp = {"_transports": ["uv"], "_channels": ["basic"]} if arguments["transport"] == "tcp" else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}/store", **only_tcp)
    rpc.init_rpc(f"worker{ranks.rank}", rank=ranks.rank, world_size=ranks.size, rpc_backend_options=options)
    yield
    rpc.shutdown()


class Caller:
    """Rank 0. Rank 1 answers from its agent's threads."""

    def __init__(self, torch, dist):
        from torch.distributed import rpc
        self.torch, self.rpc, self.autograd = torch, rpc, dist.autograd

    def measure(self, request):
        return getattr(self, "_" + request["kind"])(request)

    def _tensor(self, request):
        return self.torch.arange(int(request["bytes"]) // 4, dtype=self.torch.int32)

    def _call(self, tensor):
        return self.rpc.rpc_sync(CALLEE, echo, args=(tensor,))

    def _check(self, tensor, back):
        if not self.torch.equal(tensor, back):
            raise RuntimeError("the callee's tensor is another one")

    def _sync(self, request):
        tensor = self._tensor(request)
        for _ in range(3):
            self._check(tensor, self._call(tensor))
        us = samples(request, lambda: timed(lambda: self._call(tensor)))
        return {"us": statistics.median(us), "iterations": len(us)}

    def _async(self, request):
        tensor, window = self._tensor(request), int(request["window"])

        def flight():
            return self.torch.futures.wait_all([self.rpc.rpc_async(CALLEE, echo, args=(tensor,)) for _ in range(window)])
        for back in flight():
            self._check(tensor, back)
        us = sum(flights := samples(request, lambda: timed(flight))) / len(flights) / window
        return {"us": us, "per_s": 1e6 / us, "iterations": len(flights) * window}

    def _backward(self, request):
        torch, hidden = self.torch, int(request["hidden"])
        self.rpc.rpc_sync(CALLEE, make_linear, args=(hidden,))
        make_linear(hidden)
        x = torch.randn(int(request["batch"]), hidden, requires_grad=True)
        local, whole = self._local_backward(x), self._remote_backward(x)  # also to warm up
        if not torch.allclose(local[1], whole[1]):
            raise RuntimeError("the remote gradient is another one")
        both = samples(request, lambda: (self._local_backward(x)[0], self._remote_backward(x)[0]))
        local_us, whole_us = (statistics.median(each) for each in zip(*both))
        return {"us": whole_us - local_us, "local_us": local_us, "whole_us": whole_us, "iterations": len(both)}

    def _local_backward(self, x):
        x.grad = linear.weight.grad = linear.bias.grad = None
        loss = forward(x).sum()
        return timed(loss.backward), x.grad

    def _remote_backward(self, x):
        with self.autograd.context() as context:
            loss = self.rpc.rpc_sync(CALLEE, forward, args=(x,)).sum()
            return timed(lambda: self.autograd.backward(context, [loss])), self.autograd.get_gradients(context)[x]


def timed(function):
    """Microseconds."""
    start = time.monotonic_ns()
    function()
    return (time.monotonic_ns() - start) / 1e3


def samples(request, take):
    """What `take` gives, at least five times, until the request's time is over."""
    end = time.monotonic() + int(request["budget_ms"]) / 1e3
    taken = []
    while len(taken) < 5 or time.monotonic() < end:
        taken.append(take())
    return taken


def main():
    joined = {}

    def prepare(arguments, ranks):
        joined.update(arguments)
        return lambda torch, dist: Caller(torch, dist).measure if ranks.rank == 0 else lambda _request: None
    torch_ranks.run(prepare, functools.partial(workers, joined))


if __name__ == "__main__":
    main()
