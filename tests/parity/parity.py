"""The cases of tests/parity/cases.cpp, trained by python torch: DistributedDataParallel over gloo, two processes.

    python parity.py results [--goldens folder] [--case name]...

Nothing is drawn at random: parameters and data are a formula of their number (`numbers`), the same as in models.h.
What a rank sees is written to results/<case>.<type>.rank<rank>.txt, a tensor a line: its name and its values, or `none`
for a gradient that is not there. Goldens are the same in float64, of a few steps.
"""
import argparse
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
STEPS = 20
UNEVEN_STEPS = (14, 20)  # by rank
BATCH, IN, WIDTH, OUT = 4, 4, 6, 2
SMALL_BUCKETS = 0.0001  # MiB: several buckets even for these models
GOLDEN_STEPS = (0, 1, 3, 10, 19)  # of which goldens hold the gradients; of parameters the last are enough
TYPES = {"f32": torch.float32, "f64": torch.float64}


# ---- values from numbers ----

def scrambled(tag, index):
    h = (tag * 0x9E3779B1 + index * 0x85EBCA77 + 1) & 0xFFFFFFFF
    h ^= h >> 16
    h = h * 0x7FEB352D & 0xFFFFFFFF
    h ^= h >> 15
    h = h * 0x846CA68B & 0xFFFFFFFF
    return h ^ h >> 16


def numbers(tag, *shape):
    """Between -1 and 1, exact in every type of 24 bits or more."""
    count = torch.Size(shape).numel()
    values = [((scrambled(tag, i) >> 8) - 2**23) / 2**23 for i in range(count)]
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


# ---- models ----

class Mlp(nn.Module):
    def __init__(self, width=WIDTH, bias=True):
        super().__init__()
        self.first = nn.Linear(IN, width, bias)
        self.second = nn.Linear(width, width, bias)
        self.last = nn.Linear(width, OUT, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Branches(nn.Module):
    """One of two layers is used, or neither; one never is."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(IN, WIDTH)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, OUT)

    def forward(self, x, way):
        y = torch.tanh(self.trunk(x))
        if way == 0:
            y = torch.tanh(self.left(y))
        elif way == 1:
            y = torch.tanh(self.right(y))
        return self.last(y)


class Repeats(nn.Module):
    """One layer is used twice, one never."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(IN, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, OUT)

    def forward(self, x):
        return self.last(torch.tanh(self.shared(torch.tanh(self.shared(torch.tanh(self.first(x)))))))


class Normed(nn.Module):
    """No bias before the norm: its gradient would be nothing but rounding."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(IN, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, OUT)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


class Bags(nn.Module):
    """Rows of a table, added up; their gradients are sparse."""
    ROWS = 12

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(self.ROWS, WIDTH, mode="sum", sparse=True)
        self.last = nn.Linear(WIDTH, OUT)

    def forward(self, rows):
        return self.last(torch.tanh(self.table(rows)))


# ---- what the cases share ----

class Run:
    """One case on one rank: where values come from, and what has been seen."""

    def __init__(self, rank, dtype):
        self.rank = rank
        self.dtype = dtype
        self.seen = {}

    def fill(self, net):
        """Ranks begin differently; DistributedDataParallel takes rank 0's."""
        net.to(self.dtype)
        with torch.no_grad():
            for i, parameter in enumerate(net.parameters()):
                parameter.copy_(0.5 * numbers(1 + i + 100 * self.rank, *parameter.shape))
        return net

    def input(self, step, part=0):
        return numbers(1000 + 10 * step + 2 * part + self.rank, BATCH, IN).to(self.dtype)

    def rows(self, step):
        return torch.tensor([[scrambled(3000 + 10 * step + self.rank, 3 * i + j) % Bags.ROWS for j in range(3)]
                             for i in range(BATCH)])

    def target(self, step, part=0):
        return numbers(2000 + 10 * step + 2 * part + self.rank, BATCH, OUT).to(self.dtype)

    def loss(self, output, step, part=0):
        return nn.functional.mse_loss(output, self.target(step, part))

    def see(self, name, tensor):
        if tensor is not None:
            tensor = tensor.detach()
            tensor = tensor.to_dense() if tensor.is_sparse else tensor.clone()
        self.seen[name] = tensor

    def see_parameters(self, when, net):
        for name, parameter in net.named_parameters():
            self.see(f"{when}.param.{name}", parameter)
        for name, buffer in net.named_buffers():
            self.see(f"{when}.buffer.{name}", buffer)

    def train(self, net, optimizer, backward, steps=STEPS):
        """`backward` runs forward and backward of a step and returns the loss."""
        for step in range(steps):
            optimizer.zero_grad()
            self.see(f"step{step}.loss", backward(step))
            for name, parameter in net.named_parameters():
                self.see(f"step{step}.grad.{name}", parameter.grad)
            optimizer.step()
            self.see_parameters(f"step{step}", net)

    def mse_backward(self, model):
        def backward(step):
            loss = self.loss(model(self.input(step)), step)
            loss.backward()
            return loss
        return backward

    def accumulating_backward(self, model):
        """Two parts a step; only the second is synced."""
        def backward(step):
            with model.no_sync():
                local = self.loss(model(self.input(step, 0)), step, 0)
                local.backward()
            synced = self.loss(model(self.input(step, 1)), step, 1)
            synced.backward()
            return local + synced
        return backward


def sgd(net, momentum=0.9):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum)


