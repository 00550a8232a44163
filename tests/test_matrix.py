"""Every spec on disk, every combination of the keys rendered, and every pair of their values run.

A YAML file added to `specs/` and a value added to `KEYS` join without further ado.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sampling import ALL

from normgen.loader import load, load_at
from normgen.plan import plan
from normgen.render import render
from normgen.spec import MAX_HIDDEN, Spec
from normgen.target import LADDERS

ROOT = Path(__file__).resolve().parents[1]
SPECS = sorted((ROOT / "specs").glob("*.yaml"))

Row = dict[str, Any]

STAGES: dict[str, list[Any]] = {
    "norm": ["layer", "rms"],
    "save": [[], ["rstd"], ["mean"], ["mean", "rstd"]],
    "residual": [
        "none",
        {"store_sum": False},
        {"store_sum": True},
        {"norm_of": "unrounded_sum"},
        {"dtype": "float32"},
        {"dtype": "float32", "norm_of": "unrounded_sum"},
    ],
    "affine": ["weight", "none", "weight and bias"],
    "weight_offset": [0.0, 1.0, -0.5],
    "cast": ["multiply_then_cast", "cast_then_multiply"],
    "eps": ["inside_sqrt", "outside_sqrt"],
    "grad": [False, True],
}
OTHERS: dict[str, list[Any]] = {
    "hidden": ["dynamic", 40, [24, 16392]],
    "strategy": ["auto", "single_block", "welford"],
    "input": [["float16", "bfloat16", "float32"], ["float16", "bfloat16"], ["bfloat16"], ["float32"]],
    "weight": [["same", "float32"], ["same"], ["float32"], ["bfloat16"]],
    "output": ["same", "float32", "bfloat16"],
}
# The first value of a key goes with all values of the others, so that a part of a row can always be completed.
KEYS = STAGES | OTHERS
FIRSTS = {key: values[0] for key, values in KEYS.items()}


def spec_of(row: Row, name: str) -> Row:
    """The keys of a spec file for a row; what the row leaves out is at its first value."""
    full = FIRSTS | row
    options = {key: full[key] for key in ("weight_offset", "cast")}
    affine: Any = {"weight": full["affine"] != "none", "bias": full["affine"] == "weight and bias", **options}
    if not affine["weight"] and all(options[key] == FIRSTS[key] for key in options):
        affine = "none"
    return {
        "name": name,
        "norm": full["norm"],
        "hidden": full["hidden"],
        "eps": {"value": 1e-5, "placement": full["eps"]},
        "dtypes": {key: full[key] for key in ("input", "weight", "output")},
        "affine": affine,
        **{key: full[key] for key in ("residual", "save", "grad", "strategy")},
    }


def allowed(row: Row) -> bool:
    """Whether the compiler takes the values of a row together."""
    try:
        Spec.model_validate(spec_of(row, "row"))
    except ValidationError:
        return False
    return True


Pair = tuple[tuple[str, int], tuple[str, int]]


def pairs(row: Row) -> set[Pair]:
    """All pairs of values in a row, by their places in `KEYS`."""
    return set(itertools.combinations([(key, KEYS[key].index(row[key])) for key in KEYS if key in row], 2))


def possible_pairs() -> dict[Pair, Row]:
    """Every pair of values that can occur together, and the row that holds nothing else."""
    rows = (
        {one: first, other: second}
        for one, other in itertools.combinations(KEYS, 2)
        for first, second in itertools.product(KEYS[one], KEYS[other])
    )
    return {pair: row for row in rows if allowed(row) for pair in pairs(row)}


def covering_rows() -> list[Row]:
    """Few rows that hold every possible pair: each starts from a missing one, and takes up what it can."""
    possible = possible_pairs()
    missing = dict(possible)
    rows: list[Row] = []

    def completed(row: Row) -> Row:
        for key in sorted(KEYS, key=lambda key: -len(KEYS[key])):
            if key not in row:
                options = [option for value in KEYS[key] if pairs(option := row | {key: value}) <= possible.keys()]
                row = max(
                    filter(allowed, options),
                    key=lambda o: (len(pairs(o) & missing.keys()), -sum(r[key] == o[key] for r in rows)),
                )
        return row

    while missing:
        starts = list(missing.values())
        candidates = map(completed, starts[:: max(1, len(starts) // 4)])
        row = max(candidates, key=lambda row: len(pairs(row) & missing.keys()))
        missing = {pair: start for pair, start in missing.items() if pair not in pairs(row)}
        rows.append({key: row[key] for key in KEYS})
    return rows


ROWS = covering_rows()


def rendered(row: Row, name: str) -> dict[str, str]:
    text = json.dumps(spec_of(row, name)).encode()
    return render(plan(load(text, f"{name}.yaml")), f"{name}.yaml")


# Specs on disk.


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_committed_files_are_what_specs_make(path: Path) -> None:
    spec = load_at(path)
    assert spec.name == path.stem
    files = render(plan(spec), f"specs/{path.name}")
    assert list(files) == [f"{path.stem}.py", f"tests/test_{path.stem}.py"]
    for name, text in files.items():
        assert (ROOT / "generated" / name).read_text() == text, f"{name} differs; run: normgen build specs/{path.name}"


def test_committed_modules_import() -> None:
    """All of them in one process, each with its function, its module class and its reference."""
    script = (
        "import importlib, json, sys\n"
        "modules = {name: importlib.import_module(name) for name in sys.argv[1:]}\n"
        "print(json.dumps({name: [callable(getattr(m, one)) and one for one in m.__all__] "
        "for name, m in modules.items()}))"
    )
    names = [path.stem for path in SPECS]
    run = subprocess.run(
        [sys.executable, "-c", script, *names], cwd=ROOT / "generated", capture_output=True, text=True, check=True
    )
    wanted = {name: ["".join(map(str.capitalize, name.split("_"))), *sorted(["reference", name])] for name in names}
    assert json.loads(run.stdout) == wanted


# All combinations.


def undefined(function: ast.FunctionDef, known: set[str]) -> set[str]:
    """The names that a kernel reads before it has given them a value, in the order of its lines."""
    known = known | {argument.arg for argument in function.args.args}
    missing: set[str] = set()

    def read(node: ast.AST) -> None:
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
        missing.update(names - known)

    def visit(statements: list[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, ast.For):
                read(statement.iter)
                known.add(ast.unparse(statement.target))
                visit(statement.body)
            elif isinstance(statement, ast.If):
                read(statement.test)
                before = set(known)
                visit(statement.body)
                made = known - before
                known.difference_update(made)
                visit(statement.orelse)
                known.update(made)
            else:
                read(statement)
                if isinstance(statement, ast.AugAssign):
                    missing.update({ast.unparse(statement.target)} - known)
                known.update(
                    one.id
                    for one in ast.walk(statement)
                    if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
                )

    visit(function.body)
    return missing


def unused(function: ast.FunctionDef) -> set[str]:
    """The arguments and values of a kernel that it never reads; `_` says so itself."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    loaded = {name.id for name in names if isinstance(name.ctx, ast.Load)}
    return ({argument.arg for argument in function.args.args} | {name.id for name in names}) - loaded - {"_"}


