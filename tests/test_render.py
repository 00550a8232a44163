"""What is rendered: the contract of the templates, the review checklist of a kernel, and the same bytes everywhere."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from jinja2 import nodes

from normgen.equations import SCOPE, parse
from normgen.kernels import Kernel
from normgen.loader import load
from normgen.plan import Plan, plan
from normgen.render import environment, explain, explain_data, render, solve, stage_text, templates
from normgen.spec import RESERVED_NAMES
from normgen.stages.base import Stage
from normgen.target import LADDERS, WIDEST, Chunk, Ladders, Slab, Tile

ROOT = Path(__file__).resolve().parents[1]
PLANS = {path.stem: plan(load(path.read_bytes(), path.name)) for path in sorted((ROOT / "specs").glob("*.yaml"))}
EVERYTHING = """\
name: {name}
norm: layer
eps: {{value: {eps}}}
affine: {{bias: true, weight_offset: -0.3333333333333333, cast: cast_then_multiply}}
residual: {{dtype: float32}}
save: [mean, rstd]
"""
FORWARD_ONLY = "name: f\nnorm: rms\nhidden: 512\neps: {value: 1e-6, placement: outside_sqrt}\ngrad: false\n"

shipped = pytest.mark.parametrize("name", PLANS)


def plan_of(text: str) -> Plan:
    return plan(load(text.encode(), "spec.yaml"))


@lru_cache
def module_of(name: str) -> ast.Module:
    return ast.parse((ROOT / "generated" / f"{name}.py").read_text())


def kernels_in(tree: ast.Module) -> list[ast.FunctionDef]:
    """The kernels of a module, without the arithmetic that they share."""
    return [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(one).startswith("triton.jit") for one in node.decorator_list)
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


# The contract of templates.


def test_stages_and_their_templates() -> None:
    files = {path.stem for path in (templates() / "stages").glob("*.jinja")}
    assert files == {stage.template for stage in Stage.__subclasses__()}
    for name in files:
        macros = set(environment().get_template(f"stages/{name}.jinja").module.__dict__) - {"_body_stream", "__name__"}
        assert (
            {"forward", "backward", "reference"} <= macros <= {"forward", "backward", "reference", "chunked", "slabs"}
        ), name


def test_strategies_decide_nothing() -> None:
    """What a strategy asks is about memory and loops: what kind of step it has, what a tensor extends over."""
    files = sorted((templates() / "strategies").glob("*.jinja"))
    used = {kernel.strategy for one in PLANS.values() for kernel in solve(one).all}
    assert {path.stem for path in files} == used
    for path in files:
        tree = environment().parse(path.read_text())
        macros = [macro.name for macro in tree.find_all(nodes.Macro)]
        assert macros[0] == "kernel", path.name
        filters = [loop.test for loop in tree.find_all(nodes.For) if loop.test]
        tests = [condition.test for condition in tree.find_all((nodes.If, nodes.CondExpr))]
        names = {name.name for test in tests + filters for name in test.find_all(nodes.Name)}
        assert names <= {"kernel", "first", "loop", "step", "tensor", "lines", "index", "words", *macros}, path.name
        asked = {one.attr for test in tests + filters for one in test.find_all(nodes.Getattr)}
        of_kernel = {"words", "sums", "loads", "lines", "stores", "posted", "carried", "held", "read_again", "at_once"}
        of_step = {"kind", "tensor", "dims", "role", "first", "before", "mentions", "hoisted"}
        assert asked <= of_kernel | of_step, path.name
        constants = {one.value for test in tests + filters for one in test.find_all(nodes.Const)}
        kinds = {"Load", "Store", "Accumulate", "Take", "word", "NH", "N", "H", "dims", "equalto", "share", 1}
        assert constants <= kinds, path.name


@pytest.mark.parametrize("stage", Stage.__subclasses__())
def test_stages_hold_no_memory(stage: type[Stage]) -> None:
    text = (templates() / "stages" / f"{stage.template}.jinja").read_text()
    assert not re.findall(r"tl\.(?:load|store|atomic\w*|program_id)|_ptr|\w+_stride|mask=", text)


@shipped
def test_equations_name_nothing_foreign(name: str) -> None:
    for stage, taken, left in PLANS[name].stages:
        forward = parse(stage_text(stage, "forward", taken, left))
        backward = parse(stage_text(stage, "backward", taken, left))
        shared = {taken, left, *(tensor.value for tensor in stage.tensors())}
        own = {equation.target for equation in forward}
        assert left in own
        assert {use for equation in forward for use in equation.uses} <= shared | own
        shared |= own | {f"d{value}" for value in shared} | {equation.target for equation in backward}
        assert {use for equation in backward for use in equation.uses} <= shared
        assert f"d{taken}" in {equation.target for equation in backward}
        assert not shared & SCOPE


# What a spec does not ask for is absent.


@shipped
def test_absent_features_leave_no_trace(name: str) -> None:
    spec = PLANS[name].spec
    text = (ROOT / "generated" / f"{name}.py").read_text().replace(name, "").lower()
    words = set().union(*map(words_in, kernels_in(module_of(name))))
    absent: set[str] = set()
    if spec.residual is None:
        assert "residual" not in text
        absent |= {"residual", "summed"}
    if spec.affine is None or not spec.affine.bias:
        assert not re.search(r"\bd?bias\b|: shift,", text)
        absent |= {"beta"}
    if spec.affine is None:
        assert not re.search(r"\bd?weight\b", text)
        absent |= {"gamma", "partial", "gain", "scaled"}
    if spec.norm == "rms":
        absent |= {"mean", "shift", "shifted", "centered"}
    if not spec.save:
        assert "return_statistics" not in text
    assert not words & absent
    # What is there does leave its words, so that the absence above means something.
    assert {"rstd", "x"} <= words
    assert ("mean" in words) == (spec.norm == "layer")
    assert ("residual" in words) == (spec.residual is not None)


def test_forward_only() -> None:
    text = render(plan_of(FORWARD_ONLY), "f.yaml")["f.py"]
    [kernel] = kernels_in(ast.parse(text))
    assert kernel.name == "f_forward"
    assert not {"dy", "dx", "dgamma"} & words_in(kernel)
    assert "once_differentiable" not in text
    assert "H: tl.constexpr" in text
    assert "f_backward" not in text


# Compile-time arguments: sizes, and which half of an exchange a launch does.
SIZES = {"BLOCK_N", "BLOCKS", "BLOCK_SIZE", "STAGES", "SLABS", "ALIGNMENT", "H"}
HALVES = {"POST", "FINISH"}


@shipped
def test_compile_time_arguments_are_no_flags(name: str) -> None:
    for kernel in kernels_in(module_of(name)):
        constants = {a.arg for a in kernel.args.args if a.annotation and ast.unparse(a.annotation) == "tl.constexpr"}
        assert "BLOCK_SIZE" in constants
        assert "BLOCK_N" in constants or "BLOCK_N: tl.constexpr = 1" in ast.unparse(kernel)
        halves = HALVES if kernel.name.endswith("_slabs") else set()
        assert halves <= constants <= SIZES | halves | {"input_dtype", "output_dtype"}
        conditions = {ast.unparse(node.test) for node in ast.walk(kernel) if isinstance(node, ast.If)}
        conditions -= halves | ({"tile < N", "tile >= program + programs"} if halves else set())
        assert all(re.fullmatch(r"(d\w+|mean|rstd)_ptr is not None", condition) for condition in conditions)
        assert not any(isinstance(node, ast.While) for node in ast.walk(kernel))


# The review checklist of a kernel.


def address(call: ast.Call) -> str:
    return ast.unparse(call.args[0])


def mask_of(call: ast.Call) -> str:
    """The mask of a load or store; of a number that several programs have, one of them stores it."""
    [mask] = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "mask"]
    return mask.replace("(row < N) & col_mask", "mask").removesuffix(" & owner")


def wanted_mask(where: str) -> str:
    """The mask that belongs to an address: of the row, of the column, or of both."""
    by_row, by_column = bool(re.search(r"_rows\b|\brow\b", where)), bool(re.search(r"\bcol\b", where))
    return {(True, True): "mask", (True, False): "row_mask", (False, True): "col_mask"}[by_row, by_column]


@shipped
def test_loads_and_stores_are_masked(name: str) -> None:
    for kernel in kernels_in(module_of(name)):
        loads, stores = list(calls(kernel, "tl.load")), list(calls(kernel, "tl.store"))
        assert loads
        assert stores
        for call in loads + stores:
            assert mask_of(call) == wanted_mask(address(call)), ast.unparse(call)
        for load_ in loads:
            [other] = [ast.unparse(keyword.value) for keyword in load_.keywords if keyword.arg == "other"]
            assert other == ("1.0" if address(load_).startswith("gamma_ptr") else "0.0")
        made = {target: set(values(kernel, target)) for target in ("mask", "row_mask", "col, col_mask")}
        assert made["mask"] <= {"row_mask & col_mask"}
        assert made["row_mask"] <= ROW_MASKS[strategy_of(name, kernel)]
        assert made["col, col_mask"]
        # The last argument says that all columns exist: of this block, or of all that begin at a multiple of its size.
        for columns in made["col, col_mask"]:
            whole = "(block + 1) * BLOCK_SIZE <= H" if "block *" in columns else "H % BLOCK_SIZE == 0"
            starts = ("block * BLOCK_SIZE", "start", "slab * BLOCK_SIZE", "tl.program_id(0) * BLOCK_SIZE")
            assert columns in [f"_columns({start}, BLOCK_SIZE, H, {whole})" for start in starts]
        assert not values(kernel, "col_mask")
        assert not values(kernel, "col")


# Chunks have a program for each row, which therefore exists.
ROW_MASKS = {
    "tile": {"row < N"},
    "persistent": {"row < N"},
    "chunked": {"tl.full([BLOCK_N, 1], True, tl.int1)"},
    "slabs": {"row < N"},
    "sum_partials": set(),
}


def strategy_of(name: str, function: ast.FunctionDef) -> str:
    return next(kernel.strategy for kernel in solve(PLANS[name]).all if kernel.name == function.name)


def values(kernel: ast.FunctionDef, target: str) -> list[str]:
    """What is assigned to `target`, line by line."""
    made = [node for node in ast.walk(kernel) if isinstance(node, ast.Assign)]
    return [ast.unparse(node.value) for node in made if ast.unparse(node.targets[0]).strip("()") == target]


@shipped
def test_columns_beyond_a_row_are_masked(name: str) -> None:
    [columns] = [n for n in module_of(name).body if isinstance(n, ast.FunctionDef) and n.name == "_columns"]
    assert [ast.unparse(line) for line in columns.body] == [
        "col = start + tl.arange(0, BLOCK_SIZE)[None, :]",
        "if FULL:\n    col_mask = tl.full([1, BLOCK_SIZE], True, tl.int1)\nelse:\n    col_mask = col < H",
        "return (col, col_mask)",
    ]


@shipped
def test_loads_are_cast_at_once(name: str) -> None:
    """Before anything is computed: a slab carries raw values from row to row, and casts them where it takes them."""
    for kernel in kernels_in(module_of(name)):
        if strategy_of(name, kernel) == "sum_partials":  # what it loads was stored in the dtype of the computation
            continue
        cast = {ast.unparse(call.func.value) for call in ast.walk(kernel) if cast_to_compute(call)}
        made = [node for node in ast.walk(kernel) if isinstance(node, ast.Assign)]
        for target, call in ((ast.unparse(node.targets[0]), call) for node in made for call in calls(node, "tl.load")):
            text = ast.unparse(call)
            # Statistics are kept in the dtype of the computation.
            if text in cast or address(call) in ("mean_ptr + row", "rstd_ptr + row"):
                continue
            assert re.fullmatch(r"\w+_(loaded|raw|next)", target), text
            assert target in cast, text
        first = ast.unparse(kernel.args.args[0]).removesuffix(": tl.constexpr")
        definition = f"compute: tl.constexpr = tl.float64 if {first}.dtype.element_ty == tl.float64 else tl.float32"
        assert definition in ast.unparse(kernel)


def cast_to_compute(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "to"
        and [ast.unparse(argument) for argument in node.args] == ["compute"]
    )


@shipped
def test_addresses(name: str) -> None:
    """Parameters are addressed by column alone; a row is a 64-bit number times a stride that is an argument.

    What is stored is contiguous: its stride is H.
    """
    solved = {kernel.name: kernel for kernel in solve(PLANS[name]).all}
    assert solved.keys() == {kernel.name for kernel in kernels_in(module_of(name))}
    for kernel in kernels_in(module_of(name)):
        plan_of_it = solved[kernel.name]
        arguments = {argument.arg for argument in kernel.args.args}
        for call in (*calls(kernel, "tl.load"), *calls(kernel, "tl.store")):
            if re.match(r"(gamma|beta)_ptr", address(call)):
                assert address(call) in ("gamma_ptr + col", "beta_ptr + col")
        sums = {ast.unparse(n) for n in ast.walk(kernel) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add)}
        for tensor in plan_of_it.strided:
            assert f"{tensor.pointer} + row * {tensor.stride}" in sums
            assert tensor.stride in arguments
        for tensor in plan_of_it.stores:
            if tensor.dims == "NH":
                assert f"{tensor.pointer} + row * H" in sums
        products = [ast.unparse(n) for n in ast.walk(kernel) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]
        strides = {product.removeprefix("row * ") for product in products if product.startswith("row * ")}
        words = {str(len(plan_of_it.words)), f"{len(plan_of_it.words)} * SLABS", "SLABS"} if plan_of_it.words else set()
        assert strides
        assert strides <= {tensor.stride for tensor in plan_of_it.strided} | {"H"} | words
        rows = values(kernel, "row")
        assert rows
        if plan_of_it.strategy != "sum_partials":  # a few hundred rows
            assert all(".to(tl.int64)" in row for row in rows)


def ladders_of(name: str) -> dict[str, tuple[tuple[int | None, ...], ...]]:
    """The launch parameters that a module holds, by name."""
    made = [node for node in module_of(name).body if isinstance(node, ast.Assign)]
    found = {ast.unparse(node.targets[0]): node.value for node in made}
    ladders = ("_FORWARD_TILES", "_CHUNKS", "_FORWARD_SLABS", "_BACKWARD_TILES", "_BACKWARD_SLABS")
    return {name: ast.literal_eval(found[name]) for name in ladders if name in found} | {
        name: (ast.literal_eval(found[name]),) for name in ("_STATISTICS", "_COLUMNS") if name in found
    }


@shipped
def test_blocks_are_powers_of_two(name: str) -> None:
    ladders = ladders_of(name)
    sizes = {
        rung[1] for ladder, rungs in ladders.items() if ladder not in ("_STATISTICS", "_COLUMNS") for rung in rungs
    }
    sizes |= {rung[0] for rung in ladders.get("_STATISTICS", ())}
    sizes |= {size for rung in ladders.get("_COLUMNS", ()) for size in rung[:2]}
    assert sizes
    assert all(size is not None and size & (size - 1) == 0 for size in sizes)
    text = ast.unparse(module_of(name))
    found = set(re.findall(r"^ *BLOCK_SIZE = (.+)$", text, re.MULTILINE))
    wanted = {"min(columns * 2 // itemsize, 1 << (H - 1).bit_length())"} if "_slabs(" in text else set()
    assert found == wanted | (
        {"min(columns, 1 << (H - 1).bit_length())"} if "_tile(" in text or "_CHUNKS" in text else set()
    )
    # Of slabs, by the widest element of the rows that the kernel loads: dtypes have 2, 4 or 8 bytes.
    for kernel in kernels_in(module_of(name)):
        if kernel.name.endswith("_slabs"):
            loaded = [arg.arg.removesuffix("_stride") for arg in kernel.args.args if arg.arg.endswith("_stride")]
            items = ", ".join(f"{row}.itemsize" for row in loaded)
            itemsize = f"max({items})" if len(loaded) > 1 else items
            ladder = f"_{'FORWARD' if 'forward' in kernel.name else 'BACKWARD'}_SLABS"
            assert f"N, H, {ladder}, {itemsize}, " in text
    if "_FORWARD_TILES" in ladders:
        assert "return (1 << rows.bit_length() - 1, BLOCKS, BLOCK_SIZE, *launch)" in text


@shipped
def test_ladders_lead_upwards(name: str) -> None:
    for ladder, rungs in ladders_of(name).items():
        if ladder in ("_STATISTICS", "_COLUMNS"):
            continue
        widest = [rung[0] for rung in rungs]
        assert None not in widest[:-1]
        assert widest[:-1] == sorted(set(widest[:-1]))
        assert widest[-1] is None or widest == sorted(set(widest))


@shipped
def test_every_width_is_served(name: str) -> None:
    """The ladders have no gap: whole rows to some width, and from there on chunks and slabs, or a refusal."""
    one, ladders = PLANS[name], ladders_of(name)
    directions = [("_FORWARD_TILES", "_CHUNKS", "_FORWARD_SLABS"), ("_BACKWARD_TILES", "_BACKWARD_SLABS")]
    for names in directions[: 2 if one.backward else 1]:
        widest = [rung[0] for ladder in names for rung in ladders.get(ladder, ())]
        limit = max(one.spec.widths) if one.spec.widths else one.width_limit
        assert widest[-1] is None if limit is None else max(w for w in widest if w) >= limit


@shipped
def test_statistics(name: str) -> None:
    spec = PLANS[name].spec
    placed = {"inside_sqrt": "_sqrt(var + epsilon)", "outside_sqrt": "_sqrt(var) + epsilon"}
    comments = {
        "inside_sqrt": "# eps inside the square root: the PyTorch convention.",
        "outside_sqrt": "# eps outside the square root: not the PyTorch convention.",
    }
    text = (ROOT / "generated" / f"{name}.py").read_text()
    for placement in placed:
        assert (placed[placement] in text) == (placement == spec.eps.placement)
        assert (comments[placement] in text) == (placement == spec.eps.placement)
    for kernel in kernels_in(module_of(name)):
        source = ast.unparse(kernel)
        if "width" in names_in(kernel):  # every mean is over H, however many lanes there are
            assert f"width = tl.full({'[]' if kernel.name.endswith('_slabs') else '[1, 1]'}, H, compute)" in source
        for call in calls(kernel, "tl.sum"):
            assert not {"mask", "col_mask", "row_mask"} & names_in(call)
        stored = {address(call): ast.unparse(call.args[1]) for call in calls(kernel, "tl.store")}
        if "_forward" in kernel.name:
            assert {f"{one}_ptr + row": one for one in spec.save}.items() <= stored.items()
            assert ("mean_ptr + row" in stored) == ("mean" in spec.save)


# The same bytes everywhere, of a kind that ruff leaves alone.


@pytest.mark.parametrize(
    "environ",
    [
        {"PYTHONHASHSEED": "1", "TZ": "Asia/Kathmandu", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONHASHSEED": "4242", "TZ": "America/St_Johns", "LC_ALL": "C.UTF-8", "COLUMNS": "40"},
    ],
)
def test_committed_files_come_out_of_any_environment(environ: dict[str, str], tmp_path: Path) -> None:
    specs = [str(path) for path in sorted((ROOT / "specs").glob("*.yaml"))]
    build(*specs, "--out", "out", cwd=tmp_path, environ=environ)
    for made in ("*.py", "tests/*.py"):
        committed = {path.name: path.read_bytes() for path in (ROOT / "generated").glob(made)}
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob(made)} == committed
        assert len(committed) >= len(specs)


def build(*arguments: str, cwd: Path, environ: dict[str, str] | None = None) -> None:
    """`normgen build` in a process of its own, which fails if that imports torch or triton."""
    script = (
        "import sys\nfrom normgen.cli import main\ncode = main(sys.argv[1:])\n"
        "assert not {'torch', 'triton'} & set(sys.modules)\nsys.exit(code)"
    )
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | (environ or {})
    subprocess.run(
        [sys.executable, "-c", script, "build", *arguments], cwd=cwd, env=variables, check=True, capture_output=True
    )


def test_build_is_quick(tmp_path: Path) -> None:
    """Half a second of processor time for one spec, the start of Python included; the best of three.

    The first may find no compiled templates, and compiles them.
    """
    (tmp_path / "s.yaml").write_text(EVERYTHING.format(name="s", eps=1e-5))
    environ = {"PYTHONDONTWRITEBYTECODE": ""}
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        build("s.yaml", cwd=tmp_path, environ=environ)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert (tmp_path / "generated" / "s.py").exists()
    assert min(times) < 0.5


@shipped
def test_generated_files_stand_alone(name: str) -> None:
    for path in (ROOT / "generated" / f"{name}.py", ROOT / "generated" / "tests" / f"test_{name}.py"):
        text = path.read_text()
        imported = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                imported.add(str(node.module).split(".")[0])
        assert {"torch", "triton"} <= imported
        ours = {"torch", "triton"} | ({"pytest"} if path.parent.name == "tests" else set())
        assert imported - ours <= sys.stdlib_module_names
        assert not re.search(r"\b(19|20)\d\d-\d\d-\d\d\b|\b\d\d:\d\d:\d\d\b", text)
        assert not re.search(r"(?<![\w.)])/\w+/|[A-Z]:\\", text)
        assert str(ROOT) not in text


@pytest.mark.parametrize("eps", ["1e-6", "1.1920928955078125e-07", "0.30000000000000004", "1", "2.5e30"])
def test_eps_is_exact(eps: str) -> None:
    module, test = render(plan_of(EVERYTHING.format(name="s", eps=eps)), "s.yaml").values()
    defaults = [
        ast.literal_eval(default)
        for function in ast.walk(ast.parse(module))
        if isinstance(function, ast.FunctionDef)
        for argument, default in zip(reversed(function.args.args), reversed(function.args.defaults), strict=False)
        if argument.arg == "eps"
    ]
    # The function, the class, the reference, and the operator's own three.
    assert defaults == [float(eps)] * 6
    assert f"float eps={float(eps)!r})" in module.replace('"\n        "', "")
    assert f"eps={float(eps)!r}):" in test


def test_names_as_long_as_can_be(tmp_path: Path) -> None:
    """No line past the limit, and none that ruff would write otherwise."""
    (tmp_path / "tests").mkdir()
    for name in ("n" * 48, "_".join("n" * 24) + "n"):
        for path, text in render(plan_of(EVERYTHING.format(name=name, eps=1.1920928955078125e-07)), "s.yaml").items():
            (tmp_path / path).write_text(text)
    assert len(list(tmp_path.rglob("*.py"))) == 4
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path)]
    for command in (["check"], ["format", "--check"]):
        run = subprocess.run([sys.executable, "-m", "ruff", *command, *config], capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr


def test_reserved_names_are_those_that_would_be_shadowed() -> None:
    tree = ast.parse(render(plan_of(EVERYTHING.format(name="s", eps=1)), "s.yaml")["s.py"])
    taken = {"reference"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            taken |= {(alias.asname or alias.name).lower() for alias in node.names}
        if isinstance(node, ast.ClassDef) and node.name == "S":
            [forward] = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "forward"]
            taken |= {argument.arg for argument in forward.args.args} - {"self"}
    assert {"torch", "x", "residual", "tensor"} <= taken <= RESERVED_NAMES


# Explanations.


@pytest.fixture
def few_rungs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ladders of their own, so that what is said of them is the same after the next search for better ones."""
    tiles = [
        Tile(widest=256, columns=256, elements=1024, warps=1, programs=1),
        Tile(widest=2048, columns=2048, elements=2048, warps=2, programs=1),
    ]
    chunks = [
        Chunk(widest=16384, columns=4096, warps=16),
        Chunk(widest=65536, columns=4096, warps=32),
    ]
    slabs = [Slab(widest=WIDEST, columns=4096, warps=4, programs=2)]
    ladders = Ladders(forward=tiles, chunks=chunks, forward_slabs=slabs, backward=tiles, backward_slabs=slabs)
    monkeypatch.setattr("normgen.spec.LADDERS", dict.fromkeys(LADDERS, ladders))


