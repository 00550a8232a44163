"""Plan -> the kernels of a module: for each, what it loads and stores, and its equations in order.

The one place that knows which kernel computes what; `equations` orders the lines, `templates/strategies` hold loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from normgen.equations import (
    Accumulate,
    Equation,
    EquationError,
    Fold,
    Let,
    Step,
    Store,
    System,
    Walks,
    chunked,
    mentioning,
    packed,
    parse,
    parse_blocks,
    parse_fold,
    single,
    whole_rows,
)
from normgen.plan import Plan
from normgen.stages.base import Stage, Tensor

Macro = Callable[[Stage, str, str, str], str]
"""Renders the macro of that name of a stage's template: (stage, macro, taken, left) -> text."""


NO_LINES = Walks()


@dataclass(frozen=True)
class Kernel:
    """One Triton kernel: `strategy` names its template."""

    name: str
    strategy: str
    doc: str
    loads: tuple[Tensor, ...]
    stores: tuple[Tensor, ...]
    lines: Walks = NO_LINES
    posted: Walks = NO_LINES
    """In a kernel of slabs: the sums over a slab of each row. `lines` takes those of all slabs, as loaded values."""
    words: tuple[Tensor, ...] = ()
    """Row sums that the programs which share a row exchange."""

    @cached_property
    def staged(self) -> Kernel | None:
        """Of a kernel of slabs: the one that takes one launch, in which programs wait for one another's sums."""
        if self.strategy != "slabs":
            return None
        return replace(self, name=f"{self.name.removesuffix('slabs')}staged", strategy="staged")

    @cached_property
    def packed(self) -> tuple[Tensor, ...]:
        """In a kernel that keeps its row as it is in memory: the tensors that it keeps."""
        kept = {name for walk in self.lines.walks for name, _ in walk.kept} if self.strategy == "packed" else set()
        stored = tuple(step.tensor for step in self.lines.steps if isinstance(step, Store) and step.value in kept)
        return tuple(tensor for tensor in self.loads if tensor.value in kept) + stored

    @cached_property
    def early(self) -> tuple[Tensor, ...]:
        """In a kernel of tiles: what all rows share, which a program that is alone loads along with its rows."""
        return tuple(tensor for tensor in self.loads if tensor.dims == "H") if self.strategy == "tile" else ()

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.loads + self.stores

    @cached_property
    def optional(self) -> tuple[Tensor, ...]:
        """What is not stored where its pointer is None: a gradient, or statistics, that a call does not ask for."""
        if any(tensor.role == "output" for tensor in self.stores):
            return tuple(tensor for tensor in self.stores if tensor.role == "statistic")
        gradients = tuple(tensor for tensor in self.stores if tensor.role == "gradient")
        return gradients if len(gradients) > 1 else ()

    @cached_property
    def strided(self) -> tuple[Tensor, ...]:
        """Tensors loaded by row; each has a stride of its own. What is stored is contiguous."""
        return tuple(tensor for tensor in self.loads if tensor.dims == "NH")

    @cached_property
    def sums(self) -> tuple[Tensor, ...]:
        """Parameter gradients: summed over the rows of this program, one row of partial sums a program."""
        return tuple(tensor for tensor in self.stores if tensor.dims == "H")

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes that the kernel rounds to, as compile-time arguments."""
        return tuple(name for name in ("input_dtype", "output_dtype") if self.mentions(name))

    @cached_property
    def text(self) -> str:
        """All expressions of the kernel, to see which names they mention."""
        lines: list[str] = []
        for part in (self.posted, self.lines):
            lines += [line for step in part.steps for line in _expressions(step)]
            lines += [line for walk in part.walks for line in (*walk.begin, *walk.each, *walk.end)]
        return "\n".join(lines)

    def mentions(self, name: str) -> bool:
        return mentioning(self.text, name)


def _expressions(step: Step) -> list[str]:
    if isinstance(step, Let):
        return [step.equation.expression]
    return [step.expression] if isinstance(step, Accumulate) else []


@dataclass(frozen=True)
class Kernels:
    """The kernels of one module. What a strategy or the absence of grad makes superfluous is None."""

    forward: Kernel | None = None
    forward_chunked: Kernel | None = None
    forward_slabs: Kernel | None = None
    statistics: Kernel | None = None
    backward: Kernel | None = None
    backward_slabs: Kernel | None = None
    sum_partials: Kernel | None = None
    saved: tuple[Tensor, ...] = ()
    """What autograd must keep: the tensors of the call that backward turned out to read."""
    gradients: tuple[Tensor, ...] = ()
    """What backward makes, one for each gradient that differs in value or dtype."""
    gradient_of: tuple[tuple[Tensor, Tensor], ...] = ()
    """(argument of the call, the gradient it is handed)."""
    incoming: tuple[Tensor, ...] = ()
    """The gradients that backward is given, one for each output."""

    @property
    def rounds_forward(self) -> bool:
        return any(kernel.dtypes for kernel in (self.forward, self.forward_chunked, self.forward_slabs) if kernel)

    @property
    def rounds(self) -> bool:
        """Whether any kernel rounds to a dtype that it is given."""
        return any(kernel.dtypes for kernel in self.all)

    @property
    def exchanges(self) -> bool:
        """Whether programs that share a row exchange its sums."""
        return any(kernel.words for kernel in self.all)

    @property
    def all(self) -> tuple[Kernel, ...]:
        found = (
            self.forward,
            self.forward_chunked,
            self.forward_slabs,
            self.forward_slabs and self.forward_slabs.staged,
            self.statistics,
            self.backward,
            self.backward_slabs,
            self.backward_slabs and self.backward_slabs.staged,
            self.sum_partials,
        )
        return tuple(kernel for kernel in found if kernel)


def kernels(plan: Plan, macro: Macro) -> Kernels:
    """Solve the equations of the plan's stages for every kernel that its strategies ask for."""
    name = plan.spec.name
    forward_equations = _equations(plan, macro, "forward")
    welford = plan.spec.strategy == "welford"
    folds = [f for stage, x, y in plan.stages if welford and (f := parse_fold(macro(stage, "chunked", x, y)))]
    loads = plan.inputs + plan.parameters
    stores = plan.outputs + plan.statistics
    forward = forward_chunked = forward_slabs = None
    if plan.forward.tiles:
        lines = whole_rows(System.of(forward_equations, loads, stores))
        forward = _kernel(f"{name}_forward", "tile", "Results, a tile of whole rows a program.", loads, stores, lines)
    if plan.forward.chunks:
        system = System.of(forward_equations, loads, stores, folds)
        if plan.forward.packed:
            lines, strategy, doc = packed(system), "packed", "Results, a row a program, kept as it is in memory."
        else:
            lines, strategy, doc = chunked(system), "chunked", "Results, each row in chunks."
        forward_chunked = _kernel(f"{name}_forward_chunked", strategy, doc, loads, stores, lines)
    if plan.forward.slabs:
        forward_slabs = _forward_slabs(plan, macro, forward_equations)
    made = Kernels(forward, forward_chunked, forward_slabs)
    return _with_backward(plan, macro, forward_equations, folds, made) if plan.backward else made


