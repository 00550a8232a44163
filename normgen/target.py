"""Facts about GPUs, and the launch ladders that rest on them: the only file that knows hardware.

Rungs are models, since a table of `normgen tune` holds the same; its rules are those of launchers and kernels.
The ladders were chosen on an H200 (torch 2.11.0, triton 3.6.0, bf16, 2^27 elements); `benchmarks/results/h200` holds
what they reach.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, field_validator, model_validator

from normgen.stages.base import Model, fault


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

WIDEST = 2**31 - 1
"""Wider than any row: rungs of that width are unlimited, `null` in a table."""

# What rungs must fit: one multiprocessor of NVIDIA's, sm_80 to sm_100; a thread has at most 255 of the registers.
WARP = TARGETS["cuda:90"].warp
THREADS = TARGETS["cuda:90"].warps * WARP
REGISTERS = TARGETS["cuda:90"].registers
THREAD_REGISTERS = 255
PROGRAMS = 16
"""A multiprocessor of sm_75, sm_86 or sm_87 runs no more at once; others run 24 or 32."""

SHARED_KEPT = 12288
"""Bytes of a program's shared memory that tiles on their way are not given."""
SHARED_ROW = 16
"""Bytes of it for each row on its way: two statistics."""


SLAB_SCRATCH = 1024
"""Bytes of it that a program of slabs takes besides its rows, at most: warps add up through them."""


def power_above(width: int) -> int:
    """The power of two that is no less."""
    return 1 << (width - 1).bit_length()


def _unlimited(value: Any) -> Any:
    return WIDEST if value is None else value


def _positive(value: int) -> int:
    if value < 1:
        raise fault(f"must be at least 1, not {value}")
    return value


def _power_of_two(value: int) -> int:
    if value < 1 or value & (value - 1):
        raise fault(f"must be a power of two, not {value}; {1 << max(0, value.bit_length() - 1)} is one")
    return value


def _warps(value: int) -> int:
    if _power_of_two(value) > 32:
        raise fault(f"a program has at most 32 warps, not {value}")
    return value


def _measured(value: Any) -> list[tuple[int, float]]:
    pairs: list[Any] = value if isinstance(value, list) else [None]
    for pair in pairs:
        types = [type(number) for number in pair] if isinstance(pair, (list, tuple)) else []
        if types not in ([int, int], [int, float]):
            raise fault(f"{reprlib.repr(value)} is no list of widths and shares; write it as in [[4096, 0.93]]")
    return [(width, float(share)) for width, share in pairs]


