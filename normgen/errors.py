"""Errors for people: where, which key, what is wrong, what would be right."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with one file: a spec, or a generated file that is in the way.

    `line` and `column` count from 1; 0 means that the fault has no place in the file (it cannot be read at all).
    `key` is the dotted path of the key, or empty where the fault concerns the file as a whole.
    """

    path: str
    line: int
    column: int
    key: str
    message: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}:{self.column}" if self.line else self.path
        return f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}"


class SpecError(Exception):
    """A spec that cannot be used. Carries all faults found, so that one run shows everything there is to mend."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


class OutputError(Exception):
    """Something in the output directory cannot be read or written. Carries it as one fault."""

    def __init__(self, path: str, message: str) -> None:
        self.faults = [Fault(path, 0, 0, "", message)]
        super().__init__(str(self.faults[0]))


class ToolError(Exception):
    """Something that a command needs besides normgen is missing or set up so that it cannot serve."""

    def __init__(self, tool: str, message: str) -> None:
        self.faults = [Fault(tool, 0, 0, "", message)]
        super().__init__(str(self.faults[0]))
