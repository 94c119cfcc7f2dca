"""What lockstep set out to reach; each aim is held against the records."""

MIB = 1 << 20


def _all_reduce(records, case, field, most, words):
    rows = [r for r in records if r["suite"] == "all_reduce" and r["bytes"] >= MIB
            and r["case"] in (case, case + "_rotating")]
    return {"aim": words, "found": [(f"{size_text(r['bytes'])} {r['case']}", r.get(field)) for r in rows],
            "met": _met(rows, lambda r: r[field] <= most, field)}


def _met(rows, test, field):
    """None: not measured; else whether every row passes."""
    if not rows or any(r.get(field) is None for r in rows):
        return None
    return all(test(r) for r in rows)


def hold_against(records):
    """A list of {"aim", "found", "met"}; met is None when something was not measured."""
    aims = []
    suites = {r["suite"] for r in records}
    if "all_reduce" in suites:
        aims.append(_all_reduce(records, "zero_copy", "ratio_limit", 1.5,
                                "zero-copy all_reduce within 1.5x of the limit from 1 MiB"))
        aims.append(_all_reduce(records, "staged", "ratio_openmpi", 1.0,
                                "staged all_reduce no slower than Open MPI from 1 MiB"))
    if "store" in suites:
        get = [r for r in records if r["suite"] == "store" and r["case"] == "get" and r["clients"] == 1]
        add = [r for r in records if r["suite"] == "store" and r["case"] == "add" and r["clients"] == 4]
        aims.append({"aim": "store get in at most 25 us", "found": [("1 client, us", r["lockstep"]) for r in get],
                     "met": _met(get, lambda r: r["lockstep"] <= 25, "lockstep")})
        aims.append({"aim": "store add by 4 clients: at least 250,000 a second",
                     "found": [("4 clients, per s", r["lockstep_per_s"]) for r in add],
                     "met": _met(add, lambda r: r["lockstep_per_s"] >= 250_000, "lockstep_per_s")})
    if "ddp_step" in suites:
        step = [r for r in records if r["suite"] == "ddp_step" and r["case"] == "1024x8_views"]
        aims.append({"aim": "DDP step at 32 MiB of parameters with bucket views at most 1.35x the local step",
                     "found": [(r["case"], r.get("ratio_local")) for r in step],
                     "met": _met(step, lambda r: r["ratio_local"] <= 1.35, "ratio_local")})
    return aims


def size_text(n_bytes):
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes} B"
