"""What is rendered: the contract of the templates, ladders, explanations, and the same bytes everywhere."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
from jinja2 import nodes
from reading import kernels_in, ladders_in, words_in

from normgen.equations import SCOPE, parse
from normgen.kernels import Kernel
from normgen.loader import load, load_at
from normgen.modules import imported
from normgen.plan import Plan, plan
from normgen.render import environment, explain, explain_data, formula, render, solve, stage_text, templates
from normgen.spec import RESERVED_NAMES
from normgen.stages.base import Stage
from normgen.target import LADDERS, WIDEST, Chunk, Ladders, Slab, Tile

ROOT = Path(__file__).resolve().parents[1]
PLANS = {path.stem: plan(load_at(path)) for path in sorted((ROOT / "specs").glob("*.yaml"))}
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
        known = {"loop", "step", "tensor", "lines", "loaded", "pair", "pairs"}
        assert names <= known | {*macros}, path.name
        asked = {one.attr for test in tests + filters for one in test.find_all(nodes.Getattr)}
        of_kernel = {"words", "sums", "lines", "optional", "mentions", "hoisted"}
        of_step = {"kind", "tensor", "dims", "role", "first"}
        assert asked <= of_kernel | of_step, path.name
        constants = {one.value for test in tests + filters for one in test.find_all(nodes.Const)}
        kinds = {"Load", "Store", "Accumulate", "Take", "word", "now", "NH", "N", "H", "epsilon"}
        assert constants <= kinds | {1, 2}, path.name


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
HALVES = {"POST"}
STEPS = {"row < N", "tile < N", "done >= 0"}  # which of the rows in work exist


@shipped
def test_compile_time_arguments_are_no_flags(name: str) -> None:
    for kernel in kernels_in(module_of(name)):
        constants = {a.arg for a in kernel.args.args if a.annotation and ast.unparse(a.annotation) == "tl.constexpr"}
        assert "BLOCK_SIZE" in constants
        staged = kernel.name.endswith("_staged")
        assert staged or "BLOCK_N" in constants or "BLOCK_N: tl.constexpr = 1" in ast.unparse(kernel)
        halves = HALVES if kernel.name.endswith("_slabs") else set()
        few = {"EARLY"} if kernel.name.endswith("_forward") else set()  # how weights of few rows come
        # Whether NVIDIA's instructions are there: for Gluon's copies, they are.
        widened = {"PTX"} if "_widen(" in ast.unparse(kernel) and not staged else set()
        assert halves | widened <= constants <= SIZES | halves | few | widened | {"input_dtype", "output_dtype"}
        conditions = {ast.unparse(node.test) for node in ast.walk(kernel) if isinstance(node, ast.If)}
        conditions -= halves | {f"not {half}" for half in halves} | few | (STEPS if staged else set())
        assert all(re.fullmatch(r"(d\w+|mean|rstd)_ptr is not None", condition) for condition in conditions)
        assert not any(isinstance(node, ast.While) for node in ast.walk(kernel))


# Ladders.


@shipped
def test_ladders_lead_upwards(name: str) -> None:
    for ladder, rungs in ladders_in(module_of(name)).items():
        if ladder in ("_STATISTICS", "_PARTIALS_TILE"):
            continue
        widest = [rung[0] for rung in rungs]
        assert None not in widest[:-1]
        assert widest[:-1] == sorted(set(widest[:-1]))
        assert widest[-1] is None or widest == sorted(set(widest))


@shipped
def test_every_width_is_served(name: str) -> None:
    """The ladders have no gap: whole rows to some width, and from there on chunks and slabs, or a refusal."""
    one, ladders = PLANS[name], ladders_in(module_of(name))
    directions = [("_FORWARD_TILES", "_CHUNKS", "_FORWARD_SLABS"), ("_BACKWARD_TILES", "_BACKWARD_SLABS")]
    for names in directions[: 2 if one.backward else 1]:
        widest = [rung[0] for ladder in names for rung in ladders.get(ladder, ())]
        limit = max(one.spec.widths) if one.spec.widths else one.width_limit
        assert widest[-1] is None if limit is None else max(w for w in widest if w) >= limit


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
        "import sys\nfrom normgen.__main__ import main\ncode = main()\n"
        "assert not {'torch', 'triton'} & set(sys.modules)\nsys.exit(code)"
    )
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | (environ or {})
    subprocess.run(
        [sys.executable, "-c", script, "build", *arguments], cwd=cwd, env=variables, check=True, capture_output=True
    )


def test_build_is_quick(tmp_path: Path) -> None:
    """Half a second of processor time for one spec, the start of Python included; the best of five.

    The first may find no compiled templates, and compiles them.
    """
    (tmp_path / "s.yaml").write_text(EVERYTHING.format(name="s", eps=1e-5))
    environ = {"PYTHONDONTWRITEBYTECODE": ""}
    times = []
    for _ in range(5):
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
    slabs = [Slab(widest=WIDEST, columns=4096, warps=4, programs=2, stages=4)]
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
  eps stands outside the square root: not the PyTorch convention.

tensors
  x             input      (..., H)    float16, bfloat16 or float32
  weight        parameter  (H,)        dtype of x or float32
  y             output     (..., H)    dtype of x

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
  y = round_y(round(x_hat) * (weight + 1)) + bias
  eps stands inside the square root: the PyTorch convention.
  round is to the dtype of x, round_y to that of y.

tensors
  x             input      (..., H)    float16, bfloat16 or float32
  residual      input      (..., H)    dtype of x
  weight        parameter  (H,)        dtype of x, bfloat16 or float32
  bias          parameter  (H,)        dtype of x, bfloat16 or float32
  y             output     (..., H)    bfloat16
  residual_out  output     (..., H)    dtype of x
  mean          statistic  (...)       float32

kernels
  c_forward_chunked: Results, each row in chunks.
  c_statistics: Row statistics that forward did not save.
  c_backward_slabs: Gradients, a slab of columns a program.
  c_backward_staged: Gradients, a slab of columns a program.
  c_sum_partials: Second step of the sums over rows.

why
  - forward: no whole rows at any width, as strategy: welford asks
  - forward: all rows, chunks read again from the cache
  - backward: no whole rows at any width, as strategy: welford asks
  - backward: all rows, a row is shared by programs of 4096 columns of 2 bytes each
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
        "forward: wider rows, a row is shared by programs of 8192 columns of 2 bytes each",
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


@pytest.mark.parametrize(
    ("offset", "gain"),
    [
        ("1.0", "(weight + 1)"),
        ("-0.5", "(weight - 0.5)"),
        ("1e-7", "(weight + 1e-07)"),
        ("0.123456789", "(weight + 0.123456789)"),
    ],
)
def test_an_offset_is_shown_as_it_is(offset: str, gain: str) -> None:
    made = plan_of(f"name: a\nnorm: rms\neps: {{value: 1e-6}}\naffine: {{weight_offset: {offset}}}\n")
    assert formula(made)[-1] == f"y = x_hat * {gain}"


def test_a_module_that_failed_is_not_imported_by_half(tmp_path: Path) -> None:
    path = tmp_path / "half.py"
    path.write_text("x = 1\nraise ImportError('no')\n")
    for _ in range(2):
        with pytest.raises(ImportError, match="no"):
            imported("normgen_half", path)


def test_the_readme_shows_a_kernel_as_it_is() -> None:
    text = (ROOT / "README.md").read_text()
    [kernel] = re.findall(r"```python\n(    .+?)```", text, re.DOTALL)
    assert kernel in (ROOT / "generated" / "rmsnorm_residual.py").read_text()
