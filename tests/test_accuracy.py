"""`normgen bench --errors`: what a unit is, which rows are measured, and kernels beside torch in the interpreter."""

from __future__ import annotations

import csv
import functools
import importlib.util
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from normgen.bench import accuracy, cases, plots, providers, report, run, tables, ulps
from normgen.bench.cases import Sizes
from normgen.bench.report import ErrorRow, Results
from normgen.cli import main
from normgen.loader import load
from normgen.processes import spread

ROOT = Path(__file__).resolve().parents[1]


def measured(name: str, sizes: Sizes, *names: str) -> list[ErrorRow]:
    spec = load((ROOT / f"specs/{name}.yaml").read_bytes(), name)
    return accuracy.measure(accuracy.Task(spec, sizes, names or ("normgen", "torch"), "cpu"))


@pytest.mark.parametrize(
    ("dtype", "value", "unit"),
    [
        (torch.float32, 1.0, 2.0**-23),
        (torch.float32, 1.9999, 2.0**-23),
        (torch.float32, -2.0, 2.0**-22),
        (torch.float32, 0.75, 2.0**-24),
        (torch.float32, 2.0**-126, 2.0**-149),
        (torch.float32, 1e-40, 2.0**-149),
        (torch.float32, 0.0, 2.0**-149),
        (torch.bfloat16, 1.0, 2.0**-7),
        (torch.bfloat16, -1000.0, 4.0),
        (torch.float16, 1.0, 2.0**-10),
        (torch.float16, 60000.0, 32.0),
        (torch.float16, 2.0**-14, 2.0**-24),
        (torch.float16, 1e-6, 2.0**-24),
    ],
)
def test_a_unit_in_the_last_place(dtype: torch.dtype, value: float, unit: float) -> None:
    assert ulps.ulp(torch.tensor([value], dtype=torch.float64), dtype).tolist() == [unit]


def test_units_are_the_spacing_of_numbers() -> None:
    torch.manual_seed(1)
    value = torch.randn(1000) * 10.0 ** torch.randint(-38, 38, (1000,))
    next_one = torch.nextafter(value.abs(), torch.tensor(math.inf))
    assert torch.equal(ulps.ulp(value.double(), torch.float32), next_one.double() - value.abs().double())


