"""One training step as a picture: what each rank computed, and when each bucket was ready, started and done.

Drawn from DdpLoggingData::to_json() of every rank. Stamps of ranks on one host come from one clock, so ranks share the axis.
"""

from .aims import size_text
from .plot import Svg

FORWARD, BACKWARD, TAIL = "#8fb8de", "#1f77b4", "#c9c9c9"
WAITING, REDUCING, HIDDEN = "#f6d7b0", "#d62728", "#2ca02c"
WIDTH, LEFT, RIGHT, TOP = 980, 196, 28, 92
LANE, BAR, GAP = 21, 13, 34  # of a lane, of what is drawn in it, between ranks


class Axis:
    def __init__(self, start, end):
        self.start = start
        self.scale = (WIDTH - LEFT - RIGHT) / (end - start)

    def x(self, stamp):
        return LEFT + (stamp - self.start) * self.scale


def draw(ranks, path, title):
    """ranks: the data of every rank, as dicts, of the same step."""
    start = min(data["forward_compute_time_start"] for data in ranks)
    end = max(data["backward_time_end"] for data in ranks)
    axis = Axis(start, end + 0.01 * (end - start))
    heights = [LANE * (1 + len(data["bucket_done_time"])) for data in ranks]
    bottom = TOP + sum(heights) + GAP * len(ranks)
    svg = Svg(WIDTH, bottom + 40)
    svg.text(WIDTH / 2, 26, title, extra='font-size="16"')
    _legend(svg)
    _grid(svg, axis, (end - start) / 1e6, bottom)
    y = TOP
    for data, height in zip(ranks, heights):
        _rank(svg, axis, data, y, height)
        y += height + GAP
    svg.save(path)


def _legend(svg):
    x = 24
    for colour, words in ((FORWARD, "forward"), (BACKWARD, "backward computes"), (TAIL, "backward waits, hands back"),
                          (WAITING, "ready, waits its turn"), (HIDDEN, "reduced, hidden by backward"),
                          (REDUCING, "reduced, exposed")):
        svg.bar(x, 42, 11, 11, colour)
        svg.text(x + 15, 52, words, "start", extra='font-size="11"')
        x += 30 + 6.3 * len(words)
    svg.bar(24, 60, 11, 11, BACKWARD)
    svg.line(29.5, 61, 29.5, 70, "#ffffff")
    svg.text(39, 70, "a gradient is computed", "start", extra='font-size="11"')
    x = 200
    for mark in ("ready", "started", "done"):
        _mark(svg, mark, x, 66)
        svg.text(x + 9, 70, f"bucket {mark}", "start", extra='font-size="11"')
        x += 110


def _grid(svg, axis, span_ms, bottom):
    step = next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 1e9) if span_ms / s <= 12)
    n = 0
    while n * step <= span_ms:
        x = axis.x(axis.start + n * step * 1e6)
        svg.line(x, TOP - 8, x, bottom - GAP + 8, "#e6e6e6")
        svg.text(x, bottom - GAP + 22, f"{n * step:g}", extra='font-size="11"')
        n += 1
    svg.text((LEFT + WIDTH - RIGHT) / 2, bottom - GAP + 40, "milliseconds since the step began", extra='font-size="11"')


def _rank(svg, axis, data, y, height):
    begin, computed = data["backward_compute_time_start"], data["backward_compute_time_end"]
    x_end = axis.x(computed)
    svg.line(x_end, y - 4, x_end, y + height, "#1f77b4", 'stroke-dasharray="3 3"')
    svg.text(12, y + BAR - 2, f"rank {data['rank']}", "start", extra='font-weight="bold"')
    svg.text(LEFT - 8, y + BAR - 2, "compute", "end", extra='font-size="11"')
    for colour, a, b in ((FORWARD, data["forward_compute_time_start"], data["forward_compute_time_end"]),
                         (BACKWARD, begin, computed), (TAIL, computed, data["backward_time_end"])):
        svg.bar(axis.x(a), y, max(axis.x(b) - axis.x(a), 0.5), BAR, colour)
    for ready in data["parameter_ready_time"]:
        if ready >= 0:
            svg.line(axis.x(begin + ready), y + 2, axis.x(begin + ready), y + BAR - 2, "#ffffff")
    for b in range(len(data["bucket_done_time"])):
        _bucket(svg, axis, data, b, y + LANE * (b + 1))
    comm, hidden = data["backward_comm_time"], data["backward_compute_comm_overlap_time"]
    svg.text(12, y + LANE + BAR - 2, f"reduces {comm / 1e6:.1f} ms", "start", "#666", 'font-size="10"')
    svg.text(12, y + LANE + BAR + 11, f"{100 * hidden / max(comm, 1):.0f} % hidden", "start", HIDDEN, 'font-size="10"')


def _bucket(svg, axis, data, b, y):
    begin, computed = data["backward_compute_time_start"], data["backward_compute_time_end"]
    ready, started, done = (begin + data[f"bucket_{word}_time"][b] for word in ("ready", "started", "done"))
    sizes = data["rebuilt_bucket_sizes"] or data["bucket_sizes"]
    svg.text(LEFT - 8, y + BAR - 2, f"bucket {b}, {size_text(sizes[b])}", "end", extra='font-size="11"')
    svg.line(LEFT, y + BAR / 2, WIDTH - RIGHT, y + BAR / 2, "#f0f0f0")
    if data["bucket_done_time"][b] < 0:
        svg.text(axis.x(ready) + 6, y + BAR - 2, "left out", "start", "#666", 'font-size="10"')
        return
    middle = min(max(computed, started), done)
    for colour, a, to in ((WAITING, ready, started), (HIDDEN, started, middle), (REDUCING, middle, done)):
        if to > a:
            svg.bar(axis.x(a), y + 2, axis.x(to) - axis.x(a), BAR - 4, colour)
    for mark, stamp in (("ready", ready), ("started", started), ("done", done)):
        _mark(svg, mark, axis.x(stamp), y + BAR / 2)


def _mark(svg, what, x, y):
    """A tick for ready, so that it is seen where the bucket was started at once."""
    if what == "ready":
        svg.bar(x - 1, y - 8, 2, 16, "#333")
    elif what == "started":
        svg.shape("path", f'd="M{x - 2:.1f},{y - 4.5:.1f} L{x + 5.5:.1f},{y:.1f} L{x - 2:.1f},{y + 4.5:.1f} Z"', "#333", "white")
    else:
        svg.shape("path", f'd="M{x:.1f},{y - 5:.1f} L{x + 4:.1f},{y:.1f} L{x:.1f},{y + 5:.1f} L{x - 4:.1f},{y:.1f} Z"',
                  "#333", "white")
