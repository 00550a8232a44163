"""Spec -> Plan: which tensors there are, which strategies serve which widths, and why. No text of kernels here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from normgen.spec import Spec
from normgen.stages.base import Dtype, Stage, Tensor
from normgen.stages.normalize import Normalize
from normgen.target import BACKWARD_LADDER, FORWARD_LADDER, Rung, single_block_limit

Strategy = Literal["single_block", "chunked"]


@dataclass(frozen=True)
class Direction:
    """How one direction (forward or backward) is launched: rungs for whole rows, and chunks beyond them."""

    ladder: tuple[Rung, ...]
    chunked: bool


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
    """Statistics that are not saved; a chunked backward computes them once, for both of its kernels."""
    forward: Direction
    backward: Direction | None
    reasons: tuple[str, ...]

    @property
    def baked_width(self) -> int | None:
        """The one width accepted, a constant of the kernels."""
        widths = self.spec.widths
        return widths[0] if widths and len(widths) == 1 else None

    @property
    def width_limit(self) -> int | None:
        """The widest row that a strategy of whole rows only can take; None where chunks take the rest."""
        return single_block_limit(self.spec.grad) if self.spec.strategy == "single_block" else None

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
    forward = _direction(spec, "forward", FORWARD_LADDER, reasons)
    backward = _direction(spec, "backward", BACKWARD_LADDER, reasons) if spec.grad else None
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
    )


def _direction(spec: Spec, name: str, ladder: tuple[Rung, ...], reasons: list[str]) -> Direction:
    """The part of the ladder that the spec's widths and strategy use."""
    single_block = spec.strategy == "single_block"
    limit = single_block_limit(spec.grad) if single_block else ladder[-1].widest
    widths = spec.widths
    if spec.strategy == "welford":
        reasons.append(f"{name}: rows are walked in chunks at every width, as strategy: welford asks")
        return Direction((), chunked=True)
    rungs = tuple(
        rung
        for below, rung in zip((0, *(r.widest for r in ladder)), ladder, strict=False)
        if below < limit and (widths is None or any(below < width <= rung.widest for width in widths))
    )
    for rung in rungs:
        tile = f"{rung.elements} elements, {rung.warps} warp{'s' * (rung.warps > 1)}"
        reasons.append(f"{name}: to H = {rung.widest}, {rung.reason} ({tile})")
    chunks = spec.strategy == "auto" and (widths is None or widths[-1] > limit)
    if chunks:
        reasons.append(f"{name}: beyond H = {limit} a row does not fit the registers of one program: chunks")
    elif single_block and widths is None and name == "forward":
        reasons.append(f"{name}: wider rows than {limit} are refused at run time, as strategy: single_block asks")
    return Direction(rungs, chunks)


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
