"""Pictures as SVG, written by hand: no library to install, and the files can be read in a browser or a diff."""

import math

from .aims import MIB, size_text

TENSOR_COLOUR = "#17becf"
COLOURS = {"lockstep": "#1f77b4", "limit": "#2ca02c", "probe": "#2ca02c", "bare": "#2ca02c",
           "fresh": "#8c564b", "openmpi": "#d62728", "torch": "#ff7f0e",
           "local": "#7f7f7f", "flat": "#9467bd", "zero_copy": "#1f77b4", "staged": TENSOR_COLOUR, "call": TENSOR_COLOUR}
WIDTH, HEIGHT, MARGIN = 720, 440, 64


class Svg:
    def __init__(self, width, height):
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                      f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>']

    def text(self, x, y, words, anchor="middle", colour="#333", extra=""):
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" {extra}>{words}</text>')

    def line(self, x1, y1, x2, y2, colour="#ddd", extra=""):
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {extra}/>')

    def shape(self, kind, where, fill, stroke):
        self.parts.append(f'<{kind} {where} fill="{fill}" stroke="{stroke}"/>')

    def path(self, points, colour, dash=""):
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="2" '
                          f'stroke-dasharray="{dash}"/>')
        self.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]

    def bar(self, x, y, width, height, colour):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>')

    def save(self, path):
        with open(path, "w", encoding="utf-8") as out:
            out.write("\n".join(self.parts) + "\n</svg>\n")


def _log_grid(svg, low, high, y_of, right):
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        value = 10.0 ** power
        if low <= value <= high:
            svg.line(MARGIN, y_of(value), right, y_of(value))
            svg.text(MARGIN - 6, y_of(value) + 4, f"{value:g}", "end")


def _y_on_log_axis(low, high):
    return lambda value: HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * math.log(value / low) / math.log(high / low)


def lines(title, series, x_text, path):
    """series: {(label, colour, dash): [(x, y)]}; two logarithmic axes, one line each, x_text under every x."""
    series = {key: sorted(points) for key, points in series.items() if points}
    if not series:
        return False
    xs = sorted({x for points in series.values() for x, _ in points})
    values = [y for points in series.values() for _, y in points]
    low, high = min(values) / 1.5, max(values) * 1.5
    span = max(math.log2(xs[-1] / xs[0]), 1)
    right = WIDTH - 170
    y_of = _y_on_log_axis(low, high)

    def x_of(x):
        return MARGIN + 20 + (right - MARGIN - 40) * math.log2(x / xs[0]) / span

    svg = Svg(WIDTH, HEIGHT)
    svg.text(WIDTH / 2, 24, title, extra='font-size="15"')
    _log_grid(svg, low, high, y_of, right)
    for x in xs:
        svg.text(x_of(x), HEIGHT - MARGIN + 18, x_text(x), extra='font-size="10"')
    for n, ((label, colour, dash), points) in enumerate(sorted(series.items())):
        svg.path([(x_of(x), y_of(y)) for x, y in points], colour, dash)
        svg.path([(right + 8, 60 + 18 * n), (right + 28, 60 + 18 * n)], colour, dash)
        svg.text(right + 34, 64 + 18 * n, label, "start", colour, 'font-size="10"')
    svg.save(path)
    return True


def all_reduce(records, path, rotating):
    """Time against size, one line per contender; ours once per case."""
    series = {}
    for r in records:
        if r["case"].endswith("_rotating") != rotating:
            continue
        case = r["case"].removesuffix("_rotating")
        ours = (f"lockstep {case}", TENSOR_COLOUR if case.endswith("_tensor") else COLOURS["lockstep"],
                "" if case.startswith("zero_copy") else "6 3")
        series.setdefault(ours, {})[r["bytes"]] = r.get("lockstep")
        for name in ("limit", "openmpi", "torch"):
            series.setdefault((name, COLOURS[name], ""), {})[r["bytes"]] = r.get(name)
    series = {key: [(b, v) for b, v in points.items() if v] for key, points in series.items()}
    title = f"all_reduce, 2 ranks, {'rotating' if rotating else 'hot'} buffers: microseconds by size"
    return lines(title, series, size_text, path)


