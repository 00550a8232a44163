"""Looks for races: `python -m tests.race_hunt [--alone] REPEATS [SPEC ...]`, on a GPU; all shipped specs by default.

Two streams call the function of a spec forward and backward, over and over, each with numbers of its own, while a third
multiplies matrices: programs start in ever another order, on ever other multiprocessors. Each result must have the bits
of the first. Prints a line for each width; exits 1 where bits differ. A hang is for the caller to notice. `--alone`
calls one after the other on one stream: what looks at the threads of each program by itself may bear no more.
"""

from __future__ import annotations

import argparse
import sys
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


def hunt(made: Plan, H: int, repeats: int, alone: bool) -> int:
    """How many of `repeats` calls on each of two streams, or in turn on one, had other bits than the first."""
    rows, dtype = ELEMENTS // H, ("bfloat16" if "bfloat16" in made.spec.dtypes.input else made.spec.dtypes.input[0])
    cases = [make_case(made, Sizes(H, n, dtype)) for n in (rows, rows + 1)]
    with torch.no_grad():  # a number taken from the other stream is then another
        for tensor in (*cases[1].arguments, *cases[1].cotangents):
            tensor.copy_(0.75 * tensor.flip(0))
    offers = [offer("normgen", case) for case in cases]
    shared = torch.cuda.current_stream()
    streams, beside = [shared if alone else torch.cuda.Stream() for _ in offers], torch.cuda.Stream()
    firsts = list(map(called, offers))
    matrix = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    differing = torch.zeros(len(offers), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for repeat in range(repeats):
        if repeat % 20 == 0 and not alone:  # all wait until the host, which is slower, has queued twenty calls on each
            for stream in (*streams, beside):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(20_000_000)
        if not alone:
            with torch.cuda.stream(beside):
                matrix @ matrix
        for index, (stream, offered, first) in enumerate(zip(streams, offers, firsts, strict=True)):
            with torch.cuda.stream(stream):
                same = [(one == other).all() for one, other in zip(called(offered), first, strict=True)]
                differing[index] += ~torch.stack(same).all()
    torch.cuda.synchronize()
    return int(differing.sum())


def main() -> int:
    parser = argparse.ArgumentParser(prog="race_hunt")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("repeats", type=int)
    parser.add_argument("specs", nargs="*", type=Path, default=sorted((ROOT / "specs").glob("*.yaml")))
    arguments = parser.parse_args()
    found = 0
    for source in arguments.specs:
        made = plan(load_at(source))
        for H in made.spec.widths or WIDTHS:
            differing = hunt(made, H, arguments.repeats, arguments.alone)
            found += differing
            print(f"{made.spec.name}, H {H}: {differing} of {2 * arguments.repeats} calls with other bits", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
