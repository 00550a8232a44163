"""Reading a generated module: its kernels, what they call and assign, its ladders."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Ladder = tuple[tuple[int | None, ...], ...]


def kernels_in(tree: ast.Module) -> list[ast.FunctionDef]:
    """The kernels of a module, without the arithmetic that they share."""
    return [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(one).startswith(("triton.jit", "gluon.jit")) for one in node.decorator_list)
        and not node.name.startswith("_")
    ]


def calls(tree: ast.AST, function: str) -> Iterator[ast.Call]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == function)


def names_in(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def words_in(tree: ast.AST) -> set[str]:
    """The parts of all identifiers: `dgamma_partial_ptr` has dgamma, partial and ptr, and gamma besides."""
    found = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)} | names_in(tree)
    parts = {part for name in found for part in name.split("_")}
    return parts | {part.removeprefix("d") for part in parts}


def address(call: ast.Call) -> str:
    return ast.unparse(call.args[0])


def values(tree: ast.AST, target: str) -> list[str]:
    """What is assigned to `target`, line by line."""
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    return [ast.unparse(node.value) for node in made if ast.unparse(node.targets[0]).strip("()") == target]


def ladders_in(tree: ast.Module) -> dict[str, Ladder]:
    """The launch parameters that a module holds, by name; where there is no ladder, one rung."""
    made = [node for node in tree.body if isinstance(node, ast.Assign)]
    found = {ast.unparse(node.targets[0]): node.value for node in made}
    ladders = ("_FORWARD_TILES", "_CHUNKS", "_FORWARD_SLABS", "_BACKWARD_TILES", "_BACKWARD_SLABS")
    return {name: ast.literal_eval(found[name]) for name in ladders if name in found} | {
        name: (ast.literal_eval(found[name]),) for name in ("_STATISTICS", "_PARTIALS_TILE") if name in found
    }