def bars(title, groups, names, path):
    """groups: [(label, {contender: value})]; a logarithmic axis, since values lie orders of magnitude apart."""
    values = [v for _, group in groups for v in group.values() if v]
    if not values:
        return False
    low, high = min(values) / 2, max(values) * 1.4
    y_of = _y_on_log_axis(low, high)
    whole = max(WIDTH, MARGIN + 100 + 26 * len(names) * len(groups))  # numbers above the bars must not run together
    right = whole - 100
    step = (right - MARGIN) / len(groups)
    width = 0.8 * step / len(names)

    svg = Svg(whole, HEIGHT)
    svg.text(whole / 2, 24, title, extra='font-size="15"')
    _log_grid(svg, low, high, y_of, right)
    for g, (label, group) in enumerate(groups):
        left = MARGIN + g * step + 0.1 * step
        svg.text(left + 0.4 * step, HEIGHT - MARGIN + 18, label, extra='font-size="10"')
        for n, name in enumerate(names):
            if group.get(name):
                top = y_of(group[name])
                svg.bar(left + n * width, top, width - 2, HEIGHT - MARGIN - top, COLOURS[name])
                value = f"{group[name]:.3g}" if group[name] < 1000 else f"{group[name]:,.0f}"
                svg.text(left + (n + 0.5) * width, top - 4, value, extra='font-size="9"')
    for n, name in enumerate(names):
        svg.bar(right + 8, 54 + 18 * n, 10, 10, COLOURS[name])
        svg.text(right + 22, 63 + 18 * n, name, "start", COLOURS[name], 'font-size="10"')
    svg.save(path)
    return True


GROWTH_LINES = {"init": "#1f77b4", "new_group": "#d62728", "first_all_reduce": "#2ca02c", "barrier": "#9467bd"}


def growth(records, path):
    """Milliseconds against ranks: a line per phase, ours and (dashed) PyTorch's."""
    series = {}
    for r in records:
        if r["kind"] != "processes" or r["case"] not in GROWTH_LINES:
            continue
        for name, dash in (("lockstep", ""), ("torch", "6 3")):
            if r.get(name):
                key = (f"{name} {r['case']}", GROWTH_LINES[r["case"]], dash)
                series.setdefault(key, []).append((r["ranks"], r[name] / 1000))
    return lines("growth, ranks as processes: milliseconds by ranks", series, str, path)


def draw(records, folder):
    """All pictures the records allow; returns the paths written."""
    def of(suite, **where):
        return [r for r in records if r["suite"] == suite and all(r.get(key) == value for key, value in where.items())]
    made = []
    for rotating in (False, True):
        path = f"{folder}/all_reduce_{'rotating' if rotating else 'hot'}.svg"
        if all_reduce(of("all_reduce", ranks=2), path, rotating):
            made.append(path)
    if growth(of("growth"), f"{folder}/growth.svg"):
        made.append(f"{folder}/growth.svg")
    pictures = [
        ("all_reduce_by_ranks", "all_reduce, 25 MiB, zero-copy: microseconds by ranks", ("lockstep", "limit", "openmpi", "torch"),
         [(f"{r['ranks']} ranks", r) for r in of("all_reduce", bytes=25 * MIB, case="zero_copy")]),
        ("barrier", "barrier: microseconds", ("lockstep", "call", "limit", "openmpi", "torch"),
         joined(of("barrier"), lambda r: f"{r['ranks']} ranks", {"engine": "lockstep", "call": "call"})),
        ("two_hosts", "all_reduce on two hosts, 1 Gbit/s: microseconds", ("lockstep", "probe", "flat", "torch"),
         [(f"{r['case']}, {size_text(r['bytes'])}", r) for r in of("two_hosts", case="hierarchical")]),
        ("store", "store: microseconds per operation", ("lockstep", "torch"),
         [(f"{r['case']}, {r['clients']} client{'s' * (r['clients'] > 1)}", r) for r in of("store")]),
        ("ddp_step", "ddp_step, 2 ranks: microseconds per step", ("lockstep", "local", "torch"),
         [(r["case"], r) for r in of("ddp_step", ranks=2) if not r["case"].endswith("_adam")]),
        ("dtensor", "redistributions of 25 MiB, 2 ranks, shards in shared memory: microseconds",
         ("lockstep", "bare", "fresh", "torch"), [(r["case"], r) for r in of("dtensor", kind="shared")]),
        ("rpc", "rpc, 2 processes: microseconds per call, and per backward pass over the local one", ("lockstep", "torch"),
         [(f"{r['case']}, {size_text(r['bytes'])}", r) for r in of("rpc")]),
    ]
    for ranks in sorted({r["ranks"] for r in of("collectives")}):
        rows = of("collectives", ranks=ranks, bytes=25 * MIB) or of("collectives", ranks=ranks)
        pictures.insert(-6, (f"collectives_{ranks}", f"{size_text(rows[0]['bytes'])}, {ranks} ranks: microseconds",
                             ("zero_copy", "staged", "openmpi", "torch"),
                             joined(rows, lambda r: r["kind"], {"zero_copy": "zero_copy", "staged": "staged"})))
    for name, title, contenders, groups in pictures:
        path = f"{folder}/{name}.svg"
        if bars(title, [(label, {c: group.get(c) for c in contenders}) for label, group in groups], contenders, path):
            made.append(path)
    return made


def joined(records, label, cases):
    """One group per label: the others' numbers, and ours under the name `cases` gives the record's case."""
    groups = {}
    for r in records:
        if r["case"] in cases:
            groups.setdefault(label(r), {}).update({**r, "lockstep": groups.get(label(r), {}).get("lockstep")})
            groups[label(r)][cases[r["case"]]] = r["lockstep"]
    return list(groups.items())
