"""How far a search is, on stderr: a line that is written over on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from typing import TextIO

EVERY = 10.0
BAR = 24


class Progress:
    """Steps done of `total`, with an estimate of the time that is left."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total, self.done = total, 0
        self.stream = sys.stderr if stream is None else stream
        self.terminal = self.stream.isatty()
        self.start = time.monotonic()
        self.shown = self.start
        self.width = 0

    def step(self, what: str, steps: int = 1) -> None:
        self.done += steps
        now = time.monotonic()
        if now - self.shown >= (0.1 if self.terminal else EVERY):
            self.shown = now
            self._show(self.line(what, now - self.start))

    def line(self, what: str, passed: float) -> str:
        share = self.done / self.total if self.total else 1.0
        left = clock(passed / share - passed) if share else "?"
        filled = round(BAR * share)
        return f"[{'#' * filled}{'.' * (BAR - filled)}] {self.done}/{self.total}, {left} left: {what}"

    def _show(self, line: str) -> None:
        if self.terminal:
            self.stream.write("\r" + line.ljust(self.width))
            self.width = len(line)
        else:
            self.stream.write(line + "\n")
        self.stream.flush()

    def end(self) -> None:
        """Leave the line to what is printed next."""
        if self.terminal and self.width:
            self.stream.write("\n")
            self.stream.flush()


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
