"""What a kernel turned out to be, read from its assembly: registers, spills, and how wide rows are accessed."""

from __future__ import annotations

import ast
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

# Bytes that one instruction moves, by its end: `ld.global.v4.b32` and `global_load_dwordx4` move 16.
PTX_ACCESS = re.compile(r"\s(?:ld|st)\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(?P<count>\d))?\.[bfsu](?P<bits>\d+)\s")
PTX_COPY = re.compile(r"\scp\.async\.\S+ .*, (?P<bytes>0x[0-9a-f]+|\d+)(?:, \S+)*\s*;")
# Of what was inlined, the line of the call comes last: in the directive or, in Triton 3.6, in the comment after it.
PTX_LOCATION = re.compile(r"\s*\.loc\s+(?P<file>\d+) (?P<line>\d+)(?:.* inlined_at (?P<call_file>\d+) (?P<call>\d+))?")
PTX_COMMENT = re.compile(r".*// (?P<name>\S+):\d+:\d+ @\[ (?P=name):(?P<call>\d+):")
AMD_ACCESS = re.compile(r"\s(?:global|buffer|flat)_(?:load|store)_(?P<kind>\w+)")
AMD_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def amd_usage(text: str) -> tuple[int, int]:
    """Registers and bytes spilled, both a thread, from AMD assembly."""

    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", text)
        assert match, f"no {name} in the assembly"
        return int(match[1])

    spills = 4 * (number("vgpr_spill_count") + number("sgpr_spill_count"))
    return number("vgpr_count"), max(spills, number("private_segment_fixed_size"))


def nvidia_usage(cubin: bytes, cuobjdump: Path) -> tuple[int, int]:
    """Registers and bytes spilled, both a thread, from a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def access_bits(
    source: str,
    first: int,
    text: str,
    loaded: Iterable[str],
    stored: Iterable[str],
    helpers: Mapping[str, str] = {},
    constants: Mapping[str, object] = {},
    copies: Collection[str] = (),
) -> dict[str, int]:
    """Width of the narrowest access to the rows of each argument, in bits; 0 where no instruction was found.

    `source` is the kernel's Python text, which starts at line `first` of its file, and `text` the assembly (PTX or
    AMD's). `loaded` and `stored` are the names of its pointers to rows whose loads and stores count. An access to one
    element a row, such as the first, does not, and an argument that has no other is left out. `helpers` are the Triton
    functions that the kernel may call, by name, as text: what one returns may be columns. What stands under an `if` of
    one of the `constants` that is false is not compiled, nor under its `else` if it is true. `copies` are the names of
    functions that load what they are given the address of.
    """
    fewest: dict[int, int] = {}
    for number, moved in _instructions(text):
        fewest[number] = min(moved, fewest.get(number, moved))
    return {
        pointer: 8 * min((fewest[number] for number in lines if number in fewest), default=0)
        for pointer, lines in _column_lines(source, first, set(loaded), set(stored), helpers, constants, copies).items()
    }


def _instructions(text: str) -> Iterator[tuple[int, int]]:
    """Line of the file and bytes moved, for each instruction that touches global memory.

    One of a function that was inlined is told of twice: for its own line, and for that of the call.
    """
    numbers: list[int] = []
    inline = located = False
    for line in text.splitlines():
        if line.endswith("inline asm"):
            inline, located = "begin" in line, False
        elif location := PTX_LOCATION.match(line):
            # LLVM counts on from line to line of inline assembly: the first location in it is the true one.
            if not (inline and located):
                places = [(location["file"], location["line"]), (location["call_file"], location["call"])]
                if comment := PTX_COMMENT.match(line):
                    places.append((location["file"], comment["call"]))
                numbers = [int(number) for file, number in places if file == "1"]
            located = True
        elif moved := _moved(line):
            yield from ((number, moved) for number in numbers)


def _moved(line: str) -> int:
    """Bytes that an instruction moves from or to global memory; 0 for any other."""
    if found := PTX_ACCESS.search(line):
        return int(found["count"] or 1) * int(found["bits"]) // 8
    if found := PTX_COPY.search(line):
        return int(found["bytes"], 0)
    if found := AMD_ACCESS.search(line):
        return AMD_BYTES.get(found["kind"], 2)
    return 0


def _column_lines(
    source: str,
    first: int,
    loaded: set[str],
    stored: set[str],
    helpers: Mapping[str, str],
    constants: Mapping[str, object],
    copies: Collection[str],
) -> dict[str, set[int]]:
    """Lines of the file that load or store a block of columns, for each pointer to rows that has such lines.

    No name in the kernel is known beforehand: followed are addresses from the pointers they are computed from, and
    columns from `[None, :]`.
    """
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id in constants:
            node.body, node.orelse = (node.body, []) if constants[node.test.id] else ([], node.orelse)
    pointers = {name: {name} for name in loaded | stored}
    columns: set[str] = set()
    spreading = {name for name, text in helpers.items() if "[None, :]" in text}
    assignments = [node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))]
    for node in sorted(assignments, key=lambda node: node.lineno):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        targets = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        if node.value is None or any(_memory(part) for part in ast.walk(node.value)):
            continue
        for name in names:
            if reached := _reached(node.value, pointers):
                pointers[name] = reached
        if _has_columns(node.value, columns) or _calls(node.value) & spreading:
            columns |= names
    found: dict[str, set[int]] = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in copies:
            for pointer in {pointer for part in call.args for pointer in _reached(part, pointers)} & loaded:
                found.setdefault(pointer, set()).add(first + call.lineno - 1)
        access = _memory(call)
        if access and isinstance(call, ast.Call) and call.args and _has_columns(call.args[0], columns):
            for pointer in _reached(call.args[0], pointers) & (loaded if access == "load" else stored):
                lines = range(first + call.lineno - 1, first + (call.end_lineno or call.lineno))
                found.setdefault(pointer, set()).update(lines)
    return found


def _calls(node: ast.AST) -> set[str]:
    """The functions that an expression calls by a plain name."""
    return {c.func.id for c in ast.walk(node) if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)}


def _memory(node: ast.AST) -> str | None:
    """load or store, where the node is a call of one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("load", "store"):
        return node.func.attr
    return None


def _names(node: ast.AST) -> set[str]:
    """The names whose values an expression uses: `col.to(tl.int64)` that of col, `x_ptr.dtype` none."""
    if isinstance(node, ast.Attribute):
        return set()
    if isinstance(node, ast.Name):
        return {node.id}
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        parts.append(node.func.value)
    return {name for part in parts for name in _names(part)}


def _reached(node: ast.AST, pointers: Mapping[str, set[str]]) -> set[str]:
    return {pointer for name in _names(node) for pointer in pointers.get(name, ())}


def _has_columns(node: ast.AST, columns: set[str]) -> bool:
    spread = any(
        isinstance(part, ast.Subscript)
        and isinstance(part.slice, ast.Tuple)
        and isinstance(part.slice.elts[0], ast.Constant)
        and part.slice.elts[0].value is None
        for part in ast.walk(node)
    )
    return spread or bool(columns & _names(node))
