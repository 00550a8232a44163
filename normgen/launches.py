"""What a generated module launches: the module is imported and called, and its launches are recorded rather than run.

It is handed CPU tensors and told that it runs kernels, on as many multiprocessors as the target has. Nothing here knows
kernels, their arguments, or how the launcher chooses them. torch and triton are imported when they are first needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from normgen.errors import Fault, SpecError, ToolError
from normgen.modules import imported, interpreted
from normgen.plan import Direction, Plan, plan
from normgen.render import render, sentence
from normgen.spec import Spec
from normgen.target import TARGETS, WIDEST

# Where the last rung of a ladder takes all wider rows: twice the width at which it begins, but no less.
BEYOND = 2**16
# Elements of the batch that is handed in: rows enough for every program that a persistent grid may have. Their memory
# is asked for and never touched.
BATCH = 2**25


@dataclass(frozen=True)
class Call:
    """One call of a module, of which forward, backward or both are looked at."""

    source: str
    """Path of the spec."""
    plan: Plan
    path: str
    """File of the generated module."""
    dtype: str
    weight_dtype: str
    width: int
    rows: int
    forward: bool
    backward: bool


@dataclass(frozen=True)
class Launch:
    """One launch, as far as it decides what is compiled. Holds no tensor, so that another process may compile it."""

    path: str
    """File of the generated module."""
    kernel: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    rows: tuple[str, ...]
    """Arguments that point to rows."""
    batch: tuple[str, ...]
    """Those that point to one for each row of the batch, and not for each program, as partial sums do."""
    aligned: tuple[str, ...]
    """Those whose rows all begin at a multiple of 16 bytes, and end at one."""
    lines: str = field(repr=False)
    """Source of the kernel without its name, and of what it calls."""

    @property
    def key(self) -> str:
        """Equal for launches that compile to the same: same lines but for the name, same types, same constants."""
        told = (self.signature, self.constants, self.attributes, self.options, self.rows, self.batch)
        return f"{self.lines}\n{told}"


def runtime() -> tuple[Any, Any]:
    """torch and triton. Raises ToolError where one is missing, or Triton interprets kernels."""
    if interpreted():
        raise ToolError("TRITON_INTERPRET", "it is set, and kernels would be interpreted, not compiled; unset it")
    found = []
    for name in ("torch", "triton"):
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            message = "not installed, and kernels cannot be inspected without it; run: pip install torch triton"
            raise ToolError(name, message) from None
    torch, triton = found
    if not isinstance(triton.language.sum, triton.runtime.JITFunction):
        raise ToolError("triton", "imported to interpret kernels, not to compile them; inspect in a process of its own")
    return torch, triton


def calls(
    specs: Mapping[str, Spec],
    dtype: str | None = None,
    weight_dtype: str | None = None,
    widths: Sequence[int] | None = None,
    short: int = 0,
) -> list[Call]:
    """The calls to look at; arguments are those of normgen.inspect.inspect, and so are the errors."""
    found: list[Call] = []
    faults = []
    for source, spec in specs.items():
        made = plan(spec)
        path = _written(made, source)
        listed = spec.dtypes.input
        x = dtype or ("bfloat16" if "bfloat16" in listed else listed[0])
        taken = list(dict.fromkeys(x if name == "same" else name for name in spec.dtypes.weight))
        weight = weight_dtype or (x if x in taken else taken[0])
        if x not in listed:
            faults.append(Fault(source, 0, 0, "dtypes.input", f"x of {x} is not taken; inspect {sentence(listed)}"))
        elif weight not in taken and made.parameters:
            message = f"a weight of {weight} with x of {x} is not taken; inspect {sentence(taken)}"
            faults.append(Fault(source, 0, 0, "dtypes.weight", message))
        for width in widths or ():
            if reason := _refusal(made, width):
                faults.append(Fault(source, 0, 0, "hidden", f"the width {width} is not taken; {reason}"))
        forward = set(widths or _representative(made, made.forward, short))
        backward = set(widths or _representative(made, made.backward, short)) if made.backward else set()
        for width in sorted(forward | backward):
            # Odd, as the number of rows is no multiple of anything in general.
            many = Call(source, made, path, x, weight, width, BATCH // width | 1, width in forward, width in backward)
            found.append(many)
            if many.forward:  # which launches few rows in its own way
                found.append(replace(many, rows=1, backward=False))
    if faults:
        raise SpecError(faults)
    return found


def _refusal(made: Plan, width: int) -> str | None:
    """Which widths the spec takes, if not this one."""
    if made.spec.widths is not None:
        return None if width in made.spec.widths else f"inspect {sentence(made.spec.widths)}"
    if made.width_limit is not None and width > made.width_limit:
        return f"inspect {made.width_limit} or less"
    return None


def _representative(made: Plan, direction: Direction, short: int) -> set[int]:
    """A width for each way a direction is launched: those listed, or about the widest of each rung and one beyond."""
    if made.spec.widths is not None:
        return set(made.spec.widths)
    limit = made.width_limit or WIDEST
    widest = [min(rung.widest, limit) for rung in (*direction.tiles, *direction.wide)]
    if widest[-1] == WIDEST:
        widest[-1] = max([BEYOND, *(2 * width for width in widest[:-1])])
    return {width - short for width in widest}


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """For modules, whose source Python and Triton read from a file. Gone with the process."""
    return tempfile.TemporaryDirectory(prefix="normgen")


def _written(made: Plan, source: str) -> str:
    """Path of the generated module, now on disk."""
    spec = made.spec
    text = render(made, source)[f"{spec.name}.py"]
    # Operators of its own, lest it find those of the same module imported elsewhere, and launch what that one has.
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    text = text.replace(f"normgen_{spec.digest[:8]}", f"normgen_inspected_{digest}")
    path = Path(_folder().name, digest, f"{spec.name}.py")
    if not path.exists():
        path.parent.mkdir()
        path.write_text(text)
    return str(path)


def module_at(path: str) -> ModuleType:
    """The module in that file, imported."""
    return imported(f"normgen_inspected_{Path(path).parent.name}", Path(path))


def launches(call: Call, target: str) -> list[Launch]:
    """What the module launches in this call, on a GPU of the target. Raises ToolError as `runtime` does."""
    torch, triton = runtime()
    module = module_at(call.path)
    functions = _functions(triton, module)
    taken: list[_Taken] = []
    with contextlib.ExitStack() as stack:
        for function in functions:
            # `kernel[grid](...)` calls `run`, and so does whoever holds the kernel under another name.
            stack.enter_context(mock.patch.object(function, "run", _recorder(function, taken)))
        answers = {
            "_runs_kernels": True,
            "_multiprocessors": TARGETS[target].multiprocessors,
            "_shared_memory": TARGETS[target].shared_program,
            "_threads": TARGETS[target].warp * TARGETS[target].warps,
            "_is_cuda": target.startswith("cuda:"),
            "_waits": target.startswith("cuda:"),
        }
        for name, answer in answers.items():
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, lambda *_, answer=answer: answer))
        # AMD's warps are twice as wide, and launchers ask torch whether it was built for them.
        hip = None if target.startswith("cuda:") else torch.version.hip or "0"
        stack.enter_context(mock.patch.object(torch.version, "hip", hip))
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):  # what was remembered may have been of another target
                value.cache_clear()
        arguments = _tensors(torch, call)
        results = getattr(module, call.plan.spec.name)(**arguments)
        found = list(taken) if call.forward else []
        if call.backward:
            taken.clear()
            results = results if isinstance(results, tuple) else (results,)
            torch.autograd.grad(results, list(arguments.values()), [torch.empty_like(result) for result in results])
            found += taken
    assert found, f"{call.plan.spec.name} launched nothing for width {call.width}"
    backend = triton.compiler.make_backend(gpu(triton, target))
    return [_launch(triton, backend, call, functions, one) for one in found]


@dataclass(frozen=True)
class _Taken:
    """A launch as it was asked for."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _functions(triton: Any, module: ModuleType) -> list[Any]:
    """The Triton functions of a module."""
    return [value for value in vars(module).values() if isinstance(value, triton.runtime.JITFunction)]


