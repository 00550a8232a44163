"""The residual added before the norm."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from normgen.stages.base import Dtype, Stage, Tensor, fault


class Residual(Stage):
    """A second input of the shape of x, added to it before the norm."""

    template: ClassVar[str] = "residual"
    leaves: ClassVar[str] = "summed"

    add: Literal["before_norm"] = Field("before_norm", description="Where the residual joins.")
    store_sum: bool = Field(True, description="Return x + residual as a second result.")
    dtype: Literal["same", "float32"] | None = Field(
        None, description="Dtype of the residual and of the stored sum; `same` (the default) is the dtype of x."
    )
    norm_of: Literal["rounded_sum", "unrounded_sum"] | None = Field(
        None,
        description="rounded_sum: the sum as it is stored is normalised, as unfused code does (the default where "
        "the sum is stored); unrounded_sum: the fp32 sum is.",
    )

    @field_validator("dtype")
    @classmethod
    def _of_a_stored_sum(cls, dtype: str | None, info: ValidationInfo) -> str | None:
        if dtype is not None and info.data.get("store_sum") is False:
            raise fault("dtype is the dtype of the stored sum, and store_sum is false; leave dtype out")
        return dtype

    @field_validator("norm_of")
    @classmethod
    def _rounded_where_stored(cls, norm_of: str | None, info: ValidationInfo) -> str | None:
        if norm_of == "rounded_sum" and info.data.get("store_sum") is False:
            raise fault(
                "store_sum is false, so the sum is never rounded; leave norm_of out or write norm_of: unrounded_sum"
            )
        return norm_of

    @property
    def normalises_stored_sum(self) -> bool:
        """Whether backward can read the stored sum: in fp32 it is the very sum, rounded or not."""
        return self.store_sum and (self.norm_of != "unrounded_sum" or self.dtype == "float32")

    @property
    def rounds(self) -> bool:
        """Whether the sum is rounded to less than the precision it was computed in before it goes on."""
        return self.normalises_stored_sum and self.dtype != "float32"

    def tensors(self) -> tuple[Tensor, ...]:
        dtype: Dtype = "float32" if self.dtype == "float32" else "input"
        residual = Tensor("residual", "NH", "input", dtype, "residual", "added to x before the norm")
        faithful = self.normalises_stored_sum
        stored = Tensor("residual_out", "NH", "output", dtype, "residual_out", "x + residual", faithful=faithful)
        return (residual, stored) if self.store_sum else (residual,)

    def formula(self, taken: str, left: str) -> str:
        return f"{left} = round({taken} + residual)" if self.rounds else f"{left} = {taken} + residual"
