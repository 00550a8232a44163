"""What the examples share: where their kernels run, a count of every launch, and numbers held against bounds.

Import it before triton and generated modules: on a machine without a GPU it turns on Triton's interpreter, which triton
asks for when it is imported, and it makes generated/ importable from wherever an example is run.
"""

import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

# What transformers reads when an example imports it: no network, no chatter, no progress bars.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from triton import knobs  # noqa: E402
from triton.runtime.jit import KernelInterface  # noqa: E402

# 2^-24: the most that one rounding to float32 can be off, relative to the value.
ROUNDING = torch.finfo(torch.float32).eps / 2


def rounding_bound(norms: int) -> float:
    """How far two float32 models may differ that only compute their norms differently, relative to the largest entry.

    `norms` stand one behind the other, forward and backward. Each may be off by 4 roundings of its largest entry (its
    sum, its division, its root, its products), and what follows it may magnify that 4 times.
    """
    return norms * 4 * 4 * ROUNDING


@contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Count, by kernel name, every Triton kernel that is launched inside the `with` block.

    It counts where Triton itself launches, `kernel[grid](...)`, compiled and interpreted alike, so the generated code
    stays as it is, and a module that was imported under two names (its operator is registered once) is still seen.
    """
    counts: Counter[str] = Counter()
    getitem = KernelInterface.__getitem__

    def counting_getitem(kernel, grid):
        launch = getitem(kernel, grid)

        def counting_launch(*args, **kwargs):
            counts[kernel.fn.__name__] += 1
            return launch(*args, **kwargs)

        return counting_launch

    def watch(launch):
        """Generated modules launch the kernels that they kept without Triton, unless somebody hooked into launches."""

    KernelInterface.__getitem__ = counting_getitem
    knobs.runtime.launch_enter_hook.add(watch)
    try:
        yield counts
    finally:
        knobs.runtime.launch_enter_hook.remove(watch)
        KernelInterface.__getitem__ = getitem


@dataclass
class Evidence:
    """Measured numbers, the bounds they missed, and the launches behind them."""

    max_abs_diff: float = 0.0
    launches: int = 0
    missed: list[str] = field(default_factory=list)

    def hold(self, what: str, measured: float, bound: float) -> None:
        """Print a number beside its bound; NaN misses every bound."""
        met = measured <= bound
        print(f"{what}: {measured:.3g} (at most {bound:.3g}){'' if met else '  MISSED'}")
        if not met:
            self.missed.append(what)

    def expect_launches(self, counts: Mapping[str, int], expected: Mapping[str, int]) -> None:
        """Add `counts` to the launches; miss where a kernel of `expected` was not launched exactly so often."""
        self.launches += sum(counts.values())
        for kernel, launches in expected.items():
            met = counts.get(kernel, 0) == launches
            print(f"{kernel}: {counts.get(kernel, 0)} launches (exactly {launches}){'' if met else '  MISSED'}")
            if not met:
                self.missed.append(f"launches of {kernel}")

    def conclude(self) -> int:
        """Print the last line; the exit code is 1 if a bound was missed."""
        print(f"max_abs_diff={self.max_abs_diff:.3g} launches={self.launches}")
        return 1 if self.missed else 0


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of any element; NaN where there is one."""
    return (found.double() - expected.double()).abs().max().item()


def gradient_difference(found: nn.Module, expected: nn.Module) -> float:
    """The largest difference of any gradient, relative to the largest gradient of the submodule it belongs to.

    Relative to the submodule, so weight and bias together, because a gradient can be zero in exact arithmetic (softmax
    ignores what the bias of the keys adds to every score); what is left of it is rounding, as large as in the weight.
    """
    differences: dict[str, list[float]] = {}
    scales: dict[str, list[float]] = {}
    gradients = {name: parameter.grad for name, parameter in found.named_parameters()}
    for name, parameter in expected.named_parameters():
        owner = name.rpartition(".")[0]
        differences.setdefault(owner, []).append(difference(gradients[name], parameter.grad))
        scales.setdefault(owner, []).append(parameter.grad.abs().max().item())
    return largest(largest(differences[owner]) / max(scales[owner]) for owner in scales)


def largest(values: Iterable[float]) -> float:
    """Their maximum, or NaN if there is one; Python's `max` may drop it."""
    values = list(values)
    return math.nan if any(map(math.isnan, values)) else max(values)
