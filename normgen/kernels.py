"""Plan -> the kernels of a module: for each, what it loads and stores, and its equations in order.

The one place that knows which kernel computes what; `equations` orders the lines, `templates/strategies` hold loops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from normgen.equations import (
    Accumulate,
    Equation,
    EquationError,
    Fold,
    Let,
    Load,
    Pass,
    Step,
    System,
    chunked,
    parse,
    parse_fold,
    persistent,
    straight,
)
from normgen.plan import Plan
from normgen.stages.base import Stage, Tensor

Macro = Callable[[Stage, str, str, str], str]
"""Renders the macro of that name of a stage's template: (stage, macro, taken, left) -> text."""


@dataclass(frozen=True)
class Kernel:
    """One Triton kernel: `strategy` names its template."""

    name: str
    strategy: str
    doc: str
    loads: tuple[Tensor, ...]
    stores: tuple[Tensor, ...]
    steps: tuple[Step, ...] = ()
    hoisted: tuple[Step, ...] = ()
    passes: tuple[Pass, ...] = ()

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.loads + self.stores

    @cached_property
    def optional(self) -> bool:
        """Whether a store may be left out at run time, its pointer None: one gradient is wanted and another not."""
        return len(self.stores) > 1 and all(tensor.role == "gradient" for tensor in self.stores)

    @cached_property
    def strided(self) -> tuple[Tensor, ...]:
        """Tensors addressed by row; each has a stride of its own."""
        return tuple(tensor for tensor in self.tensors if tensor.dims == "NH")

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
        for step in (*self.hoisted, *self.steps):
            lines += _expressions(step)
        for one in self.passes:
            for step in (*one.before, *one.inside, *one.after):
                lines += _expressions(step)
            lines += [*one.begin, *one.each, *one.end]
        return "\n".join(lines)

    def mentions(self, name: str) -> bool:
        return re.search(rf"(?<![\w.]){name}\b", self.text) is not None


def _expressions(step: Step) -> list[str]:
    if isinstance(step, Let):
        return [step.equation.expression]
    return [step.expression] if isinstance(step, Accumulate) else []


@dataclass(frozen=True)
class Kernels:
    """The kernels of one module. What a strategy or the absence of grad makes superfluous is None."""

    forward: Kernel | None
    forward_chunked: Kernel | None
    statistics: Kernel | None
    backward: Kernel | None
    backward_chunked: Kernel | None
    backward_columns: Kernel | None
    sum_partials: Kernel | None
    saved: tuple[Tensor, ...]
    """What autograd must keep: the tensors of the call that backward turned out to read."""
    gradients: tuple[Tensor, ...]
    """What backward makes, one for each gradient that differs in value or dtype."""
    gradient_of: tuple[tuple[Tensor, Tensor], ...]
    """(argument of the call, the gradient it is handed)."""
    incoming: tuple[Tensor, ...]
    """The gradients that backward is given, one for each output."""

    @property
    def rounds_forward(self) -> bool:
        return any(kernel.dtypes for kernel in (self.forward, self.forward_chunked) if kernel)

    @property
    def rounds(self) -> bool:
        """Whether any kernel rounds to a dtype that it is given."""
        return any(kernel.dtypes for kernel in self.all)

    @property
    def all(self) -> tuple[Kernel, ...]:
        found = (
            self.forward,
            self.forward_chunked,
            self.statistics,
            self.backward,
            self.backward_chunked,
            self.backward_columns,
            self.sum_partials,
        )
        return tuple(kernel for kernel in found if kernel)


