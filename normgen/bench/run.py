"""A run of `normgen bench`: every spec at every width, one provider after another in one process."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normgen.bench import cases
from normgen.bench.cases import PROVIDERS, Mode, Sizes
from normgen.bench.check import Truth, check_gradients, check_outputs, poison, truth
from normgen.bench.header import header
from normgen.bench.latency import failure, latency
from normgen.bench.measure import peak_mb, time_gpu
from normgen.bench.plots import plot
from normgen.bench.profile import ncu, profile
from normgen.bench.providers import LIBRARIES, Case, Offer, Unsupported, make_case, offer
from normgen.bench.report import LatencyRow, ProfileRow, Results, Row
from normgen.bench.tables import latency_tables, profile_tables, tables
from normgen.bench.warm import warm
from normgen.errors import OutputError
from normgen.plan import Plan, plan
from normgen.render import solve
from normgen.spec import Spec


@dataclass(frozen=True)
class Options:
    """What the command line asks for; an empty tuple or None is the default of each."""

    widths: tuple[int, ...]
    elements: int
    rows: tuple[int, ...]
    dtype: str
    providers: tuple[str, ...]
    modes: tuple[Mode, ...]
    latency: bool
    profile: bool
    jobs: int
    out: Path | None


class ContextLostError(Exception):
    """A provider broke the CUDA context: nothing can run in this process any more."""


def bench(specs: dict[str, Spec], options: Options) -> tuple[Results, list[str]]:
    """Measure the specs, given by their paths. Returns what was found, and the same in lines for a terminal.

    Raises OutputError where nothing can be measured, or the results cannot be written.
    """
    if not torch.cuda.is_available():
        raise OutputError(
            "bench", f"torch {torch.__version__} sees no CUDA GPU here; run this on a machine that has one"
        )
    plans = {source: _checked(source, spec, options) for source, spec in specs.items()}
    notes = [
        f"{name} is not installed: left out"
        for name in _wanted(options)
        if name in LIBRARIES and not _installed(LIBRARIES[name])
    ]
    results = Results(header())
    if options.jobs > 1:
        _say(warm(_sizes(plans, options), _warmed(options), options.jobs))
    try:
        _measure(plans, options, results)
        if options.profile:
            notes += _profile(plans, options, results)
    except ContextLostError as error:
        results.stopped = str(error)
        notes.append(f"stopped: {error}; run the rest again without that provider")
    lines = [*tables(results.rows), *latency_tables(results.latency), *profile_tables(results.profile)]
    _save(results, options)
    if options.out is not None and results.rows:
        notes += [said] if (said := plot(results.rows, options.out)) else []
    return results, [*lines, *notes]


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _wanted(options: Options) -> list[str]:
    return [name for name in PROVIDERS if not options.providers or name in options.providers]


def _present(options: Options) -> list[str]:
    """The providers that are asked for and installed; the copy is not one that offers anything."""
    wanted = [name for name in _wanted(options) if name != "copy"]
    return [name for name in wanted if name not in LIBRARIES or _installed(LIBRARIES[name])]


def _warmed(options: Options) -> list[str]:
    return [name for name in _present(options) if name != "torch"]


def _checked(source: str, spec: Spec, options: Options) -> Plan:
    made = plan(spec)
    if options.dtype not in spec.dtypes.input:
        raise OutputError(source, f"the spec does not take {options.dtype}; its dtypes are {spec.dtypes.input}")
    if not cases.widths_of(made, options.widths):
        raise OutputError(source, f"the spec takes none of the widths {list(options.widths)}")
    return made


def _sizes(plans: dict[str, Plan], options: Options) -> list[tuple[Plan, Sizes]]:
    """Everything that is measured, in order."""
    found = []
    for made in plans.values():
        asked = options.widths or (cases.LATENCY_WIDTHS if options.latency and made.spec.widths is None else ())
        for H in cases.widths_of(made, asked):
            default = cases.LATENCY_ROWS if options.latency else (max(1, options.elements // H),)
            found += [(made, Sizes(H, rows, options.dtype)) for rows in options.rows or default]
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _save(results: Results, options: Options) -> None:
    if options.out is None:
        return
    try:
        results.save(options.out)
    except OSError as error:
        raise OutputError(str(options.out), f"cannot be written: {error.strerror or error}") from None


def _measure(plans: dict[str, Plan], options: Options, results: Results) -> None:
    for made, sizes in _sizes(plans, options):
        begin = time.monotonic()
        # Compiled functions of other widths count towards the limit of recompilations.
        torch.compiler.reset()
        case = make_case(made, sizes)
        expected = truth(case)
        offers = {name: _offered(name, case) for name in _present(options)}
        try:
            if options.latency:
                for small in _latency_rows(case, expected, offers):
                    results.latency.append(small)
            else:
                for row in _rows(case, expected, offers, options.modes):
                    results.rows.append(row)
        finally:
            _save(results, options)
        _say(f"{made.spec.name}: {sizes.rows} x {sizes.H} took {time.monotonic() - begin:.1f} s")


def _offered(name: str, case: Case) -> Offer | str:
    """What a provider offers for a case, or why it does not."""
    try:
        return offer(name, case)
    except Unsupported as error:
        return f"unsupported: {error}"
    except Exception as error:
        return failure(error)


def _rows(case: Case, expected: Truth, offers: dict[str, Offer | str], modes: tuple[Mode, ...]) -> Iterator[Row]:
    sizes = case.sizes
    for mode, count in cases.traffic(case.plan, case.kernels, sizes).items():
        if mode not in modes:
            continue
        same: dict[str, Any] = {
            "spec": case.spec.name,
            "mode": mode,
            "H": sizes.H,
            "rows": sizes.rows,
            "elements": sizes.elements,
            "dtype": sizes.dtype,
        }
        moved, times = _copy(case, count)
        limit = moved / times["ms"] / 1e9
        yield Row(op="copy", provider="copy", bytes=moved, tb_s=limit, fraction_of_copy=1.0, **times, **same)
        for name, offered in offers.items():
            found: dict[str, Any] = (
                {"error": offered} if isinstance(offered, str) else _timed(case, expected, offered, mode)
            )
            if "ms" in found:
                found["tb_s"] = count / found["ms"] / 1e9
                found["fraction_of_copy"] = found["tb_s"] / limit
            yield Row(op=cases.operation(case.plan, mode), provider=name, bytes=count, **found, **same)
            _still_alive(name, case)


def _copy(case: Case, count: int) -> tuple[int, dict[str, Any]]:
    """The bytes that a copy of about `count` bytes, read and written together, moves in rows of H, and its times."""
    x = case.arguments[0]
    rows = max(1, count // (2 * case.sizes.H * x.element_size()))
    source = torch.randn(rows, case.sizes.H, dtype=x.dtype, device=x.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes, vars(time_gpu(lambda: target.copy_(source))).copy()


def _timed(case: Case, expected: Truth, offered: Offer, mode: Mode) -> dict[str, Any]:
    """The measured fields of a Row, or its `error`. Nothing wrong is timed."""
    # Whatever ran before may have been one that overwrites, and may have failed half-way.
    case.restore()
    try:
        run = offered.backward() if mode == "backward" else getattr(offered, mode)
        poison(case, case.plan.results if mode == "forward" else case.plan.arguments)
        check = check_outputs if mode == "forward" else check_gradients
        fault = check(case, expected, run())
        if fault is not None:
            return {"error": fault}
        peak = peak_mb(run)
        return {**vars(time_gpu(run, case.restore if offered.overwrites else None)), "peak_mb": peak}
    except Exception as error:
        return {"error": failure(error)}


def _still_alive(name: str, case: Case) -> None:
    """After some errors of a kernel every further call fails, those of innocent providers too."""
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise ContextLostError(f"{name} broke the CUDA context at H = {case.sizes.H} ({failure(error)})") from None


def _latency_rows(case: Case, expected: Truth, offers: dict[str, Offer | str]) -> Iterator[LatencyRow]:
    for name, offered in offers.items():
        if isinstance(offered, str):
            times: dict[str, Any] = {"error": offered}
        else:
            case.restore()
            try:
                times = latency(case, offered, expected)
            except Exception as error:
                times = {"error": failure(error)}
        sizes = case.sizes
        op = cases.operation(case.plan, "forward")
        yield LatencyRow(op, case.spec.name, sizes.H, sizes.rows, sizes.dtype, name, **times)
        _still_alive(name, case)


def _profile(plans: dict[str, Plan], options: Options, results: Results) -> list[str]:
    """Count DRAM bytes of our kernels, fused and separate. Returns a sentence where that cannot be."""
    tool = ncu()
    if tool is None:
        return ["no DRAM bytes: ncu (Nsight Compute) is not installed"]
    # The memory of this process is needed by the one that is profiled.
    torch.cuda.empty_cache()
    for source, made in plans.items():
        asked = options.widths or (cases.PROFILE_WIDTHS if made.spec.widths is None else ())
        providers = ["normgen", *(["separate"] if made.spec.residual else [])]
        for H in cases.widths_of(made, asked):
            rows = options.rows[0] if options.rows and not options.latency else max(1, options.elements // H)
            sizes = Sizes(H, rows, options.dtype)
            results.profile += _profile_rows(tool, source, made, sizes, providers, options.modes)
            _save(results, options)
    return []


def _profile_rows(
    tool: str, source: str, made: Plan, sizes: Sizes, providers: list[str], modes: tuple[Mode, ...]
) -> list[ProfileRow]:
    found = []
    for mode, count in cases.traffic(made, solve(made), sizes).items():
        for name in providers if mode in modes else ():
            counts = profile(tool, source, sizes, name, mode)
            op = cases.operation(made, mode)
            found.append(
                ProfileRow(op, made.spec.name, mode, sizes.H, sizes.rows, sizes.dtype, name, bytes=count, **counts)
            )
            _say(f"{made.spec.name}: profiled {mode} of {name} at H = {sizes.H}")
    return found
