"""Plan -> {path: text}: the Jinja environment and the two files of a spec. No decision is taken here."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket

from normgen.emit import seal
from normgen.equations import mentioning, plus
from normgen.kernels import Kernel, Kernels, kernels
from normgen.numerics import BOUNDS
from normgen.plan import Plan
from normgen.spec import class_name
from normgen.stages.base import Stage, Tensor
from normgen.target import PARTIALS, SHARED_KEPT, SHARED_ROW, SLAB_SCRATCH, STATISTICS, TARGETS, WIDEST

WIDTH = 120


def templates() -> Path:
    """The folder of templates: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parent
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


def call(head: str, arguments: list[str], tail: str = ")", indent: int = 0) -> str:
    """`head`, arguments, `tail` as ruff formats them: on one line where that fits, else one argument a line.

    `indent` is the column at which the text will stand; the caller indents.
    """
    line = f"{head}{', '.join(arguments)}{tail}"
    if indent + len(line) <= WIDTH:
        return line
    return "\n".join([head, *(textwrap.indent(f"{argument},", "    ") for argument in arguments), tail])


def assigned(name: str, expression: str, indent: int) -> str:
    """`name = expression` as ruff formats it: in parentheses of its own lines where it does not fit one."""
    line = f"{name} = {expression}"
    return line if indent + len(line) <= WIDTH else f"{name} = (\n    {expression}\n)"


def launch_arguments(kernel: Kernel, indent: int) -> list[str]:
    """What a kernel is launched with, apart from its tile: Python variables of the launcher, in order of the signature.

    Tensors with rows are loaded from `<name>_rows` and stored to contiguous tensors. `indent` is the column at which an
    argument will stand.
    """
    loaded = {tensor: f"{tensor.api}_rows" if tensor.dims == "NH" else tensor.api for tensor in kernel.loads}
    stored = {t: f"{t.api}_partial" if t.dims == "H" and t.stem else t.stem or t.api for t in kernel.stores}
    variables = loaded | stored
    strides = [f"{tensor.api}_stride" for tensor in kernel.strided]
    dtypes = {"input_dtype": "input_dtype", "output_dtype": "out.dtype"}
    return [
        _tuple([*variables.values(), *(["exchanged"] if kernel.words else [])], indent),
        _tuple(strides, indent),
        "N",
        *(["eps"] if kernel.mentions("epsilon") else []),
        *(f"{name}={dtypes[name]}" for name in kernel.dtypes),
        "H=H",
    ]


def _tuple(elements: list[str], indent: int) -> str:
    return f"({elements[0]},)" if len(elements) == 1 else call("(", elements, ")", indent + len(","))


def dense(text: str) -> str:
    """`text` without empty lines, as the inside of a function is."""
    return "\n".join(line for line in text.splitlines() if line.strip())


def literal(text: str, indent: int) -> str:
    """`text` as a string literal, cut at commas into adjacent literals where it does not fit one line."""
    lines = [""]
    for part in re.split(r"(?<=, )", text):
        if indent + len(lines[-1] + part) + len('"",') > WIDTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(f'"{line}"' for line in lines)


def _bytecode_cache() -> FileSystemBytecodeCache | None:
    """Compiled templates beside Python's own compiled files: parsing them takes longer than all else in a build."""
    folder = Path(__file__).parent / "__pycache__"
    if sys.dont_write_bytecode:
        return None
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
    return _Cache(str(folder), "%s.jinja") if os.access(folder, os.W_OK) else None


class _Cache(FileSystemBytecodeCache):
    """Where there is no room for it, templates are compiled again the next time."""

    def dump_bytecode(self, bucket: Bucket) -> None:
        with contextlib.suppress(OSError):
            super().dump_bytecode(bucket)


