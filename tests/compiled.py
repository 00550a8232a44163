"""Compiles the kernels of all specs for a GPU that need not be there, and prints what came out as JSON.

A script, run in a process of its own: Triton decides at its import whether kernels are compiled or interpreted, and
the other tests import it to interpret.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import math
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from normgen.kernels import Kernel, Kernels
from normgen.loader import load
from normgen.plan import Plan, plan
from normgen.render import render, solve
from normgen.spec import MAX_HIDDEN
from normgen.target import BACKWARD_LADDER, CHUNK, COLUMNS, FORWARD_LADDER, Rung

SPECS = Path(__file__).parents[1] / "specs"
# For the kernels' source, which Triton reads from a file. Gone with the process.
FOLDER = tempfile.TemporaryDirectory()
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}
SIZES = {"*fp16": 2, "*bf16": 2, "*fp32": 4}
# What a launch tells the compiler of a pointer or an integer that is a multiple of 16.
MULTIPLE_OF_16 = [["tt.divisibility", 16]]
# Bytes that one instruction moves, by its end: `ld.global.v4.b32` and `global_load_dwordx4` move 16.
PTX_ACCESS = re.compile(r"\s(?:ld|st)\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(?P<count>\d))?\.[bfsu](?P<bits>\d+)\s")
PTX_COPY = re.compile(r"\scp\.async\.\S+ .*, (?P<bytes>0x[0-9a-f]+|\d+)(?:, \S+)?\s*;")
AMD_ACCESS = re.compile(r"\s(?:global|buffer|flat)_(?:load|store)_(?P<kind>\w+)")
AMD_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


@dataclass(frozen=True)
class Tile:
    rows: int
    columns: int
    warps: int


@dataclass
class Variant:
    """One compilation: a kernel with the dtypes and the tile of a launch."""

    kernel: Kernel
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    tile: Tile
    alignment: int
    """Elements that the width and all strides are a multiple of."""
    specs: list[str] = field(default_factory=list)
    """Those whose kernel this is; the same lines under another name are compiled once."""


@dataclass(frozen=True)
class Compiled:
    specs: list[str]
    kernel: str
    tile: Tile
    registers: int
    spilled: int
    """Bytes of memory that stand in for registers, a thread."""
    shared: int
    narrow: dict[str, int]
    """Lines that load or store rows with fewer than 16 bytes an instruction, and with how many; 0: no instruction."""


def variants(paths: Iterable[Path], x: str, weight: str, tile: Tile | None = None) -> list[Variant]:
    """Every distinct kernel of the specs as its launcher would have it, or with the tile given.

    A weight of x's own dtype stands for any that the spec takes. Where any width may come, it is the widest of each
    rung, and width and strides are multiples of 16 bytes but not of the 16 elements that Triton looks for by itself.
    """
    found: dict[object, Variant] = {}
    for path in paths:
        made = plan(load(path.read_bytes(), str(path)))
        taken = [x if dtype == "same" else dtype for dtype in made.spec.dtypes.weight]
        if x not in made.spec.dtypes.input or weight not in {x, *taken}:
            continue
        given = weight if weight in taken else taken[0]
        kernels = solve(made)
        module = _functions(made.spec.name, render(made, str(path))[f"{made.spec.name}.py"])
        for kernel in kernels.all:
            function = getattr(module, kernel.name)
            signature, constants = _arguments(made, kernels, kernel, x, given)
            assert list(signature) == function.arg_names, (kernel.name, list(signature), function.arg_names)
            if weight != x and signature == _arguments(made, kernels, kernel, x, x)[0]:
                continue  # it has no tensor of the weight's dtype: compiled with x of that dtype
            reach = 16 // min(SIZES[signature[tensor.pointer]] for tensor in kernel.strided)
            launches = _launches(made, kernel, FORWARD_LADDER if kernel == kernels.forward else BACKWARD_LADDER)
            for chosen, alignment in dict.fromkeys((tile or one, math.gcd(reach, w)) for one, w in launches):
                variant = Variant(kernel, function, signature, constants, chosen, alignment)
                lines = function.src.replace(f"def {kernel.name}(", "def (")
                key = (lines, *signature.items(), *map(str, constants.items()), chosen, alignment)
                found.setdefault(key, variant).specs.append(made.spec.name)
    return list(found.values())


def _functions(name: str, text: str) -> ModuleType:
    """The Triton functions of a generated module in a module of their own, which needs no torch."""
    functions = [
        ast.get_source_segment(text, node)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and "triton.jit" in map(ast.unparse, node.decorator_list)
    ]
    head = "import triton\nimport triton.language as tl\n"
    path = Path(FOLDER.name) / f"{name}.py"
    path.write_text(head + "".join(f"\n\n@triton.jit\n{function}\n" for function in functions))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _arguments(
    made: Plan, kernels: Kernels, kernel: Kernel, x: str, weight: str
) -> tuple[dict[str, str], dict[str, Any]]:
    """Types of a kernel's arguments, in order, and the values of those that are constants."""
    dtypes = {"input": x, "weight": weight, "compute": "float32"}
    pointers = {t.pointer: POINTERS[dtypes.get(t.dtype, t.dtype)] for t in kernel.tensors}
    if kernel != kernels.sum_partials:  # sums over rows are handed over in fp32, whatever the parameter's dtype
        pointers |= {t.pointer: POINTERS["float32"] for t in kernel.sums}
    output = made.outputs[0].dtype
    constants: dict[str, Any] = {"H": made.baked_width} if made.baked_width else {}
    rounded = {"input_dtype": x, "output_dtype": dtypes.get(output, output)}
    constants |= {name: getattr(tl, rounded[name]) for name in kernel.dtypes}
    signature = (
        pointers
        | {tensor.stride: "i32" for tensor in kernel.strided}
        | {"N": "i32", "H": "i32"}
        | ({"epsilon": "fp64"} if kernel.mentions("epsilon") else {})
        | dict.fromkeys(kernel.dtypes, "constexpr")
        | dict.fromkeys(("ALIGNMENT", "BLOCK_N", "BLOCK_SIZE"), "constexpr")
    )
    return signature | dict.fromkeys(constants, "constexpr"), constants


