"""Facts about GPUs, and the launch ladders that rest on them: the only file that knows hardware.

The ladders were chosen on an H200 (torch 2.11.0, triton 3.6.0, bf16, 2^27 elements); `benchmarks/results/h200` holds
what the final code reaches at every width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Gpu:
    """What one multiprocessor (AMD: compute unit) has, and in which portions programs are given it."""

    multiprocessors: int
    warp: int
    """Threads a warp."""
    warps: int
    """Resident at once, of all programs."""
    programs: int
    """Resident at once, however small."""
    registers: int
    """Of 32 bits, in `parts` files of equal size; a warp has its registers in one of them."""
    parts: int
    register_step: int
    """Registers a thread are rounded up to a multiple of this."""
    shared: int
    """Bytes of shared memory for all resident programs."""
    shared_program: int
    """Bytes that one program may ask for."""
    shared_step: int
    shared_reserved: int
    """Bytes that each program takes besides what it asks for."""

    def occupancy(self, registers: int, shared: int, warps: int) -> tuple[int, str]:
        """Resident programs a multiprocessor, and what allows no more: warps, programs, registers or shared.

        Takes registers a thread, bytes of shared memory and warps of one program. No program at all is resident where
        one asks for more than there is.
        """
        taken = -(-registers // self.register_step) * self.register_step * self.warp
        reserved = -(-(shared + self.shared_reserved) // self.shared_step) * self.shared_step
        limits = {
            "warps": self.warps // warps,
            "programs": self.programs,
            "registers": self.parts * (self.registers // self.parts // max(taken, 1)) // warps,
            "shared": self.shared // max(reserved, 1) if shared <= self.shared_program else 0,
        }
        limit = min(limits, key=lambda name: limits[name])
        return limits[limit], limit


# The GPU that stands for each target: A100, H100 and H200, B200, MI300X. From the technical specifications by compute
# capability in NVIDIA's programming guide, its occupancy calculator, and LLVM's AMDGPUBaseInfo (a compute unit has four
# files of 512 vector registers a lane, and eight warps on each).
TARGETS = {
    "cuda:80": Gpu(108, 32, 64, 32, 65536, 4, 8, 164 * 1024, 163 * 1024, 128, 1024),
    "cuda:90": Gpu(132, 32, 64, 32, 65536, 4, 8, 228 * 1024, 227 * 1024, 128, 1024),
    "cuda:100": Gpu(148, 32, 64, 32, 65536, 4, 8, 228 * 1024, 227 * 1024, 128, 1024),
    "hip:gfx942": Gpu(304, 64, 32, 32, 4 * 512 * 64, 4, 8, 64 * 1024, 64 * 1024, 512, 0),
}


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

    def rows(self, width: int) -> int:
        """How many rows of that width are in a tile, as `_tile` of the generated module has it."""
        block = min(self.columns, 1 << (width - 1).bit_length())
        return max(1, self.elements // (-(-width // block) * block))


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