def test_errors_are_counted_in_units_of_the_element_or_of_its_row() -> None:
    # The root mean square is 2 in the first row, and 1 in the second.
    exact = torch.tensor([[2.0, -2.0, 2.0, 2.0], [1.0, 1.0, 2.0**0.5, 0.0]], dtype=torch.float64)
    off = torch.tensor([[2.0, 0.0, -4.0, 0.0], [0.0, 0.0, 1.0, 3.0]], dtype=torch.float64) * 2.0**-23
    largest, mean = ulps.errors(exact + off, exact, torch.float32)
    # Units of 2^-22 in the first row; in the second the zero, too, is measured in units of 1.
    assert (largest, mean) == (3.0, (1 + 0 + 2 + 0 + 0 + 0 + 1 + 3) / 8)
    # An element larger than its row has the unit of its own: here 2^-5 of bfloat16, of a row that is 2.
    exact = torch.tensor([4.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert ulps.errors(exact + 2.0**-6, exact, torch.bfloat16)[0] == 1.0
    assert ulps.errors(torch.tensor([4.0 + 2.0**-6, 0, 0, 0]), exact, torch.bfloat16) == (0.5, 0.125)


def test_what_is_rounded_correctly_is_off_by_half_a_unit_at_most() -> None:
    torch.manual_seed(2)
    exact = torch.randn(50, 400, dtype=torch.float64) ** 3
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        largest, mean = ulps.errors(exact.to(dtype), exact, dtype)
        assert 0.49 < largest <= 0.5
        assert 0.05 < mean < 0.25


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_has_no_error(wrong: float) -> None:
    out, exact = torch.tensor([1.0, wrong]), torch.ones(2, dtype=torch.float64)
    assert not math.isfinite(ulps.errors(out, exact, torch.float32)[0])


def test_rows_that_a_dtype_holds() -> None:
    every = [(offset, scale) for offset in (0, 1, 100, 1000) for scale in (1e-3, 1.0, 1e3)]
    assert list(accuracy.inputs("float32")) == every
    # In bfloat16 numbers around 1000 are 4 apart, more than the spread.
    assert list(accuracy.inputs("bfloat16")) == [pair for pair in every if pair[0] < 1000]
    # In float16 nothing is larger than 65504.
    assert list(accuracy.inputs("float16")) == [pair for pair in every if pair not in ((100, 1e3), (1000, 1e3))]


def row(provider: str, y: float, dx: float | None = None, **more: Any) -> ErrorRow:
    kind = {"dtype": "float32", "H": 64, "offset": 0, "scale": 1.0, **more}
    means = {"y_mean": y / 4, "dx_mean": None if dx is None else dx / 4}
    return ErrorRow(spec="rmsnorm", rows=8, provider=provider, y=y, dx=dx, **means, **kind)


ROWS = [
    row("normgen", 2.0, 1.0),
    row("torch", 1.0, 4.0),
    row("liger", 8.0, 2.0),
    row("normgen", 1.0, 2.5, scale=1e3),
    row("torch", 3.0, 1.0, scale=1e3),
    row("normgen", 0.5, 0.5, dtype="bfloat16", offset=100),
    row("torch", 0.5, 0.5, dtype="bfloat16", offset=100),
    *(
        ErrorRow("rmsnorm", "bfloat16", 64, 8, 100, scale, "liger", error="wrong: dx is not finite")
        for scale in (1.0, 1e3)
    ),
]


def test_worse_than_torch() -> None:
    """By more than one unit: y of the first row is not, though the largest error of all of torch is smaller there."""
    said = "worse than torch: dx of rmsnorm, float32, H 64, offset 0, scale 1000: 2.50 (0.62) against 1.00 (0.25)"
    assert report.worse(ROWS) == [said]
    assert Results({}, errors=ROWS).failed
    assert not Results({}, errors=[one for one in ROWS if one.scale == 1]).failed
    assert Results({}, errors=[ErrorRow("a", "float16", 1, 1, 0, 1, "normgen", error="wrong: y")]).failed


def test_table() -> None:
    assert tables.error_tables(ROWS) == [
        "rmsnorm, y: units in the last place, the largest error of a draw (the mean of all)",
        "   dtype  offset      normgen        torch        liger  ours - torch",
        " float32       0  2.00 (0.38)  3.00 (0.50)  8.00 (2.00)         +1.00",
        "bfloat16     100  0.50 (0.12)  0.50 (0.12)            -         +0.00",
        "",
        "rmsnorm, dx: units in the last place, the largest error of a draw (the mean of all)",
        "   dtype  offset      normgen        torch        liger  ours - torch",
        " float32       0  2.50 (0.44)  4.00 (0.62)  2.00 (0.50)         +1.50",
        "bfloat16     100  0.50 (0.12)  0.50 (0.12)            -         +0.00",
        "",
        "  liger at bfloat16 H 64: wrong: dx is not finite",
        "worse than torch: dx of rmsnorm, float32, H 64, offset 0, scale 1000: 2.50 (0.62) against 1.00 (0.25)",
        "normgen is worse than torch by more than 1 unit in 1 of 6 errors",
    ]


def test_files(tmp_path: Path) -> None:
    Results({"gpu": "X"}, errors=ROWS, name="errors").save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["errors.csv", "errors.json"]
    document = json.loads((tmp_path / "errors.json").read_text())
    assert document["gpu"] == "X"
    assert [ErrorRow(**one) for one in document["errors"]] == ROWS
    with (tmp_path / "errors.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["provider"], line["y"], line["dweight"]) for line in lines[:2]] == [
        ("normgen", "2.0", ""),
        ("torch", "1.0", ""),
    ]


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("matplotlib"):
        assert plots.plot_errors(ROWS, tmp_path) is None
        assert [path.name for path in tmp_path.iterdir()] == ["errors.png"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plots.plot_errors(ROWS, tmp_path) == "no plots: matplotlib is not installed"


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter, also where there is a GPU; no libraries, and one draw."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    monkeypatch.setattr(run, "_installed", lambda package: False)
    monkeypatch.setattr(cases, "ERROR_DRAWS", 1)


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm", "rmsnorm_residual", "rmsnorm_llama"])
def test_ours_is_never_worse_than_torch(
    name: str, on_cpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--width", "48", "--rows", "7", "--dtype", "float16", "--providers", "normgen", "torch"]
    assert main(["bench", "--errors", str(ROOT / f"specs/{name}.yaml"), *arguments, "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    rows = [ErrorRow(**one) for one in json.loads((tmp_path / "errors.json").read_text())["errors"]]
    names = ["y", "dx", "dweight", *(["dbias"] if name == "layernorm" else [])]
    assert len(rows) == 2 * 10  # of each provider, one for all offsets and scales that float16 holds
    for one in rows:
        assert (one.spec, one.dtype, one.H, one.rows, one.error) == (name, "float16", 48, 7, None)
        assert [key for key in report.MEASURED if getattr(one, key) is not None] == names
    # Rounded once, after arithmetic in fp32 that is a thousand times finer; Llama's norm is rounded twice.
    ours = [one for one in rows if one.provider == "normgen"]
    assert all(0.4 < one.y <= (0.51 if name != "rmsnorm_llama" else 1.01) for one in ours if one.y is not None)
    assert all(0.3 < one.dx <= 0.51 for one in ours if one.dx is not None)
    assert f"normgen is worse than torch by more than 1 unit in 0 of {len(names) * 10} errors" in out
    assert f"{name}: 7 x 48 in float16, 1 of 1 in" in err


@pytest.mark.parametrize(
    ("name", "dtype", "H", "draws"),
    [
        # A stored sum is cut off to bfloat16 here, where a GPU rounds it: see benchmarks/README.md.
        *((name, "bfloat16", H, 1) for name in ("rmsnorm", "layernorm") for H in (48, 451)),
        *((name, "float32", H, 9) for name in ("rmsnorm", "layernorm", "rmsnorm_residual") for H in (48, 451)),
        # Beyond the widest tile: in chunks forward, in slabs backward.
        ("rmsnorm", "float32", 12544, 1),
    ],
)
def test_nor_in_other_dtypes_and_wider_rows(
    name: str, dtype: str, H: int, draws: int, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "OFFSETS", (1,))
    monkeypatch.setattr(cases, "SCALES", (1.0,))
    monkeypatch.setattr(cases, "ERROR_DRAWS", draws)
    rows = measured(name, Sizes(H, 16 if H < 10000 else 2, dtype))
    compared = [one for key in report.MEASURED for one in report.excess(rows, key)]
    assert len(compared) == (4 if name == "layernorm" else 3)
    assert report.worse(rows) == []


def test_errors_are_over_draws(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows and incoming gradients that are new each time and the same for all, medians and means."""
    monkeypatch.setattr(cases, "OFFSETS", (0,))
    monkeypatch.setattr(cases, "ERROR_DRAWS", 3)
    once, drawn, found = accuracy._measured, [], {}

    def kept(case: providers.Case, expected: Any, offered: Any) -> dict[str, Any]:
        drawn.append((case.arguments[0].detach().clone(), case.original.clone(), case.arguments[1].detach().clone()))
        outcome = once(case, expected, offered)
        found.setdefault(offered.function, []).append(outcome)
        return outcome

    monkeypatch.setattr(accuracy, "_measured", kept)
    rows = measured("rmsnorm", Sizes(48, 7, "float32"))
    xs, dys, weights = zip(*drawn, strict=True)
    assert all(torch.equal(weights[0], weight) for weight in weights)
    for tensors in (xs, dys):
        assert all(torch.equal(ours, torchs) for ours, torchs in zip(tensors[::2], tensors[1::2], strict=True))
        assert len({float(tensor.std()) for tensor in tensors}) == 9  # three draws of each of three scales
    assert [row.draws for row in rows] == [3] * 6
    for provider, outcomes in zip(("normgen", "torch"), found.values(), strict=True):
        mine = [row for row in rows if row.provider == provider]
        for row, three in zip(mine, (outcomes[:3], outcomes[3:6], outcomes[6:]), strict=True):
            for key in ("y", "dx", "dweight"):
                assert getattr(row, key) == pytest.approx(sorted(one[key] for one in three)[1], rel=1e-3)
                mean = sum(one[f"{key}_mean"] for one in three) / 3
                assert getattr(row, f"{key}_mean") == pytest.approx(mean, rel=1e-3)


def test_what_fails_is_not_drawn_again(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "ERROR_DRAWS", 3)
    calls = []

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        raise ValueError("no")

    monkeypatch.setitem(providers._OFFERS, "liger", lambda case: providers._offer(case, failing))
    rows = measured("rmsnorm", Sizes(32, 2, "float32"), "liger")
    assert len(calls) == len(rows) == 12
    assert {(row.y, row.error) for row in rows} == {(None, "ValueError: no")}


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_no_mean_costs_digits_of_the_result(name: str, on_cpu: None) -> None:
    """In float32, where every rounding shows: a few units at any offset, where a lost mean costs hundreds."""
    rows = measured(name, Sizes(48, 7, "float32"))
    ours, torchs = ([one for one in rows if one.provider == provider] for provider in ("normgen", "torch"))
    assert [(one.offset, one.scale) for one in ours] == list(accuracy.inputs("float32"))
    assert all(one.y < 16 and one.y_mean < 1 for one in ours)
    assert all(one.dx < 16 and one.dx_mean < 1 for one in ours if one.offset < 2)
    # Gradients take the mean from the saved statistics, where it has the digits of float32 and no more, in torch too.
    for key in ("y_mean", "dx_mean", "dweight_mean"):
        assert sum(getattr(one, key) for one in ours) < 1.1 * sum(getattr(one, key) for one in torchs)


def test_a_faulty_kernel_is_worse_than_torch(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = providers._OFFERS["torch"]

    def faulty(by: float, case: providers.Case) -> providers.Offer:
        offered = right(case)
        return providers._offer(case, lambda *arguments: (offered.function(*arguments)[0] * by,))

    arguments = ["bench", "--errors", str(ROOT / "specs/rmsnorm.yaml"), "--width", "32", "--rows", "4"]
    arguments += ["--dtype", "bfloat16", "--providers", "normgen", "torch", "liger"]
    monkeypatch.setitem(providers._OFFERS, "normgen", functools.partial(faulty, 1 + 2.0**-5))
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "worse than torch: y of rmsnorm, bfloat16, H 32, offset 0, scale 0.001: " in out
    assert "more than 1 unit in 27 of 27 errors" in out
    assert "liger is not installed: left out" in out
    monkeypatch.setitem(providers._OFFERS, "normgen", functools.partial(faulty, math.inf))
    assert main([*arguments, "--format", "json"]) == 1
    ours = json.loads(capsys.readouterr().out)["errors"][0]
    assert (ours["provider"], ours["y"], ours["error"]) == ("normgen", None, "wrong: y is not finite")


def test_incoming_gradients_are_restored(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One library writes over them: neither exact results nor the errors of others may change by that."""
    right = providers._OFFERS["torch"]

    def overwriting(case: providers.Case) -> providers.Offer:
        def direct() -> Any:
            gradients = right(case).backward()()
            case.cotangents[0].zero_()
            return lambda: gradients

        return providers._offer(case, right(case).function, direct=direct)

    spec = load((ROOT / "specs/rmsnorm.yaml").read_bytes(), "rmsnorm.yaml")
    monkeypatch.setitem(providers._OFFERS, "liger", overwriting)
    for names in (("liger", "torch"), ("torch", "liger")):
        rows = accuracy.measure(accuracy.Task(spec, Sizes(32, 4, "float32"), names, "cpu"))
        assert len(rows) == 24
        assert all(one.dx is not None and one.dx < 8 for one in rows)


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    path = str(ROOT / "specs/rmsnorm.yaml")
    assert main(["bench", "--errors", path]) == 2
    assert capsys.readouterr().err == (
        f"normgen bench: torch {torch.__version__} sees no CUDA GPU here; run this on a machine that has one, or set "
        "TRITON_INTERPRET=1 for kernels in Triton's interpreter\n"
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    source = tmp_path / "half.yaml"
    source.write_text("name: half\nnorm: rms\nhidden: 64\neps: {value: 1e-6}\ndtypes: {input: [float16]}\n")
    assert main(["bench", "--errors", str(source), "--dtype", "float32"]) == 2
    assert "half.yaml: the spec takes no x of float32; write --dtype float16" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--errors", "--latency", path])
    assert stop.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_tasks_go_to_other_processes() -> None:
    spec = load((ROOT / "specs/layernorm.yaml").read_bytes(), "layernorm.yaml")
    task = accuracy.Task(spec, Sizes(cases.ERROR_WIDTHS[0], cases.ERROR_ROWS, "float16"), ("normgen",), "cuda")
    assert pickle.loads(pickle.dumps(task)) == task
    assert str(pickle.loads(pickle.dumps(run.ContextLostError("broke")))) == "broke"


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_the_tasks(jobs: int) -> None:
    assert list(spread(abs, [-3, 2, -1], jobs)) == [3, 2, 1]
    with pytest.raises(TypeError, match="bad operand"):
        list(spread(abs, [1, None], jobs))
