"""Is a result right? What is timed is held against the module's formula in fp64 first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from normgen.bench.cases import dtype_of
from normgen.bench.providers import Case, Tensors
from normgen.stages.base import Tensor

# What a provider may differ by, as a share of the largest element of the row: two units in the last place of it leave
# room for other rounding points than the spec's, such as a weight multiplied in 16 bits, and for nothing else. fp32
# sums of a quarter of a million elements differ by more than that in their order alone.
_TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2e-5}
# Gradients pass through more roundings where a library rounds each step to 16 bits.
_GRADIENT_FACTOR = 2
# Rows that are compared, evenly spaced from the first to the last, and elements of them where rows are wide.
_ROWS, _ELEMENTS = 64, 2**22
# Elements of a piece of x where the reference goes over all rows: its fp64 intermediates then take about 3 GB.
_PIECE = 2**24


@dataclass(frozen=True)
class Truth:
    """What the formula of the spec gives in fp64 for some rows; sums over rows are over all of them.

    It is rounded where the spec names a rounding, and nowhere else.
    """

    rows: Any
    """Index of the rows."""
    outputs: Tensors
    statistics: Tensors
    """Those that the spec saves."""
    gradients: Tensors
    """One for each argument; empty without a backward pass."""


def truth(case: Case, most: int = _ROWS) -> Truth:
    """The results and gradients of up to `most` rows, by the formula that the tests of the module hold it to."""
    count = max(1, min(case.sizes.rows, most, _ELEMENTS // case.sizes.H))
    rows = torch.arange(count, device=case.arguments[0].device) * (case.sizes.rows - 1) // max(1, count - 1)
    inputs, outputs = len(case.plan.inputs), len(case.plan.outputs)
    leaves = _upcast(case, rows)
    results = _results(case, leaves)
    gradients: Tensors = ()
    if case.plan.backward is not None:
        cotangents = [cotangent[rows].double() for cotangent in case.cotangents]
        gradients = torch.autograd.grad(results[:outputs], leaves[:inputs], cotangents) + _parameter_gradients(case)
    found = tuple(result.detach() for result in results)
    return Truth(rows, found[:outputs], found[outputs:], gradients)


def _upcast(case: Case, rows: Any) -> Tensors:
    pairs = zip(case.plan.arguments, case.arguments, strict=True)
    picked = (argument[rows] if tensor.dims == "NH" else argument for tensor, argument in pairs)
    return tuple(one.detach().double().requires_grad_(case.plan.backward is not None) for one in picked)


def _results(case: Case, arguments: Tensors) -> Tensors:
    dtype = getattr(torch, case.sizes.dtype)
    results = case.module._formula(*arguments, case.spec.eps.value, torch.float64, dtype)
    return results if isinstance(results, tuple) else (results,)


def _parameter_gradients(case: Case) -> Tensors:
    """Sums over all rows, a piece of them at a time."""
    inputs = len(case.plan.inputs)
    if not case.plan.parameters:
        return ()
    totals = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in case.arguments[inputs:]]
    step = max(1, _PIECE // case.sizes.H)
    for start in range(0, case.sizes.rows, step):
        piece = slice(start, start + step)
        leaves = _upcast(case, piece)
        cotangents = [cotangent[piece].double() for cotangent in case.cotangents]
        outputs = _results(case, leaves)[: len(cotangents)]
        found = torch.autograd.grad(outputs, leaves[inputs:], cotangents)
        for total, gradient in zip(totals, found, strict=True):
            total += gradient
    return tuple(totals)


def poison(case: Case, tensors: Sequence[Tensor]) -> None:
    """Leave NaN-filled blocks of the sizes of `tensors` in the allocator, where the next call will place its own.

    What that call does not write then shows as NaN. Other free blocks are given back first: an old and right result
    in one of them would pass.
    """
    torch.cuda.empty_cache()
    shapes = {"NH": (case.sizes.rows, case.sizes.H), "N": (case.sizes.rows,), "H": (case.sizes.H,)}
    # Twice: a call may need as much again for what it keeps for backward.
    blocks = [
        torch.full(
            shapes[tensor.dims],
            math.nan,
            dtype=getattr(torch, dtype_of(tensor, case.spec, case.sizes.dtype)),
            device=case.arguments[0].device,
        )
        for tensor in (*tensors, *tensors)
    ]
    del blocks


def check_outputs(case: Case, expected: Truth, outputs: Tensors) -> str | None:
    """What is wrong with the outputs of a provider, in words; None where they are right."""
    tolerance = _TOLERANCE[case.sizes.dtype]
    return _first_fault(case.plan.outputs, outputs, expected.outputs, expected.rows, "", tolerance)


def check_statistics(case: Case, expected: Truth, statistics: Tensors) -> str | None:
    """What is wrong with the statistics that the spec saves, in words; None where they are right."""
    tolerance = _TOLERANCE[case.sizes.dtype]
    return _first_fault(case.plan.statistics, statistics, expected.statistics, expected.rows, "", tolerance)


def check_gradients(case: Case, expected: Truth, gradients: Tensors) -> str | None:
    """What is wrong with the gradients of all arguments, in words; None where they are right."""
    tolerance = _TOLERANCE[case.sizes.dtype] * _GRADIENT_FACTOR
    return _first_fault(case.plan.arguments, gradients, expected.gradients, expected.rows, "d", tolerance)


def _first_fault(
    tensors: Sequence[Tensor], found: Tensors, expected: Tensors, rows: Any, prefix: str, tolerance: float
) -> str | None:
    for tensor, out, wanted in zip(tensors, found, expected, strict=True):
        picked = None if tensor.dims == "H" else rows
        if fault := _difference(out, wanted, picked, prefix + tensor.api, tolerance):
            return fault
    return None


def _difference(out: Any, wanted: Any, rows: Any, name: str, tolerance: float) -> str | None:
    """`wanted` holds the rows of `out` that `rows` picks, or all of it. Elements that nobody wrote are NaN anywhere."""
    picked = out if rows is None else out[rows]
    if picked.shape != wanted.shape:
        return f"wrong: {name} has shape {tuple(out.shape)}"
    missing = int(out.isnan().sum())
    if missing:
        return f"wrong: {missing} of {out.numel()} elements of {name} are NaN"
    size = wanted.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    error = (picked.double() - wanted).abs() / size
    # Written so that a difference of infinities, which is NaN, counts.
    off = int((~(error <= tolerance)).sum())
    if not off:
        return None
    return (
        f"wrong: {off} of {error.numel()} elements of {name} are off, the worst by {float(error.max()):.2g} "
        "of the largest of its row"
    )
