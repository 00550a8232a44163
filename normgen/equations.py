"""Equations into ordered lines of a kernel: pure text and graph work, no torch, no triton.

A stage states single-assignment equations of per-element values. This module parses them, finds out which are needed
for the values that a kernel must store, and orders them as walks over the blocks of a row, one more than there are row
reductions that need one another. A kernel that holds whole rows keeps in registers what a later walk needs
(`whole_rows`), or only what was loaded, as it was loaded, and makes the rest of it again (`packed`); one that does not
hold them (`chunked`) loads it again.

Loads come as late as the order allows (what is loaded before a reduction stays in registers across it), stores as
soon as their value exists.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar

from normgen.stages.base import Tensor

# Names that a kernel has in scope; they are not values of the pipeline.
SCOPE = frozenset(
    "tl _divide _sqrt _total first H BLOCK_N BLOCK_SIZE start row col row_mask col_mask mask"
    " compute epsilon share shares counts input_dtype output_dtype"
    # What strategies call their own.
    " N BLOCKS SLABS STAGES EARLY PTX POST ALIGNMENT LAYOUT AHEAD LAG"
    " program programs tile block slab lane done slot step words owner".split()
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
    row: tuple[Equation, ...] = ()
    """What follows from the targets otherwise than where a sum runs over the whole row."""

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
    raw: bool = False
    """Kept as it is loaded, under the name `<value>_raw`, beside the value in the dtype of the arithmetic."""


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


@dataclass(frozen=True)
class Take:
    """A value that an earlier walk, or the one in front of the loop over rows, left in registers."""

    kind = "Take"
    value: str
    raw: bool = False
    """It was left as it is in memory."""


@dataclass(frozen=True)
class Reload:
    """A value that an earlier walk stored, read back."""

    kind = "Reload"
    tensor: Tensor
    value: str


@dataclass(frozen=True)
class Meet:
    """All threads of the program have come this far, and see what the others have stored."""

    kind = "Meet"


Step = Load | Let | Store | Accumulate | Take | Reload | Meet


@dataclass(frozen=True)
class Walk:
    """One walk over the blocks of a row: what comes before it, in it, and after it."""

    before: tuple[Step, ...]
    begin: tuple[str, ...]
    inside: tuple[Step, ...]
    each: tuple[str, ...]
    end: tuple[str, ...]
    after: tuple[Step, ...]
    kept: tuple[tuple[str, str], ...]
    """Values that later walks take from registers, and what is kept of each."""
    sums: tuple[str, ...]
    """The row sums that are complete after it."""

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.before + self.inside + self.after


@dataclass(frozen=True)
class Walks:
    """The lines of a kernel."""

    hoisted: tuple[Load, ...] = ()
    walks: tuple[Walk, ...] = ()

    @property
    def hoisted_kept(self) -> tuple[tuple[str, str], ...]:
        """What is hoisted is kept, as it is in memory."""
        return tuple((load.tensor.value, _raw_name(load.tensor.value)) for load in self.hoisted)

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.hoisted + tuple(step for walk in self.walks for step in walk.steps)

    @property
    def loads(self) -> tuple[Tensor, ...]:
        """The tensors that are loaded, in that order."""
        return tuple(dict.fromkeys(step.tensor for step in self.steps if isinstance(step, Load)))

    @property
    def stores(self) -> tuple[Tensor, ...]:
        """The tensors that are stored, in that order."""
        return tuple(step.tensor for step in self.steps if isinstance(step, Store))

    def eviction(self, number: int, step: Step) -> str:
        """What a cache should do with what a step of that walk reads or writes: keep what is read again, not the last.

        Empty where it makes no difference.
        """
        if not isinstance(step, (Load, Store, Reload)) or len(self.walks) == 1:
            return ""
        if step.tensor.dims == "H":
            return "evict_last"
        last = number == len(self.walks) - 1
        again = {s.tensor for w in self.walks[number + 1 :] for s in w.inside if isinstance(s, (Load, Reload))}
        read = isinstance(step, (Load, Reload))
        if step.tensor.dims != "NH" or (read and step.tensor not in again and not last):
            return ""
        return "evict_last" if read and not last else "evict_first" if last else ""


def mentioning(text: str, name: str) -> bool:
    """Whether `name` stands in `text` as an identifier of its own."""
    return re.search(rf"(?<![\w.]){name}\b", text) is not None


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
    """A stage's own way to take its reductions in chunks: blocks `begin:`, `each:` and `row:`; None for no text."""
    blocks = parse_blocks(text, "begin", "each", "row")
    if blocks is None:
        return None
    begin, each = (filter(None, map(str.strip, block.splitlines())) for block in blocks[:2])
    return replace(Fold.of(begin, each), row=tuple(parse(blocks[2])))


def parse_blocks(text: str, *names: str) -> tuple[str, ...] | None:
    """The text of named blocks in their order, such as `begin:` and `each:`; None for no text."""
    if not text.strip():
        return None
    blocks = []
    for name in names:
        before, text = text.split(f"{name}:")
        blocks.append(before)
    return *blocks[1:], text


