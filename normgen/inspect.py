"""What kernels compile to, without a GPU: registers, spills, shared memory, width of accesses, occupancy.

The launches are those of the generated module itself: it is imported, called, and what it launches is recorded rather
than run. The only part of normgen that needs torch and triton, which are imported when something is inspected.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect as python_inspect
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from normgen.assembly import access_bits, amd_usage, nvidia_usage
from normgen.errors import Fault, SpecError, ToolError
from normgen.plan import Direction, Plan, plan
from normgen.render import render, sentence
from normgen.spec import Spec
from normgen.target import FORWARD_LADDER, TARGETS

# Beyond every ladder.
BEYOND = 2 * FORWARD_LADDER[-1].widest
# Elements of the batch that is handed in: rows enough for every program that a persistent grid may have. Their memory
# is asked for and never touched.
BATCH = 2**25
WHOLE = 128
"""Bits that the widest access to memory moves."""


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
        parts = (self.signature, self.constants, self.attributes, self.options)
        return "\n".join(
            [self.lines, *(repr(list(part.items())) for part in parts), repr((self.rows, self.batch, self.aligned))]
        )


@dataclass(frozen=True)
class Usage:
    """What one compilation came to."""

    registers: int
    """A thread."""
    spills: int
    """Bytes of memory that stand in for registers, a thread."""
    shared: int
    """Bytes of shared memory, a program."""
    accesses: dict[str, int]
    """Bits of the narrowest access to the rows of each argument; 0 where no instruction was found."""
    warps: int
    """Of one program, as resident."""


@dataclass(frozen=True)
class Compiled:
    """A kernel as it is launched for one width."""

    spec: str
    """Path of the spec."""
    kernel: str
    target: str
    width: int
    dtype: str
    weight_dtype: str | None
    """None where there is no parameter."""
    constants: dict[str, object]
    """Compile-time arguments by name."""
    num_warps: int
    num_stages: int
    registers: int
    """A thread."""
    spills: int
    """Bytes a thread."""
    shared: int
    """Bytes a program."""
    load_bits: int | None
    """Bits of the narrowest access to rows; None where the kernel's own lines access none."""
    accesses: dict[str, int]
    """The same for each argument that points to rows."""
    aligned: tuple[str, ...]
    """Arguments whose rows are multiples of 16 bytes, so that accesses may be as wide."""
    occupancy: int
    """Programs resident on one multiprocessor."""
    limit: str
    """What allows no more of them: registers, shared, warps or programs."""

    @property
    def findings(self) -> list[str]:
        """What is wrong with it, in words."""
        found = []
        if self.spills:
            found.append(f"spills {self.spills} bytes a thread, with {self.registers} registers")
        if self.shared > TARGETS[self.target].shared_program:
            most = TARGETS[self.target].shared_program
            found.append(f"asks for {self.shared} bytes of shared memory, and {self.target} has {most} for a program")
        for name in self.aligned:
            bits = self.accesses.get(name, WHOLE)
            if bits == 0:
                found.append(f"no instruction accesses the rows of {name}, though its lines do")
            elif bits < WHOLE:
                found.append(f"accesses rows of {name} {bits // 8} bytes at a time, though they are multiples of 16")
        return found


def inspect(
    specs: Mapping[str, Spec],
    target: str,
    dtype: str | None = None,
    weight_dtype: str | None = None,
    widths: Sequence[int] | None = None,
    jobs: int = 1,
) -> list[Compiled]:
    """Compile every kernel of the specs as the generated modules launch them, for a GPU that need not be there.

    Args:
        specs: by the path they were read from.
        target: a key of normgen.target.TARGETS.
        dtype: of x; default bfloat16, or the first that a spec lists where it does not list that.
        weight_dtype: of weight and bias; default that of x where a spec takes it, else the first that it lists.
        widths: default the widths that a spec lists; where any is accepted, the widest of each rung and one beyond.
        jobs: processes that compile.

    Returns:
        One for each kernel and width it is launched for; by spec, kernel and width. Equal ones are compiled once.

    Raises SpecError for a dtype or width that a spec does not take, and ToolError where torch or triton is missing or
    kernels would be interpreted.
    """
    _runtime()
    calls = _calls(specs, dtype, weight_dtype, widths)
    launches: list[tuple[str, _Call, Launch]] = []
    for source, call in calls:
        launches += [(source, call, launch) for launch in _launches(call, source, target)]
    distinct = {launch.key: launch for _, _, launch in launches}
    usage = dict(zip(distinct, _compile_all(list(distinct.values()), target, jobs), strict=True))
    found = [_compiled(source, call, launch, usage[launch.key], target) for source, call, launch in launches]
    order = {(one.spec, one.kernel): number for number, one in reversed(list(enumerate(found)))}
    return sorted(_distinct(found), key=lambda one: (order[one.spec, one.kernel], one.width))


def _distinct(found: Iterable[Compiled]) -> list[Compiled]:
    return list({repr(one): one for one in found}.values())


