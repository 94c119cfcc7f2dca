"""What the contenders in Python with PyTorch have in common: ranks made by fork, and the loop over requests.

Arguments, requests and answers are those of common/request.h. torch is imported after the fork: its threads would not
survive one.
"""

import contextlib
import ctypes
import json
import os
import sys
import tempfile

CLONE_NEWNET = 0x40000000
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


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

    def mean(self, mine):
        """On rank 0 the mean of every rank's number; waits for all of them. On the others their own."""
        if self.rank != 0:
            print(json.dumps(mine), file=self._to[0], flush=True)
            return mine
        return sum([json.loads(pipe.readline()) for pipe in self._from] + [mine]) / self.size

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


def raise_malloc_thresholds():
    """As ddp_step/malloc_thresholds.h."""
    libc = ctypes.CDLL(None)
    if libc.mallopt(M_MMAP_THRESHOLD, 32 << 20) != 1 or libc.mallopt(M_TRIM_THRESHOLD, 2147483647) != 1:
        raise OSError("malloc refused its thresholds")


@contextlib.contextmanager
def gloo(_torch, dist, ranks, meeting):
    """The default process group with Gloo."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=ranks.rank, world_size=ranks.size)
    yield
    dist.destroy_process_group()


def run(prepare, joined=gloo):
    """The program: `prepare(arguments, ranks)` runs in every rank before torch is imported, and returns what makes of
    (torch, torch.distributed) the function that handles a request. `joined(torch, dist, ranks, meeting)` is how the ranks
    come together, a context manager; `meeting` a folder that they share."""
    arguments = dict(word.split("=", 1) for word in sys.argv[1:])
    with tempfile.TemporaryDirectory() as meeting:
        ranks = Ranks(int(arguments["ranks"]))
        try:
            _serve(prepare(arguments, ranks), ranks, lambda torch, dist: joined(torch, dist, ranks, meeting))
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


def _serve(make_handler, ranks, joined):
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    with joined(torch, dist):
        handle = make_handler(torch, dist)
        if ranks.rank == 0:
            print(json.dumps({"ready": True}), flush=True)
        while True:
            line = ranks.tell(sys.stdin.readline() if ranks.rank == 0 else None)
            if not line:
                break
            answer = handle(dict(word.split("=", 1) for word in line.split()))
            if ranks.rank == 0:
                print(json.dumps(answer), flush=True)