def only_f64(case):
    case.types = ["f64"]
    return case


# ---- the cases ----

def plain(run):
    net = run.fill(Mlp())
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS)
    run.train(net, sgd(net), run.mse_backward(model))


def bucket_views(run):
    net = run.fill(Mlp())
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS, gradient_as_bucket_view=True)
    run.train(net, sgd(net), run.mse_backward(model))


def no_sync(run):
    net = run.fill(Mlp())
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS)
    run.train(net, sgd(net), run.accumulating_backward(model))


def find_unused(run):
    """Ranks take the same way in three steps of four, and different ones in the fourth."""
    net = run.fill(Branches())
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS, find_unused_parameters=True)

    def backward(step):
        way = (step + (run.rank if step % 4 == 3 else 0)) % 3
        loss = run.loss(model(run.input(step), way), step)
        loss.backward()
        return loss

    run.train(net, sgd(net), backward)


def static_graph(run):
    net = run.fill(Repeats())
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS, static_graph=True)
    run.train(net, sgd(net), run.mse_backward(model))


def buffers(run):
    net = run.fill(Normed())
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS)
    run.train(net, sgd(net), run.mse_backward(model))


def sparse(run):
    net = run.fill(Bags())
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS)

    def backward(step):
        loss = run.loss(model(run.rows(step)), step)
        loss.backward()
        return loss

    run.train(net, sgd(net, momentum=0), backward)


def fp16_hook(run):
    net = run.fill(Mlp())
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    run.train(net, sgd(net), run.mse_backward(model))


def power_sgd_run(run, bias=False, **options):
    """One bucket: torch starts the second exchange in callbacks, whose order over several buckets is left to chance."""
    net = run.fill(Mlp(12, bias))
    model = DistributedDataParallel(net)
    state = powerSGD_hook.PowerSGDState(None, min_compression_rate=1, random_seed=5, **options)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    run.train(net, sgd(net), run.mse_backward(model))


def power_sgd(run):
    power_sgd_run(run, matrix_approximation_rank=1, start_powerSGD_iter=3)


def power_sgd_cold(run):
    """A new random Q in every step: the whole sequence of seeds."""
    power_sgd_run(run, matrix_approximation_rank=1, start_powerSGD_iter=2, warm_start=False)


@only_f64
def power_sgd_rank2(run):
    """Two columns, and biases, which are not compressed. In float32 torch's own rounding exceeds the bound here: it
    orthogonalises once where lockstep does so twice, and carries an error over for what was sent exactly."""
    power_sgd_run(run, bias=True, matrix_approximation_rank=2, start_powerSGD_iter=2)


