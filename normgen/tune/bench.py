"""One rendered module on one device: launches it with a candidate, checks the results, takes the time.

torch and triton are imported here when a bench is made, and nowhere else in normgen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from normgen.modules import imported
from normgen.plan import plan
from normgen.render import solve
from normgen.spec import Spec
from normgen.stages.base import Tensor
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
# Results are compared to find launches that compute something else, not to bound a rounding: tests do that.
TOLERANCES = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-4}
CHECKED_ELEMENTS = 2**24


class Refused(Exception):
    """A candidate that does not work, with the reason."""


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None


@dataclass
class Problem:
    """The tensors of calls at one width, by their names in the API."""

    width: int
    forward: list[Any]
    backward: list[Any]
    bytes: dict[str, int]
    """That a call reads and writes, by direction."""


class Bench:
    """A module that is loaded from `path`, made of `spec`. `elements` are those of x when it is timed."""

    def __init__(
        self, spec: Spec, path: Path, dtype: str, elements: int, device: str = "cuda", timer: Timer | None = None
    ) -> None:
        self.torch: Any = import_module("torch")
        self.spec, self.plan = spec, plan(spec)
        self.kernels = solve(self.plan)
        self.dtype, self.elements, self.device = dtype, elements, device
        weights = spec.dtypes.weight
        self.dtypes = {"input": dtype, "weight": dtype if "same" in weights else weights[0], "compute": "float32"}
        self.module: Any = imported(f"normgen_tuned.{path.stem}", path)
        self.timer = timer or self._median
        gpu = {}
        if device == "cuda":
            properties = self.torch.cuda.get_device_properties(0)
            gpu = {
                "multiprocessors": properties.multi_processor_count,
                "shared_memory": getattr(properties, "shared_memory_per_block_optin", 65536),
            }
        self.space: Space = space(spec, self.kernels, dtype, **gpu)
        self.copies: dict[int, float] = {}

    def facts(self) -> dict[str, str]:
        """What the results hold for."""
        name = self.torch.cuda.get_device_name(0) if self.device == "cuda" else self.device
        return {"gpu": name, "torch": str(self.torch.__version__), "triton": import_module("triton").__version__}

    def problem(self, width: int, rows: int) -> Problem:
        """Random tensors; what backward takes of forward, forward has computed with the module's own ladders."""
        seed = self.torch.Generator(self.device).manual_seed(width)
        made: dict[str, Any] = {t.api: self._random(t, rows, width, seed) for t in self.plan.arguments}
        forward = list(made.values())
        results = self._forward(forward)
        made |= {t.api: result for t, result in zip(self.plan.results, results, strict=True)}
        bytes_moved = {"forward": _bytes(forward) + _bytes(results)}
        backward: list[Any] = []
        if self.plan.backward:
            incoming = [self._random(t, rows, width, seed) for t in self.kernels.incoming]
            backward = incoming + [made[t.api] for t in self.kernels.saved]
            bytes_moved["backward"] = _bytes(backward) + sum(self._size(t, rows, width) for t in self.kernels.gradients)
        return Problem(width, forward, backward, bytes_moved)

    def call(self, problem: Problem, direction: str) -> list[Any]:
        """Results of one call, with the ladders as they are now."""
        return self._forward(problem.forward) if direction == "forward" else self._backward(problem.backward)

    def _forward(self, arguments: list[Any]) -> list[Any]:
        return _listed(self.module._forward(*arguments))

    def _backward(self, arguments: list[Any]) -> list[Any]:
        needs = [True] * len(self.kernels.gradients)
        dtype = getattr(self.torch, self.dtype)
        return list(self.module._backward(*arguments, self.spec.eps.value, dtype, needs))

    def _random(self, tensor: Tensor, rows: int, width: int, seed: Any) -> Any:
        shape = (rows, width) if tensor.dims == "NH" else (width,)
        dtype = getattr(self.torch, self.dtypes.get(tensor.dtype, tensor.dtype))
        return self.torch.randn(shape, generator=seed, device=self.device, dtype=self.torch.float32).to(dtype)

    def _size(self, tensor: Tensor, rows: int, width: int) -> int:
        itemsize = getattr(self.torch, self.dtypes.get(tensor.dtype, tensor.dtype)).itemsize
        return width * (rows if tensor.dims == "NH" else 1) * int(itemsize)

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

    def check(self, problem: Problem, truth: list[Any], ladder: str, launch: Launch) -> None:
        """Run a candidate and compare. Raises Refused where it does not run, is wrong or spills."""
        direction = direction_of(ladder)
        self.module._COMPILED.clear()
        with self.launching(ladder, launch, problem.width), _refusing():
            results = self.call(problem, direction)
            self.synchronize()
        tensors = self.plan.results if direction == "forward" else self.kernels.gradients
        wrong = [t.api for t, got, want in zip(tensors, results, truth, strict=True) if not self._close(got, want)]
        for result in results:
            # Memory is used again: what the next candidate forgets to write must not look right.
            result.fill_(float("nan"))
        if wrong:
            raise Refused(f"wrong: {', '.join(wrong)}")
        for kept in self.module._COMPILED.values():
            compiled = kept[-1][0]
            if spilled := getattr(compiled, "n_spills", 0):
                raise Refused(f"spills: {spilled} registers a thread, {getattr(compiled, 'name', 'a kernel')}")

    def _close(self, got: Any, want: Any) -> bool:
        bound = TOLERANCES[self.dtype] * (want.abs() + want.abs().max())
        return bool(((got.double() - want).abs() <= bound).all())

    def truth(self, problem: Problem) -> dict[str, list[Any]]:
        """What the plain formula of the module gives in fp64, rounded only where the spec says so."""
        torch = self.torch
        arguments = [tensor.double().requires_grad_() for tensor in problem.forward]
        dtype = getattr(torch, self.dtype)
        results = _listed(self.module._formula(*arguments, self.spec.eps.value, torch.float64, dtype))
        truth = {"forward": [result.detach() for result in results]}
        if self.plan.backward:
            outputs = results[: len(self.plan.outputs)]
            incoming = [tensor.double() for tensor in problem.backward[: len(self.kernels.incoming)]]
            gradients = torch.autograd.grad(outputs, arguments, incoming)
            handed = dict(zip((t.api for t in self.plan.arguments), gradients, strict=True))
            owners = {g.value: argument.api for argument, g in reversed(self.kernels.gradient_of)}
            truth["backward"] = [handed[owners[gradient.value]] for gradient in self.kernels.gradients]
        return truth

    def time(self, problem: Problem, ladder: str, launch: Launch) -> float:
        """Seconds of a call. Raises Refused where it does not run."""
        direction = direction_of(ladder)
        with self.launching(ladder, launch, problem.width), _refusing():
            return self.timer(lambda: self.call(problem, direction))

    def copy(self, count: int) -> float:
        """Seconds of a device copy that reads and writes `count` bytes in all."""
        if count not in self.copies:
            source = self.torch.zeros(max(1, count // 2), dtype=self.torch.uint8, device=self.device)
            target = self.torch.empty_like(source)
            self.copies[count] = self.timer(lambda: target.copy_(source))
        return self.copies[count]

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def alive(self) -> bool:
        """Whether the device still answers: an access out of bounds ends all work of a process."""
        try:
            self.synchronize()
            self.torch.zeros(1, device=self.device)
            self.synchronize()
        except Exception:
            return False
        return True

    def _median(self, call: Callable[[], object]) -> float:
        testing = import_module("triton.testing")
        return float(testing.do_bench(call, warmup=10, rep=50, return_mode="median")) / 1e3


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def rows_checked(width: int, elements: int) -> int:
    """Few enough for a formula in fp64, and a number that no tile divides."""
    return max(1, min(CHECKED_ELEMENTS, elements) // width) + 3
