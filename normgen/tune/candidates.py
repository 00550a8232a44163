"""Which launches are worth a try at a width. Pure arithmetic: no GPU is asked, and none need be there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from pydantic import ValidationError

from normgen.kernels import Kernel, Kernels
from normgen.stages.base import Tensor
from normgen.target import (
    REGISTERS,
    SHARED_KEPT,
    SHARED_ROW,
    SLAB_SCRATCH,
    TARGETS,
    THREAD_REGISTERS,
    WARP,
    Chunk,
    Ladders,
    Rung,
    Slab,
    Tile,
    power_above,
)

DIRECTIONS = {"forward": ("forward", "chunks", "forward_slabs"), "backward": ("backward", "backward_slabs")}
"""The ladders of a direction: of whole rows first, of the widest last."""

POWERS = tuple(1 << power for power in range(18))
WARPS = (1, 2, 4, 8, 16, 32)
# Elements of a row a thread: fewer leave loads short of 16 bytes of 2-byte elements, more leave no registers.
FEWEST, MOST = 8, 64
# Narrow rows share a tile up to this size; beyond, a program only starts later.
SHARED_TILE = 4096
WIDEST_TILE = 32768
# Bytes of shared memory that every program takes besides its own.
RESERVED = TARGETS["cuda:90"].shared_reserved
# Narrower rows are not worth reading again, and not worth sharing.
NARROWEST_CHUNKED = 2048

Launch = tuple[int, ...]
"""What a kernel is launched with at one width: the values of a ladder's rung as they come out there.