def _fit(elements: int, warps: int, programs: int) -> None:
    """Refuse more than a multiprocessor holds: `elements` of 4 bytes in registers, in each of `programs` programs."""
    threads = WARP * warps * max(1, programs)
    if threads > THREADS:
        message = f"{programs} programs of {warps} warps are {threads} threads, and a multiprocessor has {THREADS}"
        raise fault(f"{message}; write fewer programs or warps", key="programs")
    if programs > PROGRAMS:
        raise fault(f"{programs} programs are more than the {PROGRAMS} that every multiprocessor runs", key="programs")
    held, room = -(-elements // (WARP * warps)), min(THREAD_REGISTERS, REGISTERS // threads)
    if held > room:
        message = f"{elements} elements are {held} registers for each thread of {warps * WARP}, and there are {room}"
        raise fault(f"{message}; write more warps{', fewer programs' * (programs > 1)} or fewer elements", key="warps")


Widest = Annotated[int, BeforeValidator(_unlimited)]
Measured = Annotated[list[tuple[int, float]], PlainValidator(_measured)]

_WIDEST = "The widest row served; null: as wide as they come."
_WARPS = "Warps a program, a power of two."
_PROGRAMS = "Programs a multiprocessor."
_MEASURED = "Widths tried, each with the speed reached: the share of that of a device copy of the same bytes."


class Tile(Model):
    """Whole rows in registers, for rows up to `widest`: `elements` a tile, in blocks of at most `columns` columns."""

    widest: Widest = Field(description="The widest row served.")
    columns: int = Field(description="Columns a block, a power of two.")
    elements: int = Field(description="Elements a tile: rows share it as far as they fit.")
    warps: int = Field(description=_WARPS)
    stages: int = Field(default=1, description="Tiles on their way or in work at a time, in a persistent grid.")
    programs: int = Field(default=0, description=f"{_PROGRAMS[:-1]}, in a persistent grid.")
    measured: Measured = Field(default_factory=list, description=_MEASURED)

    _widths = field_validator("widest")(_positive)
    _powers = field_validator("columns")(_power_of_two)
    _warps = field_validator("warps")(_warps)

    @field_validator("stages")
    @classmethod
    def _few(cls, stages: int) -> int:
        if not 1 <= stages <= 8:
            raise fault(f"must be from 1 to 8, not {stages}")
        return stages

    @field_validator("programs")
    @classmethod
    def _not_negative(cls, programs: int) -> int:
        if programs < 0:
            raise fault(f"must be at least 1, or 0 where the grid is not persistent, not {programs}")
        return programs

    @model_validator(mode="after")
    def _fits(self) -> Tile:
        if self.widest == WIDEST:
            raise fault("a tile holds whole rows, so there is a widest; write a number such as 8192", key="widest")
        if self.elements < self.columns:
            message = f"a tile of {self.elements} elements is less than a block of {self.columns} columns"
            raise fault(f"{message}; write {self.columns} or more", key="elements")
        block = min(self.columns, power_above(self.widest))
        _fit(max(-(-self.widest // block) * block, self.elements), self.warps, self.programs)
        return self


class Chunk(Model):
    """Rows read again for each walk, in chunks of `columns`."""

    widest: Widest = Field(description=_WIDEST)
    columns: int = Field(description="Columns a chunk, a power of two.")
    warps: int = Field(description=_WARPS)
    programs: int = Field(default=1, description=f"{_PROGRAMS[:-1]}: what registers leave room for.")
    measured: Measured = Field(default_factory=list, description=_MEASURED)

    _positives = field_validator("widest", "programs")(_positive)
    _powers = field_validator("columns")(_power_of_two)
    _warps = field_validator("warps")(_warps)

    @model_validator(mode="after")
    def _fits(self) -> Chunk:
        _fit(self.columns, self.warps, self.programs)
        return self


class Slab(Model):
    """Rows shared by programs that own `columns` columns each and have `stages` rows in shared memory."""

    widest: Widest = Field(description=_WIDEST)
    columns: int = Field(
        description="Columns a program, a power of two: of 2 bytes; of wider elements, parameters too, fewer."
    )
    warps: int = Field(description=_WARPS)
    programs: int = Field(description=_PROGRAMS)
    stages: int = Field(description="Rows on their way, in work, or waiting for their sums at a time.")
    measured: Measured = Field(default_factory=list, description=_MEASURED)

    _positives = field_validator("widest", "programs")(_positive)
    _powers = field_validator("columns")(_power_of_two)
    _warps = field_validator("warps")(_warps)

    @field_validator("stages")
    @classmethod
    def _some(cls, stages: int) -> int:
        if not 2 <= stages <= 16:
            raise fault(f"must be from 2 to 16, not {stages}")
        return stages

    @model_validator(mode="after")
    def _fits(self) -> Slab:
        if self.columns < 4:
            raise fault("a program owns at least 4 columns: of 8 bytes, it owns a quarter", key="columns")
        _fit(self.columns, self.warps, self.programs)
        return self


Rung = Tile | Chunk | Slab


class Ladders(Model):
    """Rungs by width, narrow to wide; what serves the widest rows takes all that are wider."""

    forward: list[Tile] = Field(description="Tiles of the forward kernel; [] where all rows go in chunks.")
    chunks: list[Chunk] = Field(description="Chunks of the forward kernel, for wider rows; all of them with welford.")
    forward_slabs: list[Slab] = Field(
        description="Slabs of the forward kernel, for still wider rows; the last is null."
    )
    backward: list[Tile] = Field(description="Tiles of the backward kernel; [] where all rows go in slabs.")
    backward_slabs: list[Slab] = Field(description="Slabs of the backward kernel, for wider rows; the last is null.")

    @field_validator("forward", "chunks", "forward_slabs", "backward", "backward_slabs")
    @classmethod
    def _ascending(cls, rungs: list[Any]) -> list[Any]:
        for index, (narrow, wide) in enumerate(pairwise(rungs), 1):
            if wide.widest <= narrow.widest:
                message = f"rungs go from narrow to wide, and the one before ends at {_width(narrow.widest)}"
                raise fault(f"{message}; write more, or leave this one out", key=(index, "widest"))
        return rungs

    @field_validator("chunks")
    @classmethod
    def _some(cls, rungs: Sequence[Rung]) -> Sequence[Rung]:
        if not rungs:
            raise fault(
                "the list is empty; strategy welford takes its chunks from here, so one rung at least is needed"
            )
        return rungs

    @field_validator("forward_slabs", "backward_slabs")
    @classmethod
    def _endless(cls, rungs: Sequence[Rung]) -> Sequence[Rung]:
        if not rungs:
            raise fault("the list is empty; one rung at least takes the widest rows, its widest null")
        if rungs[-1].widest < WIDEST:
            raise fault("the last rung takes all wider rows; write null", key=(len(rungs) - 1, "widest"))
        return rungs

    @field_validator("backward")
    @classmethod
    def _persistent(cls, tiles: list[Tile]) -> list[Tile]:
        for index, tile in enumerate(tiles):
            if not tile.programs:
                raise fault("the backward grid is persistent; write at least 1", key=(index, "programs"))
        return tiles


def _width(widest: int) -> str:
    return "null" if widest == WIDEST else str(widest)


class Table(Ladders):
    """Ladders that `normgen tune` found for one spec, with the facts of the search; `specs/tuned/<name>.yaml`."""

    gpu: str = Field(description="The GPU that was searched on, as torch names it.")
    torch: str = Field(description="The version of torch.")
    triton: str = Field(description="The version of triton.")
    dtype: Literal["float16", "bfloat16", "float32"] = Field(description="The dtype of x, and of parameters.")
    elements: int = Field(description="Elements of x, at every width.")

    _positives = field_validator("elements")(_positive)

    @field_validator("gpu", "torch", "triton")
    @classmethod
    def _plain(cls, text: str) -> str:
        # It stands in a comment and in a docstring of the generated module.
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 .,()+/_-]{0,47}", text):
            raise fault(f"{reprlib.repr(text)} is no name; write up to 48 of: letters, digits, spaces and .,()+/_-")
        return text


def _tiles(*rungs: tuple[int, ...]) -> list[Tile]:
    names = ("widest", "columns", "elements", "warps", "stages", "programs")
    return [Tile.model_validate(dict(zip(names, rung, strict=False))) for rung in rungs]


def _chunks(*rungs: tuple[int, ...]) -> list[Chunk]:
    names = ("widest", "columns", "warps", "programs")
    return [Chunk.model_validate(dict(zip(names, rung, strict=True))) for rung in rungs]


def _slabs(*rungs: tuple[int, ...]) -> list[Slab]:
    names = ("widest", "columns", "warps", "programs", "stages")
    return [Slab.model_validate(dict(zip(names, rung, strict=True))) for rung in rungs]


# Chosen for the share of a device copy that is reached (bf16, 2^27 elements), from what was tried
# (benchmarks/results/h200/search.json): tiles at 23 widths, LayerNorm's forward at 9; chunks at 7; slabs at 3 to 7. Not
# every rung was tried at every width that it serves. Nor is it always the fastest tried: one may serve its neighbours
# too, spill nothing, or move 16 bytes at a time on other GPUs. Many small programs did best: LayerNorm's backward at
# 1024 columns reached 0.75 with 8 warps a program, 0.95 with 2 and 4. Keyed by norm, and whether a residual is added,
# which doubles the rows on their way.
LADDERS: dict[tuple[Literal["rms", "layer"], bool], Ladders] = {
    ("rms", False): Ladders(
        forward=_tiles(
            (96, 32, 2048, 2),
            (256, 128, 2048, 1),
            (512, 256, 2048, 2),
            (768, 1024, 2048, 1),
            (1024, 1024, 2048, 4),
            (2048, 2048, 2048, 2),
            (4096, 4096, 4096, 4),
        ),
        chunks=_chunks(
            (6144, 2048, 8, 5),
            (24576, 4096, 16, 3),
            (32768, 8192, 32, 2),
            (65536, 16384, 32, 1),
        ),
        forward_slabs=_slabs((WIDEST, 8192, 4, 2, 5)),
        backward=_tiles(
            (64, 64, 2048, 4, 4, 4),
            (96, 32, 4096, 4, 3, 2),
            (128, 64, 8192, 8, 3, 1),
            (256, 256, 2048, 2, 3, 4),
            (512, 512, 1024, 2, 4, 4),
            (768, 1024, 2048, 4, 4, 3),
            (1024, 1024, 1024, 2, 4, 4),
            (1536, 2048, 2048, 2, 4, 4),
            (2048, 2048, 2048, 4, 4, 4),
            (3072, 1024, 3072, 4, 4, 2),
            (4096, 4096, 4096, 4, 3, 2),
            (5120, 1024, 5120, 4, 4, 1),
            (6144, 2048, 6144, 8, 4, 1),
            (8192, 8192, 8192, 8, 3, 1),
            (12288, 2048, 12288, 8, 3, 1),
        ),
        backward_slabs=_slabs((WIDEST, 8192, 8, 1, 6)),
    ),
    ("rms", True): Ladders(
        forward=_tiles(
            (256, 128, 2048, 4),
            (512, 512, 2048, 2),
            (2048, 2048, 2048, 4),
            (4096, 4096, 4096, 4),
            (8192, 8192, 8192, 8),
        ),
        chunks=_chunks((65536, 16384, 32, 1)),
        forward_slabs=_slabs((WIDEST, 2048, 2, 4, 5)),
        backward=_tiles(
            (256, 128, 8192, 8, 3, 1),
            (512, 512, 4096, 4, 3, 2),
            (768, 1024, 4096, 4, 3, 2),
            (1024, 1024, 8192, 8, 3, 1),
            (2048, 2048, 2048, 4, 3, 4),
            (2560, 4096, 4096, 4, 4, 2),
            (3072, 4096, 4096, 4, 3, 2),
            (4096, 2048, 4096, 4, 3, 2),
            (5120, 1024, 5120, 4, 4, 1),
            (6144, 2048, 6144, 8, 3, 1),
            (8192, 8192, 8192, 8, 3, 1),
            (12288, 4096, 12288, 8, 3, 1),
            (16384, 4096, 16384, 8, 2, 1),
        ),
        backward_slabs=_slabs((65536, 4096, 4, 2, 4), (WIDEST, 8192, 8, 1, 4)),
    ),
    ("layer", False): Ladders(
        forward=_tiles(
            (96, 32, 2048, 2),
            (128, 64, 1024, 1),
            (256, 64, 2048, 1),
            (512, 512, 1024, 1),
            (768, 256, 1536, 1),
            (1024, 1024, 2048, 2),
            (1536, 512, 1536, 1),
            (2048, 2048, 2048, 2),
            (3072, 1024, 3072, 2),
            (4096, 2048, 4096, 4),
            (7168, 1024, 7168, 4),
            (8192, 2048, 8192, 4),
        ),
        chunks=_chunks((16384, 4096, 8, 3), (32768, 8192, 16, 2)),
        forward_slabs=_slabs((WIDEST, 8192, 4, 2, 5)),
        backward=_tiles(
            (64, 64, 8192, 16, 3, 1),
            (96, 64, 8192, 16, 4, 1),
            (128, 64, 2048, 4, 4, 2),
            (256, 256, 8192, 16, 3, 1),
            (512, 512, 2048, 2, 3, 4),
            (768, 1024, 3072, 2, 4, 4),
            (1024, 1024, 2048, 2, 3, 4),
            (1280, 512, 1536, 2, 4, 4),
            (1536, 512, 1536, 2, 3, 4),
            (2048, 1024, 4096, 4, 3, 2),
            (3072, 1024, 3072, 4, 4, 2),
            (4096, 2048, 4096, 8, 3, 2),
            (5120, 1024, 5120, 4, 4, 1),
            (6144, 2048, 6144, 8, 4, 1),
            (7168, 8192, 8192, 16, 4, 1),
            (8192, 4096, 8192, 8, 3, 1),
            (12288, 4096, 12288, 16, 3, 1),
        ),
        backward_slabs=_slabs((131072, 2048, 2, 4, 6), (WIDEST, 8192, 8, 1, 6)),
    ),
    ("layer", True): Ladders(
        forward=_tiles(
            (128, 128, 2048, 4),
            (256, 128, 2048, 2),
            (1024, 1024, 1024, 2),
            (2048, 2048, 2048, 2),
            (4096, 2048, 4096, 8),
            (8192, 8192, 8192, 8),
        ),
        chunks=_chunks((12288, 4096, 8, 4), (32768, 8192, 16, 2), (65536, 16384, 32, 1)),
        forward_slabs=_slabs((WIDEST, 4096, 4, 2, 5)),
        backward=_tiles(
            (64, 64, 8192, 16, 3, 1),
            (96, 32, 8192, 8, 3, 1),
            (128, 64, 2048, 4, 4, 2),
            (256, 128, 8192, 16, 3, 1),
            (512, 512, 2048, 2, 3, 4),
            (768, 1024, 2048, 2, 4, 4),
            (1024, 1024, 4096, 4, 3, 2),
            (1536, 512, 1536, 2, 3, 4),
            (2048, 1024, 4096, 4, 3, 2),
            (3072, 1024, 3072, 4, 4, 2),
            (4096, 1024, 4096, 4, 3, 2),
            (6144, 2048, 6144, 8, 4, 1),
            (8192, 8192, 8192, 8, 3, 1),
            (12288, 4096, 12288, 16, 3, 1),
        ),
        backward_slabs=_slabs((65536, 4096, 4, 2, 4), (WIDEST, 8192, 8, 1, 4)),
    ),
}


@dataclass(frozen=True)
class Fixed:
    """Tiles of a kernel that is launched the same way at every width."""

    rows: int
    columns: int
    warps: int


PARTIALS = Fixed(128, 32, 8)
STATISTICS = Fixed(1, 4096, 16)


def single_block_limit(ladders: Ladders, grad: bool) -> int:
    """The widest row that the largest tile can hold, in every direction that is emitted; 0 where there are no tiles."""

    def most(tile: Tile) -> int:
        # Wider than the ladder has it serve, where others serve faster: 64 elements a thread.
        return max(tile.widest, tile.elements, min(8192, 64 * WARP * tile.warps))

    directions = (ladders.forward, ladders.backward) if grad else (ladders.forward,)
    return min(most(tiles[-1]) if tiles else 0 for tiles in directions)
