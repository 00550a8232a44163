"""Looks for races: `python -m tests.race_hunt REPEATS [SPEC ...]`, on a GPU; all shipped specs unless some are named.

Two streams call the function of a spec forward and backward, over and over, each with numbers of its own, while a third
multiplies matrices: programs start in ever another order, on ever other multiprocessors. Each result must have the bits
of the first. Prints a line for each width; exits 1 where bits differ. A hang is for the caller to notice.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from normgen.bench.cases import Sizes
from normgen.bench.providers import Offer, make_case, offer
from normgen.loader import load_at
from normgen.plan import Plan, plan

ROOT = Path(__file__).parents[1]
# Rows that one program holds, in one block and in several; chunks; rows that a few programs share, and many.
WIDTHS = (100, 4096, 5000, 12288, 20000, 131072, 200001)
ELEMENTS = 2**22  # more programs than run at once


def called(offered: Offer) -> list[torch.Tensor]:
    """Results and, where there are any, what was kept for backward, statistics among it, and gradients."""
    results = offered.function(*offered.arguments)
    if not offered.cotangents:
        return list(results)
    kept = results[0].grad_fn.saved_tensors
    return [*results, *kept, *torch.autograd.grad(results, offered.arguments, offered.cotangents)]


def hunt(made: Plan, H: int, repeats: int) -> int:
    """How many of `repeats` calls on each of two streams had other bits than the first."""
    rows, dtype = ELEMENTS // H, ("bfloat16" if "bfloat16" in made.spec.dtypes.input else made.spec.dtypes.input[0])
    cases = [make_case(made, Sizes(H, n, dtype)) for n in (rows, rows + 1)]
    with torch.no_grad():  # a number taken from the other stream is then another
        for tensor in (*cases[1].arguments, *cases[1].cotangents):
            tensor.copy_(0.75 * tensor.flip(0))
    offers = [offer("normgen", case) for case in cases]
    streams, beside = [torch.cuda.Stream() for _ in offers], torch.cuda.Stream()
    firsts = list(map(called, offers))
    matrix = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    differing = torch.zeros(len(offers), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for repeat in range(repeats):
        if repeat % 20 == 0:  # all wait until the host, which is slower, has queued twenty calls on each
            for stream in (*streams, beside):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(20_000_000)
        with torch.cuda.stream(beside):
            matrix @ matrix
        for index, (stream, offered, first) in enumerate(zip(streams, offers, firsts, strict=True)):
            with torch.cuda.stream(stream):
                same = [(one == other).all() for one, other in zip(called(offered), first, strict=True)]
                differing[index] += ~torch.stack(same).all()
    torch.cuda.synchronize()
    return int(differing.sum())


def main(argv: Sequence[str]) -> int:
    repeats, found = int(argv[0]), 0
    for source in argv[1:] or sorted(map(str, (ROOT / "specs").glob("*.yaml"))):
        made = plan(load_at(Path(source)))
        for H in made.spec.widths or WIDTHS:
            differing = hunt(made, H, repeats)
            found += differing
            print(f"{made.spec.name}, H {H}: {differing} of {2 * repeats} calls with other bits", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