Answer = TypeVar("Answer")


def _remembered(ask: Callable[[System, str], Answer]) -> Callable[[System, str], Answer]:
    """A question about a value, answered once: equations lead to the same values again and again."""

    def answer(self: System, name: str) -> Answer:
        key = ask.__name__, name
        if key not in self._answers:
            self._answers[key] = ask(self, name)
        found: Answer = self._answers[key]
        return found

    return answer


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
    _answers: dict[tuple[str, str], Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @staticmethod
    def of(
        equations: Iterable[Equation],
        loads: Iterable[Tensor],
        stores: Iterable[Tensor],
        folds: Iterable[Fold] = (),
    ) -> System:
        """A value that can be loaded overrides the equation of the same name; later equations override earlier ones."""
        loadable = {tensor.value: tensor for tensor in loads}
        folds = tuple(folds)
        stated = [*equations, *(equation for fold in folds for equation in fold.row)]
        known = {equation.target: equation for equation in stated if equation.target not in loadable}
        aliases = {e.target: e.expression for e in known.values() if e.expression.isidentifier()}
        for name in aliases:
            while aliases[name] in aliases:
                aliases[name] = aliases[aliases[name]]
        kept = {n: e.renamed(aliases) for n, e in known.items() if n not in aliases}
        wanted = tuple((tensor, aliases.get(tensor.value, tensor.value)) for tensor in stores)
        return System(kept, loadable, wanted, folds)._with_firsts()

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
        stores = tuple((tensor, renames.get(value, value)) for tensor, value in self.stores)
        return replace(self, equations=equations, firsts=frozenset(firsts), stores=stores)

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

    @_remembered
    def uses(self, name: str) -> tuple[str, ...]:
        if name in self.loads or name in self.firsts:
            return ()
        fold = self._fold_of(name)
        if fold:
            return fold.uses
        if name not in self.equations:
            raise EquationError(f"{name} is neither an equation nor a tensor of this kernel")
        return self.equations[name].uses

    @_remembered
    def reduces(self, name: str) -> bool:
        return name not in self.loads and (
            self._fold_of(name) is not None or (name in self.equations and self.equations[name].reduces)
        )

    @_remembered
    def dims(self, name: str) -> frozenset[str]:
        """The axes a value extends over: rows N, columns H."""
        if name in self.firsts:
            return frozenset("N") if "N" in self.loads[name.removesuffix("_first")].dims else frozenset()
        if name in self.loads:
            return frozenset(self.loads[name].dims)
        axes = frozenset[str]().union(*map(self.dims, self.uses(name)))
        return axes - {"H"} if self.reduces(name) else axes

    @_remembered
    def level(self, name: str) -> int:
        """How many row reductions, one needing the other, come before the value exists."""
        deepest = max(map(self.level, self.uses(name)), default=0)
        return deepest + 1 if self.reduces(name) else deepest

    def step(self, name: str) -> Load | Let:
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


def whole_rows(system: System) -> Walks:
    """The walks of a kernel that holds whole rows: what an earlier walk computed is kept in registers."""
    return _walks(system, keep="values", hoist=False)


def packed(system: System, persistent: bool = False) -> Walks:
    """The same, but kept is only what was loaded or stored, as it is in memory, and the rest is made of it again.

    Elements of 2 bytes take half the registers so. In a persistent kernel, loads that do not depend on the row stand in
    front of the loop over rows.
    """
    return _walks(system, keep="memory", hoist=persistent)


def chunked(system: System) -> Walks:
    """The walks of a kernel that reads a row again for each: a value is loaded, or made, again where it is needed."""
    return _walks(system, keep="", hoist=False)


def single(system: System) -> Walks:
    """The lines of a program that owns a block of columns, so that it walks none: all that it made is at hand."""
    return _walks(system, keep="values", hoist=False, loop=False)


def _walks(system: System, keep: Literal["", "memory", "values"], hoist: bool, loop: bool = True) -> Walks:
    """Level by level: first what the row sums need, then these, then what can be stored or summed over rows.

    Without a `loop` over blocks a row sum is one line.
    """
    reductions = [name for name in system.needed() if system.reduces(name)]
    pending = list(system.stores)
    hoisted: dict[str, Load] = {}
    rows_done: set[str] = set()
    made: dict[str, _Walk] = {}
    stored: dict[str, _Walk] = {}
    walks: list[_Walk] = []
    used = {use for name in system.needed() for use in system.uses(name)}

    def emit(name: str, walk: _Walk, rows: list[Step]) -> None:
        dims = system.dims(name)
        if "H" not in dims:
            if name not in rows_done:
                rows_done.add(name)
                for use in system.uses(name):
                    emit(use, walk, rows)
                rows.append(system.step(name))
            return
        if name in walk.done:
            return
        walk.done.add(name)
        if hoist and "N" not in dims and name in system.loads:
            hoisted[name] = Load(system.loads[name], raw=True)
            walk.inside.append(Take(name, raw=True))
        elif keep == "values" and name in made:
            made[name].kept[name] = name
            walk.inside.append(Take(name))
        elif keep == "memory" and name in stored:
            stored[name].kept[name] = f"{name}.to({stored[name].stored[name].pointer}.dtype.element_ty)"
            walk.inside.append(Take(name, raw=True))
        elif keep == "memory" and name in made and name in system.loads:
            made[name].kept[name] = _raw_name(name)
            walk.inside.append(Take(name, raw=True))
        elif name in stored:
            storing = stored[name]
            walk.inside.append(Reload(storing.stored[name], name))
            # A thread reads back what another may have stored, and a row sum within one warp is no barrier.
            if Meet() not in storing.after:
                storing.after.append(Meet())
        else:
            for use in system.uses(name):
                emit(use, walk, rows)
            walk.inside.append(system.step(name) if name not in made else _uncommented(system.step(name)))
            made.setdefault(name, walk)

    for level in range(max((system.level(value) for _, value in system.stores), default=0) + 1):
        walk = _Walk()
        folds: list[Fold] = []
        for name in reductions:
            if system.level(name) == level + 1 and name not in rows_done:
                fold = system.fold(name) if loop else _at_once(system.equations[name])
                if not set(fold.targets) <= set(reductions):
                    fold = fold.only(set(fold.targets) & set(reductions))
                for use in fold.uses:
                    emit(use, walk, walk.before)
                rows_done.update(fold.targets)
                folds.append(fold)
        for tensor, value in list(pending):
            spans_columns = "H" in system.dims(value)
            if system.level(value) > (level if spans_columns else level + 1):
                continue
            pending.remove((tensor, value))
            if tensor.dims != "H":
                emit(value, walk, walk.before if spans_columns else walk.after)
                (walk.inside if spans_columns else walk.after).append(Store(tensor, value))
                if keep != "values" and tensor.dims == "NH" and tensor.faithful:
                    walk.stored.setdefault(value, tensor)
            elif value in system.loads or value in used:
                emit(value, walk, walk.before)
                walk.inside.append(Accumulate(tensor, value))
            else:
                for use in system.uses(value):
                    emit(use, walk, walk.before)
                walk.inside.append(Accumulate(tensor, system.equations[value].expression))
        stored |= dict.fromkeys(walk.stored, walk)
        walk.folds = folds
        if folds or walk.inside or walk.after:
            walks.append(walk)
    return Walks(tuple(hoisted.values()), tuple(walk.frozen() for walk in walks))


@dataclass
class _Walk:
    """A `Walk` in the making."""

    before: list[Step] = field(default_factory=list)
    inside: list[Step] = field(default_factory=list)
    after: list[Step] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    kept: dict[str, str] = field(default_factory=dict)
    stored: dict[str, Tensor] = field(default_factory=dict)

    def frozen(self) -> Walk:
        def lines(of: str) -> tuple[str, ...]:
            return tuple(line for fold in self.folds for line in getattr(fold, of))

        return Walk(
            before=tuple(self.before),
            begin=lines("begin"),
            inside=tuple(map(self._raw, self.inside)),
            each=lines("each"),
            end=lines("end"),
            after=tuple(self.after),
            kept=tuple(self.kept.items()),
            sums=tuple(name for fold in self.folds for name in fold.targets),
        )

    def _raw(self, step: Step) -> Step:
        """The step, of a load that is kept as it is in memory as one that says so."""
        if isinstance(step, Load) and self.kept.get(step.tensor.value) == _raw_name(step.tensor.value):
            return replace(step, raw=True)
        return step


def _raw_name(value: str) -> str:
    """The name of a value as it is in memory."""
    return f"{value}_raw"


def _uncommented(step: Step) -> Step:
    return Let(replace(step.equation, comment=())) if isinstance(step, Let) else step


def _lane_sum(equation: Equation) -> Fold:
    """A row sum block by block: lane by lane in the loop, across lanes once after it."""
    lanes = f"{equation.target}_lanes"
    return Fold(
        (equation.target,),
        equation.uses,
        (f"{lanes} = tl.zeros([BLOCK_N, BLOCK_SIZE], compute)",),
        (f"{lanes} = {plus(lanes, equation.summand)}",),
        (f"{equation.target} = tl.sum({lanes}, axis=1, keep_dims=True)",),
    )


def _at_once(equation: Equation) -> Fold:
    """A row sum that needs no loop."""
    factors = _factors(equation.summand)
    total = f"_sum_of_products({', '.join(factors)})" if factors else equation.expression
    return Fold((equation.target,), equation.uses, (), (), (f"{equation.target} = {total}",))


def plus(total: str, summand: str) -> str:
    """`total + summand`, a product in one instruction: nothing that should cancel is in a sum of many products."""
    factors = _factors(summand)
    return f"tl.fma({', '.join(factors)}, {total})" if factors else f"{total} + {summand}"


def _factors(expression: str) -> tuple[str, ...]:
    """The two factors of a product; none of anything else."""
    body = ast.parse(expression, mode="eval").body
    if isinstance(body, ast.BinOp) and isinstance(body.op, ast.Mult):
        return ast.unparse(body.left), ast.unparse(body.right)
    return ()