def zero(run):
    net = run.fill(Mlp())
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.005)
    run.train(net, optimizer, run.mse_backward(model))


def post_local_sgd(run):
    """Five steps together, then each rank alone, with the parameters averaged every fourth step."""
    net = run.fill(Mlp())
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS)
    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=5)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(sgd(net), PeriodicModelAverager(period=4, warmup_steps=5))
    run.train(net, optimizer, run.mse_backward(model))


def join_run(run, divide_by_initial_world_size):
    """Rank 0 runs out of data first."""
    net = run.fill(Normed())
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS)
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        run.train(net, sgd(net), run.mse_backward(model), steps=UNEVEN_STEPS[run.rank])
    run.see_parameters("end", net)


def join_initial(run):
    join_run(run, True)


def join_active(run):
    join_run(run, False)


def join_no_sync(run):
    """Each step in two parts, of which the first is local: the rank that is out of data follows the second alone."""
    net = run.fill(Mlp())
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS)
    with model.join():
        run.train(net, sgd(net), run.accumulating_backward(model), steps=UNEVEN_STEPS[run.rank])
    run.see_parameters("end", net)


def join_zero(run):
    """Plain Adam here: ZeroRedundancyOptimizer is to do the same. torch's own does not under join: on a rank that is out
    of data it goes on with the gradients of that rank's last step, since DistributedDataParallel does not set new ones."""
    net = run.fill(Mlp())
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.005)
    with model.join():
        run.train(net, optimizer, run.mse_backward(model), steps=UNEVEN_STEPS[run.rank])
    run.see_parameters("end", net)


# What torch 2.11 cannot be asked on the CPU: batched_powerSGD_hook (fails an assertion of its own), optimizers inside
# backward (wants a CUDA stream), delay_all_reduce_named_params (nobody waits for the reduction: every run differs).
CASES = [plain, bucket_views, no_sync, find_unused, static_graph, buffers, sparse, fp16_hook, power_sgd, power_sgd_cold,
         power_sgd_rank2, zero, post_local_sgd, join_initial, join_active, join_no_sync,
         join_zero]


# ---- running them ----

def in_goldens(name):
    when, what = name.split(".")[:2]
    if when == "end" or what == "loss":
        return True
    step = int(when.removeprefix("step"))
    return step in GOLDEN_STEPS if what == "grad" else step == STEPS - 1


def write(path, seen, title, digits):
    with open(path, "w") as file:
        print(f"# {title}", file=file)
        for name, tensor in seen.items():
            values = "none" if tensor is None else " ".join(f"{v:.{digits}g}" for v in tensor.flatten().tolist())
            print(name, values, file=file)


def work(rank, arguments, meeting):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    for case in (c for c in CASES if not arguments.case or c.__name__ in arguments.case):
        start = time.time()
        for type_name in getattr(case, "types", TYPES):
            run = Run(rank, TYPES[type_name])
            case(run)
            title = f"{case.__name__}, rank {rank} of {RANKS}, {type_name}; torch {torch.__version__}, gloo"
            write(f"{arguments.results}/{case.__name__}.{type_name}.rank{rank}.txt", run.seen, title, digits=17)
            if arguments.goldens and type_name == "f64":
                some = {name: tensor for name, tensor in run.seen.items() if in_goldens(name)}
                write(f"{arguments.goldens}/{case.__name__}.rank{rank}.txt", some, title, digits=9)
        dist.barrier()
        if rank == 0:
            print(f"parity: torch   {case.__name__:20} {time.time() - start:5.1f} s", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="folder for what the ranks see")
    parser.add_argument("--goldens", help="folder of goldens to write anew")
    parser.add_argument("--case", action="append", help="this one only")
    arguments = parser.parse_args()
    unknown = set(arguments.case or []) - {c.__name__ for c in CASES}
    if unknown:
        sys.exit(f"parity: no such case: {', '.join(sorted(unknown))}")
    os.makedirs(arguments.results, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (arguments, f"{folder}/meeting"), nprocs=RANKS)


if __name__ == "__main__":
    main()
