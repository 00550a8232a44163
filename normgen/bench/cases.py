"""What is measured: widths, rows, the name of each operation, and the bytes that it must move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from normgen.kernels import Kernels
    from normgen.plan import Plan
    from normgen.spec import Spec
    from normgen.stages.base import Tensor

Mode = Literal["forward", "backward", "both"]
MODES: tuple[Mode, ...] = ("forward", "backward", "both")
PROVIDERS = ("copy", "normgen", "separate", "torch", "compile", "liger", "quack", "cudnn")
PEERS = ("torch", "compile", "liger", "quack", "cudnn")
"""Who a kernel is compared with. `copy` is the limit, and `separate` is ours without the fusion."""
DTYPES = ("bfloat16", "float16", "float32")

# Widths that people use: hidden sizes and head sizes of published models, and powers of two far beyond them.
WIDTHS = (
    *(64, 96, 128, 256, 451, 512, 768, 1024, 1152, 1536, 2048, 2304, 2560, 2880, 3072, 4096, 4544, 5120, 6144, 6912),
    *(7168, 8192, 12288, 16384, 32768, 65536, 131072, 262144),
)
ELEMENTS = 2**27
"""Elements of x: large enough that start-up and the L2 cache do not count."""
LATENCY_WIDTHS = (64, 1024, 4096, 8192)
LATENCY_ROWS = (1, 16, 64)
PROFILE_WIDTHS = (4096,)
ERROR_WIDTHS = (64, 451, 4096, 65536)
"""Rows of each way to walk them; one width that no block divides."""
ERROR_ROWS = 64
ERROR_DRAWS = 25
"""Of rows of one kind, since a largest error in fp32 is partly luck: of two kernels of one quality, a gradient of 64
elements is worse by more than a unit in one of 7 single draws, in 3 % of medians of 9 and in 0.3 % of medians of 25."""
OFFSETS = (0, 1, 100, 1000)
"""The mean of a row, in units of its spread."""
SCALES = (1e-3, 1.0, 1e3)
"""The spread of a row."""

_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Sizes:
    """A case: N rows of width H in one dtype."""

    H: int
    rows: int
    dtype: str

    @property
    def elements(self) -> int:
        return self.H * self.rows


def weight_dtype(spec: Spec, dtype: str) -> str:
    """The dtype of weight and bias: that of x where the spec allows it."""
    allowed = spec.dtypes.weight
    return dtype if "same" in allowed or dtype in allowed else allowed[0]


def dtype_of(tensor: Tensor, spec: Spec, dtype: str) -> str:
    """The dtype that a tensor of the plan has where x has `dtype`."""
    named = {"input": dtype, "weight": weight_dtype(spec, dtype), "compute": "float32"}
    return named.get(tensor.dtype, tensor.dtype)


def nbytes(tensors: Iterable[Tensor], spec: Spec, sizes: Sizes) -> int:
    """The bytes of `tensors`, each counted once."""
    counts = {"NH": sizes.elements, "N": sizes.rows, "H": sizes.H}
    return sum(counts[t.dims] * _SIZES[dtype_of(t, spec, sizes.dtype)] for t in tensors)


def traffic(plan: Plan, kernels: Kernels, sizes: Sizes) -> dict[Mode, int]:
    """The bytes that each mode must move: every input read once, every output written once.

    Forward reads the arguments and writes results and statistics. Backward reads the incoming gradients and what
    forward left for it, and writes the gradients. A mode that the spec does not have is left out.
    """
    forward = nbytes(plan.arguments + plan.results, plan.spec, sizes)
    if plan.backward is None:
        return {"forward": forward}
    backward = nbytes(kernels.incoming + kernels.saved + kernels.gradients, plan.spec, sizes)
    return {"forward": forward, "backward": backward, "both": forward + backward}


def operation(plan: Plan, mode: Mode) -> str:
    """The name of an operation in result files: rms, ln or add where the spec computes what the peers do."""
    suffix = {"forward": "fwd", "backward": "bwd", "both": "both"}[mode]
    return f"{_family(plan) or plan.spec.name}_{suffix}"


def _family(plan: Plan) -> str | None:
    """rms, ln or add (RMSNorm of a stored sum): the operations that every peer has. None for other specs."""
    spec, affine, residual = plan.spec, plan.spec.affine, plan.spec.residual
    usual = spec.eps.placement == "inside_sqrt" and spec.dtypes.output == "same" and not plan.scratch
    if not usual or affine is None or affine.weight_offset or affine.cast != "multiply_then_cast":
        return None
    if spec.norm == "layer":
        return "ln" if affine.bias and residual is None else None
    if affine.bias:
        return None
    if residual is None:
        return "rms"
    return "add" if residual.rounds else None


def widths_of(plan: Plan, asked: Iterable[int]) -> list[int]:
    """Those of `asked` that the spec accepts; where nothing is asked for, the widths it lists or WIDTHS."""
    spec = plan.spec
    wanted = tuple(asked) or spec.widths or WIDTHS
    limit = plan.width_limit
    return [w for w in wanted if (spec.widths is None or w in spec.widths) and (limit is None or w <= limit)]
