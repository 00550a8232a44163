"""The normalisation itself: row statistics and x_hat."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from normgen.stages.base import Model, Stage, Tensor, fault

Statistic = Literal["mean", "rstd"]


class Eps(Model):
    """The constant that keeps the root away from zero. Also the default of the run-time argument `eps`."""

    value: float = Field(description="A positive, finite number; 1e-6 is read as a number.", examples=[1e-6])
    placement: Literal["inside_sqrt", "outside_sqrt"] = Field(
        "inside_sqrt",
        description="inside_sqrt: 1/sqrt(var + eps), as in PyTorch; outside_sqrt: 1/(sqrt(var) + eps).",
    )

    @field_validator("value")
    @classmethod
    def _positive(cls, value: float) -> float:
        if not (math.isfinite(value) and value > 0):
            raise fault(f"eps must be positive and finite, not {value!r}; 1e-5 and 1e-6 are usual")
        # The kernel adds eps in fp32, where a smaller number would vanish and a larger one be infinite.
        if not 2.0**-126 <= value <= 3.0e38:
            raise fault(f"eps must be a normal fp32 number (1.2e-38 to 3e38), not {value!r}; 1e-5 and 1e-6 are usual")
        return value


class Normalize(Stage):
    """x_hat = (x - mean) * rstd for layer, x * rstd for rms."""

    template: ClassVar[str] = "normalize"
    leaves: ClassVar[str] = "x_hat"

    norm: Literal["rms", "layer"]
    placement: Literal["inside_sqrt", "outside_sqrt"]
    save: list[Statistic]

    def tensors(self) -> tuple[Tensor, ...]:
        doc = {"mean": "mean of the row", "rstd": "factor that scaled the row"}
        return tuple(Tensor(name, "N", "statistic", "compute", name, doc[name]) for name in self.save)

    @property
    def statistics(self) -> tuple[Tensor, ...]:
        """All statistics that backward rests on, whether they are saved or not."""
        names: tuple[Statistic, ...] = ("mean", "rstd") if self.norm == "layer" else ("rstd",)
        return tuple(Tensor(name, "N", "statistic", "compute", name, "scratch") for name in names)

    def formula(self, taken: str, left: str) -> str:
        centered = f"({taken} - mean({taken}))" if self.norm == "layer" else taken
        variance = f"var({taken})" if self.norm == "layer" else f"mean({taken}^2)"
        root = f"sqrt({variance} + eps)" if self.placement == "inside_sqrt" else f"(sqrt({variance}) + eps)"
        return f"{left} = {centered} / {root}"
