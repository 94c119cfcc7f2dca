#!/usr/bin/env python3
"""PyTorch's all_reduce with Gloo, 2 ranks; same requests and answers as the other contenders (common/request.h)."""

import json
import os
import statistics
import sys
import tempfile
import time

RANKS = 2
PARTS = 5


def measure(torch, dist, rank, tell, request, kept):
    n = int(request["bytes"]) // 4
    n_buffers = int(request["buffers"])
    if kept.get("shape") != (n, n_buffers):
        kept.update(shape=(n, n_buffers), buffers=[torch.zeros(n) for _ in range(n_buffers)])
    buffers = kept["buffers"]
    buffers[0].fill_(rank + 1)
    dist.all_reduce(buffers[0])
    if not bool((buffers[0] == sum(range(1, RANKS + 1))).all()):
        raise RuntimeError("the all-reduce gave a wrong sum")
    for tensor in buffers:
        tensor.zero_()

    def loop(count):
        start = time.monotonic()
        for k in range(count):
            dist.all_reduce(buffers[k % n_buffers])
        return time.monotonic() - start

    goal = int(request["budget_ms"]) / 1000 / PARTS
    loop(n_buffers)
    took = loop(4) / 4
    count = tell(max(1, int(goal / took)))
    times = [loop(count) / count * 1e6 for _ in range(PARTS)]
    return {"us": statistics.median(times), "iterations": count * PARTS}


def main():
    pipe_in, pipe_out = os.pipe()
    meeting = tempfile.mkdtemp()
    rank = 0 if os.fork() else 1
    words_in = os.fdopen(pipe_in, "r")
    words_out = os.fdopen(pipe_out, "w", buffering=1)
    (words_in if rank == 0 else words_out).close()
    import torch  # after the fork: its threads would not survive one
    import torch.distributed as dist
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=RANKS)

    def tell(value):
        if rank == 0:
            words_out.write(f"{json.dumps(value)}\n")
            return value
        return json.loads(words_in.readline() or "null")

    if rank == 0:
        print(json.dumps({"ready": True}), flush=True)
    kept = {}
    while True:
        line = tell(sys.stdin.readline() if rank == 0 else None)
        if not line:
            break
        answer = measure(torch, dist, rank, tell, dict(word.split("=", 1) for word in line.split()), kept)
        if rank == 0:
            print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
