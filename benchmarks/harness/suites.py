"""The suites on one host: which contenders, which cases, which requests."""

from . import rounds
from .ddp_step import DdpStep
from .dtensor import DTensor
from .growth import Growth
from .rpc import Rpc
from .suite import MIB, RankSuite, Suite
from .two_hosts import TwoHosts


class AllReduce(RankSuite):
    name = "all_reduce"
    peers = ("limit", "openmpi", "torch")
    ours = {"zero_copy": ("lockstep", "zero_copy"), "staged": ("lockstep", "staged"),
            "zero_copy_tensor": ("lockstep_tensor", "zero_copy"), "staged_tensor": ("lockstep_tensor", "staged")}

    def cases(self, ranks):
        """Every size with two ranks; with more the smallest that is interesting and the largest."""
        sizes = [4, 64, 4096, 65536, MIB, 25 * MIB, 100 * MIB] if ranks == 2 else [4096, 25 * MIB]
        if self.options.quick:
            sizes = [4096, MIB] if ranks == 2 else [4096]
        for n_bytes in sizes:
            yield "all_reduce", n_bytes, False
            if n_bytes >= MIB:
                yield "all_reduce", n_bytes, True


class Collectives(RankSuite):
    name = "collectives"
    peers = ("openmpi", "torch")
    ours = {"zero_copy": ("lockstep", "zero_copy"), "staged": ("lockstep", "staged")}
    budget = 0.4
    kinds = ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather", "scatter", "send_recv",
             "exchange")

    def cases(self, ranks):
        sizes = [(4096, False), (MIB, False), (25 * MIB, False), (25 * MIB, True)]
        if ranks != 2:
            sizes = [(4096, False), (25 * MIB, False)]
        if self.options.quick:
            sizes = sizes[:1]
        return [(kind, n_bytes, rotating) for kind in self.kinds for n_bytes, rotating in sizes]


class Barrier(RankSuite):
    name = "barrier"
    peers = ("limit", "openmpi", "torch")
    ours = {"engine": ("lockstep", "any"), "call": ("lockstep_tensor", "any")}

    def cases(self, ranks):
        return [("barrier", 0, False)]


class Store(Suite):
    name = "store"

    def commands(self, _part):
        return {"lockstep": self.program("store_lockstep"), "torch": self.program("store_torch")}

    def cases(self, _part):
        return [(op, clients) for op in ("get", "set", "add") for clients in (1, 4)]

    def run(self, part, progress):
        for op, clients in self.cases(part):
            entries = {name: self.asker(name, op=op, clients=clients) for name in ("lockstep", "torch")}
            answers = self.play(f"store {op}, {clients} client{'s' * (clients > 1)}", entries, progress)
            record = {"suite": self.name, "case": op, "clients": clients, "unit": "us"}
            rounds.compare(record, answers.get("lockstep", []), {"torch": answers.get("torch", [])})
            for name in ("lockstep", "torch"):
                record[f"{name}_per_s"] = rounds.round_number(rounds.median_of(answers.get(name, []), "per_s"))
            yield record


SUITES = {suite.name: suite for suite in (AllReduce, Collectives, Barrier, TwoHosts, Store, DdpStep,
                                           DTensor, Rpc, Growth)}


def default_ranks(cores):
    """Numbers of ranks by suite: twice the cores on small machines, where ranks must take turns; else up to 16."""
    def up_to(most):
        return [n for n in (2, 4, 8, 16) if n <= most]
    return {"all_reduce": up_to(max(cores, 4)), "collectives": up_to(max(cores, 4)), "barrier": up_to(max(cores, 8)),
            "ddp_step": up_to(min(max(cores, 4), 8)), "growth": [2, 8, 32, 64, 128]}
