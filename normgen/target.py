"""Facts about GPUs, and the launch ladders that rest on them: the only file that knows hardware.

The ladders were chosen on an H200 (torch 2.11.0, triton 3.6.0, bf16, 2^27 elements); `benchmarks/results/h200` holds
what the final code reaches at every width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Tile:
    """Whole rows in registers, for rows up to `widest`: `elements` a tile, in blocks of at most `columns` columns."""

    widest: int
    columns: int
    elements: int
    warps: int
    stages: int = 1
    """Tiles on their way or in work at a time, in a persistent grid."""
    programs: int = 0
    """Programs a multiprocessor, in a persistent grid."""


@dataclass(frozen=True)
class Chunk:
    """Rows read again for each walk, in chunks of `columns`; every `slab` columns have a program of their own."""

    widest: int
    columns: int
    slab: int
    warps: int
    programs: int = 1
    """Programs a multiprocessor where several share a row."""


@dataclass(frozen=True)
class Slab:
    """Rows shared by programs that own `columns` columns each."""

    widest: int
    columns: int
    """Of elements of 2 bytes; wider elements, fewer."""
    warps: int
    programs: int
    """Programs a multiprocessor."""


@dataclass(frozen=True)
class Ladders:
    """Rungs by width, narrow to wide; what serves the widest rows takes all that are wider."""

    forward: tuple[Tile, ...]
    chunks: tuple[Chunk, ...]
    backward: tuple[Tile, ...]
    slabs: tuple[Slab, ...]


WIDEST = 2**31 - 1

# A program that holds a whole row keeps it in registers, of which a thread has at most 255: 32 to 64 elements a thread
# forward and 16 to 40 backward leave room for the parameters and for other programs.
# AMD's warps are of 64 threads: with fewer than 512 elements a warp a load would not fill 16 bytes.
LADDERS: dict[Literal["rms", "layer"], Ladders] = {
    "rms": Ladders(
        forward=(
            Tile(256, 256, 1024, 1),
            Tile(2048, 2048, 2048, 2),
            Tile(4096, 4096, 4096, 4),
            Tile(8192, 8192, 8192, 8),
        ),
        chunks=(
            Chunk(16384, 4096, WIDEST, 16),
            Chunk(65536, 8192, WIDEST, 32),
            Chunk(WIDEST, 8192, 32768, 32, 2),
        ),
        backward=(
            Tile(4096, 4096, 4096, 8, 3, 2),
            Tile(5632, 1024, 5120, 4, 3, 2),
            Tile(8192, 8192, 8192, 16, 4, 1),
        ),
        slabs=(Slab(WIDEST, 4096, 4, 2),),
    ),
    "layer": Ladders(
        forward=(
            Tile(256, 256, 1024, 1),
            Tile(2048, 2048, 2048, 2),
            Tile(4096, 4096, 4096, 4),
            Tile(8192, 8192, 8192, 8),
        ),
        chunks=(
            Chunk(16384, 4096, WIDEST, 16),
            Chunk(32768, 8192, WIDEST, 32),
            Chunk(WIDEST, 4096, 16384, 16, 4),
        ),
        backward=(
            Tile(4096, 4096, 4096, 8, 3, 2),
            Tile(5632, 1024, 5120, 4, 3, 2),
            Tile(8192, 8192, 8192, 16, 4, 1),
        ),
        slabs=(Slab(WIDEST, 4096, 4, 2),),
    ),
}


@dataclass(frozen=True)
class Columns:
    """Tiles of the kernel that adds up partial sums, a block of columns at a time."""

    rows: int
    columns: int
    warps: int


COLUMNS = Columns(128, 32, 8)
STATISTICS = Chunk(WIDEST, 4096, WIDEST, 16)


def single_block_limit(norm: Literal["rms", "layer"], grad: bool) -> int:
    """The widest row that one program can hold, in every direction that is emitted."""
    ladders = LADDERS[norm]
    return min(ladders.forward[-1].widest, ladders.backward[-1].widest) if grad else ladders.forward[-1].widest
