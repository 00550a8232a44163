"""Facts about GPUs, and the launch ladders that rest on them: the only file that knows hardware."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rung:
    """Rows up to `widest` elements are served by tiles of `elements` elements, with `warps` warps a program."""

    widest: int
    elements: int
    warps: int
    programs: int
    """Programs a multiprocessor in a persistent grid; unused where there is one program a tile."""
    reason: str


# A program that holds a whole row keeps it in registers: 65536 of 32 bits a multiprocessor, at most 255 a thread.
FORWARD_LADDER = (
    Rung(1024, 2048, 4, 0, "narrow rows share a tile of 2048 elements"),
    Rung(4096, 4096, 4, 0, "one row a program, 32 elements a thread"),
    Rung(16384, 16384, 8, 0, "one row a program, at most 64 elements a thread"),
)
BACKWARD_LADDER = (
    Rung(2048, 2048, 4, 4, "narrow rows share a tile of 2048 elements"),
    Rung(4096, 4096, 8, 2, "one row a step, 16 elements a thread"),
    Rung(8192, 8192, 16, 1, "one row a step; parameters and their sums stay in registers"),
)


@dataclass(frozen=True)
class Chunk:
    """The loop over chunks of a row wider than the ladder."""

    elements: int
    warps: int


CHUNK = Chunk(4096, 8)


@dataclass(frozen=True)
class Columns:
    """Tiles of the kernel that sums parameter gradients over rows, a block of columns at a time."""

    rows: int
    columns: int
    warps: int


COLUMNS = Columns(16, 128, 4)


def single_block_limit(grad: bool) -> int:
    """The widest row that one program can hold, in every direction that is emitted."""
    return min(FORWARD_LADDER[-1].widest, BACKWARD_LADDER[-1].widest) if grad else FORWARD_LADDER[-1].widest
