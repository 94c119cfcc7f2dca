"""The cases of tests/parity/sharded_*.cpp, run by python torch: torch.distributed.tensor over gloo, processes.

    python sharded.py results [--goldens folder]

Nothing is drawn at random: tensors are a formula of their tag (`parity.numbers`), the same as in models.h. The cases of a
mesh are run by one world, `line` of 2 ranks and `square` of 2 x 2. What a rank sees is written to two files:

    results/<mesh>.<type>.rank<rank>.txt            a tensor a line: <case>.<tensor>.local or .full, and its values
    results/<mesh>.<type>.rank<rank>.placements.txt <case>.<tensor>, and its placements

Goldens are the same in float64: placements and full values once for all ranks, and of the transformer not everything.
"""
import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sharded_operators  # noqa: F401  (adds its cases)
import sharded_transformer  # noqa: F401
from parity import TYPES, write
from sharded_run import CASES, MESHES, Run


def in_goldens(name, placements, rank):
    """Of the transformer: the ranks' parameters, before and after, the gradients of the first step, logits and losses."""
    tensor, kind = name.rsplit(".", 1)
    if kind == "full" and rank > 0:
        return False
    if not tensor.startswith("transformer"):
        return True
    when = tensor.split(".")[1]
    if when == "step0":
        return kind == "full"
    if when == "step1":
        return kind == "full" and tensor.endswith(".loss")
    return kind == "local" or placements[tensor] == ["plain"]


def write_placements(path, seen, title):
    with open(path, "w") as file:
        print(f"# {title}", file=file)
        for name, placements in seen.items():
            print(name, *placements, file=file)


def work(rank, arguments, mesh_name, meeting):
    torch.set_num_threads(1)
    shape = MESHES[mesh_name]
    ranks = torch.Size(shape).numel()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", shape)
    for type_name, dtype in TYPES.items():
        start = time.time()
        run = Run(rank, dtype, mesh)
        cases = [case for case in CASES[mesh_name] if type_name in getattr(case, "types", TYPES)]
        for case in cases:
            run.case = case.__name__
            case(run)
        title = f"{mesh_name}, rank {rank} of {ranks}, {type_name}; torch {torch.__version__}, gloo"
        base = f"{arguments.results}/{mesh_name}.{type_name}.rank{rank}"
        write(f"{base}.txt", run.values, title, digits=17)
        write_placements(f"{base}.placements.txt", run.placements, title)
        if arguments.goldens and type_name == "f64":
            some = {name: values for name, values in run.values.items() if in_goldens(name, run.placements, rank)}
            write(f"{arguments.goldens}/{mesh_name}.rank{rank}.txt", some, title, digits=9)
            if rank == 0:
                write_placements(f"{arguments.goldens}/{mesh_name}.placements.txt", run.placements, title)
        dist.barrier()
        if rank == 0:
            print(f"parity: torch   {mesh_name}, {len(cases)} cases, {type_name} {time.time() - start:5.1f} s", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="folder for what the ranks see")
    parser.add_argument("--goldens", help="folder of goldens to write anew")
    arguments = parser.parse_args()
    for folder in filter(None, (arguments.results, arguments.goldens)):
        os.makedirs(folder, exist_ok=True)
    for mesh_name, shape in MESHES.items():
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(work, (arguments, mesh_name, f"{folder}/meeting"),
                                        nprocs=torch.Size(shape).numel())


if __name__ == "__main__":
    main()