@dataclass(frozen=True)
class _Call:
    """One call of a module, of which forward, backward or both are looked at."""

    plan: Plan
    dtype: str
    weight_dtype: str
    width: int
    forward: bool
    backward: bool

    @property
    def rows(self) -> int:
        """Odd, as the number of rows is no multiple of anything in general, and more than one."""
        return BATCH // self.width | 1


def _runtime() -> tuple[Any, Any]:
    """torch and triton."""
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y"):
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


def _calls(
    specs: Mapping[str, Spec], dtype: str | None, weight_dtype: str | None, widths: Sequence[int] | None
) -> list[tuple[str, _Call]]:
    calls: list[tuple[str, _Call]] = []
    faults = []
    for source, spec in specs.items():
        made = plan(spec)
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
        forward = set(widths or representative(made, made.forward))
        backward = set(widths or representative(made, made.backward)) if made.backward else set()
        for width in sorted(forward | backward):
            calls.append((source, _Call(made, x, weight, width, width in forward, width in backward)))
    if faults:
        raise SpecError(faults)
    return calls


def _refusal(made: Plan, width: int) -> str | None:
    """Which widths the spec takes, if not this one."""
    if made.spec.widths is not None:
        return None if width in made.spec.widths else f"inspect {sentence(made.spec.widths)}"
    if made.width_limit is not None and width > made.width_limit:
        return f"inspect {made.width_limit} or less"
    return None


def representative(made: Plan, direction: Direction | None) -> list[int]:
    """A width for each way a direction is launched: those listed, or the widest of each rung and one beyond."""
    if direction is None:
        return []
    if made.spec.widths is not None:
        return list(made.spec.widths)
    limit = made.width_limit or BEYOND
    return sorted({min(rung.widest, limit) for rung in direction.ladder} | ({BEYOND} if direction.chunked else set()))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """For modules, whose source Python and Triton read from a file. Gone with the process."""
    return tempfile.TemporaryDirectory(prefix="normgen")


def _written(made: Plan, source: str) -> Path:
    """The generated module as a file."""
    name = made.spec.name
    text = render(made, source)[f"{name}.py"]
    # Operators of its own, lest it find those of the same module imported elsewhere and launch through that.
    digest = hashlib.sha256(text.encode()).hexdigest()
    text = text.replace(f"normgen_{made.spec.digest[:8]}", f"normgen_inspected_{digest[:16]}")
    path = Path(_folder().name, digest[:16], f"{name}.py")
    if not path.exists():
        path.parent.mkdir()
        path.write_text(text)
    return path


@cache
def _module(path: str) -> ModuleType:
    name = f"normgen_inspected_{Path(path).parent.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _launches(call: _Call, source: str, target: str) -> list[Launch]:
    """What the module launches in this call, on a GPU of the target."""
    torch, triton = _runtime()
    path = str(_written(call.plan, source))
    module = _module(path)
    taken: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    with contextlib.ExitStack() as stack:
        for function in _functions(module).values():
            stack.enter_context(mock.patch.object(function, "run", _recorder(function, taken)))
        for name, answer in (("_runs_kernels", True), ("_multiprocessors", TARGETS[target].multiprocessors)):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, lambda *_, answer=answer: answer))
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
    return [_launch(triton, module, call, path, target, *one) for one in found]


def _functions(module: ModuleType) -> dict[str, Any]:
    """The Triton functions of a module, by name."""
    _, triton = _runtime()
    return {name: value for name, value in vars(module).items() if isinstance(value, triton.runtime.JITFunction)}


