"""One line that tells how far the run is."""

import shutil
import sys
import time


class Progress:
    """On a terminal a bar that is redrawn; elsewhere a line whenever the label changes."""

    def __init__(self, total):
        self.total = max(total, 1)
        self.done = 0
        self.label = None
        self.start = time.monotonic()
        self.live = sys.stderr.isatty()

    def show(self, label):
        if not self.live and label != self.label:
            print(f"[{100 * self.done // self.total:3d} %] {label}", file=sys.stderr, flush=True)
        self.label = label
        self._draw()

    def step(self):
        self.done += 1
        self._draw()

    def close(self):
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _draw(self):
        if not self.live:
            return
        spent = time.monotonic() - self.start
        left = spent / self.done * (self.total - self.done) if self.done else None
        width = 24
        filled = width * self.done // self.total
        text = f"[{'#' * filled}{'.' * (width - filled)}] {100 * self.done // self.total:3d} %  {self.label}"
        if left is not None:
            text += f"  ({left:.0f} s left)"
        print("\r\x1b[K" + text[:shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)