def _forward_slabs(plan: Plan, macro: Macro, equations: list[Equation]) -> Kernel:
    """What needs no sum of the row, that with a residual, is stored along with its slab's sums."""
    early = tuple(tensor for tensor in plan.outputs if tensor.value != "y")
    return _slabs(
        f"{plan.spec.name}_forward_slabs",
        "Results, a slab of columns a program.",
        equations,
        _blocks(plan, macro),
        plan.inputs + plan.parameters,
        early,
        tuple(tensor for tensor in plan.outputs if tensor not in early) + plan.statistics,
    )


def _slabs(
    name: str,
    doc: str,
    equations: list[Equation],
    blocks: tuple[list[Equation], list[Equation]],
    loads: tuple[Tensor, ...],
    early: tuple[Tensor, ...],
    stores: tuple[Tensor, ...],
) -> Kernel:
    """A kernel of slabs. One step makes of `loads` what is stored `early`, and the sums over a slab of each row.

    Another makes of the same, and of the sums of all slabs, the other `stores`. `blocks` hold the equations of a stage
    for the one step and for the other.
    """
    slab, row = blocks
    mentioned = sorted({use for equation in row for use in equation.uses if use.endswith("_slabs")})
    asked = tuple(_word(name.removesuffix("_slabs")) for name in mentioned)
    offered = loads + tuple(_word(name) for name in mentioned)
    sums = _row_sums(chunked(System.of([*equations, *slab, *row], offered, stores + asked)))
    lanes = tuple(_word(f"{tensor.value}_slabs") for tensor in sums)
    totals = [Equation(tensor.value, f"_total({tensor.value}_slabs)") for tensor in sums]
    lines = single(System.of([*equations, *totals, *row], loads + lanes, stores))
    if len(lines.walks) > 1:
        raise EquationError(f"{name}: a row sum needs another; slabs take one exchange")
    posted = single(System.of([*equations, *slab], loads, early + sums))
    return replace(_kernel(name, "slabs", doc, loads, early + stores, lines, posted), words=sums)


def _word(name: str) -> Tensor:
    """A sum of a row that programs exchange."""
    return Tensor(name, "N", "word", "compute", name, "number of a row")


def _row_sums(lines: Walks) -> tuple[Tensor, ...]:
    """The row sums of a kernel, in the order in which they are complete."""
    return tuple(_word(name) for walk in lines.walks for name in walk.sums)


