"""What a world of PyTorch with Gloo costs by its number of ranks: the phases of growth/lockstep_growth.cpp.

A request makes a fresh world of forked processes. torch is imported before the fork, by a parent that never runs an
operation, so that its threads do not exist yet; the import is not part of what is measured, as loading libtorch is not.
"""

import json
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist

GROUPS, BARRIERS = 8, 30
PHASES = {"init": 1, "barrier": BARRIERS, "new_group": GROUPS, "first_all_reduce": GROUPS, "destroy": GROUPS, "leave": 1}


def be_rank(rank, size, folder, gate):
    """Runs every phase; returns {phase: (begin, end)} in seconds of the monotonic clock, and what the world added."""
    torch.set_num_threads(1)
    times = {}

    def phase(name, body):
        begin = time.monotonic()
        body()
        times[name] = (begin, time.monotonic())

    fds = len(os.listdir("/proc/self/fd"))
    os.read(gate, 1)
    phase("init", lambda: dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                                                  world_size=size))
    dist.barrier()
    phase("barrier", lambda: [dist.barrier() for _ in range(BARRIERS)])
    groups = []
    dist.barrier()
    phase("new_group", lambda: groups.extend(dist.new_group() for _ in range(GROUPS)))
    x = torch.ones(1024)
    dist.barrier()
    phase("first_all_reduce", lambda: [dist.all_reduce(x, group=group) for group in groups])
    if x[0].item() != float(torch.tensor(float(size) ** GROUPS)):
        raise RuntimeError("a sum was wrong")
    dist.barrier()
    phase("destroy", lambda: [dist.destroy_process_group(group) for group in groups])
    dist.barrier()
    times["fds"] = len(os.listdir("/proc/self/fd")) - fds
    phase("leave", dist.destroy_process_group)
    return times


def measure(size):
    with tempfile.TemporaryDirectory() as folder:
        gate, open_gate = os.pipe()
        readers, children = [], []
        for rank in range(size):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(open_gate)
                code = 1
                try:
                    words = json.dumps(be_rank(rank, size, folder, gate))
                    os.write(writer, words.encode())
                    code = 0
                finally:
                    os._exit(code)
            os.close(writer)
            readers.append(reader)
            children.append(child)
        time.sleep(0.2)
        os.close(open_gate)
        os.close(gate)
        texts = []
        for reader in readers:
            with os.fdopen(reader) as pipe:
                texts.append(pipe.read())
        for child in children:
            os.waitpid(child, 0)
    if not all(texts):
        raise RuntimeError("a rank failed")
    ranks = [json.loads(text) for text in texts]
    answer = {name: 1e6 * (max(r[name][1] for r in ranks) - min(r[name][0] for r in ranks)) / times
              for name, times in PHASES.items()}
    answer["fds"] = sum(r["fds"] for r in ranks) / size
    return answer


def main():
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = dict(word.split("=", 1) for word in line.split())
        try:
            answer = measure(int(request["ranks"]))
        except Exception as error:  # the harness is told, whatever it is
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
