"""Errors in units in the last place of a result."""

from __future__ import annotations

from typing import Any

import torch


def ulp(value: Any, dtype: Any) -> Any:
    """The spacing of numbers of `dtype` from each element of `value` on, as an fp64 tensor of its shape.

    That is 2^(exponent - stored bits of the mantissa); below the smallest normal number it is the same as there.
    """
    kind = torch.finfo(dtype)
    _, exponent = torch.frexp(value.double().abs().clamp_min(kind.tiny))
    return torch.ldexp(torch.full_like(value, kind.eps, dtype=torch.float64), exponent - 1)


def errors(out: Any, exact: Any, dtype: Any) -> tuple[float, float]:
    """The largest and the mean distance of `out` from `exact`, in units of `dtype`; NaN where `out` is not finite.

    The unit of an element is that at its exact value, or at the root mean square of its row where that is larger: of
    [N, H] along H, and a gradient of [H] is one row. So a result that is rounded correctly is off by half a unit at
    most, and what an error means does not hang on luck: where a bias, the mean or other rows cancel a value almost to
    nothing, the terms were rounded at the size of the row, and the smallest of a million such elements would alone
    decide how large the largest error is. The largest element as a measure, instead, would forgive an ordinary one two
    bits. What is lost of a mean far from 0 counts in full: the exact row has it removed.

    Args:
        out: [N, H] or [H], of any dtype: that of a library that returns wider results than the spec asks for, too.
        exact: fp64, of the same shape.
        dtype: that which the spec gives the result.
    """
    size = exact.square().mean(-1, keepdim=True).sqrt()
    off = (out.detach().double() - exact).abs() / ulp(torch.maximum(exact.abs(), size), dtype)
    return float(off.max()), float(off.mean())