def assert_sound(module: ast.Module, name: str) -> None:
    """Every kernel defines what it uses and uses what it defines, and is launched with as many arguments as it has."""
    functions = {n.name: n for n in module.body if isinstance(n, ast.FunctionDef)}
    kernels = {found: function for found, function in functions.items() if found.startswith(f"{name}_")}
    assert kernels
    shared, gluon = (
        {found for found, one in functions.items() if decorators & set(map(ast.unparse, one.decorator_list))}
        for decorators in ({"triton.jit"}, {"gluon.jit", "gluon.constexpr_function"})
    )
    called = {node.id for one in functions.values() for node in ast.walk(one) if isinstance(node, ast.Name)}
    assert shared | gluon <= called
    for kernel in kernels.values():
        staged = gluon | {"gl", "async_copy", "max"} if kernel.name.endswith("_staged") else set()
        assert not undefined(kernel, {"tl", "triton", "range"} | shared | staged), kernel.name
        # Every kernel is told how many rows there are; one that has a program for each need not ask.
        assert unused(kernel) <= ({"N"} if kernel.name.endswith(("_chunked", "_statistics")) else set()), kernel.name
    launched = set()
    for function in module.body:
        values = [node.value for node in ast.walk(function) if isinstance(node, ast.Assign)]
        chosen = [node.id for value in values for node in ast.walk(value) if isinstance(node, ast.Name)]
        chosen = [name for name in chosen if name in kernels]
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "_launch" and function.name != "_launch":
                launch, _, _, _, tensors, strides, *others = node.args
                target = ast.unparse(launch)
                for kernel in chosen if target == "kernel" else [target]:
                    arguments = [argument.arg for argument in kernels[kernel].args.args]
                    named = {keyword.arg for keyword in node.keywords if keyword.arg} - {"num_warps"}
                    named |= {"ALIGNMENT"} if strides.elts else set()
                    assert set(arguments[len([*tensors.elts, *strides.elts, *others]) :]) == named, kernel
                    launched.add(kernel)
    assert launched == set(kernels)


def combinations_of_stages() -> Iterator[Row]:
    for values in itertools.product(*STAGES.values()):
        if allowed(row := dict(zip(STAGES, values, strict=True))):
            yield row


