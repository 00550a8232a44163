"""`normgen tune`: what is left to try, tried; then the ladders, merged, in the table beside the spec."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from normgen.emit import replace, spec_path
from normgen.errors import Fault, SpecError
from normgen.loader import table_path
from normgen.plan import plan
from normgen.render import render, solve
from normgen.spec import MAX_HIDDEN, Spec
from normgen.target import WIDEST, Ladders, Rung, Table, single_block_limit
from normgen.tune.bench import Bench, Problem, Refused, rows_checked
from normgen.tune.candidates import DIRECTIONS, Launch, Space, default, space
from normgen.tune.merge import grid, merged
from normgen.tune.progress import Progress
from normgen.tune.raw import Raw

WIDTHS: tuple[int, ...] = (
    128,
    256,
    512,
    768,
    1024,
    1152,
    1536,
    2048,
    2304,
    2880,
    3072,
    4096,
    4544,
    5120,
    6144,
    6912,
    7168,
    8192,
)
WIDTHS += (12288, 16384, 32768, 65536, 131072, 262144)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    widths: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    elements: int = 2**27
    jobs: int = 1
    seconds: int | None = None
    out: Path = Path(".normgen")
    dry_run: bool = False


def _error(message: str) -> SpecError:
    return SpecError([Fault("normgen tune", 0, 0, "", message)])


def require_gpu() -> None:
    """Raises SpecError where nothing can be measured."""
    try:
        torch = import_module("torch")
        import_module("triton")
    except ImportError as error:
        raise _error(f"measures with torch and triton, and {error.name} is not installed here") from None
    if not torch.cuda.is_available():
        raise _error("measures on a GPU, and torch finds none here")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise _error("measures compiled kernels, and TRITON_INTERPRET=1 has them interpreted; unset it")


@dataclass(frozen=True)
class Search:
    """What is searched: one spec, and the widths that count."""

    spec: Spec
    """The spec for any width: a width is a constant of its kernels anyhow, and all kernels are there to choose from."""
    space: Space
    widths: tuple[int, ...]
    most: int
    """The widest row that the spec serves, or that is worth a rung of its own."""

    @property
    def ladders(self) -> Ladders:
        return self.spec.ladders

    def todo(self, width: int) -> Iterator[tuple[str, Launch]]:
        """What to try at a width; first what serves it as long as nothing is found."""
        for direction, names in DIRECTIONS.items():
            if not any(name in self.space.ladders for name in names):
                continue
            name, rung = default(self.space, self.ladders, direction, width)
            first = (name, self.space.effective(name, rung, width))
            others = [(n, launch) for n in names if n in self.space.ladders for launch in self.space.launches(n, width)]
            yield from dict.fromkeys((first, *others))


def search(spec: Spec, source: str, options: Options, **gpu: int) -> Search:
    """Raises SpecError for a dtype or a width that the spec does not take."""
    if options.dtype not in spec.dtypes.input:
        message = f"the spec takes no x of {options.dtype}; write --dtype {spec.dtypes.input[0]}"
        raise SpecError([Fault(source, 0, 0, "", message)])
    most = single_block_limit(spec.ladders, spec.grad) if spec.strategy == "single_block" else MAX_HIDDEN
    served = spec.widths or tuple(width for width in WIDTHS if width <= most)
    widths = tuple(sorted(set(options.widths))) or served
    for width in widths:
        if width > most or (spec.widths and width not in spec.widths):
            wanted = f"one of {', '.join(map(str, spec.widths))}" if spec.widths else f"at most {most}"
            raise SpecError([Fault(source, 0, 0, "", f"the spec takes no rows of {width}; --width must be {wanted}")])
    dynamic = spec.model_copy(update={"hidden": "dynamic"})
    return Search(dynamic, space(dynamic, solve(plan(dynamic)), options.dtype, **gpu), widths, most)


def tune(spec: Spec, source: str, options: Options, make: Callable[[Spec, Path], Bench] | None = None) -> list[str]:
    """Search, and write the table. `make` gives a bench of a module that lies at a path. Returns what there is to say.

    Raises SpecError for what cannot be searched, OutputError for files; KeyboardInterrupt leaves the raw file whole.
    """
    found = search(spec, source, options)
    if options.dry_run:
        return _forecast(found)
    text = render(plan(found.spec), spec_path(Path(source)))[f"{spec.name}.py"]
    folder = options.out / "tune"
    module = folder / f"{spec.name}.py"
    replace(module, text)
    bench = make(found.spec, module) if make else Bench(found.spec, module, options.dtype, options.elements)
    found = Search(found.spec, bench.space, found.widths, found.most)
    facts = {**bench.facts(), "dtype": options.dtype, "elements": options.elements}
    key = {"spec": spec.digest, "code": hashlib.sha256(text.encode()).hexdigest()[:16], **facts}
    raw = Raw(folder / f"{spec.name}.jsonl", key)
    try:
        left = _measure(found, bench, raw, module, options)
    except KeyboardInterrupt:
        kept = len(raw.shares) + len(raw.skipped)
        print(f"stopped; {kept} results are kept in {raw.path}, and the same command goes on there", file=sys.stderr)
        raise
    path = table_path(Path(source))
    replace(path, table_text(_table(spec, found, raw, facts, source), spec.name, spec_path(Path(source))))
    return _summary(raw, left, path, source)


def _forecast(found: Search) -> list[str]:
    lines = []
    total: Counter[str] = Counter()
    for width in found.widths:
        count = Counter(ladder for ladder, _ in found.todo(width))
        total += count
        lines.append(f"H {width:<7} {', '.join(f'{number} {name}' for name, number in count.items())}")
    return [*lines, f"{found.spec.name}: {total.total()} candidates at {len(found.widths)} widths"]


def _measure(found: Search, bench: Bench, raw: Raw, module: Path, options: Options) -> int:
    """Try what is not in the raw file yet, in the time there is. Returns how much was left untried."""
    todo = {
        width: [(ladder, launch) for ladder, launch in found.todo(width) if (width, ladder, launch) not in raw]
        for width in found.widths
    }
    progress = Progress(sum(map(len, todo.values())))
    end = time.monotonic() + options.seconds if options.seconds else float("inf")
    compilers = _Compilers(found.spec, module, bench.device, options) if options.jobs > 1 else None
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
        raise _error(f"{rows} rows of {width} do not work with the default rungs: {reason}") from None


def _try(
    bench: Bench,
    raw: Raw,
    known: tuple[int, str, Launch],
    problems: tuple[Problem, Problem],
    truth: dict[str, list[Any]],
) -> None:
    _, ladder, launch = known
    small, full = problems
    direction = next(name for name, ladders in DIRECTIONS.items() if ladder in ladders)
    try:
        bench.check(small, truth[direction], ladder, launch)
        seconds = bench.time(full, ladder, launch)
    except Refused as refused:
        raw.add(known, skipped=str(refused))
        if not bench.alive():
            message = f"the GPU is lost to this process after {ladder} {launch} at H = {known[0]}: {refused}"
            raise _error(f"{message}; the same command goes on without it") from None
        return
    raw.add(known, share=round(bench.copy(full.bytes[direction]) / seconds, 5), seconds=seconds)


class _Compilers:
    """Processes that fill Triton's cache, each with a bench of its own."""

    def __init__(self, spec: Spec, module: Path, device: str, options: Options) -> None:
        arguments = (spec, module, options.dtype, options.elements, device)
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


def _start(spec: Spec, module: Path, dtype: str, elements: int, device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that measures decides when to end
    _worker.append(Bench(spec, module, dtype, elements, device))


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