def _recorder(function: Any, taken: list[Any]) -> Any:
    """Stands in for `run`, which `kernel[grid](...)` calls."""

    def run(*args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        taken.append((function, args, kwargs))

    return run


def _tensors(torch: Any, call: _Call) -> dict[str, Any]:
    """The tensors of a call, contiguous and never written to, by their names."""
    dtypes = {"input": call.dtype, "weight": call.weight_dtype}
    shape = (call.rows, call.width)
    return {
        tensor.api: torch.empty(
            shape if tensor.dims == "NH" else shape[1:],
            dtype=getattr(torch, dtypes.get(tensor.dtype, tensor.dtype)),
            requires_grad=call.backward,
        )
        for tensor in call.plan.arguments
    }


def _launch(
    triton: Any,
    module: ModuleType,
    call: _Call,
    path: str,
    target: str,
    function: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Launch:
    """What the launch tells the compiler. Triton itself works it out, as in `JITFunction.run`, for a GPU not there."""
    backend = triton.compiler.make_backend(_gpu(triton, target))
    bind = triton.runtime.jit.create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, given = bind(*args, **kwargs)
    _, signature, constants, attributes = function._pack_args(backend, kwargs, bound, specialization, given)
    rows = {name: value for name, value in bound.items() if hasattr(value, "data_ptr") and value.dim() == 2}
    functions = _functions(module)
    called = [f.src for name, f in functions.items() if f is not function and re.search(rf"\b{name}\(", function.src)]
    return Launch(
        path=path,
        kernel=function.__name__,
        signature=signature,
        constants=constants,
        attributes=attributes,
        options=given,
        rows=tuple(rows),
        batch=tuple(name for name, tensor in rows.items() if tensor.shape[0] == call.rows),
        aligned=tuple(name for name, tensor in rows.items() if _is_aligned(tensor)),
        lines="\n".join([function.src.replace(f"def {function.__name__}(", "def ("), *called]),
    )


def _is_aligned(tensor: Any) -> bool:
    size = tensor.element_size()
    return all(
        number % 16 == 0 for number in (tensor.data_ptr(), *(size * n for n in (tensor.stride(0), tensor.shape[1])))
    )


def _gpu(triton: Any, target: str) -> Any:
    backend, arch = target.split(":")
    gpu = triton.backends.compiler.GPUTarget
    return gpu(backend, int(arch) if arch.isdecimal() else arch, TARGETS[target].warp)


def _compile_all(launches: Sequence[Launch], target: str, jobs: int) -> Iterator[Usage]:
    """In processes of their own where that pays: each imports torch anew, which takes as long as a few compilations."""
    jobs = min(jobs, -(-len(launches) // 8))
    if jobs <= 1:
        yield from (_compile(launch, target) for launch in launches)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_compile, launches, [target] * len(launches), chunksize=1)


def _compile(launch: Launch, target: str) -> Usage:
    _, triton = _runtime()
    function = getattr(_module(launch.path), launch.kernel)
    source = triton.compiler.ASTSource(function, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(source, target=_gpu(triton, target), options=launch.options)
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers, spills = amd_usage(text)
    else:
        text = compiled.asm["ptx"]
        folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        registers, spills = nvidia_usage(compiled.asm["cubin"], folder / "cuobjdump")
    lines, first = python_inspect.getsourcelines(function.fn)
    return Usage(
        registers=registers,
        spills=spills,
        shared=compiled.metadata.shared,
        # A program stores one row of partial sums, by as many threads as it has: few elements each, however written.
        accesses=access_bits("".join(lines), first, text, loaded=launch.rows, stored=launch.batch),
        warps=compiled.metadata.num_warps,
    )


def _compiled(source: str, call: _Call, launch: Launch, usage: Usage, target: str) -> Compiled:
    _, triton = _runtime()
    options = triton.compiler.make_backend(_gpu(triton, target)).parse_options(launch.options)
    names = list(launch.signature)
    occupancy, limit = TARGETS[target].occupancy(usage.registers, usage.shared, usage.warps)
    return Compiled(
        spec=source,
        kernel=launch.kernel,
        target=target,
        width=call.width,
        dtype=call.dtype,
        weight_dtype=call.weight_dtype if call.plan.parameters else None,
        constants={names[index]: _plain(value) for (index, *_), value in launch.constants.items()},
        num_warps=options.num_warps,
        num_stages=options.num_stages,
        registers=usage.registers,
        spills=usage.spills,
        shared=usage.shared,
        load_bits=min(usage.accesses.values(), default=None),
        accesses=usage.accesses,
        aligned=launch.aligned,
        occupancy=occupancy,
        limit=limit,
    )


def _plain(value: Any) -> object:
    """A constant as JSON may hold it: dtypes of Triton by their names."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def data(found: Iterable[Compiled]) -> list[dict[str, object]]:
    """For programs: the fields of each, and its findings."""
    return [{**asdict(one), "findings": one.findings} for one in found]


def faults(found: Iterable[Compiled]) -> list[Fault]:
    """All findings, at the spec they are about."""
    return [
        Fault(one.spec, 0, 0, one.kernel, f"at width {one.width} in {one.dtype} on {one.target}, it {finding}")
        for one in found
        for finding in one.findings
    ]


HEAD = "kernel width warps stages registers spills shared load_bits occupancy limit constants".split()
LEFT = {"kernel", "limit", "constants"}


def table(found: Iterable[Compiled]) -> list[str]:
    """For people: a block of aligned lines for each spec."""
    blocks: dict[str, list[tuple[str, ...]]] = {}
    for one in found:
        weight = f", weight {one.weight_dtype}" if one.weight_dtype else ""
        blocks.setdefault(f"{one.spec}: x {one.dtype}{weight}; {one.target}", []).append(_row(one))
    rows = [row for block in blocks.values() for row in block]
    sizes = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]

    def aligned(row: Sequence[str]) -> str:
        cells = zip(HEAD, row, sizes, strict=True)
        return "  ".join(f"{text:{'<' if name in LEFT else '>'}{size}}" for name, text, size in cells).rstrip()

    lines: list[str] = []
    for title, block in blocks.items():
        lines += ["", title, aligned(HEAD), *map(aligned, block)]
    return lines[1:]


def _row(one: Compiled) -> tuple[str, ...]:
    numbers = (one.width, one.num_warps, one.num_stages, one.registers, one.spills, one.shared)
    bits = "-" if one.load_bits is None else str(one.load_bits)
    constants = " ".join(f"{name}={value}" for name, value in one.constants.items())
    return (one.kernel, *map(str, numbers), bits, str(one.occupancy), one.limit, constants)