forward: rows, columns, warps; backward: these, stages, programs.
chunks: columns, warps, programs; slabs: these, stages.
"""


@dataclass(frozen=True)
class Space:
    """What of a spec and a GPU decides which launches there are."""

    ladders: tuple[str, ...]
    """Those that the module has."""
    itemsize: int
    row_bytes: int
    """Of a column of all rows that the backward kernel loads."""
    held: int
    """Arrays of a tile's size in the registers of the backward kernel, by and large."""
    slab_bytes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """In shared memory for a column of a slab, by ladder: of each of its rows, and of its weights."""
    packed: int = 0
    """Bytes of an element of what forward keeps of rows wider than tiles; 0 where it reads them again."""
    shared_memory: int = 232448
    multiprocessors: int = 132

    def effective(self, ladder: str, rung: Rung, width: int) -> Launch:
        """What the launcher makes of a rung for rows of that width."""
        if isinstance(rung, Slab):
            return rung.columns, rung.warps, rung.programs, rung.stages
        if isinstance(rung, Chunk):
            return rung.columns, rung.warps, rung.programs
        return self.tile(ladder, (rung.columns, rung.elements, rung.warps, rung.stages, rung.programs), width)

    def tile(self, ladder: str, values: tuple[int, int, int, int, int], width: int) -> Launch:
        """The same of a tile, as plain numbers: columns, elements, warps, stages, programs."""
        columns, elements, warps, stages, programs = values
        block = min(columns, power_above(width))
        row = -(-width // block) * block
        rows = 1 << (max(1, elements // row).bit_length() - 1)
        if ladder == "forward":
            return rows, block, warps
        return rows, block, warps, min(stages, self.stages(rows, row, programs)), programs

    def stages(self, rows: int, columns: int, programs: int) -> int:
        """The most stages for which tiles on their way have room in shared memory, with two statistics of each row."""
        room = self.shared_memory // max(1, programs) - SHARED_KEPT
        return max(1, 1 + room // (rows * (columns * self.row_bytes + SHARED_ROW)))

    def rung(self, ladder: str, launch: Launch, width: int) -> Rung:
        """The rung that serves rows up to `width`, and launches that at `width`. Raises ValidationError if none may."""
        if ladder == "chunks":
            columns, warps, programs = launch
            return Chunk(widest=width, columns=columns, warps=warps, programs=programs)
        if ladder not in ("forward", "backward"):
            columns, warps, programs, stages = launch
            return Slab(widest=width, columns=columns, warps=warps, programs=programs, stages=stages)
        rows, columns, warps, *rest = launch
        elements = rows * -(-width // columns) * columns
        stages, programs = rest or (1, 0)
        return Tile(widest=width, columns=columns, elements=elements, warps=warps, stages=stages, programs=programs)

    def literal(self, ladder: str, rung: Rung) -> tuple[int, ...]:
        """A rung without its width as the module's ladder spells it."""
        names = {
            "forward": ("columns", "elements", "warps"),
            "backward": ("columns", "elements", "warps", "stages", "programs"),
            "chunks": ("columns", "warps", "programs"),
        }
        return tuple(getattr(rung, name) for name in names.get(ladder, ("columns", "warps", "programs", "stages")))

    def launches(self, ladder: str, width: int) -> list[Launch]:
        """The launches worth a try; each is the rung of a valid ladder."""
        made: dict[str, Callable[[int], Iterator[Launch]]] = {
            "forward": self._forward,
            "backward": self._backward,
            "chunks": self._chunks,
            "forward_slabs": partial(self._slabs, "forward_slabs"),
            "backward_slabs": partial(self._slabs, "backward_slabs"),
        }
        whole = DIRECTIONS[direction_of(ladder)][0]
        if ladder != whole and whole in self.ladders and width < NARROWEST_CHUNKED:
            return []
        return [launch for launch in dict.fromkeys(made[ladder](width)) if self._valid(ladder, launch, width)]

    def _valid(self, ladder: str, launch: Launch, width: int) -> bool:
        try:
            self.rung(ladder, launch, width)
        except ValidationError:
            return False
        return True

    def _tiles(self, width: int, most: int) -> Iterator[tuple[int, int, int, int]]:
        """Rows, columns, warps and elements of tiles with up to `most` elements a thread."""
        for columns in _blocks(width):
            row = -(-width // columns) * columns
            for rows in POWERS:
                elements = rows * row
                if elements > WIDEST_TILE or (rows > 1 and elements > SHARED_TILE):
                    break
                for warps in WARPS:
                    # Beyond a row narrower than the fewest elements a thread, threads would hold the same.
                    if max(FEWEST, 16 // self.itemsize) <= elements / (WARP * warps) <= most:
                        yield rows, columns, warps, elements

    def _forward(self, width: int) -> Iterator[Launch]:
        for rows, columns, warps, _ in self._tiles(width, MOST):
            yield rows, columns, warps

    def _backward(self, width: int) -> Iterator[Launch]:
        for rows, columns, warps, elements in self._tiles(width, min(MOST, THREAD_REGISTERS // self.held)):
            for programs in (1, 2, 3, 4, 6, 8):
                # Fewer than 4 warps a multiprocessor cannot keep its memory busy.
                if programs * warps < 4 or programs * elements * self.held > REGISTERS:
                    continue
                for stages in range(1, 1 + min(4, self.stages(rows, elements // rows, programs))):
                    yield rows, columns, warps, stages, programs

    def _chunks(self, width: int) -> Iterator[Launch]:
        for columns, warps, each in _parts(width, (1024, 2048, 4096, 8192, 16384), 4):
            for programs in (1, 2, 3, 4, 5, 6):
                taken = 2 * each
                if self.packed:  # the whole row, as it is in memory
                    taken = -(-width // columns) * each * self.packed // 4
                if taken + 24 <= min(THREAD_REGISTERS, REGISTERS // (WARP * warps * programs)):
                    yield columns, warps, programs

    def _slabs(self, ladder: str, width: int) -> Iterator[Launch]:
        row_bytes, weight_bytes = self.slab_bytes[ladder]
        # Registers hold a row as numbers, and once more what is made of it; of sums over rows, the compiler tells.
        for columns, warps, each in _parts(width, (1024, 2048, 4096, 8192), 1):
            for programs in (1, 2, 3, 4, 5, 6, 8, 12):
                registers = min(THREAD_REGISTERS, REGISTERS // (WARP * warps * programs))
                if 2 * each + 24 > registers or -(-width // columns) > programs * self.multiprocessors:
                    continue
                for stages in range(3, 9):
                    taken = columns * 2 // self.itemsize * (stages * row_bytes + weight_bytes) + SLAB_SCRATCH
                    # Half of shared memory at least: with less, too few rows are on their way.
                    if self.shared_memory // 2 <= taken * programs <= self.shared_memory - RESERVED * (programs - 1):
                        yield columns, warps, programs, stages


def direction_of(ladder: str) -> str:
    return next(name for name, ladders in DIRECTIONS.items() if ladder in ladders)


def _blocks(width: int) -> list[int]:
    """Columns a block: the power of two above, and smaller ones that leave fewer lanes idle, in up to 12 blocks."""
    found = [power_above(width)]
    padded = found[0]
    for columns in (found[0] >> shift for shift in range(1, 6)):
        row = -(-width // columns) * columns
        if columns >= 128 and row < padded and row // columns <= 12:
            found.append(columns)
            padded = row
    return found


def _parts(width: int, sizes: tuple[int, ...], fewest: int) -> Iterator[tuple[int, int, int]]:
    """Columns, warps (at least `fewest`) and elements a thread of the parts that a row is cut into."""
    for columns in sizes:
        for warps in (warps for warps in WARPS if warps >= fewest):
            each = columns // (WARP * warps)
            if columns <= power_above(width) and FEWEST <= each <= MOST:
                yield columns, warps, each


def space(kernels: Kernels, dtype: str, **gpu: int) -> Space:
    """The space of kernels for x of that dtype. `gpu`: its shared_memory and multiprocessors, if not an H200's."""
    itemsize = 4 if dtype == "float32" else 2
    backward = kernels.backward or kernels.backward_slabs
    ladders = {
        "forward": kernels.forward,
        "chunks": kernels.forward_chunked,
        "forward_slabs": kernels.forward_slabs,
        "backward": kernels.backward,
        "backward_slabs": kernels.backward_slabs,
    }
    sizes = {"input": itemsize, "float16": 2, "bfloat16": 2}

    def size(tensor: Tensor) -> int:
        return sizes.get(tensor.dtype, 4)

    def weights(kernel: Kernel) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in kernel.loads if tensor.dims == "H")

    slabs = {name: kernel for name, kernel in ladders.items() if kernel and name.endswith("_slabs")}
    return Space(
        ladders=tuple(name for name, kernel in ladders.items() if kernel),
        itemsize=itemsize,
        row_bytes=sum(map(size, backward.strided)) if backward else 0,
        held=2 + len(weights(backward)) + len(backward.sums) if backward else 2,
        slab_bytes={
            name: (sum(map(size, kernel.strided)), sum(map(size, weights(kernel)))) for name, kernel in slabs.items()
        },
        packed=sum(map(size, kernels.forward_chunked.packed)) if kernels.forward_chunked else 0,
        **gpu,
    )


def default(space: Space, ladders: Ladders, direction: str, width: int) -> tuple[str, Rung]:
    """The ladder and the rung that serve a width as long as nothing else is known."""
    served = [
        (name, rung) for name in DIRECTIONS[direction] if name in space.ladders for rung in getattr(ladders, name)
    ]
    return next((one for one in served if width <= one[1].widest), served[-1])
