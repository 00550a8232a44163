"""`normgen verify`: right implementations pass, each wrong one has its kind named, and what cannot be run is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from normgen.cli import main
from normgen.loader import load
from normgen.plan import Plan, plan
from normgen.render import render_battery
from normgen.verify import child
from normgen.verify.kinds import KINDS
from normgen.verify.run import Ending, Finding, Findings, judge, prepare, table
from normgen.verify.subject import Subject, Unusable, find

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "tests" / "implementations.py"
RMSNORM = str(ROOT / "specs" / "rmsnorm.yaml")


def plan_of(name: str) -> Plan:
    path = ROOT / "specs" / f"{name}.yaml"
    return plan(load(path.read_bytes(), str(path)))


def found_in(
    spec: str,
    function: str,
    folder: Path,
    forward_only: bool = False,
    options: tuple[str, ...] = (),
    file: Path = HERE,
) -> Findings:
    """The findings of a battery that runs in this process, which saves the import of torch for each."""
    name = f"{file}:{function}"
    job = prepare(plan_of(spec), name, forward_only, folder)
    subject = Subject(find(name), job["arguments"], job["results"])
    steps: list[dict[str, object]] = []
    try:
        child.run(Path(job["battery"]), subject, steps.append, options)
    finally:
        sys.modules.pop("battery", None)
    unusable = [step["message"] for step in steps if step["event"] == "unusable"]
    if unusable:
        raise Unusable(str(unusable[0]))
    return judge([*steps, {"event": "end", "refused": subject.refused}])


def faults(found: Findings) -> dict[str, str]:
    return {one.kind: f"{one.case}: {one.message}" for one in found.kinds if one.verdict == "fault"}


@pytest.mark.parametrize(
    ("spec", "function"),
    [("rmsnorm", "rms"), ("rmsnorm", "rms_function"), ("layernorm", "layer"), ("rmsnorm_residual", "add_rms")],
)
def test_right_ones_pass(spec, function, tmp_path):
    found = found_in(spec, function, tmp_path)
    assert not faults(found)
    assert not found.refused
    assert sum(one.ran for one in found.kinds) > 150


@pytest.mark.parametrize("spec", ["rmsnorm_residual", "layernorm"])
def test_ours_have_none(spec, tmp_path):
    found = found_in(spec, spec, tmp_path, file=ROOT / "generated" / f"{spec}.py")
    assert not faults(found)
    assert not [one for one in found.kinds if one.verdict not in ("ok", "not run")]
    assert not found.refused


# One width is enough for most mistakes.
NARROW = tuple(f"--deselect=battery.py::{test}" for test in ("test_forward[", "test_backward[", "test_rows_are_read"))

# What is wrong with each, and what the smallest case must say.
WRONG = [
    ("rmsnorm", "eps_outside", "eps ignored or moved", "results 1.471 of their size"),
    ("rmsnorm", "eps_fixed", "eps ignored or moved", "where the variance is eps = 1e-06"),
    ("rmsnorm", "fp16_sums", "squares in fp16", "rows of size 0.0001221 give results 120.6 of theirs"),
    ("rmsnorm", "mean_subtracted", "mean subtracted or kept", "the mean of results is"),
    ("rmsnorm", "weight_ignored", "an argument left out", "a change of weight does 0 of what it should"),
    ("rmsnorm", "fp32_weight_ignored", "weight in another dtype", "width 150, float16"),
    ("rmsnorm", "weight_at_the_row", "row offset on weight or bias", "rows of the same values"),
    ("rmsnorm", "stride_is_width", "stride taken for width", "x, row stride"),
    ("rmsnorm", "last_column_lost", "mask, first or last columns", "column 149 is left out of the sums"),
    ("rmsnorm", "block_for_width", "denominator is not the width", "divided by 256"),
    ("rmsnorm", "rows_leak", "NaN or inf leaks into other rows", "the other rows"),
    ("rmsnorm", "dx_lacks_a_term", "wrong gradients", "dx: "),
    ("rmsnorm", "dweight_of_the_last_dims", "rank, leading dimensions", "shape (2, 1): dweight: "),
    ("rmsnorm", "dy_overwritten", "inputs changed", "values of the incoming gradient"),
    ("rmsnorm", "detached", "wrong gradients", "--forward-only"),
    ("rmsnorm", "x_changed", "inputs changed", "values of the arguments"),
    ("rmsnorm", "always_fp32", "dtype of the result", "y has torch.float32, must be torch.float16"),
    ("rmsnorm", "needs_a_view", "expanded or permuted rows", "x, transposed before the rows: view size"),
    ("rmsnorm", "block_of_four", "rows of 1 to 3 elements", "width 1"),
    ("rmsnorm", "one_column_is_dense", "stride taken for width", "width 1, float32: x, row stride: values: "),
    ("rmsnorm", "saved_tensors_asked_for_twice", "computed again in backward", "saved_tensors"),
    ("rmsnorm", "squares_by_matmul", "values under autocast", "under autocast to float16: "),
    ("layernorm", "bias_missing", "an argument left out", "a change of bias does 0 of what it should"),
    ("layernorm", "one_pass", "large mean cancels", "times the bound"),
    ("layernorm", "one_pass", "gradients of rows far from zero", "dx: "),
    ("rmsnorm_residual", "strides_are_alike", "one stride for all tensors", "values: "),
    ("rmsnorm_residual", "residual_left_out", "an argument left out", "a change of residual does 0"),
]


@pytest.mark.parametrize(("spec", "function", "kind", "says"), WRONG, ids=[wrong[1] for wrong in WRONG])
def test_wrong_ones_are_named(spec, function, kind, says, tmp_path):
    found = found_in(spec, function, tmp_path, options=NARROW)
    assert says in faults(found).get(kind, "no fault of this kind")
    # Other faults are few: what follows from a wrong plain call is no fault of its own.
    assert len(faults(found)) <= 5
    assert found.wrong


@pytest.mark.parametrize(
    ("spec", "function", "kind", "says"),
    [
        ("layernorm", "one_pass", "mean that fp32 does not hold", "over the bound"),
        ("rmsnorm", "rstd_rounded", "gradients rounded on the way", "errors of dx add up to"),
    ],
)
def test_what_is_no_fault_is_noted(spec, function, kind, says, tmp_path):
    found = {one.kind: one for one in found_in(spec, function, tmp_path, options=NARROW).kinds}[kind]
    assert found.verdict == "note"
    assert says in f"{found.case}: {found.message}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="these kinds are about a GPU")
@pytest.mark.parametrize(
    ("test", "function", "kind", "says"),
    [
        ("test_cuda_graph", "waits_for_the_gpu", "captured in a CUDA graph", "no capture: "),
        ("test_two_streams", "shares_memory", "two streams at once", "a call beside one on another stream: "),
        ("test_threads", "shares_a_variable", "threads at once", "a call beside those of other threads: "),
        ("test_large_tensors", "offsets_of_32_bits", "more than 2^31 elements", "rows among so many: "),
    ],
)
def test_wrong_ones_are_named_on_a_gpu(test, function, kind, says, tmp_path):
    options = ("-k", f"{test} or test_forward_of_each_strategy")
    assert not faults(found_in("rmsnorm", "rms", tmp_path, options=options))
    found = faults(found_in("rmsnorm", function, tmp_path, options=options))
    assert list(found) == [kind]
    assert says in found[kind]


@pytest.mark.parametrize(
    ("function", "kind"),
    [("reads_too_far", "reads outside the rows"), ("writes_too_far", "writes outside the result")],
)
def test_kernels_with_a_mask_too_wide(function, kind, tmp_path):
    found = found_in("rmsnorm_llama", function, tmp_path, forward_only=True, options=NARROW)
    assert kind in faults(found)


@pytest.mark.parametrize(("spec", "function"), [("rmsnorm", "detached"), ("rmsnorm_llama", "triton_rms")])
def test_forward_only(spec, function, tmp_path):
    found = found_in(spec, function, tmp_path, forward_only=True)
    assert not faults(found)
    assert "wrong gradients" not in {one.kind for one in found.kinds}


def test_what_it_refuses_is_no_fault(tmp_path):
    found = found_in("rmsnorm", "fp32_only", tmp_path)
    assert not faults(found)
    verdicts = {one.kind: (one.verdict, one.case) for one in found.kinds}
    assert verdicts["squares in fp16"][0] == "not run"
    assert "no kernel for torch.float16" in verdicts["squares in fp16"][1]
    assert verdicts["wrong values"][0] == verdicts["wrong gradients"][0] == "ok"
    [line] = [
        line for line in found.refused if line.startswith("float16 with weights of float16: TypeError: no kernel")
    ]
    assert "width 1, 2, 3, 17" in line


def test_every_test_has_a_kind():
    """And each kind its tests: none is about something that no battery holds."""
    known = {test for kind in KINDS for test in kind.tests}
    there = set()
    for path in sorted((ROOT / "specs").glob("*.yaml")):
        lines = render_battery(plan_of(path.stem), forward_only=False)["battery.py"].splitlines()
        there |= {line[4 : line.index("(")] for line in lines if line.startswith("def test_")}
    assert there == known
    assert {test for kind in KINDS for test in kind.named_by} <= known
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert f"look for {len(KINDS)} kinds of fault" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.norms:rms", "no_such_package.norms cannot be imported: there is no module no_such_package"),
        ("no_such_file.py:rms", "there is no file no_such_file.py"),
        (f"{HERE}:rsm", "has no 'rsm'; did you mean rms?"),
        (f"{HERE}:a_number", "is no function but of type int"),
        (
            f"{HERE}:other_names",
            "cannot be called with x, weight and eps by name: missing a required argument: 'gamma'",
        ),
    ],
)
def test_what_cannot_be_called(name, message):
    with pytest.raises(Unusable) as error:
        Subject(find(name), ["x", "weight"], ["y"])
    assert str(error.value).endswith(message)
    assert "\n" not in str(error.value)
    assert name not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import not_there_at_all", "it imports not_there_at_all, which is not installed"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_what_cannot_be_imported(text, message, tmp_path):
    path = tmp_path / f"breaks_{abs(hash(text))}.py"
    path.write_text(text)
    with pytest.raises(Unusable, match=f"cannot be imported: {message}"):
        find(f"{path}:f")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "no call succeeded; width 150, float32 with weights of float32: RuntimeError: out of order"),
        ("two_results", "^returns Tensor and Tensor; it must return the tensor y$"),
    ],
)
def test_what_no_call_of_succeeds(function, message, tmp_path):
    with pytest.raises(Unusable, match=message):
        found_in("rmsnorm", function, tmp_path)


@pytest.mark.parametrize("name", ["rms", "package.module", ":rms", "package:", "package.module:1"])
def test_no_function_named(name, capsys):
    with pytest.raises(SystemExit) as error:
        main(["verify", RMSNORM, "--impl", name])
    assert error.value.code == 2
    assert "names no function; write package.module:function or file.py:function" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "how"),
    [("aborts", "the process died of SIGABRT"), ("leaves", "the process ended before all tests were run")],
)
def test_command_names_faults(function, how, capsys):
    assert main(["verify", RMSNORM, "--impl", f"{HERE}:{function}", "--format", "json"]) == 1
    said = json.loads(capsys.readouterr().out)
    [fault] = said["faults"]
    assert fault["key"] == "wrong values"
    assert fault["message"] == f"width 17, float16: {how} in this case"
    after = {one["kind"]: one for one in said["kinds"]}["wrong gradients"]
    assert (after["verdict"], after["case"]) == ("not run", how)


def test_command_passes_a_right_one(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["verify", "specs/rmsnorm.yaml", "--impl", "tests.implementations:rms", "--forward-only"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "no fault found"
    assert any(line.split("  ")[0] == "wrong values" and line.split()[-1] == "ok" for line in lines)


def test_command_says_what_cannot_be_run(capsys):
    assert main(["verify", RMSNORM, "--impl", f"{HERE}:rsm"]) == 2
    out, err = capsys.readouterr()
    assert not out
    [line] = err.splitlines()
    assert line.startswith(f"{HERE}:rsm: {HERE} has no 'rsm'; did you mean rms?")


def test_command_stops(capsys):
    assert main(["verify", RMSNORM, "--impl", f"{HERE}:sleeps", "--seconds", "2"]) == 2
    assert "stopped after 2 s before the first test" in capsys.readouterr().err


def test_what_was_fine_until_then_is_shown(capsys, monkeypatch):
    found = Findings(
        [Finding("no rows", "ok", "", "", 0, 2)], [], "stopped after 9 s, and nothing was wrong until then"
    )
    monkeypatch.setattr("normgen.verify.run.verify", lambda *_: found)
    assert main(["verify", RMSNORM, "--impl", "a:b"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("no rows  ok\n", f"a:b: {found.stopped}\n")
    assert main(["verify", RMSNORM, "--impl", "a:b", "--format", "json"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert (said["stopped"], said["kinds"][0]["verdict"]) == (found.stopped, "ok")


def test_bad_spec(tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text("name: bad\nnorm: rsm\neps: {value: 1e-6}\n")
    assert main(["verify", str(path), "--impl", "package:function"]) == 2
    assert "bad.yaml:2" in capsys.readouterr().err


STEPS = [
    {"event": "found", "id": str(i), "test": test, "width": 8, "dtype": "float16", "case": f"width {i}"}
    for i, test in enumerate(["test_forward", "test_ranks", "test_no_rows", "test_same_bits_again_and_in_any_batch"])
]


def steps(*events: tuple[str, int, str]) -> list[dict[str, object]]:
    said = [{"event": event, "id": str(i), "message": message} for event, i, message in events]
    return [*STEPS, *said]


def verdicts(found: Findings) -> dict[str, tuple[str, str]]:
    return {one.kind: (one.verdict, one.message) for one in found.kinds}


def test_a_line_may_name_its_kind():
    said = "inputs changed: x\nassert False"
    found = verdicts(judge(steps(("start", 0, ""), ("failed", 0, said), ("finish", 0, ""))))
    assert found["inputs changed"] == ("fault", "x")
    assert found["wrong values"] == ("not run", "")


def test_notes_are_no_faults():
    found = judge(steps(("start", 3, ""), ("failed", 3, "other results the second time"), ("finish", 3, "")))
    assert verdicts(found)["not the same bits again"] == ("note", "other results the second time")
    assert not found.wrong


def test_a_hang_is_no_fault_and_what_came_before_it_is():
    late = judge(steps(("start", 0, "")), Ending("stopped after 9 s", crashed=False))
    assert not late.wrong
    assert {one.verdict for one in late.kinds} == {"not run"}
    done = judge(steps(("start", 2, ""), ("finish", 2, "")), Ending("stopped after 9 s", crashed=False))
    assert {one.kind for one in done.kinds if one.verdict == "ok"} == {"no rows"}
    wrong = judge(steps(("failed", 0, "values: off"), ("start", 1, "")), Ending("stopped after 9 s", crashed=False))
    assert verdicts(wrong)["wrong values"] == ("fault", "values: off")
    assert next(line for line in table(wrong) if line.startswith("no rows")).endswith("stopped after 9 s")
