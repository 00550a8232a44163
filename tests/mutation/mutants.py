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

from mutation.rules import RULES, Rule

ROOT = Path(__file__).resolve().parents[2]
PLACES = 1
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


@lru_cache
def lines_of(source: str) -> list[tuple[str, int, str]]:
    """Each line that is in a function or a class of a module: in which, its number from 0, and its text."""
    lines = source.splitlines()
    nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    numbers = [(node.name, number) for node in nodes for number in range(node.lineno - 1, node.end_lineno or 0)]
    return [(name, number, lines[number].strip()) for name, number in numbers]


def mutants_of(rule: Rule, spec: str, source: str) -> Iterator[Mutant]:
    """Every mutant that a rule makes of a module."""
    seen: Counter[tuple[str, str]] = Counter()
    for name, number, before in lines_of(source):
        function = name.removeprefix(f"{spec}_")
        seen[function, before] += 1
        if re.fullmatch(rule.where, function):
            for match in re.finditer(rule.pattern, before):
                after = before[: match.start()] + match.expand(rule.replacement) + before[match.end() :]
                yield Mutant(rule, spec, function, number, seen[function, before], before, after)


def all_mutants() -> list[Mutant]:
    """What is planted: of each rule the changes of `PLACES` lines, in as many functions, each in one spec that has it.

    A line that several specs have in one function is one place. Hashes choose, so that a new line or spec moves few.
    A rule that applies nowhere is an error: the kind of fault it stands for would no longer be planted.
    """
    chosen: list[Mutant] = []
    for rule in RULES:
        functions: dict[str, dict[tuple[str, ...], Mutant]] = {}
        for spec in SPECS:
            for mutant in mutants_of(rule, spec, source_of(spec)):
                places = functions.setdefault(mutant.function, {})
                other = places.get(mutant.change, mutant)
                places[mutant.change] = min(other, mutant, key=lambda one: _rank(one.spec, *one.change))
        if not functions:
            raise LookupError(f"rule {rule.name!r} applies to no generated module: /{rule.pattern}/ in {rule.where}")
        firsts = [min(places.values(), key=lambda one: _rank(*one.change)) for places in functions.values()]
        chosen += sorted(firsts, key=lambda one: _rank(*one.change))[:PLACES]
    return chosen


def _rank(*words: str) -> bytes:
    return hashlib.sha256("\n".join(words).encode()).digest()
