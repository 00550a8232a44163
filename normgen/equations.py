"""Equations into ordered lines of a kernel: pure text and graph work, no torch, no triton.

A stage states single-assignment equations of per-element values. This module parses them, finds out which are needed
for the values that a kernel must store, and orders them around its row reductions:

- `straight` orders the lines of a kernel that holds a whole row at once;
- `persistent` also moves what does not depend on the row in front of the loop over rows, and turns the values that
  are summed over rows into accumulators;
- `chunked` splits the lines into passes over the chunks of a row, one more than there are dependent row reductions.

Loads come as late as the order allows (what is loaded before a reduction stays in registers across it), stores as
soon as their value exists.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from normgen.stages.base import Tensor

# Names that a kernel has in scope; they are not values of the pipeline.
SCOPE = frozenset(
    "tl _divide _sqrt first H BLOCK_N BLOCK_SIZE start row col row_mask col_mask mask"
    " compute epsilon width input_dtype output_dtype".split()
)


class EquationError(Exception):
    """A stage's equations do not fit together: a mistake in a template, never in a spec."""


@dataclass(frozen=True)
class Equation:
    """`target = expression`, and the comment that stood above it."""

    target: str
    expression: str
    comment: tuple[str, ...] = ()

    @property
    def uses(self) -> tuple[str, ...]:
        """The values read, in order of appearance."""
        return _names(self.expression)

    @property
    def reduces(self) -> bool:
        """Whether this is a sum over the row."""
        return self.expression.startswith("tl.sum(") and self.expression.endswith(", axis=1, keep_dims=True)")

    @property
    def summand(self) -> str:
        return self.expression.removeprefix("tl.sum(").removesuffix(", axis=1, keep_dims=True)")

    def renamed(self, names: Mapping[str, str]) -> Equation:
        target = names.get(self.target, self.target)
        return replace(self, target=target, expression=substitute(self.expression, names))


@dataclass(frozen=True)
class Fold:
    """A row reduction taken chunk by chunk: lines before the loop, in it, and after it."""

    targets: tuple[str, ...]
    uses: tuple[str, ...]
    begin: tuple[str, ...]
    each: tuple[str, ...]
    end: tuple[str, ...] = ()

    @staticmethod
    def of(begin: Iterable[str], each: Iterable[str]) -> Fold:
        """A fold whose targets are what `begin` defines, and that uses what neither block does."""
        begin, each = tuple(begin), tuple(each)
        targets = tuple(map(_target, begin))
        defined = {*targets, *map(_target, each)}
        uses = dict.fromkeys(name for line in each for name in _names(line) if name not in defined)
        return Fold(targets, tuple(uses), begin, each)

    def only(self, wanted: Iterable[str]) -> Fold:
        """The fold without the lines that its wanted targets do not need."""
        kept = set(wanted)
        while more := {name for line in self.each if _target(line) in kept for name in _names(line)} - kept:
            kept |= more
        each = (line for line in self.each if line.startswith("#") or _target(line) in kept)
        return Fold.of((line for line in self.begin if _target(line) in kept), each)


def _target(line: str) -> str:
    return line.split(" ", 1)[0]


@dataclass(frozen=True)
class Load:
    kind = "Load"
    tensor: Tensor
    first: bool = False
    """Only the first element of each row, under the name `<value>_first`."""


@dataclass(frozen=True)
class Let:
    kind = "Let"
    equation: Equation


@dataclass(frozen=True)
class Store:
    kind = "Store"
    tensor: Tensor
    value: str


@dataclass(frozen=True)
class Accumulate:
    """A value summed over rows: the tensor it ends up in, and the summand."""

    kind = "Accumulate"
    tensor: Tensor
    expression: str


Step = Load | Let | Store | Accumulate


@dataclass(frozen=True)
class Pass:
    """One walk over the chunks of a row: what comes before it, in it, and after it."""

    before: tuple[Step, ...]
    begin: tuple[str, ...]
    inside: tuple[Step, ...]
    each: tuple[str, ...]
    end: tuple[str, ...]
    after: tuple[Step, ...]


