"""Raw measurements, a line of JSON each: what was measured once is not measured again."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from normgen.errors import OutputError
from normgen.tune.candidates import Launch

Known = tuple[int, str, Launch]
"""Width, ladder, launch."""


class Raw:
    """The file of one spec. Lines with other facts than `key` (spec, code, GPU, versions) are kept and passed over.

    A line is written whole, at once: however a run ends, all before is there, and a torn last line is passed over.
    """

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        self.path, self.key = path, key
        self.shares: dict[Known, float] = {}
        self.skipped: dict[Known, str] = {}
        try:
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            self._torn = bool(text) and not text.endswith("\n")
        except OSError as error:
            raise OutputError(str(path), (error.strerror or str(error)).lower()) from None
        for line in text.splitlines():
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                self._take(json.loads(line))

    def _take(self, found: dict[str, Any]) -> None:
        if any(found[name] != value for name, value in self.key.items()):
            return
        known = (int(found["width"]), str(found["ladder"]), tuple(map(int, found["launch"])))
        if "skipped" in found:
            self.skipped[known] = str(found["skipped"])
        else:
            self.shares[known] = float(found["share"])

    def __contains__(self, known: object) -> bool:
        return known in self.shares or known in self.skipped

    def add(self, known: Known, **found: Any) -> None:
        """Keep what was found: `share` and `seconds`, or why it was `skipped`."""
        width, ladder, launch = known
        line = {**self.key, "width": width, "ladder": ladder, "launch": launch, **found}
        self._take(line)
        text = "\n" * self._torn + json.dumps(line) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                os.write(file, text.encode())
            finally:
                os.close(file)
        except OSError as error:
            raise OutputError(str(self.path), (error.strerror or str(error)).lower()) from None
        self._torn = False
