"""From rules to mutants: where a rule applies in the generated modules, and what the module is then."""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mutation.equivalents import EQUIVALENTS, equivalent
from mutation.rules import RULES, Rule

ROOT = Path(__file__).resolve().parents[2]
SPECS = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))


@lru_cache
def source_of(spec: str) -> str:
    return (ROOT / "generated" / f"{spec}.py").read_text()


@dataclass(frozen=True)
class Mutant:
    """One line of one module, changed by one rule."""

    rule: Rule
    spec: str
    function: str  # less the name of the spec, which kernels begin with
    number: int  # of the line, from 0
    nth: int  # of the lines of this text in the function, from 1
    row: str  # which row is meant: the last line above that sets `row`
    before: str
    after: str

    def applied_to(self, source: str) -> str:
        """The module, of which this is a mutant, with the line changed."""
        lines = source.splitlines(keepends=True)
        lines[self.number] = lines[self.number].replace(self.before, self.after)
        return "".join(lines)

    @property
    def source(self) -> str:
        return self.applied_to(source_of(self.spec))

    @property
    def change(self) -> tuple[str, ...]:
        """What is changed, whatever the spec: where specs share a stage, they share its lines."""
        before, after = (re.sub(rf"\b{self.spec}(?=_|\b)", "NAME", text) for text in (self.before, self.after))
        return self.rule.name, self.function, str(self.nth), before, after

    @property
    def place(self) -> str:
        return f"{self.function}, {self.nth}" if self.nth > 1 else self.function


@dataclass(frozen=True)
class Line:
    """A line of a function or a class, without its indent; its fields are those of a mutant of it."""

    number: int
    nth: int
    row: str
    text: str


@lru_cache
def lines_of(spec: str, source: str) -> dict[str, list[Line]]:
    """The lines of each function and class of a module."""
    texts = [line.strip() for line in source.splitlines()]
    found: dict[str, list[Line]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            seen: Counter[str] = Counter()
            row, lines = "", found.setdefault(node.name.removeprefix(f"{spec}_"), [])
            for number in range(node.lineno - 1, node.end_lineno or 0):
                text = texts[number]
                seen[text] += 1
                row = text if text.startswith("row = ") else row
                lines.append(Line(number, seen[text], row, text))
    return found


def mutants_of(rule: Rule, spec: str, source: str) -> Iterator[Mutant]:
    """Every mutant that a rule makes of a module."""
    for function, lines in lines_of(spec, source).items():
        if re.fullmatch(rule.where, function):
            for line in lines:
                for match in re.finditer(rule.pattern, line.text):
                    after = line.text[: match.start()] + match.expand(rule.replacement) + line.text[match.end() :]
                    yield Mutant(rule, spec, function, line.number, line.nth, line.row, line.text, after)


def all_mutants() -> list[Mutant]:
    """What is planted: of each rule one line where it is a fault, and of each kind of equivalent one mutant.

    A line that several specs have in one function is one line. Hashes choose, so that a new line or spec moves few.
    A rule that is nowhere a fault is an error: what it stands for would no longer be planted. So is a kind of
    equivalent that there is none of.
    """
    chosen: list[Mutant] = []
    equivalents: list[Mutant] = []
    for rule in RULES:
        found = [mutant for spec in SPECS for mutant in mutants_of(rule, spec, source_of(spec))]
        faults = [mutant for mutant in found if not equivalent(mutant)]
        if not faults:
            raise LookupError(f"rule {rule.name!r} is a fault in no generated module: /{rule.pattern}/ in {rule.where}")
        chosen.append(min(faults, key=_rank))
        equivalents += [mutant for mutant in found if equivalent(mutant)]
    for kind in EQUIVALENTS:
        found = [mutant for mutant in equivalents if equivalent(mutant) is kind]
        if not found:
            raise LookupError(f"no mutant is equivalent for this reason: {kind.reason}")
        # What survives takes a whole test: that of the spec which has the shortest.
        chosen.append(min(found, key=lambda mutant: (len(generated_test(mutant.spec)), _rank(mutant))))
    return chosen


@lru_cache
def generated_test(spec: str) -> str:
    """The generated test of a spec."""
    return (ROOT / "generated" / "tests" / f"test_{spec}.py").read_text()


def _rank(mutant: Mutant) -> tuple[bytes, bytes]:
    """By the change and, of one change, by the spec."""
    digests = (hashlib.sha256("\n".join(words).encode()) for words in (mutant.change, (mutant.spec, *mutant.change)))
    change, spec = (digest.digest() for digest in digests)
    return change, spec