@lru_cache(maxsize=1)
def environment() -> Environment:
    env = Environment(
        loader=FileSystemLoader(templates()),
        bytecode_cache=_bytecode_cache(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.globals.update(
        call=call,
        assigned=assigned,
        launch_arguments=launch_arguments,
        title=title,
        dtype_words=dtype_words,
        plus=plus,
        partials=PARTIALS,
        statistics=STATISTICS,
        shared_kept=SHARED_KEPT,
        shared_row=SHARED_ROW,
        shared_reserved=TARGETS["cuda:90"].shared_reserved,
        slab_scratch=SLAB_SCRATCH,
        widest=WIDEST,
    )
    env.tests.update(mentioning=mentioning)
    env.filters.update(
        dense=dense,
        literal=literal,
        zip=zip,
        prefix=lambda name, prefix: f"{prefix}{name}",
        suffix=lambda name, suffix: f"{name}{suffix}",
        quoted=lambda name: f'"{name}"',
        sentence=sentence,
        wrap=lambda text: textwrap.wrap(text, WIDTH),
    )
    return env


def stage_text(stage: Stage, macro: str, taken: str, left: str) -> str:
    """The text of one macro of a stage's template; empty for a macro that the stage does not have."""
    module: Any = environment().get_template(f"stages/{stage.template}.jinja").module
    return str(getattr(module, macro)(stage, taken, left)) if hasattr(module, macro) else ""


def solve(plan: Plan) -> Kernels:
    """The kernels of the plan."""
    return kernels(plan, stage_text)


def kernel_text(kernel: Kernel) -> str:
    module: Any = environment().get_template(f"strategies/{kernel.strategy}.jinja").module
    return dense(str(module.kernel(kernel)))


def render(plan: Plan, source: str) -> dict[str, str]:
    """The files of a spec by their path in the output directory; `source` is the spec's path as the header names it."""
    name, digest = plan.spec.name, plan.spec.digest
    scope = _scope(plan)
    bodies = {
        f"{name}.py": environment().get_template("module.py.jinja").render(scope),
        f"tests/test_{name}.py": environment().get_template("test.py.jinja").render(scope),
    }
    return {path: seal(_tidy(body), source, digest) for path, body in bodies.items()}


def render_battery(plan: Plan, forward_only: bool) -> dict[str, str]:
    """The test of a spec for an implementation that is not ours, `battery.py`, and the module with its formula.

    The operators of that module have a namespace of their own: the implementation may be the generated one.
    """
    module = environment().get_template("module.py.jinja").render(_scope(plan) | {"namespace": "normgen_verify"})
    asked = replace(plan, statistics=(), backward=None if forward_only else plan.backward)
    battery = environment().get_template("test.py.jinja").render(_scope(plan) | {"plan": asked, "foreign": True})
    return {f"formula/{plan.spec.name}.py": _tidy(module), "battery.py": _tidy(battery)}


def _scope(plan: Plan) -> dict[str, object]:
    """What the templates of a file are given."""
    name, digest = plan.spec.name, plan.spec.digest
    solved = solve(plan)
    return {
        "plan": plan,
        "kernels": solved,
        "kernel_text": kernel_text,
        "foreign": False,
        "namespace": f"normgen_{digest[:8]}",
        "class_name": class_name(name),
        "title": title(plan),
        "formula": formula(plan),
        "notes": [line for note in notes(plan) for line in textwrap.wrap(note, WIDTH)],
        "reasons": [
            line for r in plan.reasons for line in textwrap.wrap(r, WIDTH, initial_indent="- ", subsequent_indent="  ")
        ],
        "reference_lines": reference_lines(plan),
        "bounds": BOUNDS,
        "owners": [
            [i for i, (_, g) in enumerate(solved.gradient_of) if g == gradient] for gradient in solved.gradients
        ],
    }


def _tidy(text: str) -> str:
    """No trailing blanks and no more than two empty lines."""
    text = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def title(plan: Plan) -> str:
    """One line: what is computed."""
    norm = "RMSNorm" if plan.spec.norm == "rms" else "LayerNorm"
    of = " of x + residual" if plan.spec.residual else ""
    return f"{norm}{of} over the last axis, forward{' and backward' if plan.backward else ' only'}."


def formula(plan: Plan) -> list[str]:
    """The mathematics, a line a stage."""
    return [stage.formula(taken, left) for stage, taken, left in plan.stages]


def notes(plan: Plan) -> list[str]:
    """What the formula leaves open: the convention that eps follows, and what is rounded to."""
    inside = plan.spec.eps.placement == "inside_sqrt"
    where = "inside" if inside else "outside"
    found = [f"eps stands {where} the square root: {'' if inside else 'not '}the PyTorch convention."]
    text = " ".join(formula(plan))
    if "round(" in text:
        found.append(f"round is to the dtype of x{', round_y to that of y' if 'round_y(' in text else ''}.")
    return found


def reference_lines(plan: Plan) -> list[str]:
    """The body of the plain PyTorch formula, from the stages' own words."""
    text = "\n".join(stage_text(stage, "reference", taken, left) for stage, taken, left in plan.stages)
    return [line for line in text.splitlines() if line.strip()]


def explain(plan: Plan) -> str:
    """What will be computed, with which tensors, how it is launched and why, in text for a terminal."""
    data = explain_data(plan)
    rows = [f"  {t['name']:<14}{t['role']:<11}{t['shape']:<12}{t['dtype']}" for t in _tensors(plan)]
    return "\n".join(
        [
            f"{plan.spec.name}: {data['title']}",
            "",
            *(f"  {line}" for line in formula(plan)),
            *(f"  {line}" for line in notes(plan)),
            "",
            "tensors",
            *rows,
            "",
            "kernels",
            *(f"  {kernel.name}: {kernel.doc}" for kernel in solve(plan).all),
            "",
            "why",
            *(f"  - {reason}" for reason in plan.reasons),
            "",
            "instead",
            f"  {alternative(plan)}",
        ]
    )


def explain_data(plan: Plan) -> dict[str, object]:
    """The same as `explain`, for programs."""
    return {
        "name": plan.spec.name,
        "title": title(plan),
        "formula": formula(plan),
        "notes": notes(plan),
        "tensors": _tensors(plan),
        "kernels": [{"name": kernel.name, "doc": kernel.doc} for kernel in solve(plan).all],
        "reasons": list(plan.reasons),
        "alternative": alternative(plan),
    }


def sentence(names: Iterable[object], word: str = "or") -> str:
    """`a, b or c`."""
    *most, last = map(str, names)
    return f"{', '.join(most)} {word} {last}" if most else last


def dtype_words(plan: Plan, tensor: Tensor) -> str:
    """The dtype of a tensor in words."""
    if tensor.dtype == "weight":
        return sentence("dtype of x" if name == "same" else name for name in plan.spec.dtypes.weight)
    if tensor.value == "x":
        return sentence(plan.spec.dtypes.input)
    return {"input": "dtype of x", "compute": "float32"}.get(tensor.dtype, tensor.dtype)


def _tensors(plan: Plan) -> list[dict[str, str]]:
    shapes = {"NH": "(..., H)", "N": "(...)", "H": "(H,)"}
    return [
        {
            "name": tensor.api,
            "role": tensor.role,
            "shape": shapes[tensor.dims],
            "dtype": dtype_words(plan, tensor),
            "doc": tensor.doc,
        }
        for tensor in plan.arguments + plan.results
    ]


def alternative(plan: Plan) -> str:
    """When plain PyTorch is enough."""
    spec = plan.spec
    affine = spec.affine
    plain = affine is None or (affine.cast == "multiply_then_cast" and not affine.weight_offset)
    has_module = spec.norm == "layer" or affine is None or not affine.bias
    as_torch = spec.eps.placement == "inside_sqrt" and spec.dtypes.output == "same"
    if spec.residual is None and plain and has_module and as_torch:
        module = "RMSNorm" if spec.norm == "rms" else "LayerNorm"
        return (
            f"torch.nn.{module} computes the same, and torch.compile fuses it; generate this one for an operator that "
            "is the same in eager mode and in a graph, for its tests, or where you measured it to be faster."
        )
    return (
        "No torch.nn module computes this in one pass. torch.compile can fuse the plain formula; generate this one "
        "where the rounding points must be exactly these, in eager mode and in a graph."
    )
