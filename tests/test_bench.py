"""`normgen bench` as far as it goes without a GPU: bytes, checks, statistics, files and tables, refusals.

Times are made up here; what is timed, and what is refused before it is, is real.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from normgen.bench import cases, check, header, measure, plots, profile, providers, run, tables
from normgen.bench.cases import Sizes
from normgen.bench.measure import Timing
from normgen.bench.report import LatencyRow, ProfileRow, Results, Row
from normgen.cli import main
from normgen.loader import load
from normgen.plan import Plan, plan
from normgen.render import solve

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))


def planned(name: str) -> Plan:
    path = ROOT / "specs" / f"{name}.yaml"
    return plan(load(path.read_bytes(), str(path)))


def case_of(name: str, dtype: str = "bfloat16") -> providers.Case:
    made = planned(name)
    return providers.make_case(made, Sizes(made.baked_width or 48, 9, dtype), "cpu")


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    # In tensors of the shape of x in its dtype: bfloat16, where an fp32 tensor counts twice.
    [
        ("rmsnorm", 2, 3),
        ("rmsnorm_no_weight", 2, 3),
        ("layernorm", 2, 3),
        ("layernorm_welford", 2, 3),
        ("rmsnorm_residual", 4, 4),
        ("layernorm_residual", 4, 4),
        ("layernorm_post_residual", 3, 4),
        ("rmsnorm_residual_fp32", 6, 8),
    ],
)
def test_bytes(name: str, forward: int, backward: int) -> None:
    made = planned(name)
    spec, rows, H = made.spec, 1000, 512
    parameters = len(made.parameters) * H * 2
    statistics = len(made.statistics) * rows * 4
    counted = cases.traffic(made, solve(made), Sizes(H, rows, "bfloat16"))
    assert counted["forward"] == forward * rows * H * 2 + parameters + statistics
    # Backward reads the weight alone and writes the gradients of weight and bias.
    read = H * 2 if spec.affine else 0
    assert counted["backward"] == backward * rows * H * 2 + read + parameters + statistics
    assert counted["both"] == counted["forward"] + counted["backward"]
    single = cases.traffic(made, solve(made), Sizes(H, rows, "float32"))["forward"]
    assert single == ((forward if name != "rmsnorm_residual_fp32" else 4) * rows * H * 4 + 2 * parameters + statistics)


def test_no_backward_no_bytes() -> None:
    made = plan(load(b"name: a\nnorm: rms\neps: {value: 1e-6}\ngrad: false\n", "a.yaml"))
    assert list(cases.traffic(made, solve(made), Sizes(64, 2, "bfloat16"))) == ["forward"]


def test_operations_are_named_as_the_peers_name_them() -> None:
    peers = {
        "rmsnorm": "rms",
        "rmsnorm_4096": "rms",
        "layernorm": "ln",
        "layernorm_welford": "ln",
        "rmsnorm_residual": "add",
    }
    for name in NAMES:
        made = planned(name)
        assert cases.operation(made, "forward") == f"{peers.get(name, name)}_fwd"
        assert cases.operation(made, "backward") == f"{peers.get(name, name)}_bwd"


def test_widths() -> None:
    assert cases.widths_of(planned("rmsnorm"), ()) == list(cases.WIDTHS)
    assert cases.widths_of(planned("rmsnorm"), (64, 7)) == [64, 7]
    assert cases.widths_of(planned("rmsnorm_4096"), ()) == [4096]
    assert cases.widths_of(planned("rmsnorm_4096"), (64,)) == []
    single = plan(load(b"name: a\nnorm: rms\neps: {value: 1e-6}\nstrategy: single_block\n", "a.yaml"))
    assert max(cases.widths_of(single, ())) == 8192


def test_statistics() -> None:
    assert measure.quantile([3.0], 0.8) == 3.0
    assert measure.quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert measure.quantile([5.0, 1.0, 2.0, 3.0, 4.0], 0.2) == pytest.approx(1.8)
    assert measure.summary([float(n) for n in range(101)]) == Timing(50.0, 20.0, 80.0)
    assert measure.repetitions(0.25, 150.0) == 500
    assert measure.repetitions(1.0, 150.0) == 150
    assert measure.repetitions(100.0, 150.0) == 10
    assert measure.repetitions(0.0, 150.0) == 500


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_our_providers_are_right(name: str, dtype: str) -> None:
    if name == "rmsnorm_4096" and dtype != "bfloat16":
        pytest.skip("the same module as at other widths, and slower")
    case = case_of(name, dtype)
    expected = check.truth(case)
    for provider in ("normgen", "torch", *(["separate"] if case.spec.residual else [])):
        offered = providers.offer(provider, case)
        assert check.check_outputs(case, expected, offered.forward()) is None
        again = offered.backward()
        assert check.check_gradients(case, expected, again()) is None
        assert check.check_gradients(case, expected, again()) is None
        assert check.check_gradients(case, expected, offered.both()) is None


def test_the_plain_formulas_are_traced_whole() -> None:
    """A graph break would make torch.compile slower than it is."""
    for name in ("rmsnorm_llama", "layernorm_residual", "rmsnorm_residual_fp32"):
        torch.compiler.reset()
        case = case_of(name)
        compiled = torch.compile(providers.offer("torch", case).function, backend="eager", fullgraph=True)
        assert check.check_outputs(case, check.truth(case), compiled(*case.arguments)) is None


def spoilt(tensor: torch.Tensor, row: int, by: float) -> torch.Tensor:
    copy = tensor.detach().clone()
    copy[row, 3] += by * copy[row].abs().max()
    return copy


def test_wrong_results_are_refused() -> None:
    case = case_of("rmsnorm_residual")
    expected = check.truth(case)
    offered = providers.offer("normgen", case)
    y, summed = (one.detach() for one in offered.forward())
    assert check.check_outputs(case, expected, (y, summed)) is None
    off = check.check_outputs(case, expected, (spoilt(y, 5, 0.1), summed))
    assert off is not None and off.startswith("wrong: 1 of 432 elements of y are off, the worst by 0.")
    stored = check.check_outputs(case, expected, (y, spoilt(summed, 0, 0.1)))
    assert stored is not None and "of residual_out are off" in stored
    unwritten = check.check_outputs(case, expected, (spoilt(y, 8, float("nan")), summed))
    assert unwritten == "wrong: 1 of 432 elements of y are NaN"
    infinite = check.check_outputs(case, expected, (spoilt(y, 8, float("inf")), summed))
    assert infinite is not None and infinite.startswith("wrong: 1 of 432")
    assert check.check_outputs(case, expected, (y[:, :-1], summed)) == "wrong: y has shape (9, 47)"
    dx, dresidual, dweight = offered.both()
    assert "of dx are off" in str(check.check_gradients(case, expected, (spoilt(dx, 2, 0.1), dresidual, dweight)))
    assert "of dweight are off" in str(check.check_gradients(case, expected, (dx, dresidual, dweight * 1.1)))


def test_unwritten_elements_show_outside_of_the_compared_rows() -> None:
    made = planned("rmsnorm_no_weight")
    case = providers.make_case(made, Sizes(8, 1000, "bfloat16"), "cpu")
    expected = check.truth(case)
    assert len(expected.rows) == 64 and int(expected.rows[0]) == 0 and int(expected.rows[-1]) == 999
    [y] = providers.offer("normgen", case).forward()
    row = next(row for row in range(1000) if row not in expected.rows)
    assert check.check_outputs(case, expected, (spoilt(y, row, float("nan")),)) is not None


def test_parameter_gradients_are_over_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("layernorm")
    whole = check.truth(case)
    monkeypatch.setattr(check, "_PIECE", 4 * case.sizes.H)  # nine rows in pieces of four
    for one, other in zip(whole.gradients, check.truth(case).gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize(
    ("provider", "name", "reason"),
    [
        ("separate", "rmsnorm", "there is no residual to add"),
        ("liger", "rmsnorm_eps_outside", "eps stands inside the root"),
        ("liger", "layernorm_no_bias", "its LayerNorm has a weight without offset, and a bias"),
        ("liger", "layernorm_residual", "it has no LayerNorm with a residual"),
        ("liger", "rmsnorm_residual_fp32", "its sum is stored in the dtype of x, and normalised as stored"),
        ("quack", "rmsnorm_llama", "it rounds once"),
        ("quack", "layernorm_no_affine", "its LayerNorm has a weight without offset"),
        ("cudnn", "rmsnorm_residual", "it has no RMSNorm with a residual"),
        ("cudnn", "rmsnorm_gemma", "its weight has no offset"),
        ("cudnn", "rmsnorm_no_weight", "its RMSNorm has a weight"),
    ],
)
def test_unsupported(provider: str, name: str, reason: str) -> None:
    with pytest.raises(providers.Unsupported, match=f"^{reason}$"):
        providers.offer(provider, case_of(name))


class Overwriting(torch.autograd.Function):
    """Liger's RMSNorm by its signature; as there, dx is written over dy."""

    @staticmethod
    def forward(ctx: Any, X: Any, W: Any, eps: Any, offset: Any = 0.0, casting_mode: Any = "llama") -> Any:
        assert (offset, casting_mode) == (0.0, "gemma")
        ctx.save_for_backward(X, W)
        ctx.eps = eps
        return torch.nn.functional.rms_norm(X, X.shape[-1:], W, eps)

    @staticmethod
    def backward(ctx: Any, dY: Any) -> Any:
        X, W = (one.detach().requires_grad_() for one in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch.nn.functional.rms_norm(X, X.shape[-1:], W, ctx.eps)
        dX, dW = torch.autograd.grad(y, (X, W), dY)
        return dY.copy_(dX), dW, None, None, None


class Quack:
    """The LayerNorm functions of quack, with its parameters in fp32."""

    @staticmethod
    def layernorm_fwd(
        x: Any, weight: Any, bias: Any = None, eps: float = 1e-6, return_rstd: bool = False, return_mean: bool = False
    ) -> Any:
        assert weight.dtype == bias.dtype == torch.float32 and return_rstd and return_mean
        y, mean, rstd = torch.native_layer_norm(x.float(), x.shape[-1:], weight, bias, eps)
        return y.to(x.dtype), rstd[..., 0], mean[..., 0]

    @staticmethod
    def layernorm_bwd(x: Any, weight: Any, dout: Any, rstd: Any, mean: Any, has_bias: bool = True) -> Any:
        x_hat = (x.float() - mean[:, None]) * rstd[:, None]
        g = dout.float() * weight
        dx = (g - g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True)) * rstd[:, None]
        return dx.to(x.dtype), (dout.float() * x_hat).sum(0), dout.float().sum(0)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is none: calls run on the CPU, once, and each takes a millisecond."""

    def time_gpu(call: Callable[[], Any], prepare: Callable[[], Any] | None = None) -> Timing:
        if prepare is not None:
            prepare()
        call()
        return Timing(1.0, 0.9, 1.1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(run, "make_case", functools.partial(providers.make_case, device="cpu"))
    monkeypatch.setattr(run, "time_gpu", time_gpu)
    monkeypatch.setattr(run, "peak_mb", lambda call: 2.0)
    monkeypatch.setattr(run, "poison", lambda case, tensors: None)
    monkeypatch.setattr(run, "header", lambda: {"gpu": "none"})
    monkeypatch.setattr(run, "_installed", lambda package: package in ("liger_kernel", "quack"))
    modules = {
        "liger_kernel.ops.rms_norm": types.SimpleNamespace(LigerRMSNormFunction=Overwriting),
        "quack.rmsnorm": Quack,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


SMALL = ("--width", "48", "--elements", "500")


def test_a_run(on_cpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("--providers", "normgen", "separate", "torch", "liger", "cudnn", "--out", str(tmp_path / "out"))
    assert main(["bench", str(ROOT / "specs/rmsnorm.yaml"), *SMALL, *wanted]) == 0
    out, err = capsys.readouterr()
    document = json.loads((tmp_path / "out/bench.json").read_text())
    rows = {(row["op"], row["mode"], row["provider"]): row for row in document["rows"]}
    assert document["gpu"] == "none"
    assert [row["provider"] for row in document["rows"][:5]] == ["copy", "normgen", "separate", "torch", "liger"]
    assert {mode for _, mode, _ in rows} == {"forward", "backward", "both"}
    ours = rows["rms_bwd", "backward", "normgen"]
    assert (ours["H"], ours["rows"], ours["elements"], ours["dtype"]) == (48, 10, 480, "bfloat16")
    assert ours["bytes"] == 3 * 480 * 2 + 10 * 4 + 2 * 48 * 2
    assert ours["tb_s"] == pytest.approx(ours["bytes"] / 1e9)
    assert (ours["ms"], ours["ms_20"], ours["ms_80"], ours["peak_mb"], ours["error"]) == (1.0, 0.9, 1.1, 2.0, None)
    # Its backward writes over the incoming gradient, which those after it need as it was.
    assert rows["rms_bwd", "backward", "liger"]["error"] is None
    assert rows["rms_both", "both", "liger"]["error"] is None
    separate = rows["rms_fwd", "forward", "separate"]
    assert (separate["error"], separate["ms"]) == ("unsupported: there is no residual to add", None)
    assert "rmsnorm, rms_fwd, bfloat16: TB/s" in out
    assert "cudnn is not installed: left out" in out
    assert "rmsnorm: 10 x 48 took" in err
    with (tmp_path / "out/bench.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(document["rows"])


def test_functions_without_autograd(on_cpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", str(ROOT / "specs/layernorm.yaml"), *SMALL, "--providers", "quack", "--format", "json"]
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["provider"] for row in rows] == ["copy", "quack"] * 3
    assert [row["error"] for row in rows] == [None] * 6


def test_wrong_and_failing_providers_get_no_time(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = providers._OFFERS["normgen"]

    def wrong(case: providers.Case) -> providers.Offer:
        offered = right(case)
        return providers._offer(case, lambda *a: (spoilt(offered.function(*a)[0], 4, 0.1),))

    def failing(case: providers.Case) -> providers.Offer:
        def function(*arguments: Any) -> Any:
            raise RuntimeError("no such\n  kernel")

        return providers._offer(case, function)

    monkeypatch.setitem(providers._OFFERS, "normgen", wrong)
    monkeypatch.setitem(providers._OFFERS, "torch", failing)
    arguments = [*SMALL, "--providers", "normgen", "torch", "--mode", "forward"]
    assert main(["bench", str(ROOT / "specs/rmsnorm.yaml"), *arguments]) == 1
    out = capsys.readouterr().out
    assert "wrong: 1 of 480 elements of y are off" in out
    assert "torch at 48: RuntimeError: no such kernel" in out
    table = out.splitlines()[2].split()
    assert (table[0], table[3:]) == ("48", ["wrong", "fails", "-", "-"])


def test_a_lost_context_ends_the_run(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost() -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    arguments = [*SMALL, "--providers", "normgen", "torch", "--out", str(tmp_path)]
    assert main(["bench", str(ROOT / "specs/rmsnorm.yaml"), *arguments]) == 1
    assert "stopped: normgen broke the CUDA context at H = 48" in capsys.readouterr().out
    document = json.loads((tmp_path / "bench.json").read_text())
    assert [row["provider"] for row in document["rows"]] == ["copy", "normgen"]
    assert document["stopped"].startswith("normgen broke")


def test_profile_says_when_ncu_is_missing(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "ncu", lambda: None)
    arguments = [*SMALL, "--providers", "normgen", "--mode", "forward", "--profile"]
    assert main(["bench", str(ROOT / "specs/rmsnorm.yaml"), *arguments]) == 0
    assert "no DRAM bytes: ncu (Nsight Compute) is not installed" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(ROOT / "specs/rmsnorm.yaml")]) == 2
    out, err = capsys.readouterr()
    version = torch.__version__
    assert (out, err) == (
        "",
        f"normgen bench: torch {version} sees no CUDA GPU here; run this on a machine that has one\n",
    )


def test_refusals(on_cpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "half.yaml"
    source.write_text("name: half\nnorm: rms\nhidden: 64\neps: {value: 1e-6}\ndtypes: {input: [float16]}\n")
    assert main(["bench", str(source)]) == 2
    assert "half.yaml: the spec takes no x of bfloat16; write --dtype float16" in capsys.readouterr().err
    assert main(["bench", str(source), "--dtype", "float16", "--width", "64", "65"]) == 2
    assert "half.yaml: the spec takes no rows of 65; leave that --width out" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["bench", str(source), "--rows", "0"])
    assert stop.value.code == 2
    assert "'0' is no whole number from 1 to 1099511627776" in capsys.readouterr().err
    for unused, of in (("--mode", "--errors"), ("--elements", "--errors"), ("--mode", "--latency")):
        value = "forward" if unused == "--mode" else "64"
        assert main(["bench", str(source), of, unused, value]) == 2
        assert f"{unused} has no part in {of}; leave one out" in capsys.readouterr().err
    assert main(["bench", str(source), "--errors", "--rows", "2", "3"]) == 2
    assert "--rows takes one number with --errors; leave one out" in capsys.readouterr().err
    (tmp_path / "file").touch()
    half = ["bench", str(source), "--dtype", "float16", "--rows", "2", "--providers", "normgen"]
    assert main([*half, "--out", str(tmp_path / "file")]) == 2
    assert "file: cannot be written: File exists" in capsys.readouterr().err


def row(provider: str, H: int = 64, **more: Any) -> Row:
    timed = {"ms": 1.0, "ms_20": 0.9, "ms_80": 1.1, "tb_s": 4.0, "fraction_of_copy": 1.0, "peak_mb": 3.0}
    values = {**(timed if "error" not in more else {}), **more}
    op = "copy" if provider == "copy" else "rms_fwd"
    return Row(op, "rmsnorm", "forward", H, 10, 10 * H, "bfloat16", provider, 123, **values)


ROWS = [
    row("copy"),
    row("normgen", tb_s=3.9, fraction_of_copy=0.975),
    row("torch", tb_s=1.0, fraction_of_copy=0.25),
    row("liger", tb_s=2.6, fraction_of_copy=0.65),
    row("quack", error="unsupported: it rounds once"),
    row("copy", 131072),
    row("normgen", 131072, tb_s=3.0, fraction_of_copy=0.75),
    row("torch", 131072, error="wrong: y has shape (2,)"),
    row("liger", 131072, error="RuntimeError: too wide"),
    row("quack", 131072, error="unsupported: it rounds once"),
]


def test_table() -> None:
    assert tables.tables(ROWS) == [
        "rmsnorm, rms_fwd, bfloat16: TB/s (share of a copy of the same bytes)",
        "     H  rows   copy       normgen         torch         liger  quack  best peer  ours/best",
        "    64    10  4.000  3.900 (0.97)  1.000 (0.25)  2.600 (0.65)      -      liger       1.50",
        "131072    10  4.000  3.000 (0.75)         wrong         fails      -          -          -",
        "  quack: unsupported: it rounds once",
        "  torch at 131072: wrong: y has shape (2,)",
        "  liger at 131072: RuntimeError: too wide",
    ]
    assert tables.tables([]) == []


def test_files(tmp_path: Path) -> None:
    small = LatencyRow("rms_fwd", "rmsnorm", 64, 1, "bfloat16", "torch", 1.0, 2.0)
    counted = ProfileRow("add_fwd", "rmsnorm_residual", "forward", 64, 1, "bfloat16", "normgen", 8, 1, 4, 4)
    results = Results({"gpu": "X", "liger": None}, ROWS, [small], [counted])
    results.save(tmp_path / "new")
    folder = tmp_path / "new"
    assert sorted(path.name for path in folder.iterdir()) == ["bench.csv", "bench.json", "latency.csv", "profile.csv"]
    text = (folder / "bench.json").read_text()
    document = json.loads(text)
    assert document == results.document()
    assert json.dumps(document["rows"][0]) + "," in text.splitlines()  # a row a line, for git
    peers = {"op", "H", "elements", "dtype", "provider", "ms", "tb_s"}
    asked = {"spec", "mode", "ms_20", "ms_80", "fraction_of_copy", "peak_mb", "rows", "error"}
    assert peers | asked <= set(document["rows"][0])
    assert document["rows"][8]["error"] == "RuntimeError: too wide" and document["rows"][8]["ms"] is None
    lines = (folder / "bench.csv").read_text().splitlines()
    assert lines[0].startswith("op,spec,mode,H,rows,elements,dtype,provider,bytes,ms,")
    assert lines[9] == "rms_fwd,rmsnorm,forward,131072,10,1310720,bfloat16,liger,123,,,,,,,RuntimeError: too wide"
    assert not results.failed
    assert Results({}, [row("normgen", error="wrong: y")]).failed


def test_latency_table() -> None:
    rows = [
        LatencyRow("rms_fwd", "rmsnorm", 64, 1, "bfloat16", "normgen", 1.72, 17.25, 44.0),
        LatencyRow("rms_fwd", "rmsnorm", 64, 1, "bfloat16", "liger", None, 68.0, error="graph_us: RuntimeError: x"),
        LatencyRow("rms_fwd", "rmsnorm", 64, 1, "bfloat16", "quack", error="unsupported: it rounds once"),
    ]
    assert tables.latency_tables(rows) == [
        "rmsnorm, bfloat16: us a call: GPU in a CUDA graph / host / host, forward and backward",
        "rows   H            normgen         liger  quack",
        "   1  64  1.7 / 17.2 / 44.0  - / 68.0 / -      -",
        "  liger at 1 x 64: graph_us: RuntimeError: x",
        "  quack: unsupported: it rounds once",
    ]


def test_dram_bytes() -> None:
    text = (
        "==PROF== Connected to process 1\n"
        '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","1","add","dram__bytes_read.sum","byte","1,000"\n'
        '"0","1","add","dram__bytes_write.sum","byte","500"\n'
        '"1","1","norm","dram__bytes_read.sum","byte","24"\n'
        '"1","1","norm","dram__bytes_write.sum","byte","6"\n'
    )
    assert profile.parse(text) == {"kernels": 2, "dram_read_bytes": 1024, "dram_write_bytes": 506}
    assert profile.parse("==ERROR== ERR_NVGPUCTRPERM\n") == {}
    counted = ProfileRow("add_fwd", "a", "forward", 64, 1, "bfloat16", "separate", 3_000_000, 2, 1_200_000, 500_000)
    assert tables.profile_tables([counted]) == [
        "DRAM traffic of a call",
        "operation   H  provider  kernels  read MB  written MB  must move MB",
        "  add_fwd  64  separate        2      1.2         0.5           3.0",
    ]


def test_ncu_that_fails(tmp_path: Path) -> None:
    tool = tmp_path / "ncu"
    tool.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM'\nexit 1\n")
    tool.chmod(0o755)
    found = profile.profile(str(tool), "a.yaml", Sizes(64, 1, "bfloat16"), "normgen", "forward")
    assert found == {"error": "ncu exit code 1: ==ERROR== ERR_NVGPUCTRPERM"}


def test_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("matplotlib"):
        assert plots.plot(ROWS, tmp_path) is None
        assert [path.name for path in tmp_path.iterdir()] == ["rmsnorm_forward.png"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plots.plot(ROWS, tmp_path) == "no plots: matplotlib is not installed"
    assert plots.plot([], tmp_path) is None


def test_header_names_what_is_missing() -> None:
    assert header.version("no-such-package") is None
    state = header.python_native()
    assert state is None or all({"available", "disabled", "operations"} == set(one) for one in state.values())
