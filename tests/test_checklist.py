"""The review checklist of a norm kernel, held against the source of every shipped spec and of random ones.

Each line is a test of its own, and `test_each_line_can_fail` breaks a module by a rule to see that the test notices.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import pytest
from mutation.mutants import mutants_of
from mutation.rules import RULES, Rule
from reading import address, calls, kernels_in, ladders_in, names_in, values, words_in
from test_matrix import KEYS, allowed, spec_of

from normgen.kernels import Kernel
from normgen.loader import load, read_table
from normgen.plan import Plan, plan
from normgen.render import render, solve
from normgen.spec import TunedSpec

ROOT = Path(__file__).resolve().parents[1]
STATISTICS = {"mean", "rstd"}


@dataclass(frozen=True)
class Source:
    """A module and its test as rendered, and the plan that they must keep."""

    plan: Plan
    solved: dict[str, Kernel]
    module: str
    test: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.module)

    @cached_property
    def kernels(self) -> list[tuple[Kernel, ast.FunctionDef]]:
        """Each kernel as the compiler has solved it and as it was written."""
        written = {function.name: function for function in kernels_in(self.tree)}
        assert written.keys() == self.solved.keys()
        return [(self.solved[name], function) for name, function in written.items()]


@lru_cache
def source_of(name: str) -> Source:
    path = f"specs/{name}.yaml"
    one = plan(load(SPECS[name], path, read_table(ROOT / path)))
    return Source(one, {kernel.name: kernel for kernel in solve(one).all}, *render(one, path).values())


def random_specs(count: int) -> dict[str, bytes]:
    """Specs of values drawn key by key, the same ones each time."""
    draw, found = random.Random(4), {}
    while len(found) < count:
        row = {key: draw.choice(options) for key, options in KEYS.items()}
        if allowed(row):
            found[f"random_{len(found)}"] = json.dumps(spec_of(row, f"random_{len(found)}")).encode()
    return found


SHIPPED = {path.stem: path.read_bytes() for path in sorted((ROOT / "specs").glob("*.yaml"))}
SPECS = SHIPPED | random_specs(26)
every = pytest.mark.parametrize("source", SPECS, indirect=True)


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Source:
    return source_of(request.param)


@every
def test_1_blocks(source: Source) -> None:
    """BLOCK_SIZE is a power of 2 and declared `tl.constexpr`."""
    for _, function in source.kernels:
        annotations = {argument.arg: argument.annotation for argument in function.args.args}
        assert ast.unparse(annotations["BLOCK_SIZE"] or ast.Constant(None)) == "tl.constexpr"
    ladders = ladders_in(source.tree)
    places = dict.fromkeys(ladders, slice(1, 2)) | {"_STATISTICS": slice(0, 1), "_PARTIALS_TILE": slice(0, 2)}
    sizes = {size for name, rungs in ladders.items() for rung in rungs for size in rung[places[name]]}
    assert sizes
    assert all(size is not None and size & (size - 1) == 0 for size in sizes)
    # No wider than the row needs. Of a slab by the widest element of the rows that are loaded: 2, 4 or 8 bytes.
    sizes_of_launches = {
        "min(columns, 1 << (H - 1).bit_length())",
        "min(columns * 2 // widest, 1 << (H - 1).bit_length())",
        "columns * most // BLOCK_N",  # both powers of two
    }
    assert set(values(source.tree, "BLOCK_SIZE")) <= sizes_of_launches
    launched = " ".join(ast.unparse(source.tree).split())
    for kernel, _ in source.kernels:
        if kernel.strategy == "slabs":
            rows = [tensor.api for tensor in kernel.strided]
            weights = tuple_of(tensor.api for tensor in kernel.loads if tensor.dims == "H")
            given = (tuple_of(f"{row}_rows" for row in rows), tuple_of(f"{row}_stride" for row in rows), weights)
            direction = "FORWARD" if "_forward" in kernel.name else "BACKWARD"
            assert f"_slab_launch({', '.join(given)}, N, H, _{direction}_SLABS, {len(kernel.words)})" in launched
            assert "widest = max([tensor.itemsize for tensor in rows + weights])" in launched
    if "_FORWARD_TILES" in ladders or "_BACKWARD_TILES" in ladders:  # rows a tile
        assert "return (1 << rows.bit_length() - 1, BLOCKS, BLOCK_SIZE, *launch)" in ast.unparse(source.tree)


def tuple_of(names: Iterable[str]) -> str:
    listed = list(names)
    return f"({', '.join(listed)}{',' * (len(listed) == 1)})"


@every
def test_2_casts(source: Source) -> None:
    """Input is cast to fp32 immediately after loading, before any arithmetic."""
    for kernel, function in source.kernels:
        if kernel.strategy == "sum_partials":  # what it loads was stored in the dtype of the computation
            continue
        casts = [node for node in ast.walk(function) if isinstance(node, ast.Call) and is_cast(node, "compute")]
        cast = [part for call in casts for part in branches(call.func.value)]  # type: ignore[attr-defined]
        widened = {ast.unparse(call.args[0]) for call in calls(function, "_widen")} | set(map(ast.unparse, cast))
        for call in calls(function, "tl.load"):
            # Statistics are kept in the dtype of the computation, and so are the sums of slabs.
            if call in cast or address(call) in ("mean_ptr + row", "rstd_ptr + row") or "sums_ptr" in address(call):
                continue
            # What is loaded early is cast where it is taken.
            held = [name for name, value in assigned(function) if call in ast.walk(value)]
            assert held, ast.unparse(call)
            for name in held:
                assert re.fullmatch(r"\w+_(raw|early|shared)", name), ast.unparse(call)
                kept = name.replace("_raw", "_blocks") + "[block]"
                assert widened & {name, f"{name}[block]", f"{name}.load(LAYOUT)", kept}
        # What comes to shared memory is cast where it is taken from there.
        taken = [
            ast.unparse(one)
            for one in ast.walk(function)
            if re.match(r"(?!tl)\w+\.(index\(.+\)\.)?load\(", ast.unparse(one))
        ]
        assert set(taken) <= widened
        # Nor is anything that is kept as it is in memory taken as it is.
        lines = [(name, ast.unparse(value)) for name, value in assigned(function)]
        packed = {name for name, value in lines if re.search(r"_raw,\)|element_ty\),\)", value)}
        assert not {value for _, value in lines} & {f"{name}[block]" for name in packed}
        assert not any(re.fullmatch(r"\w+_(raw|next|done)", value) for name, value in lines if kernel_value(name))
        first = function.args.args[0].arg
        definition = f"compute: tl.constexpr = tl.float64 if {first}.dtype.element_ty == tl.float64 else tl.float32"
        if kernel.strategy == "staged":  # which no float64 is given to
            definition = "compute: tl.constexpr = tl.float32"
        assert definition in ast.unparse(function)


def kernel_value(name: str) -> bool:
    """Whether a name is that of a number that is reckoned with; statistics have the dtype of the computation."""
    return not name.endswith(("_raw", "_next", "_done")) and name not in STATISTICS


def is_cast(call: ast.Call, dtype: str) -> bool:
    is_to = isinstance(call.func, ast.Attribute) and call.func.attr == "to"
    return is_to and [ast.unparse(argument) for argument in call.args] == [dtype]


def branches(value: ast.expr) -> list[ast.expr]:
    return [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]


def assigned(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """What is assigned to which name, line by line; `+=` is no other than `=`."""
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target), node.value


@every
def test_3_other(source: Source) -> None:
    """Out-of-bounds load uses `other=0.0` (not -inf), contributing 0 to mean and variance; of gamma it is 1."""
    for kernel, function in source.kernels:
        loads = list(calls(function, "tl.load"))
        assert loads or kernel.strategy == "staged"
        for call in loads:
            [other] = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "other"]
            assert other == ("1.0" if address(call).startswith("gamma_ptr") else "0.0")


@every
def test_4_denominator(source: Source) -> None:
    """Mean denominator is H (full row length), not count of valid elements."""
    for _, function in source.kernels:
        denominators = {ast.unparse(call.args[1]) for call in calls(function, "_divide") if "sum" in ast.unparse(call)}
        # Welford's merging of chunks counts the columns of each.
        assert denominators <= {"count"}
        quotients = [n for n in ast.walk(function) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
        assert {ast.unparse(quotient) for quotient in quotients} <= {"1.0 / H"}
        assert set(values(function, "count")) <= {"tl.full([1, 1], tl.minimum(H - start, BLOCK_SIZE), compute)"}
        for call in calls(function, "tl.sum"):
            assert not {"mask", "col_mask", "row_mask"} & names_in(call)


@every
def test_5_variance(source: Source) -> None:
    """Variance is computed in fp32 before taking sqrt."""
    for kernel, function in source.kernels:
        # The only other dtypes are those that the spec rounds to, and back at once, and of indices. What a program has
        # stored it may keep as it lies there.
        kept = [ast.unparse(value) for name, value in assigned(function) if name.endswith("_blocks")]
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "to":
                [dtype] = map(ast.unparse, call.args)
                if any(value.strip("(),") == ast.unparse(call).strip("(),") for value in kept):
                    continue
                assert dtype in ("compute", "tl.int64", "input_dtype", "output_dtype"), ast.unparse(call)
        for line in filter(None, map(str.strip, ast.unparse(function).splitlines())):
            for dtype in ("input_dtype", "output_dtype"):
                assert line.count(f".to({dtype})") == line.count(f".to({dtype}).to(compute)"), line
            if match := re.match(r"(\w*_(?:sum|lanes)|var|rstd) = ", line):
                assert ".to(" not in line, f"{match[1]} is rounded"
            if re.match(r"\w+_lanes = tl.zeros", line):
                assert line.endswith(", compute)")
        if "epsilon" in names_in(function):
            # Two passes correct the mean that they took the squares about; a merge of parts has the squares about it.
            spec = source.plan.spec
            merged = kernel.strategy in ("slabs", "staged") or (
                kernel.strategy == "chunked" and spec.strategy == "welford"
            )
            corrected = spec.norm == "layer" and not merged
            mean = "square_sum * (1.0 / H)"
            less = "tl.where(drift * drift < square_mean, square_mean - drift * drift, square_mean)"
            assert values(function, "var") == [less if corrected else mean]
            assert values(function, "square_mean") == [mean] * corrected


@every
def test_6_eps(source: Source) -> None:
    """Epsilon is placed inside the sqrt (PyTorch convention), or the alternative is explicitly documented."""
    placement = source.plan.spec.eps.placement
    rstd = {"inside_sqrt": "_divide(1.0, _sqrt(var + epsilon))", "outside_sqrt": "_divide(1.0, _sqrt(var) + epsilon)"}
    comments = {
        "inside_sqrt": "# eps inside the square root: the PyTorch convention.",
        "outside_sqrt": "# eps outside the square root: not the PyTorch convention.",
    }
    for _, function in source.kernels:
        if "epsilon" in names_in(function):
            assert values(function, "rstd") == [rstd[placement]]
    for one, comment in comments.items():
        assert source.module.count(comment) == (source.module.count(rstd[one]) if one == placement else 0)
    documented = " ".join((ast.get_docstring(source.tree) or "").split())
    inside = "eps stands inside the square root: the PyTorch convention."
    outside = "eps stands outside the square root: not the PyTorch convention."
    assert (inside if placement == "inside_sqrt" else outside) in documented


@every
def test_7_parameters(source: Source) -> None:
    """Gamma and beta loads use `col_offsets` only: no row offset added."""
    for _, function in source.kernels:
        loads = [call for call in calls(function, "tl.load") if re.match(r"(gamma|beta)_ptr", address(call))]
        assert bool(loads) <= (source.plan.spec.affine is not None)
        for call in loads:
            assert address(call) in ("gamma_ptr + col", "beta_ptr + col")
        assert set(values(function, "col")) == set()  # but from `_columns`, which knows no row
    [columns] = [node for node in source.tree.body if isinstance(node, ast.FunctionDef) and node.name == "_columns"]
    assert [ast.unparse(line) for line in columns.body] == [
        "col = start + tl.arange(0, BLOCK_SIZE)[None, :]",
        "if FULL:\n    col_mask = tl.full([1, BLOCK_SIZE], True, tl.int1)\nelse:\n    col_mask = col < H",
        "return (col, col_mask)",
    ]


@every
def test_8_masks(source: Source) -> None:
    """Output store applies the same boundary mask as the input load."""
    for kernel, function in source.kernels:
        stores = list(calls(function, "tl.store"))
        assert stores
        for call in [*calls(function, "tl.load"), *stores]:
            wanted = wanted_mask(address(call))
            if "sums_ptr" in address(call):  # of each slab of a row, in a lane; that of one slab is there
                wanted = "" if call in stores else "lane < SLABS"
            assert mask_of(call) == wanted, ast.unparse(call)
        assert set(values(function, "mask")) <= {"col_mask" if kernel.strategy == "staged" else "row_mask & col_mask"}
        assert set(values(function, "row_mask")) <= ROW_MASKS[kernel.strategy]
        assert not values(function, "col_mask")
        made = set(values(function, "col, col_mask"))
        assert made
        # The last argument says that all columns exist: of this block, or of all that begin at a multiple of its size.
        for columns in made:
            whole = "(block + 1) * BLOCK_SIZE <= H" if "block *" in columns else "H % BLOCK_SIZE == 0"
            starts = ("block * BLOCK_SIZE", "start", "slab * BLOCK_SIZE", "tl.program_id(0) * BLOCK_SIZE")
            wanted = [f"_columns({start}, BLOCK_SIZE, H, {whole})" for start in starts]
            assert columns in (
                wanted if kernel.strategy != "staged" else ["_slab_columns(slab, BLOCK_SIZE, H, LAYOUT)"]
            )


# Where a program has one row, it exists.
ROW_MASKS = {
    "tile": {"row < N"},
    "persistent": {"row < N"},
    "chunked": {"tl.full([BLOCK_N, 1], True, tl.int1)"},
    "packed": {"tl.full([BLOCK_N, 1], True, tl.int1)"},
    "slabs": {"tl.full([BLOCK_N, 1], True, tl.int1)"},
    "staged": set(),
    "sum_partials": set(),
}


def mask_of(call: ast.Call) -> str:
    """The mask of a load or store; of a number that several programs have, one of them stores it."""
    mask = "".join(ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "mask")
    for one in ("row_mask & col_mask", "(row < N) & col_mask"):
        mask = mask.replace(one, "mask")
    return "row_mask" if mask == "owner" else mask.removesuffix(" & owner")


def wanted_mask(where: str) -> str:
    """The mask that belongs to an address: of the row, of the column, or of both."""
    by_row, by_column = bool(re.search(r"_rows\b|\brow\b", where)), bool(re.search(r"\bcol\b", where))
    return {(True, True): "mask", (True, False): "row_mask", (False, True): "col_mask"}.get((by_row, by_column), "none")


@every
def test_9_strides(source: Source) -> None:
    """Row stride is passed as a kernel argument, not computed as H; what is stored is contiguous, and its stride H."""
    for kernel, function in source.kernels:
        arguments = {argument.arg for argument in function.args.args}
        strides = {tensor.pointer: tensor.stride for tensor in kernel.strided}
        assert set(strides.values()) <= arguments
        addressed = re.findall(r"(?!words|sums)\b(\w+_ptr) \+ row \* (\w+)", ast.unparse(function))
        assert {pointer for pointer, _ in addressed} >= strides.keys()
        assert {pointer for pointer, _ in addressed} >= {one.pointer for one in kernel.stores if one.dims == "NH"}
        assert all(factor == strides.get(pointer, "H") for pointer, factor in addressed)
        rows = values(function, "row")
        assert rows
        if kernel.strategy != "sum_partials":  # a few hundred rows
            assert all(".to(tl.int64)" in row for row in rows)


@every
def test_10_statistics(source: Source) -> None:
    """For training: mean and rstd are stored to separate output buffers indexed by row_idx."""
    saved = set(source.plan.spec.save)
    for kernel, function in source.kernels:
        stores = [call for call in calls(function, "tl.store") if re.match(r"(mean|rstd)_ptr", address(call))]
        stored = [(address(call), ast.unparse(call.args[1])) for call in stores]
        if "_forward" in kernel.name:
            assert sorted(stored) == sorted((f"{one}_ptr + row", one) for one in saved)
        else:
            assert set(stored) <= {(f"{one}_ptr + row", one) for one in STATISTICS}
            assert len(stored) == len(set(stored))
    for one in saved:
        [made] = {value for value in values(source.tree, one) if value.startswith("torch.empty")}
        assert made == "torch.empty(*rows, dtype=_unless_float64(x.dtype, torch.float32), device=x.device)"


@every
def test_11_rms(source: Source) -> None:
    """RMSNorm variant (if implemented) omits the mean subtraction step entirely."""
    layer = source.plan.spec.norm == "layer"
    functions = [function for _, function in source.kernels]
    assert bool({"mean", "shifted", "centered"} & set().union(*map(words_in, functions))) == layer
    statistics = [function for kernel, function in source.kernels if "square_sum" in names_in(function)]
    assert statistics
    if not layer:
        for function in functions:
            for name in ("x_hat", "y", "square_sum_lanes"):
                assert not any(re.search(r" - |tl\.sum\(", value) for value in values(function, name))


@every
def test_12_test(source: Source) -> None:
    """Correctness test compares against `torch.nn.LayerNorm` at both fp16 and fp32."""
    spec, tree = source.plan.spec, ast.parse(source.test)
    assert values(tree, "DTYPES") == [f"[{', '.join(f'torch.{dtype}' for dtype in spec.dtypes.input)}]"]
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert ("test_agrees_with_torch" in functions) == (spec.eps.placement == "inside_sqrt")  # torch has no other
    if "test_agrees_with_torch" in functions:
        test = functions["test_agrees_with_torch"]
        assert ast.unparse(test.decorator_list[0]) == "pytest.mark.parametrize('dtype', DTYPES)"
        assert "y, expected = (call(arguments)[0], torch_norm(arguments).double())" in ast.unparse(test)
        assert any(
            ast.unparse(one).startswith("assert_within(y, expected, bound_of(expected, y.dtype)") for one in test.body
        )
        norm = "torch.nn.functional." + ("layer_norm" if spec.norm == "layer" else "rms_norm")
        assert len(list(calls(functions["torch_norm"], norm))) == 1


@every
def test_13_claims(source: Source) -> None:
    """No performance claims without a benchmark comparison."""
    claim = (
        r"\b(fast|quick|slow|cheap)(er|est|ly)?\b|\b(speeds?|speedups?|performance|throughput|bandwidth|optimal|efficient)\b|"
        r"\b[GT]B/s\b|\b\d+ ?(x|%)(?= |$)"
    )
    for text in (source.module, source.test):
        assert not re.findall(claim, text, re.IGNORECASE)
    # What was chosen by measurement says where the measurements are.
    chosen = [line for line in source.module.splitlines() if re.search(r"\b(chosen|measured)\b", line)]
    if isinstance(source.plan.spec, TunedSpec):
        table = source.plan.spec.table
        assert f"# Tuned on {table.gpu}: {table.dtype}, {table.elements} elements." in source.module.splitlines()
    else:
        assert chosen
    assert all("see benchmarks/ of normgen" in line for line in chosen)
    assert list((ROOT / "benchmarks" / "results").rglob("*.json"))


@every
def test_what_is_stored_is_read_back_behind_a_barrier(source: Source) -> None:
    """A program's threads do not each read what they stored themselves: loads and stores have layouts of their own."""
    for kernel, function in source.kernels:
        if kernel.strategy == "slabs":  # what one launch stores, another reads
            continue
        barriers = [call.lineno for call in calls(function, "tl.debug_barrier")]
        pointers = {call: address(call).partition(" ")[0] for call in calls(function, "tl.load")}
        for store in calls(function, "tl.store"):
            again = [call.lineno for call, pointer in pointers.items() if pointer == address(store).partition(" ")[0]]
            assert all(any(store.lineno < barrier < line for barrier in barriers) for line in again)