def kernels(plan: Plan, macro: Macro) -> Kernels:
    """Solve the equations of the plan's stages for every kernel that its strategies ask for."""
    name = plan.spec.name
    forward_equations = _equations(plan, macro, "forward")
    folds = [f for stage, x, y in plan.stages if (f := parse_fold(macro(stage, "chunked", x, y)))]
    loads = plan.inputs + plan.parameters
    stores = plan.outputs + plan.statistics
    forward = forward_chunked = None
    if plan.forward.ladder:
        steps = straight(System.of(forward_equations, loads, stores))
        forward = _kernel(
            f"{name}_forward", "tile", "Results, a tile of whole rows a program.", loads, stores, steps=steps
        )
    if plan.forward.chunked:
        passes = chunked(System.of(forward_equations, loads, stores, folds))
        forward_chunked = _kernel(
            f"{name}_forward_chunked", "chunked", "Results, each row in chunks.", loads, stores, passes=passes
        )
    nothing = Kernels(forward, forward_chunked, None, None, None, None, None, (), (), (), ())
    return _with_backward(plan, macro, forward_equations, folds, nothing) if plan.backward else nothing


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
    plan: Plan, macro: Macro, forward_equations: list[Equation], folds: list[Fold], forward: Kernels
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

    whole = chunked_rows = columns = statistics = None
    if plan.backward.ladder:
        system = System.of(equations, offered, row_gradients + sums)
        hoisted, steps = persistent(system)
        whole = _kernel(
            f"{name}_backward",
            "persistent" if sums else "tile",
            "Gradients, a tile of whole rows a step" + ("; sums over rows stay in registers." if sums else "."),
            offered,
            row_gradients + sums,
            steps=(steps if sums else straight(system)),
            hoisted=hoisted if sums else (),
        )
    if plan.backward.chunked:
        known = offered + plan.scratch
        passes = chunked(System.of(equations, known, row_gradients, folds))
        chunked_rows = _kernel(
            f"{name}_backward_chunked",
            "chunked",
            "Row gradients, each row in chunks.",
            known,
            row_gradients,
            passes=passes,
        )
        if sums:
            hoisted, steps = persistent(System.of(equations, known, sums))
            columns = _kernel(
                f"{name}_backward_columns",
                "columns",
                "Parameter gradients, a block of columns a program.",
                known,
                sums,
                steps=steps,
                hoisted=hoisted,
            )
        if plan.scratch:
            sources = tuple(t for t in faithful + plan.inputs)
            passes = chunked(System.of(equations, sources, plan.scratch, folds))
            statistics = _kernel(
                f"{name}_statistics",
                "chunked",
                "Row statistics that forward did not save.",
                sources,
                plan.scratch,
                passes=passes,
            )
    sum_partials = None
    if sums:
        partial = Tensor("partial", "NH", "input", "compute", "partial", "one row of partial sums a program")
        total = Tensor("gradient", "H", "output", "weight", "gradient", "their sum")
        _, steps = persistent(System.of([Equation("gradient", "partial")], (partial,), (total,)))
        sum_partials = _kernel(
            f"{name}_sum_partials", "columns", "Second step of a sum over rows.", (partial,), (total,), steps=steps
        )
    read = {tensor for kernel in (whole, chunked_rows, columns, statistics) if kernel for tensor in kernel.loads}
    saved = tuple(t for t in (*plan.inputs, *faithful, *plan.parameters, *plan.statistics) if t in read)
    return replace(
        forward,
        statistics=statistics,
        backward=whole,
        backward_chunked=chunked_rows,
        backward_columns=columns,
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
    steps: Sequence[Step] = (),
    hoisted: Sequence[Step] = (),
    passes: Sequence[Pass] = (),
) -> Kernel:
    """A kernel whose loads are those that its lines turned out to use."""
    lines = [*hoisted, *steps, *(step for one in passes for step in (*one.before, *one.inside, *one.after))]
    used = {step.tensor for step in lines if isinstance(step, Load)}
    return Kernel(
        name=name,
        strategy=strategy,
        doc=doc,
        loads=tuple(tensor for tensor in loads if tensor in used),
        stores=tuple(stores),
        steps=tuple(steps),
        hoisted=tuple(hoisted),
        passes=tuple(passes),
    )