@pytest.mark.usefixtures("few_rungs")
def test_explain_forward_only() -> None:
    assert (
        explain(plan_of(FORWARD_ONLY))
        == """\
f: RMSNorm over the last axis, forward only.

  x_hat = x / (sqrt(mean(x^2)) + eps)
  y = x_hat * weight
  eps stands outside the square root, 1 / (sqrt(var) + eps): not the PyTorch convention.

tensors
  x             input      (..., H)    that of x
  weight        parameter  (H,)        same or float32
  y             output     (..., H)    that of x

kernels
  f_forward: Results, a tile of whole rows a program.

why
  - forward: to H = 2048, whole rows in registers, in tiles of 2048 elements
  - grad: false, so there is no backward pass

instead
  No torch.nn module computes this in one pass. torch.compile can fuse the plain formula; generate this one where the \
rounding points must be exactly these, in eager mode and in a graph."""
    )


CHUNKED = """\
name: c
norm: layer
eps: {value: 1e-5}
affine: {bias: true, weight_offset: 1.0, cast: cast_then_multiply}
residual: {norm_of: unrounded_sum}
save: [mean]
dtypes: {weight: [same, bfloat16, float32], output: bfloat16}
strategy: welford
"""


@pytest.mark.usefixtures("few_rungs")
def test_explain_chunked() -> None:
    assert (
        explain(plan_of(CHUNKED))
        == """\
c: LayerNorm of x + residual over the last axis, forward and backward.

  summed = x + residual
  x_hat = (summed - mean(summed)) / sqrt(var(summed) + eps)
  y = round(x_hat) * (weight + 1) + bias
  eps stands inside the square root, 1 / sqrt(var + eps): the PyTorch convention.

tensors
  x             input      (..., H)    that of x
  residual      input      (..., H)    that of x
  weight        parameter  (H,)        same or bfloat16 or float32
  bias          parameter  (H,)        same or bfloat16 or float32
  y             output     (..., H)    bfloat16
  residual_out  output     (..., H)    that of x
  mean          statistic  (...)       float32

kernels
  c_forward_chunked: Results, each row in chunks.
  c_statistics: Row statistics that forward did not save.
  c_backward_slabs: Gradients, a slab of columns a program; those that share a row exchange their sums.
  c_sum_partials: Second step of the sums over rows.

why
  - forward: no whole rows at any width, as strategy: welford asks
  - forward: all rows, chunks read again from the cache
  - backward: no whole rows at any width, as strategy: welford asks
  - backward: all rows, a row is shared by programs of 4096 columns each
  - backward reads x and residual again: the sum that was normalised is not stored as such
  - backward computes rstd again: not in save

instead
  No torch.nn module computes this in one pass. torch.compile can fuse the plain formula; generate this one where the \
rounding points must be exactly these, in eager mode and in a graph."""
    )


