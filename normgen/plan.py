"""Spec -> Plan: which tensors there are, which strategies serve which widths, and why. No text of kernels here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from normgen.spec import Spec, TunedSpec
from normgen.stages.base import Dtype, Stage, Tensor
from normgen.stages.normalize import Normalize
from normgen.target import WIDEST, Chunk, Slab, Table, Tile, single_block_limit

Rung = TypeVar("Rung", Tile, Chunk, Slab)


@dataclass(frozen=True)
class Direction:
    """How one direction (forward or backward) is launched: rungs for whole rows, and for rows wider than these."""

    tiles: tuple[Tile, ...]
    chunks: tuple[Chunk, ...]
    slabs: tuple[Slab, ...]
    packed: bool = False
    """Whether chunks stay in registers, as they are in memory, rather than being read again."""

    @property
    def wide(self) -> tuple[Chunk | Slab, ...]:
        """The rungs of wider rows than tiles hold."""
        return self.chunks + self.slabs


@dataclass(frozen=True)
class Plan:
    spec: Spec
    stages: tuple[tuple[Stage, str, str], ...]
    """Each stage with the value it takes and the value it leaves."""
    inputs: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    statistics: tuple[Tensor, ...]
    """The saved ones; they are results of the operator too."""
    scratch: tuple[Tensor, ...]
    """Statistics that are not saved: where programs share rows, a kernel of its own computes them before."""
    forward: Direction
    backward: Direction | None
    reasons: tuple[str, ...]
    table: Table | None = None
    """Where the ladders come from, if `normgen tune` found them for this spec."""

    @property
    def baked_width(self) -> int | None:
        """The one width accepted, a constant of the kernels."""
        widths = self.spec.widths
        return widths[0] if widths and len(widths) == 1 else None

    @property
    def width_limit(self) -> int | None:
        """The widest row that a strategy of whole rows only can take; None where chunks take the rest."""
        return single_block_limit(self.spec.ladders, self.spec.grad) if self.spec.strategy == "single_block" else None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """The tensors of a call, in order."""
        return self.inputs + self.parameters

    @property
    def results(self) -> tuple[Tensor, ...]:
        """What the operator returns, in order."""
        return self.outputs + self.statistics


def plan(spec: Spec) -> Plan:
    """The decisions for `spec`."""
    stages = spec.stages
    names = ["x", *(stage.leaves for stage in stages[:-1]), "y"]
    output: Dtype = "input" if spec.dtypes.output == "same" else spec.dtypes.output
    tensors = [
        Tensor("x", "NH", "input", "input", "x", "the input"),
        Tensor("y", "NH", "output", output, "y", "the normalised result", stem="out"),
        *(tensor for stage in stages for tensor in stage.tensors()),
    ]
    by_role = {
        role: tuple(t for t in tensors if t.role == role) for role in ("input", "parameter", "output", "statistic")
    }
    norm = next(stage for stage in stages if isinstance(stage, Normalize))
    saved = {tensor.value for tensor in by_role["statistic"]}
    reasons: list[str] = []
    ladders, table = spec.ladders, spec.table if isinstance(spec, TunedSpec) else None
    if table:
        reasons.append(f"rungs are those that normgen tune found on {table.gpu}, {table.dtype}")
    forward = _direction(spec, "forward", ladders.forward, ladders.chunks, ladders.forward_slabs, reasons)
    backward = (
        _direction(spec, "backward", ladders.backward, [], ladders.backward_slabs, reasons) if spec.grad else None
    )
    return Plan(
        spec=spec,
        stages=tuple(zip(stages, names[:-1], names[1:], strict=True)),
        inputs=by_role["input"],
        parameters=by_role["parameter"],
        outputs=by_role["output"],
        statistics=by_role["statistic"],
        scratch=tuple(t for t in norm.statistics if t.value not in saved),
        forward=forward,
        backward=backward,
        reasons=tuple(reasons + _memory_reasons(spec)),
        table=table,
    )


def _direction(
    spec: Spec, name: str, ladder: Sequence[Tile], chunks: Sequence[Chunk], slabs: Sequence[Slab], reasons: list[str]
) -> Direction:
    """The parts of the ladders that the spec's widths and strategy use."""
    single_block = spec.strategy == "single_block"
    # To read a row again costs an RMSNorm nothing; a LayerNorm walks it three times, and reads two parameters besides.
    packed = spec.norm == "layer" and spec.strategy != "welford"
    if spec.strategy == "welford":
        ladder = ()
        reasons.append(f"{name}: no whole rows at any width, as strategy: welford asks")
        if chunks:  # one program merges the chunks of its row, however many, and that takes more registers
            ends = [*(rung.widest for rung in chunks[:-1]), WIDEST]
            alone = [rung.model_copy(update={"programs": 1}) for rung in chunks]
            chunks = [rung.model_copy(update={"widest": end}) for rung, end in zip(alone, ends, strict=True)]
            slabs = ()
    limit = ladder[-1].widest if ladder else 0
    if single_block:
        limit, chunks, slabs = single_block_limit(spec.ladders, spec.grad), (), ()
        # Rows that chunks serve faster are held by the largest tile.
        ladder = [*ladder[:-1], *(rung.model_copy(update={"widest": limit}) for rung in ladder[-1:])]
    tiles = tuple(rung for below, rung in _steps(ladder, 0) if _serves(spec, below, min(rung.widest, limit)))
    some = tuple(rung for below, rung in _steps(chunks, limit) if _serves(spec, below, rung.widest))
    limit = max(limit, chunks[-1].widest) if chunks else limit
    rest = tuple(rung for below, rung in _steps(slabs, limit) if _serves(spec, below, rung.widest))
    if tiles:
        sizes = sorted({tile.elements for tile in tiles})
        size = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
        reasons.append(f"{name}: to H = {tiles[-1].widest}, whole rows in registers, in tiles of {size} elements")
    ways: list[tuple[str, int]] = []
    for rung in some + rest:
        way = _wide(rung, packed)
        if ways and ways[-1][0] == way:  # the rungs differ in size only
            ways.pop()
        ways.append((way, rung.widest))
    for way, widest in ways:
        beyond = "wider rows" if tiles or len(ways) > 1 else "all rows"
        reasons.append(f"{name}: {f'to H = {widest}' if widest < WIDEST else beyond}, {way}")
    if single_block and spec.widths is None and name == "forward":
        reasons.append(f"{name}: wider rows than {limit} are refused at run time, as strategy: single_block asks")
    return Direction(tiles, some, rest, packed)


