"""What every stage is: options of the spec file, the tensors they bring along, and a template of equations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

Dims = Literal["NH", "N", "H"]
Role = Literal["input", "parameter", "output", "statistic", "gradient", "scratch", "word"]
Dtype = Literal["input", "weight", "float16", "bfloat16", "float32", "compute"]


def fault(message: str, key: str | tuple[str | int, ...] = "") -> PydanticCustomError:
    """A fault worded for people: what is wrong, what would be right.

    `key` names the key to blame where a rule spans several keys of one mapping: a key of it, or a path below it.
    """
    return PydanticCustomError("normgen", cast(Any, "{message}"), {"message": message, "key": key})


@dataclass(frozen=True)
class Tensor:
    """One tensor in memory: what value of the equations it holds, and where.

    Kernel signatures, strides, launcher arguments, allocations, operator schemas, docstrings and test inputs are all
    derived from lists of these.
    """

    value: str
    """Name of the value in the equations; kernel arguments are `<value>_ptr` and `<value>_stride`."""
    dims: Dims
    """NH: a row per row of x; N: one number per row; H: one row shared by all. Decides address and mask."""
    role: Role
    dtype: Dtype
    """input: that of x; weight: any the spec lists; compute: float32; a name: that one. float64 where x is float64."""
    api: str
    """Name in the Python API, where kernels have the usual names of kernels (gamma, out)."""
    doc: str
    pad: float = 0.0
    """What lanes outside the row load as."""
    faithful: bool = True
    """Whether a load gives the very value that forward computed with, so that backward may read it instead."""
    stem: str = ""
    """Stem of the kernel arguments where it is not the name of the value."""

    @property
    def pointer(self) -> str:
        return f"{self.stem or self.value}_ptr"

    @property
    def variable(self) -> str:
        """Name in host code."""
        return self.stem or self.api

    @property
    def rows(self) -> str:
        """Kernel variable that points to the first column of each row."""
        return f"{self.stem or self.value}_rows"

    @property
    def stride(self) -> str:
        return f"{self.stem or self.value}_stride"


class Model(BaseModel):
    """A mapping of the spec file: strict (`"4096"` is no integer), closed (an unknown key is an error), frozen."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Stage(Model):
    """One step of the pipeline `x -> summed -> x_hat -> normed`.

    `templates/stages/<template>.jinja` holds its equations: macros `forward`, `backward`, `reference` and, where a
    row reduction is more than a sum, `chunked`. All are given the stage, the name of the value it takes and the name
    of the value it leaves; no other name is shared between stages except those of `tensors()`.
    """

    template: ClassVar[str]
    leaves: ClassVar[str]

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the stage reads or writes besides the value it takes and the value it leaves."""
        raise NotImplementedError

    def formula(self, taken: str, left: str) -> str:
        """The mathematics in one line of text, for docstrings and `normgen explain`."""
        raise NotImplementedError
