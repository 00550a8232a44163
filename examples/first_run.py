"""Import the generated rmsnorm_residual and run it once on real numbers, forward and backward, against fp64.

Exits 1 when an error is larger than fp32 rounding explains: values are of order 1, summed over 256 elements.
"""

import sys

import torch
from evidence import DEVICE, count_launches, difference

from generated import rmsnorm_residual as module

BOUND = 1e-5


def main() -> int:
    torch.manual_seed(0)
    shapes = ((4, 8, 256), (4, 8, 256), (256,))
    inputs = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]

    with count_launches() as counts:
        results = module.rmsnorm_residual(*inputs)
        weights = [torch.randn_like(result) for result in results]
        torch.autograd.backward(results, weights)
    expected = module.reference(*exact)
    torch.autograd.backward(expected, [weight.double() for weight in weights])

    pairs = dict(zip(("y", "residual_out"), zip(results, expected, strict=True), strict=True))
    pairs |= {f"d{n}": (a.grad, b.grad) for n, a, b in zip(("x", "residual", "weight"), inputs, exact, strict=True)}
    worst = 0.0
    print(f"rmsnorm_residual on {DEVICE}, x of shape {shapes[0]} in float32, against fp64:")
    for name, (found, wanted) in pairs.items():
        error = difference(found, wanted) / max(1.0, wanted.abs().max().item())
        worst = max(worst, error)
        print(f"  {name:<13} max |error| = {error:.1e}")
    kernels = ("rmsnorm_residual_forward", "rmsnorm_residual_backward")
    launches = sum(counts[kernel] for kernel in kernels)
    print(f"worst {worst:.1e}, bound {BOUND:.0e}, kernel launches {launches}")
    return 0 if worst <= BOUND and launches == 2 else 1


if __name__ == "__main__":
    sys.exit(main())