def substitute(expression: str, names: Mapping[str, str]) -> str:
    """`expression` with whole identifiers replaced; attributes are left alone."""
    if not names:
        return expression
    pattern = r"(?<![\w.])(" + "|".join(map(re.escape, names)) + r")\b"
    return re.sub(pattern, lambda match: names[match.group(1)], expression)


@lru_cache(maxsize=4096)
def _names(text: str) -> tuple[str, ...]:
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name) and node.id not in SCOPE]
    return tuple(dict.fromkeys(node.id for node in sorted(found, key=lambda node: node.col_offset)))


def parse(text: str) -> list[Equation]:
    """The equations of a stage's text. Each line is a comment or `name = expression`; no name is defined twice."""
    equations: list[Equation] = []
    comment: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("#"):
            comment.append(line)
            continue
        statement = ast.parse(line).body[0]
        if not (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            raise EquationError(f"not an equation of the form name = expression: {line}")
        target = statement.targets[0].id
        if target in SCOPE:
            raise EquationError(f"{target} is a reserved name: {line}")
        if any(equation.target == target for equation in equations):
            raise EquationError(f"{target} is defined twice: {line}")
        equation = Equation(target, ast.unparse(statement.value), tuple(comment))
        if "tl.sum(" in equation.expression and not equation.reduces:
            raise EquationError(f"a row sum must be the whole right-hand side: {line}")
        equations.append(equation)
        comment = []
    return equations


def parse_fold(text: str) -> Fold | None:
    """The `begin:` and `each:` blocks of a stage's own way to take its reductions in chunks; None for no text."""
    if not text.strip():
        return None
    begin, each = text.split("begin:")[1].split("each:")
    return Fold.of(*(filter(None, map(str.strip, block.splitlines())) for block in (begin, each)))


@dataclass(frozen=True)
class System:
    """What one kernel knows and wants: equations, tensors it can load, values it must store where.

    Aliases (`a = b`) are propagated away and `first(...)` is expanded on construction, so that the page shows neither.
    """

    equations: Mapping[str, Equation]
    loads: Mapping[str, Tensor]
    stores: tuple[tuple[Tensor, str], ...]
    folds: tuple[Fold, ...] = ()
    firsts: frozenset[str] = field(default_factory=frozenset)

    @staticmethod
    def of(
        equations: Iterable[Equation],
        loads: Iterable[Tensor],
        stores: Iterable[Tensor],
        folds: Iterable[Fold] = (),
    ) -> System:
        """A value that can be loaded overrides the equation of the same name; later equations override earlier ones."""
        loadable = {tensor.value: tensor for tensor in loads}
        known = {equation.target: equation for equation in equations if equation.target not in loadable}
        aliases = {e.target: e.expression for e in known.values() if e.expression.isidentifier()}
        for name in aliases:
            while aliases[name] in aliases:
                aliases[name] = aliases[aliases[name]]
        kept = {n: e.renamed(aliases) for n, e in known.items() if n not in aliases}
        wanted = tuple((tensor, aliases.get(tensor.value, tensor.value)) for tensor in stores)
        return System(kept, loadable, wanted, tuple(folds))._with_firsts()

    def _with_firsts(self) -> System:
        """Expand `name = first(value)`: the same equations for the first column alone, as `value_first`."""
        equations = dict(self.equations)
        firsts: set[str] = set()

        def at_first(value: str) -> str:
            name = f"{value}_first"
            if name in equations or name in firsts:
                return name
            if value in self.loads:
                firsts.add(name)
            elif value in self.equations:
                equation = self.equations[value]
                if equation.reduces:
                    raise EquationError(f"first({value}) would need a row sum")
                names = {use: at_first(use) for use in equation.uses}
                equations[name] = replace(equation.renamed(names), target=name, comment=())
            else:
                raise EquationError(f"{value} is neither an equation nor a tensor of this kernel")
            return name

        renames: dict[str, str] = {}
        for target, equation in self.equations.items():
            match = re.fullmatch(r"first\((\w+)\)", equation.expression)
            if match and self._reaches(target):
                renames[target] = at_first(match.group(1))
            if match:
                del equations[target]
        # The comment of the shift moves to the line that uses it.
        for target in list(equations):
            equation = equations[target]
            used = [name for name in equation.uses if name in renames]
            if used:
                comment = self.equations[used[0]].comment if target == self._first_user(used[0]) else ()
                equations[target] = replace(equation.renamed(renames), comment=(*comment, *equation.comment))
        return replace(self, equations=equations, firsts=frozenset(firsts))

    def _first_user(self, name: str) -> str:
        return next(target for target, equation in self.equations.items() if name in equation.uses)

    def _reaches(self, name: str) -> bool:
        """Whether the stores need `name`."""
        seen: set[str] = set()

        def visit(value: str) -> None:
            if value in seen:
                return
            seen.add(value)
            fold = self._fold_of(value)
            for use in fold.uses if fold else self.equations[value].uses if value in self.equations else ():
                visit(use)

        for _, value in self.stores:
            visit(value)
        return name in seen

    def _fold_of(self, name: str) -> Fold | None:
        return next((fold for fold in self.folds if name in fold.targets), None)

    def fold(self, name: str) -> Fold:
        """How the reduction `name` is taken chunk by chunk."""
        return self._fold_of(name) or _lane_sum(self.equations[name])

    def uses(self, name: str) -> tuple[str, ...]:
        if name in self.loads or name in self.firsts:
            return ()
        fold = self._fold_of(name)
        if fold:
            return fold.uses
        if name not in self.equations:
            raise EquationError(f"{name} is neither an equation nor a tensor of this kernel")
        return self.equations[name].uses

    def reduces(self, name: str) -> bool:
        return name not in self.loads and (
            self._fold_of(name) is not None or (name in self.equations and self.equations[name].reduces)
        )

    def dims(self, name: str) -> frozenset[str]:
        """The axes a value extends over: rows N, columns H."""
        if name in self.firsts:
            return frozenset("N") if "N" in self.loads[name.removesuffix("_first")].dims else frozenset()
        if name in self.loads:
            return frozenset(self.loads[name].dims)
        axes = frozenset[str]().union(*map(self.dims, self.uses(name)))
        return axes - {"H"} if self.reduces(name) else axes

    def level(self, name: str) -> int:
        """How many row reductions, one needing the other, come before the value exists."""
        deepest = max(map(self.level, self.uses(name)), default=0)
        return deepest + 1 if self.reduces(name) else deepest

    def step(self, name: str) -> Step:
        if name in self.firsts:
            return Load(self.loads[name.removesuffix("_first")], first=True)
        return Load(self.loads[name]) if name in self.loads else Let(self.equations[name])

    def needed(self) -> list[str]:
        """Every value that the stores need, each after what it uses."""
        order: dict[str, None] = {}

        def visit(name: str) -> None:
            if name not in order:
                for use in self.uses(name):
                    visit(use)
                order[name] = None

        for _, value in self.stores:
            visit(value)
        return list(order)


def straight(system: System) -> list[Step]:
    """The lines of a kernel that holds whole rows: level by level, first what its reductions need, then these."""
    steps: list[Step] = []
    done: set[str] = set()
    needed = system.needed()
    reductions = [name for name in needed if system.reduces(name)]
    sums = [(tensor, value) for tensor, value in system.stores if tensor.dims == "H"]

    def emit(name: str) -> None:
        if name in done:
            return
        for use in system.uses(name):
            emit(use)
        done.add(name)
        steps.append(system.step(name))
        steps.extend(Store(tensor, value) for tensor, value in system.stores if value == name and tensor.dims != "H")

    def accumulate(level: int) -> None:
        """Add to the sums over rows what is known by `level`: no reduction to come need keep it in registers."""
        for tensor, value in [one for one in sums if system.level(one[1]) <= level]:
            sums.remove((tensor, value))
            if value in system.loads or any(value in system.uses(name) for name in needed):
                emit(value)
                steps.append(Accumulate(tensor, value))
            else:
                for use in system.uses(value):
                    emit(use)
                steps.append(Accumulate(tensor, system.equations[value].expression))

    for level in range(1, max(map(system.level, reductions), default=0) + 1):
        here = [name for name in reductions if system.level(name) == level]
        for name in here:
            for use in system.uses(name):
                emit(use)
        accumulate(level - 1)
        for name in here:
            emit(name)
        for tensor, value in system.stores:
            if tensor.dims == "N" and system.level(value) <= level:
                emit(value)
    for tensor, value in system.stores:
        if tensor.dims != "H":
            emit(value)
    accumulate(len(reductions))
    return steps


def persistent(system: System) -> tuple[list[Step], list[Step]]:
    """The lines in front of a loop over rows, and those in it."""
    hoisted: list[Step] = []
    body: list[Step] = []
    for step in straight(system):
        name = _defines(step)
        (body if name is None or "N" in system.dims(name) else hoisted).append(step)
    return hoisted, body


def _defines(step: Step) -> str | None:
    if isinstance(step, Load):
        return f"{step.tensor.value}_first" if step.first else step.tensor.value
    return step.equation.target if isinstance(step, Let) else None


def chunked(system: System) -> list[Pass]:
    """The passes over the chunks of a row. What extends over columns is made again in each pass that needs it."""
    reductions = [name for name in system.needed() if system.reduces(name)]
    pending = list(system.stores)
    rows_done: set[str] = set()
    told: set[str] = set()
    passes = []
    for level in range(max((system.level(value) for _, value in system.stores), default=0) + 1):
        chunk_done: set[str] = set()
        before: list[Step] = []
        inside: list[Step] = []
        after: list[Step] = []

        def emit(name: str, rows: list[Step], chunk: list[Step] = inside, chunk_done: set[str] = chunk_done) -> None:
            done, steps = (chunk_done, chunk) if "H" in system.dims(name) else (rows_done, rows)
            if name not in done:
                done.add(name)
                for use in system.uses(name):
                    emit(use, rows, chunk, chunk_done)
                steps.append(system.step(name) if name not in told else _uncommented(system.step(name)))
                told.add(name)

        folds: list[Fold] = []
        for name in reductions:
            if system.level(name) == level + 1 and name not in rows_done:
                fold = system.fold(name)
                if not set(fold.targets) <= set(reductions):
                    fold = fold.only(set(fold.targets) & set(reductions))
                for use in fold.uses:
                    emit(use, before)
                rows_done.update(fold.targets)
                folds.append(fold)
        for tensor, value in list(pending):
            spans_columns = "H" in system.dims(value)
            if system.level(value) <= (level if spans_columns else level + 1):
                pending.remove((tensor, value))
                emit(value, before if spans_columns else after)
                (inside if spans_columns else after).append(Store(tensor, value))
        if folds or inside or after:
            passes.append(
                Pass(
                    before=tuple(before),
                    begin=tuple(line for fold in folds for line in fold.begin),
                    inside=tuple(inside),
                    each=tuple(line for fold in folds for line in fold.each),
                    end=tuple(line for fold in folds for line in fold.end),
                    after=tuple(after),
                )
            )
    return passes


def _uncommented(step: Step) -> Step:
    return Let(replace(step.equation, comment=())) if isinstance(step, Let) else step


def _lane_sum(equation: Equation) -> Fold:
    """A row sum in chunks: lane by lane in the loop, across lanes once after it."""
    lanes = f"{equation.target}_lanes"
    return Fold(
        (equation.target,),
        equation.uses,
        (f"{lanes} = tl.zeros([BLOCK_N, BLOCK_SIZE], compute)",),
        (f"{lanes} += {equation.summand}",),
        (f"{equation.target} = tl.sum({lanes}, axis=1, keep_dims=True)",),
    )
