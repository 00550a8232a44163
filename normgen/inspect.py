"""What kernels compile to, without a GPU: registers, spills, shared memory, width of accesses, occupancy.

The launches are those of the generated module itself: it is imported, called, and what it launches is recorded rather
than run (`launches`). torch and triton are imported when something is inspected.
"""

from __future__ import annotations

import importlib
import inspect as python_inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from normgen.assembly import access_bits, amd_usage, nvidia_usage
from normgen.errors import Fault
from normgen.launches import Call, Launch, calls, gpu, launches, module_at, runtime
from normgen.processes import spread
from normgen.spec import Spec
from normgen.target import TARGETS

WHOLE = 128
"""Bits that the widest access to memory moves."""


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
    """What allows no more of them: warps, programs, registers or shared, the first that does."""

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
                found.append(f"accesses the rows of {name} by no instruction, though its lines do")
            elif bits < WHOLE:
                found.append(f"accesses rows of {name} {bits // 8} bytes at a time, though they are multiples of 16")
        return found


def inspect(
    specs: Mapping[str, Spec],
    target: str,
    dtype: str | None = None,
    weight_dtype: str | None = None,
    widths: Sequence[int] | None = None,
    short: int = 0,
    jobs: int = 1,
) -> list[Compiled]:
    """Compile every kernel of the specs as the generated modules launch them, for a GPU that need not be there.

    Args:
        specs: by the path they were read from.
        target: a key of normgen.target.TARGETS.
        dtype: of x; default bfloat16, or the first that a spec lists where it does not list that.
        weight_dtype: of weight and bias; default that of x where a spec takes it, else the first that it lists.
        widths: default the widths that a spec lists; where any is accepted, the widest of each rung and one beyond.
        short: elements by which those of the rungs are narrower. 8 makes rows of bfloat16 multiples of 16 bytes that
            are not multiples of the 16 elements that Triton looks for by itself.
        jobs: processes that compile.

    Returns:
        One for each kernel and width it is launched for; by spec, kernel and width. Equal ones are compiled once.

    Raises SpecError for a dtype or width that a spec does not take, and ToolError where torch or triton is missing or
    kernels would be interpreted.
    """
    runtime()
    recorded = [
        (call, launch) for call in calls(specs, dtype, weight_dtype, widths, short) for launch in launches(call, target)
    ]
    distinct: dict[str, Launch] = {}
    for _, launch in recorded:
        distinct.setdefault(launch.key, launch)
    usage = dict(zip(distinct, _compile_all(list(distinct.values()), target, jobs), strict=True))
    found = [_compiled(call, launch, usage[launch.key], target) for call, launch in recorded]
    order: dict[tuple[str, str], int] = {}
    for one in found:
        order.setdefault((one.spec, one.kernel), len(order))
    same = {repr(one): one for one in found}
    return sorted(same.values(), key=lambda one: (order[one.spec, one.kernel], one.width))


def _compile_all(launches: Sequence[Launch], target: str, jobs: int) -> Iterator[Usage]:
    """In processes of their own where that pays: each imports torch anew, which takes as long as a few compilations."""
    return spread(partial(_compile, target=target), launches, max(1, min(jobs, -(-len(launches) // 8))))


def _compile(launch: Launch, target: str) -> Usage:
    _, triton = runtime()
    function = getattr(module_at(launch.path), launch.kernel)
    source = _source(triton, function)(function, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(source, target=gpu(triton, target), options=launch.options)
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers, spills = amd_usage(text)
    else:
        text = compiled.asm["ptx"]
        folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        registers, spills = nvidia_usage(compiled.asm["cubin"], folder / "cuobjdump")
    lines, first = python_inspect.getsourcelines(function.fn)
    functions = {n: f for n, f in function.__globals__.items() if isinstance(f, triton.runtime.JITFunction)}
    helpers = {name: found.src for name, found in functions.items()}
    copies = [name for name, text in helpers.items() if "_async_load(" in text]
    constants = {
        name: launch.constants[index,] for index, name in enumerate(function.arg_names) if (index,) in launch.constants
    }
    return Usage(
        registers=registers,
        spills=spills,
        shared=compiled.metadata.shared,
        # A program stores one row of partial sums, by as many threads as it has: few elements each, however written.
        accesses=access_bits("".join(lines), first, text, launch.rows, launch.batch, helpers, constants, copies),
        warps=compiled.metadata.num_warps,
    )


def _source(triton: Any, function: Any) -> Any:
    """What Triton compiles a function from: of Gluon, another kind."""
    if not function.is_gluon():
        return triton.compiler.ASTSource
    return importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource


def _compiled(call: Call, launch: Launch, usage: Usage, target: str) -> Compiled:
    _, triton = runtime()
    options = triton.compiler.make_backend(gpu(triton, target)).parse_options(launch.options)
    names = list(launch.signature)
    occupancy, limit = TARGETS[target].occupancy(usage.registers, usage.shared, usage.warps)
    return Compiled(
        spec=call.source,
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
