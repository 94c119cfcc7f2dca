#!/usr/bin/env python3
"""Time of an all_reduce of python torch on CUDA memory, ranks as processes of one machine, to hold gpu_all_reduce against.

  torch_all_reduce.py [ranks = 2] [rounds = 5]

Over NCCL where every rank has a GPU; over Gloo, which copies through the host, where they share one: NCCL refuses that. Per
size: calls in a loop with one synchronisation at its end, and a synchronisation after each; microseconds per call, medians
over the rounds, of rank 0. Results are checked.
"""

import os
import sys
import time

SIZES = (4 << 10, 1 << 20, 25 << 20, 256 << 20)


def median(values):
    return sorted(values)[len(values) // 2]


def measure(torch, dist, x, synchronise, seconds=0.2):
    """Microseconds per call; every rank makes the same number of calls."""
    calls = torch.ones(1, dtype=torch.int64)
    begin = time.perf_counter()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    calls[0] = min(200, max(3, int(seconds / (time.perf_counter() - begin))))
    on = x.device if dist.get_backend() == "nccl" else "cpu"
    agreed = calls.to(on)
    dist.broadcast(agreed, 0)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(int(agreed)):
        dist.all_reduce(x)
        if synchronise:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6 / int(agreed)


def rank_main(rank, ranks, rounds, backend, port):
    import torch
    import torch.distributed as dist
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=ranks)
    for n_bytes in SIZES:
        x = torch.full((n_bytes // 4,), float(rank + 1), device=device)
        dist.all_reduce(x)
        assert bool((x == ranks * (ranks + 1) / 2).all()), "a result is wrong"
        x.zero_()
        times = [[measure(torch, dist, x, each) for _ in range(rounds)] for each in (False, True)]
        if rank == 0:
            print(f"torch {backend}  ranks {ranks}  {n_bytes:>10} bytes  loop {median(times[0]):9.1f} us  "
                  f"each {median(times[1]):9.1f} us", flush=True)
        del x
    dist.destroy_process_group()


def main():
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    import torch
    import torch.multiprocessing as processes
    if torch.cuda.device_count() == 0:
        sys.exit("torch sees no GPU")
    backend = "nccl" if torch.cuda.device_count() >= ranks else "gloo"
    processes.spawn(rank_main, (ranks, rounds, backend, 29500 + os.getpid() % 500), nprocs=ranks)


if __name__ == "__main__":
    main()
