"""A run of `normgen bench --errors`: how far results are from exact ones, over dtypes, widths, means and spreads.

Exact is what `check` holds results to before they are timed. Torch is what the provider of that name computes: torch's
own norm where it has one for the spec, else the formula in fp32, as a user of torch writes it. Of a residual it is that
of x + residual in their dtype, also where the spec stores no sum and so rounds none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from normgen.bench import cases
from normgen.bench.cases import Sizes, dtype_of
from normgen.bench.check import Truth, truth
from normgen.bench.header import header
from normgen.bench.latency import failure
from normgen.bench.plots import plot_errors
from normgen.bench.providers import Case, Offer, make_case
from normgen.bench.report import MEASURED, ErrorRow, Results
from normgen.bench.run import ContextLostError, checked, missing, offered_by, present, save, say, still_alive
from normgen.bench.tables import error_tables
from normgen.bench.ulps import errors
from normgen.bench.warm import compile_here
from normgen.errors import OutputError
from normgen.modules import interpreted
from normgen.plan import plan
from normgen.processes import spread
from normgen.spec import Spec


@dataclass(frozen=True)
class Options:
    """What the command line asks for; an empty tuple or None is the default of each."""

    widths: tuple[int, ...]
    rows: int
    dtypes: tuple[str, ...]
    providers: tuple[str, ...]
    jobs: int
    out: Path | None


@dataclass(frozen=True)
class Task:
    """All that one process measures with the same compiled kernels."""

    spec: Spec
    sizes: Sizes
    providers: tuple[str, ...]
    device: str


def accuracy(specs: dict[str, Spec], options: Options) -> tuple[Results, list[str]]:
    """Measure the errors of the specs, given by their paths. Returns them, and the same in lines for a terminal.

    Raises OutputError where nothing can be measured, or the results cannot be written.
    """
    device = _device()
    providers = tuple(name for name in present(options.providers) if name in ("normgen", *cases.PEERS))
    notes = missing(options.providers)
    tasks = []
    for source, spec in specs.items():
        for dtype in options.dtypes or spec.dtypes.input:
            made = checked(source, spec, dtype, options.widths)
            widths = cases.widths_of(made, options.widths or spec.widths or cases.ERROR_WIDTHS)
            tasks += [Task(spec, Sizes(H, options.rows, dtype), providers, device) for H in widths]
    results = Results(header(), name="errors")
    begin = time.monotonic()
    try:
        for done, (task, rows) in enumerate(zip(tasks, spread(measure, tasks, options.jobs), strict=True), 1):
            results.errors += rows
            save(results, options.out)
            rate = f"{done} of {len(tasks)} in {time.monotonic() - begin:.0f} s"
            say(f"{task.spec.name}: {task.sizes.rows} x {task.sizes.H} in {task.sizes.dtype}, {rate}")
    except (ContextLostError, BrokenProcessPool) as error:
        results.stopped = str(error)
        notes.append(f"stopped: {error}; run the rest again without that provider")
    save(results, options.out)
    if options.out is not None and (said := plot_errors(results.errors, options.out)):
        notes.append(said)
    return results, [*error_tables(results.errors), *notes]


def _device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if interpreted():
        return "cpu"
    wanted = "run this on a machine that has one, or set TRITON_INTERPRET=1 for kernels in Triton's interpreter"
    raise OutputError("normgen bench", f"torch {torch.__version__} sees no CUDA GPU here; {wanted}")


def inputs(dtype: str) -> Iterator[tuple[float, float]]:
    """Offsets and scales of rows that the dtype holds: told apart around the mean, and finite when two are added."""
    kind = torch.finfo(getattr(torch, dtype))
    for offset in cases.OFFSETS:
        for scale in cases.SCALES:
            if offset * kind.eps < 1 and 2 * scale * (offset + 6) < kind.max:
                yield offset, scale


def measure(task: Task) -> list[ErrorRow]:
    """Errors of all providers for rows of all kinds.

    Weights are standard normal, and stay: some providers keep copies. Rows of x, and of a residual, are scale * (offset
    + standard normal), and incoming gradients standard normal, drawn ERROR_DRAWS times for each kind and the same for
    all providers. Raises ContextLostError where a provider has broken the CUDA context.
    """
    compile_here()
    torch.compiler.reset()
    case = make_case(plan(task.spec), task.sizes, task.device)
    offers = {name: offered_by(name, case) for name in task.providers}
    # No H is 0: another seed than that of the weights.
    generator = torch.Generator(task.device).manual_seed(0)
    found = []
    for offset, scale in inputs(task.sizes.dtype):
        draws: dict[str, list[dict[str, Any]]] = {name: [] for name in offers}
        for _ in range(cases.ERROR_DRAWS):
            _draw(case, generator, offset, scale)
            expected = truth(case)
            for name, offered in offers.items():
                if draws[name] and "error" in draws[name][-1]:
                    continue  # it fails alike, and slowly where that is in a compiler
                draws[name].append(_measured(case, expected, offered))
                still_alive(name, case)
        kind = (case.spec.name, task.sizes.dtype, task.sizes.H, task.sizes.rows, offset, scale)
        found += [ErrorRow(*kind, name, cases.ERROR_DRAWS, **_over(measured)) for name, measured in draws.items()]
    return found


def _draw(case: Case, generator: torch.Generator, offset: float, scale: float) -> None:
    def normal(tensor: Any) -> Any:
        return torch.randn(tensor.shape, dtype=torch.float64, device=tensor.device, generator=generator)

    with torch.no_grad():
        for row in case.arguments[: len(case.plan.inputs)]:
            row.copy_(scale * (offset + normal(row)))
    for cotangent in case.cotangents:
        cotangent.copy_(normal(cotangent))
    if case.original is not None:
        case.original.copy_(case.cotangents[0])


def _over(draws: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of the largest errors and the mean of the mean ones; the `error` where the last draw has one."""
    if "error" in draws[-1]:
        return draws[-1]
    return {
        name: _rounded((fmean if name.endswith("_mean") else median)(draw[name] for draw in draws)) for name in draws[0]
    }


def _measured(case: Case, expected: Truth, offered: Offer | str) -> dict[str, Any]:
    """The measured fields of an ErrorRow for one draw, or its `error`."""
    if isinstance(offered, str):
        return {"error": offered}
    case.restore()
    try:
        results = [(case.plan.outputs[0], "y", offered.forward()[0], expected.outputs[0])]
        if case.plan.backward is not None:
            arguments = case.plan.arguments
            names = [f"d{tensor.api}" for tensor in arguments]
            results += zip(arguments, names, offered.backward()(), expected.gradients, strict=True)
        found: dict[str, Any] = {}
        for tensor, name, out, exact in results:
            if name not in MEASURED:
                continue
            picked = out[expected.rows] if tensor.dims == "NH" else out
            largest, mean = errors(picked, exact, getattr(torch, dtype_of(tensor, case.spec, case.sizes.dtype)))
            if not math.isfinite(largest):
                return {"error": f"wrong: {name} is not finite"}
            found |= {name: largest, f"{name}_mean": mean}
        return found
    except Exception as error:
        return {"error": failure(error)}


def _rounded(error: float) -> float:
    """Four digits, which is more than other draws of rows leave as it is."""
    return float(f"{error:.4g}")
