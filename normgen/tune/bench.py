"""The module of one spec on one device: launches it with a candidate, checks the results, takes the time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from normgen.bench.cases import Mode, Sizes, traffic
from normgen.bench.check import Truth, check_gradients, check_outputs, check_statistics, truth
from normgen.bench.latency import failure
from normgen.bench.measure import copying, time_gpu
from normgen.bench.providers import Case, Tensors, load_module, make_case
from normgen.plan import plan
from normgen.render import solve
from normgen.spec import Spec
from normgen.tune.candidates import DIRECTIONS, Launch, Space, direction_of, space

Timer = Callable[[Callable[[], object]], float]
"""Seconds that a call takes on the device."""

NAMES = {
    "forward": "_FORWARD_TILES",
    "chunks": "_CHUNKS",
    "forward_slabs": "_FORWARD_SLABS",
    "backward": "_BACKWARD_TILES",
    "backward_slabs": "_BACKWARD_SLABS",
}
CHECKED_ELEMENTS = 2**24
# A candidate is timed for as long as a few hundred of them allow: rungs that differ by less than 1 % are the same.
BUDGET_MS = 50.0


class Refused(Exception):
    """A candidate that does not work, with the reason."""


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Refused(failure(error)) from None


@dataclass
class Problem:
    """The tensors of calls at one width."""

    case: Case
    forward: Tensors
    backward: Tensors
    """The incoming gradients, and what backward takes of forward."""
    bytes: dict[Mode, int]
    """That a call reads and writes."""

    @property
    def width(self) -> int:
        return self.case.sizes.H


class Bench:
    """The module of `spec`, for x of `dtype`. `elements` are those of x when it is timed."""

    def __init__(self, spec: Spec, dtype: str, elements: int, device: str = "cuda", timer: Timer | None = None) -> None:
        self.spec, self.plan = spec, plan(spec)
        self.dtype, self.elements, self.device = dtype, elements, device
        self.module: Any = load_module(self.plan)
        self.kernels = solve(self.plan)
        self.timer = timer or (lambda call: time_gpu(call, budget_ms=BUDGET_MS).ms / 1e3)
        gpu = {}
        if device == "cuda":
            properties = torch.cuda.get_device_properties(0)
            gpu = {
                "multiprocessors": properties.multi_processor_count,
                "shared_memory": getattr(properties, "shared_memory_per_block_optin", 65536),
            }
        self.space: Space = space(self.kernels, dtype, **gpu)
        self.copies: dict[int, float] = {}

    def facts(self) -> dict[str, str]:
        """What the results hold for."""
        name = torch.cuda.get_device_name(0) if self.device == "cuda" else self.device
        return {"gpu": name, "torch": str(torch.__version__), "triton": triton.__version__}

    def code(self) -> str:
        """A hash of the module."""
        return hashlib.sha256(Path(self.module.__file__).read_bytes()).hexdigest()[:16]

    def problem(self, width: int, rows: int) -> Problem:
        """Random tensors; what backward takes of forward, forward has computed with the module's own ladders."""
        case = make_case(self.plan, Sizes(width, rows, self.dtype), self.device)
        forward = tuple(argument.detach() for argument in case.arguments)
        made = dict(zip((t.api for t in self.plan.arguments), forward, strict=True))
        made |= zip((t.api for t in self.plan.results), self._forward(forward), strict=True)
        backward = case.cotangents + tuple(made[t.api] for t in self.kernels.saved)
        return Problem(case, forward, backward, traffic(self.plan, self.kernels, case.sizes))

    def call(self, problem: Problem, direction: str) -> Tensors:
        """Results of one call, with the ladders as they are now."""
        return self._forward(problem.forward) if direction == "forward" else self._backward(problem.backward)

    def _forward(self, arguments: Tensors) -> Tensors:
        results = self.module._forward(*arguments)
        return tuple(results) if isinstance(results, (list, tuple)) else (results,)

    def _backward(self, arguments: Tensors) -> Tensors:
        needs = [True] * len(self.kernels.gradients)
        return tuple(self.module._backward(*arguments, self.spec.eps.value, getattr(torch, self.dtype), needs))

    @contextmanager
    def launching(self, ladder: str, launch: Launch, width: int) -> Iterator[None]:
        """The module with one rung for all rows, in the one ladder: the other of its direction is empty or unread."""
        rung = self.space.rung(ladder, launch, width)
        names = [NAMES[name] for name in DIRECTIONS[direction_of(ladder)] if name in self.space.ladders]
        kept = {name: getattr(self.module, name) for name in names}
        try:
            for name in kept:
                setattr(self.module, name, ())
            setattr(self.module, NAMES[ladder], ((None, *self.space.literal(ladder, rung)),))
            yield
        finally:
            for name, value in kept.items():
                setattr(self.module, name, value)

    def compile(self, problem: Problem, ladder: str, launch: Launch) -> None:
        """Run a candidate once, so that its kernels lie in Triton's cache; what fails here fails again in `check`."""
        direction = direction_of(ladder)
        try:
            with self.launching(ladder, launch, problem.width):
                self.call(problem, direction)
                self.synchronize()
        except Exception:
            return

    def truth(self, problem: Problem) -> Truth:
        """What is right: of as many rows as there is time for, of parameters over all."""
        return truth(problem.case, problem.case.sizes.rows)

    def check(self, problem: Problem, expected: Truth, ladder: str, launch: Launch) -> None:
        """Run a candidate and compare. Raises Refused where it does not run, is wrong or spills."""
        direction = direction_of(ladder)
        self.module._COMPILED.clear()
        with self.launching(ladder, launch, problem.width), _refusing():
            results = self.call(problem, direction)
            self.synchronize()
        fault = self._fault(problem.case, expected, results, direction)
        for result in results:
            # Memory is used again: what the next candidate forgets to write must not look right.
            result.fill_(float("nan"))
        if fault:
            raise Refused(fault)
        for kept in self.module._COMPILED.values():
            compiled = kept[-1][0]
            if spilled := getattr(compiled, "n_spills", 0):
                raise Refused(f"spills: {spilled} registers a thread, {getattr(compiled, 'name', 'a kernel')}")

    def _fault(self, case: Case, expected: Truth, results: Tensors, direction: str) -> str | None:
        if direction == "backward":
            made = dict(zip((t.value for t in self.kernels.gradients), results, strict=True))
            handed = {argument.api: made[gradient.value] for argument, gradient in self.kernels.gradient_of}
            return check_gradients(case, expected, tuple(handed[t.api] for t in self.plan.arguments))
        outputs = len(self.plan.outputs)
        fault = check_outputs(case, expected, results[:outputs])
        return fault or check_statistics(case, expected, results[outputs:])

    def share(self, problem: Problem, ladder: str, launch: Launch) -> tuple[float, float]:
        """The speed of a call as a share of that of a copy of as many bytes, and its seconds. Raises Refused."""
        direction = direction_of(ladder)
        with self.launching(ladder, launch, problem.width), _refusing():
            seconds = self.timer(lambda: self.call(problem, direction))
        count = problem.bytes["forward" if direction == "forward" else "backward"]
        if count not in self.copies:
            moved, copy = copying(count, problem.forward[0])
            self.copies[count] = moved / self.timer(copy)
        return count / seconds / self.copies[count], seconds

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def alive(self) -> bool:
        """Whether the device still answers: an access out of bounds ends all work of a process."""
        try:
            self.synchronize()
            torch.zeros(1, device=self.device)
            self.synchronize()
        except Exception:
            return False
        return True


def rows_checked(width: int, elements: int) -> int:
    """Few enough for a formula in fp64, and a number that no tile divides."""
    return max(1, min(CHECKED_ELEMENTS, elements) // width) + 3
