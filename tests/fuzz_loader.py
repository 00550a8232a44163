"""Coverage-guided fuzzing of the loader: `make fuzz`, or `python -m tests.fuzz_loader SECONDS [SEED]`.

Inputs are mutated from a corpus, `specs/` at first; one that goes another way through normgen or PyYAML joins it.
Each is loaded as a spec and as the table beside one. What must hold: it loads, and then renders, or it is refused by
faults that have a place and one printable line each; and that in time. The first input that breaks this is made smaller
and printed; the exit code is then 1.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import yaml

import normgen
from normgen.errors import SpecError
from normgen.loader import load
from normgen.plan import plan
from normgen.render import render
from normgen.spec import Spec
from normgen.target import LADDERS, Table
from normgen.tune.run import table_text

ROOT = Path(__file__).parents[1]
NORMGEN, YAML = (str(Path(module.__file__).parent) for module in (normgen, yaml))
SOURCE, TABLE = "s.yaml", "tuned/s.yaml"
SPEC = b"name: a\nnorm: rms\neps: {value: 1e-6}\n"
SECONDS = 5  # of processor time, for one input
WORDS = [word.encode() for word in (
    *("\n", "  ", "\t", ": ", "- ", "? ", "[", "]", "{", "}", ",", "&a ", "*a", "!", "!!int ", "|\n", ">-\n", "'", '"'),
    *("%", "@", "`", "#", "~", "\\", "\r", "\0", "---\n", "...\n", "<<: ", "\ufeff", "é", "\u2028", "null", "true"),
    *("no", "none", "same", "dynamic", ".inf", "-0.0", "1e-6", "1e999", "010", "0x1F", "1_0", "12:30", "9" * 40, "-1"),
    *('"\\ud800"', '"\\UFFFFFFFF"', "rms", "layer", "mean", "cast_then_multiply", "outside_sqrt", "unrounded_sum"),
    *("welford", "single_block", "float16", "bfloat16", "1048576"),
)]  # fmt: skip


class BrokenError(AssertionError):
    """The loader took too long, or a fault without a place or in more than one printable line."""


def check(data: bytes, rendering: bool = False) -> None:
    """What must hold of any bytes, as a spec and as a table. Whatever else the loader raises goes through."""
    for source, arguments in ((SOURCE, (data, SOURCE)), (TABLE, (SPEC, SOURCE, (data, TABLE)))):
        try:
            spec: Spec = load(*arguments)  # type: ignore[arg-type]
        except SpecError as error:
            for fault in error.faults:
                placed = min(fault.line, fault.column) >= 1 or "larger than" in fault.message
                if fault.path != source or not placed or not str(fault).isprintable() or len(str(fault)) > 400:
                    raise BrokenError(f"no place or no line for people: {fault!r}") from None
        else:
            if rendering:
                for path, text in render(plan(spec), SOURCE).items():
                    compile(text, path, "exec")


class Watch:
    """Runs `check`, and notes which line of normgen followed which, and which line called what of PyYAML."""

    def __init__(self) -> None:
        self.seen: set[tuple[CodeType, int, int]] = set()

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        code, before = frame.f_code, 0
        if code.co_filename.startswith(YAML):  # its scanner has a call or more for each character
            assert frame.f_back
            self.seen.add((code, frame.f_back.f_lineno, 0))
        if not code.co_filename.startswith(NORMGEN):
            return None

        def line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal before
            if event == "line":
                self.seen.add((code, before, frame.f_lineno))
                before = frame.f_lineno
            return line

        return line

    def finds_new(self, data: bytes) -> bool:
        known = len(self.seen)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        sys.settrace(self._called)
        try:
            check(data)
        finally:
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return len(self.seen) > known


def mutated(data: bytes, corpus: Sequence[bytes], chance: random.Random) -> bytes:
    """`data` with a few changes of the kinds that files suffer."""
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice((0, 1, 2, 5, 20)))
        lines = data.splitlines(keepends=True) or [b""]
        line = chance.randrange(len(lines))
        other = chance.choice(corpus)
        cut = chance.randrange(len(other) + 1)
        data = chance.choice(
            (
                data[:start] + chance.choice(WORDS) + data[end:],
                data[:start] + chance.choice(WORDS) + data[start:],
                data[:start] + chance.randbytes(1) + data[end:],
                data[:start] + data[end:],
                data[:start] + data[start:end] * chance.choice((2, 3, 200)) + data[end:],
                data[:start] + other[cut : cut + chance.choice((5, 20, 200))] + data[end:],
                b"".join(lines[:line] + lines[line + 1 :]),
                b"".join(lines[: line + 1] + lines[line:]),
                b"".join([*lines[:line], b"  ", *lines[line:]]),
            )
        )
    return data[:2048]  # a page: inputs are traced


def smaller(data: bytes, error: type[BaseException]) -> bytes:
    """As much of `data` cut away as leaves the same kind of error."""

    def breaks(candidate: bytes) -> bool:
        try:
            Watch().finds_new(candidate)
        except error:
            return True
        except Exception:
            return False
        return False

    size = len(data)
    while size:
        start, before = 0, data
        while start < len(data):
            shorter = data[:start] + data[start + size :]
            start, data = (start, shorter) if breaks(shorter) else (start + size, data)
        size //= 1 if size == 1 and data != before else 2
    return data


def corpus() -> Iterator[bytes]:
    """The shipped specs, and a table of the widest rung of each ladder."""
    for path in sorted((ROOT / "specs").glob("*.yaml")):
        yield path.read_bytes()
    words = {"gpu": "H200", "torch": "2.11.0", "triton": "3.6.0", "dtype": "bfloat16", "elements": 2**27}
    ladders = {name: rungs[-1:] for name, rungs in LADDERS["rms", False]}
    yield table_text(Table.model_validate(words | ladders), "a", SOURCE).encode()


def fuzz(seconds: float, seed: int = 0, rounds: int | None = None) -> tuple[bytes, BaseException] | None:
    """The smallest input found that breaks the loader, and how; None where none did."""

    def late(*_: object) -> None:
        raise BrokenError(f"more than {SECONDS} s")

    chance, watch, inputs = random.Random(seed), Watch(), list(corpus())
    before = signal.signal(signal.SIGVTALRM, late)
    start, count = time.monotonic(), 0
    try:
        for data in inputs:
            watch.finds_new(data)
        while time.monotonic() < start + seconds and (rounds is None or count < rounds):
            count += 1
            # The newest inputs are the least explored.
            data = mutated(chance.choice(chance.choice((inputs, inputs[-50:]))), inputs, chance)
            try:
                if watch.finds_new(data):
                    inputs.append(data)
                    check(data, rendering=True)
            except Exception as error:
                print(f"{type(error).__name__}: {error}\n{data!r}", flush=True)
                return smaller(data, type(error)), error
    finally:
        signal.signal(signal.SIGVTALRM, before)
        spent, pairs = time.monotonic() - start, len(watch.seen)
        print(f"{count} inputs in {spent:.0f} s, seed {seed}: {len(inputs)} in the corpus, {pairs} steps seen")
    return None


def main(argv: Sequence[str]) -> int:
    found = fuzz(float(argv[0]), int(argv[1]) if len(argv) > 1 else int.from_bytes(os.urandom(4), "big"))
    if found:
        print(f"{found[0]!r}\n{type(found[1]).__name__}: {found[1]}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
