"""Rounding facts and the bound that every generated test enforces. No torch here: names and numbers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """|out - ref| <= absolute + relative * max|ref| over the row + half a unit in the last place of ref.

    `ref` is the reference in fp64 on upcast inputs. The absolute part is for standard normal rows; `relative`
    covers rows with one element far larger than the rest, whose squares dominate a sum in fp32: four roundings of 2^-23
    each.
    """

    dtype: str
    absolute: float
    relative: float
    mantissa: int
    """Stored mantissa bits: a unit in the last place of v is 2^(exponent(v) - mantissa)."""


BOUNDS = (
    Bound("float16", 1e-4, 2.0**-21, 10),
    Bound("bfloat16", 1e-4, 2.0**-21, 7),
    Bound("float32", 1e-5, 2.0**-21, 23),
    Bound("float64", 1e-12, 1e-12, 52),
)
