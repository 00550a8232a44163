"""The learned scale and shift after the norm."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from normgen.stages.base import Stage, Tensor, fault


class Affine(Stage):
    """The learned scale and shift, both of shape (H,)."""

    template: ClassVar[str] = "affine"
    leaves: ClassVar[str] = "normed"

    weight: bool = Field(True, description="Multiply by a weight.")
    bias: bool = Field(False, description="Add a bias.")
    weight_offset: float = Field(0.0, description="Multiply by weight + weight_offset, the sum taken in fp32.")
    cast: Literal["multiply_then_cast", "cast_then_multiply"] = Field(
        "multiply_then_cast",
        description="multiply_then_cast: one rounding, at the store, as in torch.nn; "
        "cast_then_multiply: x_hat is rounded to the dtype of x before the product, as in Llama.",
    )

    @field_validator("weight")
    @classmethod
    def _weight_always(cls, weight: bool) -> bool:
        if not weight:
            raise fault("must be true: no norm in use has a shift without a scale; for neither, write `affine: none`")
        return weight

    @field_validator("weight_offset")
    @classmethod
    def _finite(cls, offset: float) -> float:
        if not abs(offset) <= 3.0e38:  # the sum is taken in fp32
            raise fault(f"weight_offset must be finite in fp32, not {offset!r}; 0.0 and 1.0 are usual")
        return offset

    def tensors(self) -> tuple[Tensor, ...]:
        gamma = Tensor("gamma", "H", "parameter", "weight", "weight", "scale", pad=1.0)
        beta = Tensor("beta", "H", "parameter", "weight", "bias", "shift")
        return (gamma, beta) if self.bias else (gamma,)

    @property
    def gain(self) -> str:
        """What the result is multiplied by, in text."""
        if not self.weight_offset:
            return "weight"
        size = repr(abs(self.weight_offset)).removesuffix(".0")
        return f"weight {'-' if self.weight_offset < 0 else '+'} {size}"

    def formula(self, taken: str, left: str) -> str:
        gain = f"({self.gain})" if self.weight_offset else "weight"
        if self.cast == "multiply_then_cast":
            return f"{left} = {taken} * {gain}" + (" + bias" if self.bias else "")
        product = f"round({taken}) * {gain}"
        return f"{left} = round_y({product}) + bias" if self.bias else f"{left} = {product}"