def test_explain_ways_and_not_rungs() -> None:
    """Rungs that differ in size only are one line, with the widest row of the last."""
    one = plan_of("name: r\nnorm: rms\neps: {value: 1e-5}\n")
    ladders = one.spec.ladders
    sizes = [tile.elements for tile in ladders.forward]
    assert len(sizes) > 1 and len(ladders.chunks) > 1 and ladders.forward_slabs
    size = f"{min(sizes)} to {max(sizes)} elements"
    assert [reason for reason in one.reasons if reason.startswith("forward")] == [
        f"forward: to H = {ladders.forward[-1].widest}, whole rows in registers, in tiles of {size}",
        f"forward: to H = {ladders.chunks[-1].widest}, chunks read again from the cache",
        f"forward: wider rows, a row is shared by programs of {ladders.forward_slabs[-1].columns} columns each",
    ]


@shipped
def test_explain_data(name: str) -> None:
    data = explain_data(PLANS[name])
    assert json.loads(json.dumps(data)) == data
    text = explain(PLANS[name])
    kernels: list[Kernel] = list(solve(PLANS[name]).all)
    assert data["kernels"] == [{"name": kernel.name, "doc": kernel.doc} for kernel in kernels]
    assert all(str(part) in text for key in ("formula", "reasons") for part in data[key])  # type: ignore[attr-defined]
    assert str(data["alternative"]) in text
