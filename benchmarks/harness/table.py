"""The records and aims as text."""

from .aims import size_text


def _number(value):
    if value is None:
        return "-"
    if value >= 100_000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def _share(value):
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _ratio(record, name):
    middle, spread = record.get(f"ratio_{name}"), record.get(f"ratio_{name}_spread")
    return "-" if middle is None else f"{_share(middle)} ({_share(spread[0])}..{_share(spread[1])})"


def _extra_memory(record):
    """What a rank holds beside parameters and gradients: buckets; or the optimizer's state, where that is the matter."""
    if record.get("state_bytes") is not None:
        return f"state {size_text(record['state_bytes'])} of {size_text(record['adam_state_bytes'])}"
    return "-" if record.get("extra_bytes") is None else size_text(record["extra_bytes"])


def _difference(record, name):
    """The two times whose difference a row of backward passes is."""
    if record.get(f"{name}_whole") is None:
        return "-"
    return f"{_number(record[f'{name}_whole'])} - {_number(record[f'{name}_local'])}"


# By suite: its columns before the numbers, and its contenders.
RANKS = ("ranks", lambda r: str(r["ranks"]))
BYTES = ("bytes", lambda r: size_text(r["bytes"]))
CASE = ("case", lambda r: r["case"])
SUITES = {
    "all_reduce": ([RANKS, BYTES, CASE], ("limit", "openmpi", "torch")),
    "collectives": ([("operation", lambda r: r["kind"]), RANKS, BYTES, CASE], ("openmpi", "torch")),
    "barrier": ([RANKS, CASE], ("limit", "openmpi", "torch")),
    "two_hosts": ([RANKS, BYTES, CASE], ("probe", "flat", "torch")),
    "store": ([("operation", lambda r: r["case"]), ("clients", lambda r: str(r["clients"]))], ("torch",)),
    "ddp_step": ([RANKS, ("model", lambda r: r["case"]), ("parameters", lambda r: size_text(r["bytes"]))],
                 ("local", "adam", "torch", "torch_local")),
    "dtensor": ([CASE, ("shards in", lambda r: f"{r['kind']} memory" if r.get("kind") else "-")],
                ("plain", "hand", "bare", "copied", "fresh", "torch")),
    "rpc": ([CASE, BYTES], ("torch",)),
    "growth": ([("what", lambda r: r["case"] if r["unit"] == "us" else f"{r['case']}, per rank"), RANKS,
                ("ranks are", lambda r: r["kind"])], ("torch",)),
}


def _columns(suite, records):
    head, others = SUITES[suite]
    names = ["lockstep"] + [n for n in others if any(r.get(n) is not None for r in records)]
    columns = head + [(f"{n} us", lambda r, n=n: _number(r.get(n))) for n in names]
    if suite in ("store", "rpc"):
        columns += [(f"{n} 1/s", lambda r, n=n: _number(r.get(f"{n}_per_s"))) for n in names]
    columns += [(f"lockstep/{n} (min..max)", lambda r, n=n: _ratio(r, n)) for n in names[1:] if n != "torch_local"]
    if suite == "rpc":
        columns += [(f"{n} = remote - local", lambda r, n=n: _difference(r, n)) for n in names]
    if suite == "dtensor":
        columns += [("over plain us", lambda r: _number(r.get("over_plain"))),
                    ("torch over plain us", lambda r: _number(r.get("torch_over_plain")))]
    if suite == "ddp_step":
        columns += [("torch/torch_local", lambda r: _number(r.get("torch_slowdown"))), ("extra memory", _extra_memory)]
    return columns


def suite_table(suite, records):
    """One suite as aligned lines, Markdown."""
    columns = _columns(suite, records)
    rows = [[title for title, _ in columns]] + [[cell(r) for _, cell in columns] for r in records]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def aims_table(aims):
    lines = []
    for aim in aims:
        word = {True: "met", False: "missed", None: "not measured"}[aim["met"]]
        found = ", ".join(f"{what}: {_number(value)}" for what, value in aim["found"])
        lines.append(f"{word:>12}  {aim['aim']}" + (f"\n              {found}" if found else ""))
    return "\n".join(lines)
