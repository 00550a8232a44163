"""Import the generated rmsnorm_residual and run it once on real numbers, forward and backward, against fp64.

Exits 1 when an error is larger than fp32 rounding explains: values are of order 1, summed over 256 elements.
"""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run on the CPU
sys.path.insert(0, str(Path(__file__).parents[1]))

from generated import rmsnorm_residual as module

BOUND = 1e-5


class Counted:
    """A kernel that counts its launches: the numbers below must come from it and not from the reference."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


def main() -> int:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = ((4, 8, 256), (4, 8, 256), (256,))
    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    kernels = {
        name: Counted(getattr(module, name)) for name in ("rmsnorm_residual_forward", "rmsnorm_residual_backward")
    }
    for name, kernel in kernels.items():
        setattr(module, name, kernel)

    results = module.rmsnorm_residual(*inputs)
    expected = module.reference(*exact)
    weights = [torch.randn_like(result) for result in results]
    torch.autograd.backward(results, weights)
    torch.autograd.backward(expected, [weight.double() for weight in weights])

    pairs = dict(zip(("y", "residual_out"), zip(results, expected, strict=True), strict=True))
    pairs |= {f"d{n}": (a.grad, b.grad) for n, a, b in zip(("x", "residual", "weight"), inputs, exact, strict=True)}
    worst = 0.0
    print(f"rmsnorm_residual on {device}, x of shape {shapes[0]} in float32, against fp64:")
    for name, (found, wanted) in pairs.items():
        error = (found.double() - wanted).abs().max().item() / max(1.0, wanted.abs().max().item())
        worst = max(worst, error)
        print(f"  {name:<13} max |error| = {error:.1e}")
    launches = sum(kernel.launches for kernel in kernels.values())
    print(f"worst {worst:.1e}, bound {BOUND:.0e}, kernel launches {launches}")
    return 0 if worst <= BOUND and launches == 2 else 1


if __name__ == "__main__":
    sys.exit(main())