KINDS = {rule.name: rule for rule in RULES}
BREAKS: list[tuple[Callable[[Source], None], str | Rule]] = [
    (test_1_blocks, Rule("BLOCK_SIZE is no constant", r"(?<=BLOCK_SIZE): tl\.constexpr", "")),
    (test_1_blocks, Rule("BLOCK_SIZE is the width", r"min\(columns, .+\)", "H", "_tile")),
    (test_2_casts, Rule("load not cast", r"(= tl\.load\(.+\))\.to\(compute\)", r"\1")),
    (test_2_casts, Rule("packed rows not cast", r"_widen\((.+?), compute, .+?\)", r"\1")),
    (test_3_other, "other is -inf"),
    (test_3_other, "other is 1 in place of 0"),
    (test_4_denominator, "BLOCK_SIZE in place of H"),
    (test_4_denominator, "lanes in place of H"),
    (test_4_denominator, "H - 1 in place of H"),
    (test_4_denominator, "lanes of a chunk in place of its columns"),
    (test_5_variance, "a running sum in fp16"),
    (test_5_variance, "squares in fp16"),
    (test_5_variance, "variance in fp16"),
    (test_5_variance, "rstd in the dtype of x"),
    (test_6_eps, "eps moved out of the root"),
    (test_6_eps, "eps moved into the root"),
    (test_6_eps, "eps left out"),
    (test_7_parameters, "row offset on the weight"),
    (test_7_parameters, "row offset on the weight, backward"),
    (test_7_parameters, "row offset on the bias"),
    (test_8_masks, "no mask on a load of rows"),
    (test_8_masks, "no mask on a load of a parameter"),
    (test_8_masks, "no mask on a load of a statistic"),
    (test_8_masks, "no mask on a store of rows"),
    (test_8_masks, "no mask on a store of a statistic"),
    (test_8_masks, "no mask on a store of sums"),
    (test_8_masks, "row mask lost"),
    (test_8_masks, "column mask lost"),
    (test_8_masks, "a column beyond the row stored"),
    *((test_9_strides, rule.name) for rule in RULES if re.fullmatch(r"stride of \w+ taken as H", rule.name)),
    (test_9_strides, "results stored with the stride of x"),
    (test_9_strides, "offsets of 32 bits"),
    (test_10_statistics, "1/rstd stored for rstd"),
    (test_10_statistics, "mean stored without its shift"),
    (test_10_statistics, "a row beyond the last stored"),
    (test_10_statistics, Rule("rstd stored for mean", r"(store\(mean_ptr \+ row), mean", r"\1, rstd")),
    (test_11_rms, "mean subtracted in an RMS norm"),
    (test_11_rms, "variance about the mean in an RMS norm"),
    (test_12_test, Rule("against itself", r"torch_norm\(arguments\)", "truth(arguments)[0]", "test_agrees_with_torch")),
    (
        test_12_test,
        Rule("against itself alone", r"y, expected = .+", "y = expected = call(arguments)[0]", "test_agrees_.+"),
    ),
    (test_12_test, Rule("nothing asserted", r"^assert_within\(.+", "pass", "test_agrees_with_torch")),
    (
        test_what_is_stored_is_read_back_behind_a_barrier,
        Rule("no barrier", r"tl\.debug_barrier\(\)", "pass", "forward_chunked"),
    ),
    (test_13_claims, Rule("a claim", r"# Results,", "# The fastest results,", "forward.*")),
]


@pytest.mark.parametrize(("check", "rule"), BREAKS, ids=lambda one: getattr(one, "__name__", getattr(one, "name", one)))
def test_each_line_can_fail(check: Callable[[Source], None], rule: str | Rule) -> None:
    """A module, or a test, that a rule has changed anywhere is not let through."""
    rule = KINDS[rule] if isinstance(rule, str) else rule
    seen = set()
    for name in SHIPPED:
        source = source_of(name)
        for field in ("module", "test"):
            text = getattr(source, field)
            for mutant in mutants_of(rule, name, text):
                if mutant.change not in seen:
                    seen.add(mutant.change)
                    changed = dataclasses.replace(source, **{field: mutant.applied_to(text)})
                    with pytest.raises(AssertionError):
                        check(changed)
    assert seen
