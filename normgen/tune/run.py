"""`normgen tune`: what is left to try, tried; then the ladders, merged, in the table beside the spec."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from normgen.bench.check import Truth
from normgen.emit import replace, spec_path
from normgen.errors import Fault, SpecError
from normgen.loader import table_path
from normgen.spec import Spec
from normgen.target import WIDEST, Ladders, Rung, Table
from normgen.tune.bench import Bench, Problem, Refused, rows_checked
from normgen.tune.candidates import DIRECTIONS, Launch
from normgen.tune.merge import grid, merged
from normgen.tune.progress import Progress
from normgen.tune.raw import Raw
from normgen.tune.search import WIDTHS, Options, Search, search, tune_error


def tune(spec: Spec, source: str, options: Options, make: Callable[[Spec], Bench] | None = None) -> list[str]:
    """Search, and write the table. `make` gives the bench of a spec. Returns what there is to say.

    Raises SpecError for what cannot be searched, OutputError for files; KeyboardInterrupt leaves the raw file whole.
    """
    found = search(spec, source, options)
    bench = make(found.spec) if make else Bench(found.spec, options.dtype, options.elements)
    found = Search(found.spec, bench.space, found.widths, found.most)
    facts = {**bench.facts(), "dtype": options.dtype, "elements": options.elements}
    raw = Raw(options.out / "tune" / f"{spec.name}.jsonl", {"spec": spec.digest, "code": bench.code(), **facts})
    try:
        left = _measure(found, bench, raw, options)
    except KeyboardInterrupt:
        kept = len(raw.shares) + len(raw.skipped)
        print(f"stopped; {kept} results are kept in {raw.path}, and the same command goes on there", file=sys.stderr)
        raise
    path = table_path(Path(source))
    replace(path, table_text(_table(spec, found, raw, facts, source), spec.name, spec_path(Path(source))))
    return _summary(raw, left, path, source)


def _measure(found: Search, bench: Bench, raw: Raw, options: Options) -> int:
    """Try what is not in the raw file yet, in the time there is. Returns how much was left untried."""
    todo = {
        width: [(ladder, launch) for ladder, launch in found.todo(width) if (width, ladder, launch) not in raw]
        for width in found.widths
    }
    progress = Progress(sum(map(len, todo.values())))
    end = time.monotonic() + options.seconds if options.seconds else float("inf")
    compilers = _Compilers(found.spec, bench.device, options) if options.jobs > 1 else None
    try:
        for width, launches in todo.items():
            if not launches or time.monotonic() > end:
                continue
            if compilers:
                progress.step(f"H {width}, compiling", 0)
                compilers.run(width, launches, end)
            small, full = _problem(bench, width, True), _problem(bench, width, False)
            truth = bench.truth(small)
            for ladder, launch in launches:
                if time.monotonic() > end:
                    break
                _try(bench, raw, (width, ladder, launch), (small, full), truth)
                progress.step(f"H {width}, {ladder}")
            del small, full, truth  # before those of the next width
    finally:
        progress.end()
        if compilers:
            compilers.end()
    return progress.total - progress.done


def _problem(bench: Bench, width: int, checked: bool) -> Problem:
    rows = rows_checked(width, bench.elements) if checked else max(1, bench.elements // width)
    try:
        return bench.problem(width, rows)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise tune_error(f"{rows} rows of {width} do not work with the default rungs: {reason}") from None


def _try(
    bench: Bench,
    raw: Raw,
    known: tuple[int, str, Launch],
    problems: tuple[Problem, Problem],
    truth: Truth,
) -> None:
    _, ladder, launch = known
    small, full = problems
    try:
        bench.check(small, truth, ladder, launch)
        share, seconds = bench.share(full, ladder, launch)
    except Refused as refused:
        raw.add(known, skipped=str(refused))
        if not bench.alive():
            message = f"the GPU is lost to this process after {ladder} {launch} at H = {known[0]}: {refused}"
            raise tune_error(f"{message}; the same command goes on without it") from None
        return
    raw.add(known, share=round(share, 5), seconds=seconds)


class _Compilers:
    """Processes that fill Triton's cache, each with a bench of its own."""

    def __init__(self, spec: Spec, device: str, options: Options) -> None:
        arguments = (spec, options.dtype, options.elements, device)
        self.pool: ProcessPoolExecutor | None = ProcessPoolExecutor(
            options.jobs, mp_context=get_context("spawn"), initializer=_start, initargs=arguments
        )
        self.jobs = options.jobs

    def run(self, width: int, launches: Sequence[tuple[str, Launch]], end: float) -> None:
        """Compile the kernels of these launches, until `end` at most; a kernel may kill a process of the pool."""
        if self.pool is None:
            return
        # The number of programs is no part of a kernel of tiles.
        kernels = {(ladder, launch[:4] if ladder == "backward" else launch): launch for ladder, launch in launches}
        shares = [
            [(ladder, launch) for (ladder, _), launch in list(kernels.items())[i :: self.jobs]]
            for i in range(self.jobs)
        ]
        try:
            futures: list[Future[None]] = [self.pool.submit(_compile, width, share) for share in shares if share]
            wait(futures, None if end == float("inf") else max(0.0, end - time.monotonic()))
            for future in futures:
                if future.done():
                    future.result()
        except BrokenProcessPool:
            # What is left is compiled where it is measured.
            self.pool.shutdown(wait=False, cancel_futures=True)
            self.pool = None

    def end(self) -> None:
        if self.pool is not None:
            for process in list((self.pool._processes or {}).values()):
                with suppress(OSError):
                    process.terminate()
            self.pool.shutdown(wait=False, cancel_futures=True)