def with_others(row: Row) -> Row:
    """`row` and a value for each key that no equation depends on, chosen by a hash of the row."""
    digest = hashlib.sha256(json.dumps(row).encode()).digest()
    for key, byte in zip(OTHERS, digest, strict=False):
        options = [row | {key: value} for value in OTHERS[key]]
        options = list(filter(allowed, options))
        row = options[byte % len(options)]
    return row


GROUPS = 48


# Every other group, always the same ones: the rest differ from these in one key.
@pytest.mark.parametrize("group", range(0, GROUPS, 1 if ALL else 2))
def test_combinations_of_stages(group: int) -> None:
    """Half of all, or all, each rendered with one choice of the keys that only decide on loops and dtypes."""
    rows = list(itertools.islice(combinations_of_stages(), group, None, GROUPS))
    assert rows
    for row in rows:
        module, test = rendered(with_others(row), "combined").values()
        assert_sound(ast.parse(module), "combined")
        compile(module, "combined.py", "exec")
        compile(test, "test_combined.py", "exec")


# Every pair of values.


def test_pairs_are_covered() -> None:
    covered = set().union(*map(pairs, ROWS))
    assert covered == set(possible_pairs())
    assert {(key, place) for pair in covered for key, place in pair} == {
        (key, place) for key, values in KEYS.items() for place in range(len(values))
    }


def test_ruff_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for index, row in enumerate(ROWS):
        for path, text in rendered(row, f"pair_{index}").items():
            (tmp_path / path).write_text(text)
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path)]
    for command in (["check"], ["format", "--check"]):
        run = subprocess.run([sys.executable, "-m", "ruff", *command, *config], capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
        assert "No Python files" not in run.stdout + run.stderr


# What a combination may break; the rest of a generated test is run where it is committed.
SELECTED = [
    *("each_strategy", "weight_dtypes", "agrees_with_torch", "gradcheck", "one_result_used", "not_double"),
    *("changed_input", "no_backward", "mean_far", "bad_rows", "outlier", "small_eps", "sum_past", "variance_past"),
    *("denominator", "every_", "eps_stands", "squares_may", "mean_is", "equal_rows", "only_the_rows"),
    *("eps_is_used", "eps_refused", "no_rows", "test_refused", "fake_results", "test_module"),
    *("only_wanted and (2] or 5])", "constant_rows and 1e-12-1000.1", "zero_rows and dtype0"),
]


def test_what_is_selected_exists() -> None:
    texts = "".join(path.read_text() for path in (ROOT / "generated" / "tests").glob("*.py"))
    texts += rendered(FIRSTS, "forward_only")["tests/test_forward_only.py"]
    for words in SELECTED:
        assert re.search(rf"def \w*{words.split()[0]}\w*\(", texts), words


def assert_passes(row: Row, selected: list[str], folder: Path) -> None:
    """Runs the selected part of the generated test of a row in a folder of its own."""
    (folder / "generated" / "tests").mkdir(parents=True)
    for path, text in rendered(row, "pair").items():
        (folder / "generated" / path).write_text(text)
    command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", f"({') or ('.join(selected)})"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
    run = subprocess.run(
        [sys.executable, *command, "generated/tests"], cwd=folder, env=environ, capture_output=True, text=True
    )
    assert run.returncode == 0, f"{json.dumps(spec_of(row, 'pair'))}\n{run.stdout[-4000:]}{run.stderr[-2000:]}"
    assert re.search(r"\d+ passed", run.stdout)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"pair_{ROWS.index(row)}")
def test_generated_test_of_a_pair_passes(row: Row, tmp_path: Path) -> None:
    # Dynamic widths are run where they are committed; wide rows backward have a test below.
    widths = [] if row["hidden"] == "dynamic" else ["test_forward", "test_backward and not 16392"]
    assert_passes(row, SELECTED + widths, tmp_path)


def test_chunks_forward_and_slabs_backward(tmp_path: Path) -> None:
    """A width past all whole rows, of which the last chunk and the last slab hold 8 columns."""
    row = {"hidden": 16392, "grad": True, "affine": "weight and bias", "residual": {"store_sum": True}}
    assert all(rung.widest < 16392 for ladders in LADDERS.values() for rung in (*ladders.forward, *ladders.backward))
    assert_passes(row, ["test_forward and 16392", "test_backward and 16392"], tmp_path)


@pytest.mark.skipif(not ALL, reason="takes minutes in the interpreter: NORMGEN_TESTS=all")
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_widest_rows(norm: str, tmp_path: Path) -> None:
    """Of a spec's widths the largest; a GPU takes it in every generated test."""
    row = {"norm": norm, "hidden": MAX_HIDDEN, "grad": True, "affine": "weight and bias"}
    assert_passes(row, [f"test_forward and {MAX_HIDDEN}", f"test_backward and {MAX_HIDDEN}"], tmp_path)