def _wide(rung: Chunk | Slab, packed: bool) -> str:
    """How rows that no tile holds are served."""
    if isinstance(rung, Slab):
        return f"a row is shared by programs of {rung.columns} columns of 2 bytes each"
    return "whole rows of 2 bytes an element in registers, packed" if packed else "chunks read again from the cache"


def _steps(ladder: Sequence[Rung], below: int) -> Iterator[tuple[int, Rung]]:
    """Each rung with the widest row that is served before it."""
    for rung in ladder:
        yield below, rung
        below = max(below, rung.widest)


def _serves(spec: Spec, below: int, widest: int) -> bool:
    return below < widest if spec.widths is None else any(below < width <= widest for width in spec.widths)


def _memory_reasons(spec: Spec) -> list[str]:
    if not spec.grad:
        return ["grad: false, so there is no backward pass"]
    reasons = []
    residual = spec.residual
    if residual and residual.normalises_stored_sum:
        reasons.append("backward reads the stored sum alone: it is the very value that was normalised")
    elif residual:
        reasons.append("backward reads x and residual again: the sum that was normalised is not stored as such")
    wanted = ["mean", "rstd"] if spec.norm == "layer" else ["rstd"]
    missing = [name for name in wanted if name not in spec.save]
    if missing:
        reasons.append(f"backward computes {' and '.join(missing)} again: not in save")
    return reasons