def _blocks(plan: Plan, macro: Macro) -> tuple[list[Equation], list[Equation]]:
    """What the stages say of slabs: the equations of one slab, and those of the whole row."""
    texts = [parse_blocks(macro(stage, "slabs", x, y), "slab", "row") for stage, x, y in plan.stages]
    slab, row = ([e for text in texts if text for e in parse(text[number])] for number in (0, 1))
    return slab, row


def _equations(plan: Plan, macro: Macro, direction: str) -> list[Equation]:
    """The equations of all stages in one direction. No two stages may define the same name."""
    equations: dict[str, Equation] = {}
    for stage, taken, left in plan.stages:
        for equation in parse(macro(stage, direction, taken, left)):
            if equation.target in equations:
                raise EquationError(f"{equation.target} is defined by two stages, the second being {stage.template}")
            equations[equation.target] = equation
    return list(equations.values())


def _with_backward(
    plan: Plan,
    macro: Macro,
    forward_equations: list[Equation],
    folds: list[Fold],
    forward: Kernels,
) -> Kernels:
    assert plan.backward is not None
    name = plan.spec.name
    backward_equations = _equations(plan, macro, "backward")
    equations = forward_equations + backward_equations
    incoming = tuple(_gradient(tensor) for tensor in plan.outputs)
    faithful = tuple(t for t in plan.outputs if t.value != "y" and t.faithful)
    offered = incoming + faithful + plan.inputs + plan.parameters + plan.statistics
    row_gradients, gradient_of = _distinct_gradients(plan, equations, offered)
    sums = tuple(replace(_gradient(t), stem=f"d{t.value}_partial") for t in plan.parameters)
    gradient_of += tuple(zip(plan.parameters, sums, strict=True))

    whole = slabs = statistics = None
    if plan.backward.tiles:
        lines = packed(System.of(equations, offered, row_gradients + sums), persistent=True)
        doc = "Gradients, a tile of whole rows a step" + ("; sums over rows stay in registers." if sums else ".")
        whole = _kernel(f"{name}_backward", "persistent", doc, offered, row_gradients + sums, lines)
    if plan.backward.slabs:
        known = offered + plan.scratch
        doc = "Gradients, a slab of columns a program."
        slabs = _slabs(f"{name}_backward_slabs", doc, equations, ([], []), known, (), row_gradients + sums)
        if plan.scratch:
            sources = tuple(t for t in faithful + plan.inputs)
            lines = chunked(System.of(equations, sources, plan.scratch, folds))
            doc = "Row statistics that forward did not save."
            statistics = _kernel(f"{name}_statistics", "chunked", doc, sources, plan.scratch, lines)
    sum_partials = None
    if sums:
        totals = tuple(_gradient(t) for t in plan.parameters)
        doc = "Second step of the sums over rows."
        sum_partials = Kernel(f"{name}_sum_partials", "sum_partials", doc, sums, totals)
    read = {tensor for kernel in (whole, slabs, statistics) if kernel for tensor in kernel.loads}
    saved = tuple(t for t in (*plan.inputs, *faithful, *plan.parameters, *plan.statistics) if t in read)
    return replace(
        forward,
        statistics=statistics,
        backward=whole,
        backward_slabs=slabs,
        sum_partials=sum_partials,
        saved=saved,
        gradients=row_gradients + sums,
        gradient_of=gradient_of,
        incoming=incoming,
    )


def _gradient(tensor: Tensor) -> Tensor:
    value = f"d{tensor.value}"
    doc = f"gradient of {tensor.api}"
    return replace(tensor, value=value, role="gradient", api=f"d{tensor.api}", doc=doc, pad=0.0, stem="")


def _distinct_gradients(
    plan: Plan, equations: list[Equation], offered: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[tuple[Tensor, Tensor], ...]]:
    """The row gradients, each value stored once a dtype, and which input is handed which."""
    wanted = tuple(_gradient(tensor) for tensor in plan.inputs)
    stores = System.of(equations, offered, wanted).stores
    first: dict[tuple[str, str], Tensor] = {}
    handed = []
    for argument, (gradient, value) in zip(plan.inputs, stores, strict=True):
        handed.append((argument, first.setdefault((value, gradient.dtype), gradient)))
    return tuple(first.values()), tuple(handed)


def _kernel(
    name: str,
    strategy: str,
    doc: str,
    loads: Iterable[Tensor],
    stores: Iterable[Tensor],
    lines: Walks,
    posted: Walks = NO_LINES,
) -> Kernel:
    """A kernel whose loads are those that its lines turned out to use."""
    used = {*lines.loads, *posted.loads}
    return Kernel(
        name=name,
        strategy=strategy,
        doc=doc,
        loads=tuple(tensor for tensor in loads if tensor in used),
        stores=tuple(stores),
        lines=lines,
        posted=posted,
    )