def _recorder(function: Any, taken: list[_Taken]) -> Any:
    def run(*args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        taken.append(_Taken(function, args, kwargs))

    return run


def _tensors(torch: Any, call: Call) -> dict[str, Any]:
    """The tensors of a call, contiguous and never written to, by their names."""
    dtypes = {"input": call.dtype, "weight": call.weight_dtype}
    shape = (call.rows, call.width)
    return {
        tensor.api: torch.empty(
            shape if tensor.dims == "NH" else shape[1:],
            dtype=getattr(torch, dtypes.get(tensor.dtype, tensor.dtype)),
            requires_grad=call.plan.backward is not None,  # else forward leaves statistics out
        )
        for tensor in call.plan.arguments
    }


def _launch(triton: Any, backend: Any, call: Call, functions: list[Any], taken: _Taken) -> Launch:
    """What the launch tells the compiler.

    Types, constants and divisibility are worked out by what `JITFunction.run` itself uses, the same in Triton 3.6 and
    3.9, but that the backend is given rather than that of the GPU at hand.
    """
    function = taken.function
    bind = triton.runtime.jit.create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, options = bind(*taken.args, **taken.kwargs)
    _, signature, constants, attributes = function._pack_args(backend, taken.kwargs, bound, specialization, options)
    rows = {name: value for name, value in bound.items() if hasattr(value, "data_ptr") and value.dim() == 2}
    called = [f.src for f in functions if f is not function and re.search(rf"\b{f.__name__}\(", function.src)]
    return Launch(
        path=call.path,
        kernel=function.__name__,
        signature=signature,
        constants=constants,
        attributes=attributes,
        options=options,
        rows=tuple(rows),
        batch=tuple(name for name, tensor in rows.items() if tensor.shape[0] == call.rows),
        aligned=tuple(name for name, tensor in rows.items() if _is_aligned(tensor)),
        lines="\n".join([function.src.replace(f"def {function.__name__}(", "def ("), *called]),
    )


def _is_aligned(tensor: Any) -> bool:
    row, width = tensor.stride(0) * tensor.element_size(), tensor.shape[1] * tensor.element_size()
    return all(number % 16 == 0 for number in (tensor.data_ptr(), row, width))


def gpu(triton: Any, target: str) -> Any:
    """The target as Triton knows it."""
    backend, arch = target.split(":")
    known = int(arch) if arch.isdecimal() else arch
    return triton.backends.compiler.GPUTarget(backend, known, TARGETS[target].warp)