def _launches(made: Plan, kernel: Kernel, ladder: tuple[Rung, ...]) -> Iterator[tuple[Tile, int]]:
    """The tiles that the launcher would choose, and for which widths."""
    widths = made.spec.widths
    if kernel.strategy in ("chunked", "columns"):
        chunk, block = Tile(1, CHUNK.elements, CHUNK.warps), Tile(COLUMNS.rows, COLUMNS.columns, COLUMNS.warps)
        yield from ((chunk if kernel.strategy == "chunked" else block, width) for width in widths or [MAX_HIDDEN])
        return
    below = 0
    for rung in ladder:
        for width in widths or [min(rung.widest, made.width_limit or rung.widest)]:
            if below < width <= rung.widest:
                columns = triton.next_power_of_2(width)
                yield Tile(max(1, rung.elements // columns), columns, rung.warps), width
        below = rung.widest


def compile_variant(variant: Variant, target: str, alignment: int) -> Compiled:
    """Compile as the launcher does, but that it tells the kernel of that alignment."""
    constants = variant.constants | {
        "ALIGNMENT": alignment,
        "BLOCK_N": variant.tile.rows,
        "BLOCK_SIZE": variant.tile.columns,
    }
    attributes = {
        (index,): MULTIPLE_OF_16
        for index, (name, type_) in enumerate(variant.signature.items())
        if type_[0] == "*" or (type_ == "i32" and name != "N" and alignment == 16)
    }
    compiled = triton.compile(
        ASTSource(variant.function, variant.signature, constants, attributes),
        target=TARGETS[target],
        options={"num_warps": variant.tile.warps, "enable_fp_fusion": False},
    )
    registers, spilled = _amd_usage(compiled.asm["amdgcn"]) if "amdgcn" in compiled.asm else _nvidia_usage(compiled)
    return Compiled(
        specs=variant.specs,
        kernel=variant.kernel.name,
        tile=variant.tile,
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        narrow=_narrow(variant, compiled.asm),
    )


def _amd_usage(text: str) -> tuple[int, int]:
    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", text)
        assert match, f"no {name} in the assembly"
        return int(match[1])

    spills = 4 * (number("vgpr_spill_count") + number("sgpr_spill_count"))
    return number("vgpr_count"), max(spills, number("private_segment_fixed_size"))


def _nvidia_usage(compiled: Any) -> tuple[int, int]:
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def _narrow(variant: Variant, asm: dict[str, Any]) -> dict[str, int]:
    """Lines of the kernel that load or store whole rows of multiples of 16 bytes, but fewer bytes an instruction."""
    aligned = [t for t in variant.kernel.strided if variant.alignment * SIZES[variant.signature[t.pointer]] >= 16]
    wanted = {}
    lines, first = inspect.getsourcelines(variant.function.fn)
    for number, line in enumerate(lines, first):
        access = re.search(r"tl\.(?:load|store)\(([^,]*)", line)
        names = set(re.findall(r"\w+", access[1])) if access else set()
        if "col" in names and any({t.rows, t.pointer} & names for t in aligned):
            wanted[number] = line.strip()
    fewest: dict[int, int] = {}
    for number, moved in _accesses(asm):
        fewest[number] = min(moved, fewest.get(number, moved))
    return {line: fewest.get(number, 0) for number, line in wanted.items() if fewest.get(number, 0) < 16}


def _accesses(asm: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Line of the kernel and bytes moved, for each instruction that touches global memory."""
    number = 0
    inline = located = False
    for text in asm["amdgcn" if "amdgcn" in asm else "ptx"].splitlines():
        if text.endswith("inline asm"):
            inline, located = "begin" in text, False
        elif location := re.match(r"\s*\.loc\s+(\d+) (\d+)", text):
            # LLVM counts on from line to line of inline assembly: the first location in it is the true one.
            if not (inline and located):
                number = int(location[2]) if location[1] == "1" else 0
            located = True
        elif found := PTX_ACCESS.search(text):
            yield number, int(found["count"] or 1) * int(found["bits"]) // 8
        elif found := PTX_COPY.search(text):
            yield number, int(found["bytes"], 0)
        elif found := AMD_ACCESS.search(text):
            yield number, AMD_BYTES.get(found["kind"], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("x", choices=POINTERS, help="dtype of x")
    parser.add_argument("weight", choices=POINTERS, help="dtype of weight and bias")
    parser.add_argument("--spec", type=Path, nargs="*", default=sorted(SPECS.glob("*.yaml")))
    parser.add_argument("--kernel", help="only the kernel of this name")
    parser.add_argument("--tile", type=int, nargs=3, metavar=("ROWS", "COLUMNS", "WARPS"), help="in place of the rungs")
    parser.add_argument("--alignment", type=int, help="what kernels are told of it, in place of the truth")
    args = parser.parse_args()
    found = variants(args.spec, args.x, args.weight, Tile(*args.tile) if args.tile else None)
    wanted = [variant for variant in found if args.kernel in (None, variant.kernel.name)]
    print(json.dumps([asdict(compile_variant(v, args.target, args.alignment or v.alignment)) for v in wanted]))


if __name__ == "__main__":
    main()
