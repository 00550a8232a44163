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
from normgen.bench.measure import copying, peak_mb, time_gpu
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
            "normgen bench", f"torch {torch.__version__} sees no CUDA GPU here; run this on a machine that has one"
        )
    plans = {source: checked(source, spec, options.dtype, options.widths) for source, spec in specs.items()}
    notes = missing(options.providers)
    results = Results(header())
    if options.jobs > 1:
        say(warm(_sizes(plans, options), _warmed(options), options.jobs))
    try:
        _measure(plans, options, results)
        if options.profile:
            notes += _profile(plans, options, results)
    except ContextLostError as error:
        results.stopped = str(error)
        notes.append(f"stopped: {error}; run the rest again without that provider")
    lines = [*tables(results.rows), *latency_tables(results.latency), *profile_tables(results.profile)]
    save(results, options.out)
    if options.out is not None and results.rows:
        notes += [said] if (said := plot(results.rows, options.out)) else []
    return results, [*lines, *notes]


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _wanted(asked: tuple[str, ...]) -> list[str]:
    return [name for name in PROVIDERS if name != "copy" and (not asked or name in asked)]


def present(asked: tuple[str, ...]) -> list[str]:
    """The providers that are asked for (all, where none is named) and installed; a copy offers nothing."""
    return [name for name in _wanted(asked) if name not in LIBRARIES or _installed(LIBRARIES[name])]


def missing(asked: tuple[str, ...]) -> list[str]:
    """A sentence for each provider that is asked for and not installed."""
    there = present(asked)
    return [f"{name} is not installed: left out" for name in _wanted(asked) if name not in there]


def _warmed(options: Options) -> list[str]:
    return [name for name in present(options.providers) if name != "torch"]


def checked(source: str, spec: Spec, dtype: str, widths: tuple[int, ...]) -> Plan:
    """The plan of the spec at that path. Raises OutputError where it takes no such dtype or width."""
    made = plan(spec)
    if dtype not in spec.dtypes.input:
        raise OutputError(source, f"the spec takes no x of {dtype}; write --dtype {spec.dtypes.input[0]}")
    taken = cases.widths_of(made, widths)
    if refused := [width for width in widths if width not in taken]:
        raise OutputError(source, f"the spec takes no rows of {refused[0]}; leave that --width out")
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


def say(text: str) -> None:
    """Tell the person who waits, on stderr."""
    print(text, file=sys.stderr, flush=True)


def save(results: Results, out: Path | None) -> None:
    """Keep the results in `out`, if any. Raises OutputError."""
    if out is None:
        return
    try:
        results.save(out)
    except OSError as error:
        raise OutputError(str(out), f"cannot be written: {error.strerror or error}") from None


def _measure(plans: dict[str, Plan], options: Options, results: Results) -> None:
    for made, sizes in _sizes(plans, options):
        begin = time.monotonic()
        # Compiled functions of other widths count towards the limit of recompilations.
        torch.compiler.reset()
        case = make_case(made, sizes)
        expected = truth(case)
        offers = {name: offered_by(name, case) for name in present(options.providers)}
        try:
            if options.latency:
                for small in _latency_rows(case, expected, offers):
                    results.latency.append(small)
            else:
                for row in _rows(case, expected, offers, options.modes):
                    results.rows.append(row)
        finally:
            save(results, options.out)
        say(f"{made.spec.name}: {sizes.rows} x {sizes.H} took {time.monotonic() - begin:.1f} s")


def offered_by(name: str, case: Case) -> Offer | str:
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
        moved, copy = copying(count, case.arguments[0])
        times = vars(time_gpu(copy)).copy()
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
            still_alive(name, case)


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


def still_alive(name: str, case: Case) -> None:
    """Raises ContextLostError where every further call would fail, those of innocent providers too."""
    try:
        if torch.cuda.is_available():
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
        still_alive(name, case)


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
            save(results, options.out)
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
            say(f"{made.spec.name}: profiled {mode} of {name} at H = {sizes.H}")
    return found
