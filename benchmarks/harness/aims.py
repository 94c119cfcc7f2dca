"""What lockstep set out to reach; each aim is held against the records."""

import dataclasses
import typing

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Aim:
    """`field` of every record that `where` names is at most `most`, or at least `least`.

    where: {key: value, or a tuple of values, or a function of the value}.
    """

    words: str
    where: dict
    field: str
    most: typing.Optional[float] = None
    least: typing.Optional[float] = None
    cores: typing.Optional[int] = None  # the aim is about a machine of that many

    def names(self, record):
        return all(_fits(record.get(key), wanted) for key, wanted in self.where.items())

    def holds(self, record):
        value = record[self.field]
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)


def _fits(value, wanted):
    if callable(wanted):
        return value is not None and wanted(value)
    return value in wanted if isinstance(wanted, tuple) else value == wanted


def _from_1_mib(n_bytes):
    return n_bytes >= MIB


def _small(n_bytes):
    return n_bytes <= 4096


def _rows(place):
    return (place, place + "_rotating")


def size_text(n_bytes):
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes} B"


MOST_USED = ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "exchange")

AIMS = [
    Aim("all_reduce 4 B to 4 KiB, 2 ranks, buffer level: at most 0.5 us",
        {"suite": "all_reduce", "ranks": 2, "case": ("zero_copy", "staged"), "bytes": _small}, "lockstep", 0.5),
    Aim("all_reduce 4 B to 4 KiB, 2 ranks, tensor call: at most 2 us",
        {"suite": "all_reduce", "ranks": 2, "case": ("zero_copy_tensor", "staged_tensor"), "bytes": _small}, "lockstep",
        2.0),
    Aim("zero-copy all_reduce from 1 MiB, 2 ranks: within 1.2x of the limit",
        {"suite": "all_reduce", "ranks": 2, "case": _rows("zero_copy"), "bytes": _from_1_mib}, "ratio_limit", 1.2),
    Aim("staged all_reduce from 1 MiB, 2 ranks: at least 2x faster than Open MPI",
        {"suite": "all_reduce", "ranks": 2, "case": _rows("staged"), "bytes": _from_1_mib}, "ratio_openmpi", 0.5),
    Aim("staged all_reduce of 4 KiB, 4 ranks on 2 cores: at most 12 us",
        {"suite": "all_reduce", "ranks": 4, "case": "staged", "bytes": 4096}, "lockstep", 12.0, cores=2),
    Aim("zero-copy all_reduce of 25 MiB, 4 ranks on 2 cores: at most 4 ms",
        {"suite": "all_reduce", "ranks": 4, "case": "zero_copy", "bytes": 25 * MIB}, "lockstep", 4000.0, cores=2),
    Aim("barrier, 8 ranks on 2 cores: at most 20 us",
        {"suite": "barrier", "ranks": 8, "case": "engine"}, "lockstep", 20.0, cores=2),
    *(Aim(f"{words} broadcast, all_gather, reduce_scatter, all_to_all and send/recv at 25 MiB, 2 ranks: each at least 2x "
          "faster than Open MPI",
          {"suite": "collectives", "ranks": 2, "bytes": 25 * MIB, "case": _rows(place), "kind": MOST_USED},
          "ratio_openmpi", 0.5) for words, place in (("zero-copy", "zero_copy"), ("staged", "staged"))),
    Aim("two hosts, 2 ranks each, 25 MiB over 1 Gbit/s: at least 90 % of the bare link's speed",
        {"suite": "two_hosts", "case": "hierarchical", "bytes": 25 * MIB}, "ratio_probe", 1 / 0.9),
    Aim("two hosts, 2 ranks each, 25 MiB over 1 Gbit/s: at least 1.4x as fast as PyTorch with Gloo",
        {"suite": "two_hosts", "case": "hierarchical", "bytes": 25 * MIB}, "ratio_torch", 1 / 1.4),
    Aim("two hosts, 2 ranks each, 25 MiB over 1 Gbit/s: at least 1.4x as fast as the flat Gloo plug-in",
        {"suite": "two_hosts", "case": "hierarchical", "bytes": 25 * MIB}, "ratio_flat", 1 / 1.4),
    Aim("store get in at most 25 us", {"suite": "store", "case": "get", "clients": 1}, "lockstep", 25.0),
    Aim("store add by 4 clients: at least 250,000 a second", {"suite": "store", "case": "add", "clients": 4},
        "lockstep_per_s", least=250_000),
    *(Aim(f"DDP step of {words} with bucket views, 2 ranks on 2 cores: at most {most} of the local step",
          {"suite": "ddp_step", "ranks": 2, "case": f"{model}_views"}, "ratio_local", most, cores=2)
      for model, words, most in (("256x8", "an MLP 256x8 (2 MiB)", 1.12), ("1024x8", "an MLP 1024x8 (32 MiB)", 1.20),
                                 ("2048x8", "an MLP 2048x8 (128 MiB)", 1.30), ("32x200", "200 layers of 32x32", 1.12))),
    Aim("DDP step of an MLP 1024x8, 4 ranks on 2 cores: at least 1.8x faster than PyTorch with Gloo",
        {"suite": "ddp_step", "ranks": 4, "case": ("1024x8_views", "1024x8_copies")}, "ratio_torch", 1 / 1.8, cores=2),
    Aim("ZeRO-1 Adam step of 32 MiB, 2 ranks: faster than plain DDP with Adam",
        {"suite": "ddp_step", "ranks": 2, "case": "1024x8_zero_adam"}, "ratio_adam", 1.0),
    Aim("ZeRO-1 Adam, 2 ranks: half the optimizer's state on each",
        {"suite": "ddp_step", "ranks": 2, "case": "1024x8_zero_adam"}, "state_share", 0.5),
    Aim("DDP's extra memory per rank with bucket views: none",
        {"suite": "ddp_step", "case": lambda case: case.endswith("_views")}, "extra_gradients", 0.0),
    Aim("DDP's extra memory per rank without bucket views: at most one copy of the gradients",
        {"suite": "ddp_step", "case": lambda case: case.endswith("_copies")}, "extra_gradients", 1.0),
    *(Aim(f"rpc_sync of a tensor of {size_text(n_bytes)} both ways{words}, 2 cores: at most {most} us",
          {"suite": "rpc", "case": case, "bytes": n_bytes}, "lockstep", most, cores=2)
      for case, n_bytes, words, most in (("sync", 4, "", 25), ("sync", MIB, "", 200), ("sync", 16 * MIB, "", 8000),
                                         ("sync_tcp", 4, " over loopback TCP", 60))),
    Aim("rpc_async of 4 B in flight, 2 cores: at least 150,000 a second", {"suite": "rpc", "case": "async"},
        "lockstep_per_s", least=150_000, cores=2),
    Aim("add of two DTensors of 8x8 without a gradient: at most 0.7 us over the plain one",
        {"suite": "dtensor", "case": "add"}, "over_plain", 0.7),
    Aim("tensor-parallel MLP 1024-4096-1024, batch 64, 2 ranks, forward and backward: at most 1.10 of collectives written "
        "by hand", {"suite": "dtensor", "case": "mlp"}, "ratio_hand", 1.10),
    Aim("the same: at least 1.3x faster than PyTorch's", {"suite": "dtensor", "case": "mlp"}, "ratio_torch", 1 / 1.3),
    Aim("redistributions of 25 MiB, 2 ranks, shards in shared memory: at most 1.1 of the bare collective",
        {"suite": "dtensor", "kind": "shared", "case": ("S(0) -> R", "P -> R", "P -> S(0)", "S(0) -> S(1)")},
        "ratio_bare", 1.1),
    *(Aim(f"{case}, {ranks} ranks as processes on 2 cores: at most {most / 1000:g} ms",
          {"suite": "growth", "case": case, "kind": "processes", "ranks": ranks}, "lockstep", most, cores=2)
      for case, ranks, most in (("new_group", 32, 5000), ("new_group", 128, 20_000), ("init", 128, 1_000_000))),
    Aim("backward through a remote Linear of 256 with a batch of 32, 2 cores: at most 150 us over the local one",
        {"suite": "rpc", "case": ("backward_smart", "backward_fast")}, "lockstep", 150, cores=2),
]


def hold_against(records, cores=None):
    """A list of {"aim", "found", "met"} for the suites of the records; met is None when something was not measured.

    cores: of the machine. Aims about another machine are left out.
    """
    suites = {r["suite"] for r in records}
    held = []
    for aim in AIMS:
        if aim.where["suite"] not in suites or aim.cores not in (None, cores):
            continue
        rows = [r for r in records if aim.names(r)]
        measured = bool(rows) and all(r.get(aim.field) is not None for r in rows)
        held.append({"aim": aim.words, "found": [(row_text(r), r.get(aim.field)) for r in rows],
                     "met": all(aim.holds(r) for r in rows) if measured else None})
    return held


def row_text(record):
    """Which row it is, in the words of its table."""
    words = [record["kind"]] if record.get("kind", record["suite"]) != record["suite"] else []
    if record.get("bytes"):
        words.append(size_text(record["bytes"]))
    if record.get("clients"):
        words.append(f"{record['clients']} client{'s' * (record['clients'] > 1)}")
    return " ".join(words + [record["case"]])