_worker: list[Bench] = []


def _start(spec: Spec, dtype: str, elements: int, device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that measures decides when to end
    _worker.append(Bench(spec, dtype, elements, device))


def _compile(width: int, launches: list[tuple[str, Launch]]) -> None:
    [bench] = _worker
    problem = bench.problem(width, 4)
    for ladder, launch in launches:
        bench.compile(problem, ladder, launch)


def _table(spec: Spec, found: Search, raw: Raw, facts: dict[str, Any], source: str) -> Table:
    if not raw.shares:
        reasons = Counter(raw.skipped.values()).most_common(1)
        message = f"nothing was measured{': ' + reasons[0][0] if reasons else ' in the time given'}"
        raise SpecError([Fault(source, 0, 0, "", f"{message}; no table is written")])
    tried = {width for width, _, _ in raw.shares}
    widths = sorted(tried | set(found.widths))
    if not spec.widths:
        every = {width for width in WIDTHS if width <= found.most}
        widths = grid(found.space, found.ladders, sorted(every | set(widths)), found.most)
    ladders: dict[str, list[Rung]] = {name: getattr(found.ladders, name) for name in Ladders.model_fields}
    for direction, names in DIRECTIONS.items():
        if any(name in found.space.ladders for name in names):
            ladders |= merged(found.space, found.ladders, direction, widths, raw.shares)
    # Once more by its own rules, as the loader will.
    data = {name: [rung.model_dump() for rung in rungs] for name, rungs in ladders.items()}
    return Table.model_validate({**facts, **data})


def table_text(table: Table, name: str, source: str) -> str:
    """The table as YAML, which `load` takes."""
    lines = [
        f"# Launch parameters of {name}, found by `normgen tune` and rendered by `normgen build {source}`.",
        "# measured: widths tried, each with the share of the speed of a device copy of the same bytes.",
        *(f'{key}: "{getattr(table, key)}"' for key in ("gpu", "torch", "triton")),
        f"dtype: {table.dtype}",
        f"elements: {table.elements}",
    ]
    for ladder in Ladders.model_fields:
        rungs: list[Rung] = getattr(table, ladder)
        unread = ("stages", "programs") if ladder == "forward" else ()
        lines += [f"{ladder}:", *(_rung_text(rung, unread) for rung in rungs)] if rungs else [f"{ladder}: []"]
    return "\n".join(lines) + "\n"


def _rung_text(rung: Rung, unread: tuple[str, ...]) -> str:
    fields = {key: value for key, value in rung if key not in ("measured", *unread)}
    text = ", ".join(f"{key}: {'null' if value == WIDEST else value}" for key, value in fields.items())
    measured = ", ".join(f"[{width}, {share}]" for width, share in rung.measured)
    return f"- {{{text}, measured: [{measured}]}}"


def _summary(raw: Raw, left: int, path: Path, source: str) -> list[str]:
    lines = [f"written  {path}"]
    lines.append(
        f"{len(raw.shares)} candidates measured, {len(raw.skipped)} skipped, {left} not tried; raw: {raw.path}"
    )
    kinds = Counter(reason.split(":")[0] for reason in raw.skipped.values())
    lines += [f"  skipped: {number} {kind}" for kind, number in kinds.most_common(5)]
    return [*lines, f"now run: normgen build {source}"]
