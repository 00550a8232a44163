"""What the source of a generated module must not hold: checks on the shipped ones and on specs unlike them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from normgen.loader import load
from normgen.plan import plan
from normgen.render import render

SOURCES = {path.stem: path.read_text() for path in (Path(__file__).parents[1] / "generated").glob("*.py")}
for index, keys in enumerate(
    (
        "norm: layer\naffine: {bias: true, weight_offset: -0.5, cast: cast_then_multiply}\nresidual: {dtype: float32}",
        "norm: layer\nresidual: {norm_of: unrounded_sum}\nsave: [mean]\nstrategy: welford",
        "norm: rms\naffine: {bias: true}\nresidual: {store_sum: false}\nhidden: 512\nstrategy: single_block",
        "norm: rms\naffine: none\nhidden: [24, 20000]\ngrad: false",
    )
):
    text = f"name: unlike_{index}\neps: {{value: 1e-5, placement: outside_sqrt}}\n{keys}\n"
    SOURCES[f"unlike_{index}"] = render(plan(load(text.encode(), "s.yaml")), "s.yaml")[f"unlike_{index}.py"]

# Arithmetic, loops, loads, stores and a barrier between them: nothing random, atomic or approximate, no hint; nor cdiv,
# whose sum is past 31 bits where the number of rows almost is.
LANGUAGE = {
    *("arange", "constexpr", "debug_barrier", "div_rn", "float32", "float64", "fma", "full", "int1", "int32", "int64"),
    *("load", "maximum", "minimum", "num_programs", "program_id", "range", "reshape", "split", "sqrt_rn"),
    *("static_range", "store", "sum", "where", "zeros"),
}
# Of Gluon: memory that programs share among their threads, and where each thread's part of a tensor lies.
GLUON = {"SliceLayout", "SwizzledSharedLayout", "allocate_shared_memory", "arange", "full", "num_warps"}
# Roots in fp64, and what NVIDIA's GPUs alone come to: the wait for a word.
ALONE = {
    "_sqrt": {"sqrt"},
    "_await": {"inline_asm_elementwise"},
    "_widen": {"inline_asm_elementwise", "bfloat16", "float16"},
}


@pytest.fixture(params=sorted(SOURCES))
def module(request: pytest.FixtureRequest) -> ast.Module:
    return ast.parse(SOURCES[request.param])


def kernels(module: ast.Module) -> list[ast.FunctionDef]:
    """All functions that Triton compiles."""
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    found = [one for one in functions if is_triton(one) or is_gluon(one)]
    assert {"_divide", "_sqrt", "_columns"} < {one.name for one in found}
    return found


def is_triton(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).startswith("triton.jit") for one in function.decorator_list)


def is_gluon(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).startswith("gluon.jit") for one in function.decorator_list)


def function(module: ast.Module, name: str) -> ast.FunctionDef:
    [found] = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found


def calls(tree: ast.AST, pattern: str) -> Iterator[ast.Call]:
    """Calls of what has a name that fits the pattern."""
    named = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return (node for node in named if re.fullmatch(pattern, ast.unparse(node.func)))


def test_kernels_keep_to_a_small_language(module: ast.Module) -> None:
    """Division and root, which are approximate in fp32 on a GPU, stand for fp64 in two functions alone.

    The reciprocal of a `constexpr` width is no such division: it is a number by the time that a kernel is compiled.
    """
    for kernel in kernels(module):
        attributes = [n for n in ast.walk(kernel) if isinstance(n, ast.Attribute)]
        used = {node.attr for node in attributes if ast.unparse(node.value) == "tl"}
        assert used <= LANGUAGE | ALONE.get(kernel.name, set()), kernel.name
        stated = {node.attr for node in attributes if ast.unparse(node.value) == "gl"}
        assert stated <= (GLUON if is_gluon(kernel) else set()), kernel.name
        assert {node.attr for node in attributes if ast.unparse(node.value) == "triton"} <= {"jit", "next_power_of_2"}
        divisions = [n for n in ast.walk(kernel) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
        if kernel.name == "_divide":
            allowed = {"numerator / denominator"}
        else:
            allowed = {f"1.0 / {one.arg}" for one in kernel.args.args if "tl.constexpr" in ast.unparse(one)}
        assert {ast.unparse(division) for division in divisions} <= allowed, kernel.name
    for kernel, exact, rough in ((0, "tl.div_rn(numerator, denominator)", "numerator / denominator"),
                                 (1, "tl.sqrt_rn(value)", "tl.sqrt(value)")):  # fmt: skip
        [condition] = [node for node in kernels(module)[kernel].body if isinstance(node, ast.If)]
        assert ast.unparse(condition.test).endswith(".dtype == tl.float64")
        assert ast.unparse(condition.body[0]).endswith(f" = {rough}")
        assert ast.unparse(condition.orelse[0]).endswith(f" = {exact}")


def test_kernels_read_no_globals(module: ast.Module) -> None:
    """Besides Triton and each other, which are plain functions of the module."""
    names = {kernel.name for kernel in kernels(module)}
    gluon = {"gl", "gluon", "async_copy", "_async_load", "_row_layout", "_lane_layout", "max", "range"}
    for kernel in kernels(module):
        inside = [node for part in kernel.body for node in ast.walk(part) if isinstance(node, ast.Name)]
        own = {node.id for node in inside if isinstance(node.ctx, ast.Store)} | {a.arg for a in kernel.args.args}
        known = names | {"tl", "triton"} | (gluon if is_gluon(kernel) else set())
        assert {node.id for node in inside} - own <= known, kernel.name


def test_arguments_are_what_they_are_declared(module: ast.Module) -> None:
    """None is a constant and yet not specialised, and none is given a new value in a loop."""
    for kernel in kernels(module):
        constants = {a.arg for a in kernel.args.args if a.annotation and ast.unparse(a.annotation) == "tl.constexpr"}
        for decorator in kernel.decorator_list:
            if isinstance(decorator, ast.Call):
                [keyword] = decorator.keywords
                assert keyword.arg == "do_not_specialize"
                assert not set(ast.literal_eval(keyword.value)) & constants
        loops = [node for node in ast.walk(kernel) if isinstance(node, (ast.For, ast.While))]
        stored = {
            n.id for loop in loops for n in ast.walk(loop) if isinstance(n, ast.Name) and type(n.ctx) is ast.Store
        }
        assert not stored & {a.arg for a in kernel.args.args}, kernel.name


def test_nothing_that_is_read_is_written(module: ast.Module) -> None:
    for kernel in kernels(module):
        written = {re.match(r"\w+", ast.unparse(call.args[0]))[0] for call in calls(kernel, r"tl\.store")}  # type: ignore[index]
        stems = {re.sub(r"_(ptr|rows)$", "", name) for name in written}
        assert not stems & {"x", "residual", "gamma", "beta", "dy", "dresidual_out"}, kernel.name


def test_rows_are_on_the_first_axis_of_a_grid(module: ast.Module) -> None:
    """The others end at 65535."""
    place = [argument.arg for argument in function(module, "_launch").args.args].index("grid")
    launched = [call for call in calls(module, "_launch") if isinstance(call.args[place], ast.Tuple)]
    assert launched
    for call in launched:
        second, third = map(ast.unparse, call.args[place].elts[1:])  # type: ignore[attr-defined]
        assert second in ("1", "SLABS")
        assert third == "1"


def test_hosts_name_no_device(module: ast.Module) -> None:
    """All that is allocated says where; and no kernel or number of one GPU is taken for another's."""
    strings = {
        node.value for node in ast.walk(module) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not {text for text in strings if re.fullmatch(r"(cuda|hip|cpu)(:\d+)?", text)} - {"cpu"}
    made = list(calls(module, r"torch\.(empty|zeros|ones|full|tensor|arange)"))
    assert made or list(calls(module, r"torch\.empty_like"))
    assert all("device" in {keyword.arg for keyword in call.keywords} for call in made)
    for cached in module.body:
        if isinstance(cached, ast.FunctionDef) and "functools.lru_cache" in map(ast.unparse, cached.decorator_list):
            read = re.search(r"torch\.cuda|_multiprocessors|_shared_memory|_threads|_waits", ast.unparse(cached))
            assert not read or "device" in [argument.arg for argument in cached.args.args], cached.name
    kinds = [node for node in ast.walk(function(module, "_launch")) if isinstance(node, ast.Assign)]
    kinds = [node for node in kinds if re.search(r"\bkind\b", ast.unparse(node.targets[0]))]
    assert re.search(r"\bdevice\b", ast.unparse(kinds[0].value))


def test_alignment_is_what_strides_have(module: ast.Module) -> None:
    """The one thing that the compiler is told of numbers it does not see, and it is true."""
    told = [line for line in ast.unparse(module).splitlines() if "ALIGNMENT" in line and "tl.constexpr" not in line]
    rules = [line.strip() for line in told if "=" in line and "stride = " not in line]
    assert rules == ["constants['ALIGNMENT'] = math.gcd(16, *strides)"]
    assert all(
        re.fullmatch(r"\s+(\w+_stride) = \1 // ALIGNMENT \* ALIGNMENT", one) for one in told if "stride = " in one
    )


def test_no_error_is_swallowed_and_nothing_is_tuned(module: ast.Module) -> None:
    assert not [node for node in ast.walk(module) if isinstance(node, ast.Try)]
    assert not {"autotune", "heuristics", "libdevice"} & set(re.findall(r"\w+", ast.unparse(module)))
