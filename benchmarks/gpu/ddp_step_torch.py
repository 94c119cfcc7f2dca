"""The rows of ddp_step_gpu.cpp by python torch's DistributedDataParallel, on the same GPU. Usage:

    python3 ddp_step_torch.py <ranks> [backend] [row...]

More than one rank on one GPU needs an NCCL that allows it (NCCL_MULTI_RANK_GPU_ENABLE=1, 2.30 or newer) or backend gloo.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

ROWS = {"grads": (2048, 8, 1024, False), "mlp256": (256, 8, 32, True), "mlp1024": (1024, 8, 32, True),
        "mlp4096": (4096, 8, 32, True)}


class Net(torch.nn.Module):
    def __init__(self, width, layers, bias):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=bias) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def seconds_per_step(net, optimizer, shape, updates, n_steps):
    x = torch.randn(shape, device="cuda:0")

    def once():
        optimizer.zero_grad(set_to_none=True)
        net(x).sum().backward()
        if updates:
            optimizer.step()

    once()
    torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(n_steps):
        once()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / n_steps


def rank_main(rank, ranks, backend, rows):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29555"))
    torch.cuda.set_device(0)
    dist.init_process_group(backend, rank=rank, world_size=ranks)
    for row in rows:
        width, layers, batch, updates = ROWS[row]
        torch.manual_seed(1)
        plain, wrapped = Net(width, layers, updates).cuda(), Net(width, layers, updates).cuda()
        model = DistributedDataParallel(wrapped, device_ids=[0])
        of_plain = torch.optim.SGD(plain.parameters(), 1e-6)
        of_model = torch.optim.SGD(wrapped.parameters(), 1e-6)
        without, with_ = [], []
        for i in range(9):
            n_steps = 50 if width <= 1024 else 15
            both = [seconds_per_step(plain, of_plain, (batch, width), updates, n_steps),
                    seconds_per_step(model, of_model, (batch, width), updates, n_steps)]
            slowest = torch.tensor(both, device="cuda:0", dtype=torch.double)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if i >= 2:
                without.append(slowest[0].item() * 1e3)
                with_.append(slowest[1].item() * 1e3)
        if rank == 0:
            a, b = statistics.median(without), statistics.median(with_)
            print(f"torch {row:<8} {ranks} ranks  without {a:8.3f} ms  with {b:8.3f} ms  ratio {b / a:.3f}  ({backend})",
                  flush=True)
    dist.destroy_process_group()


def main():
    ranks = int(sys.argv[1])
    backend = sys.argv[2] if len(sys.argv) > 2 else "nccl"
    rows = sys.argv[3:] or list(ROWS)
    if ranks == 1:
        rank_main(0, 1, backend, rows)
    else:
        mp.spawn(rank_main, (ranks, backend, rows), nprocs=ranks)


if __name__ == "__main__":
    main()
