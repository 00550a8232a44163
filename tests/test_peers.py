"""The table of what `normgen verify` finds in other norms: it shows what was found, what was not run, and no more."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from peers_table import (
    LIBRARIES,
    PAIRS,
    PITFALLS,
    REPORTS,
    ROOT,
    TABLE,
    Pair,
    faults,
    links,
    matrix,
    not_seen,
    refusals,
    render,
    reported,
    run,
)

from normgen.verify.kinds import KINDS

RESULTS = ROOT / "benchmarks" / "results" / "h200" / "peers.json"
LIGER = next(pair for pair in PAIRS if pair.name == "rmsnorm/liger")
CHANGED = {"verdict": "fault", "case": "width 17, bfloat16", "message": "dy\nis [written]", "failed": 2, "ran": 5}
DOCUMENT = {
    "versions": {"device": "A GPU", "torch": "2.11", "quack-kernels": None},
    "pairs": {
        "rmsnorm/liger": {
            "forward_only": False,
            "kinds": {
                "no rows": {"verdict": "ok", "ran": 1},
                "inputs changed": CHANGED,
                "rows of zeros": {"verdict": "not run", "case": "too little memory"},
            },
            "refused": ["float64: RuntimeError: no (width 8)"],
        },
        "layernorm/quack": {"why": "quack-kernels is not installed"},
        "layernorm/torch": {"why": "stopped after 9 s, and nothing was wrong until then; --seconds allows more"},
    },
}


def section(spec: str, document: dict[str, Any] = DOCUMENT) -> list[str]:
    return render(document).split(f"## specs/{spec}.yaml\n")[1].split("\n## ")[0].splitlines()


def test_committed_table_is_of_the_committed_results() -> None:
    document = json.loads(RESULTS.read_text())
    assert TABLE.read_text() == render(document)
    assert document["pairs"].keys() <= {pair.name for pair in PAIRS}
    assert not [name for name, result in document["pairs"].items() if name.endswith("/normgen") and faults(result)]


def test_what_was_found_is_shown() -> None:
    lines = section("rmsnorm")
    assert lines[1:5] == [
        "| kind of fault | liger |",
        "|---|---|",
        "| rows of zeros | not run |",
        "| inputs changed | **fault** |",
    ]
    assert "Ok in all: no rows." in lines
    assert "- Not run: rows of zeros. Reason: too little memory" in lines
    links = "[linkedin/Liger-Kernel#{0}](https://github.com/linkedin/Liger-Kernel/{1}/{0})"
    fault = r"- liger, **inputs changed**. width 17, bfloat16: dy is \[written\] (2 of 5 tests); reported: "
    assert f"{fault}{links.format(370, 'issues')}, {links.format(376, 'pull')}" in lines
    assert "- liger refuses float64: RuntimeError: no (width 8)" in lines
    text = render(DOCUMENT)
    assert "A GPU; torch 2.11, quack-kernels not installed." in text
    assert "Functions that normgen made: 0 of 3 were run in full, 0 have a fault." in text
    ours = {"rmsnorm/normgen": DOCUMENT["pairs"]["rmsnorm/liger"]}
    assert "Functions that normgen made: 1 of 3 were run in full, 1 have a fault." in render(DOCUMENT | {"pairs": ours})
    assert text.count("reported: ") == 1  # of what was seen alone


def test_a_report_is_seen_or_not() -> None:
    torch = next(pair for pair in PAIRS if pair.name == "layernorm/torch")

    def lines(**verdicts: str) -> list[str]:
        kinds = {kind.replace("_", " "): {"verdict": verdict} for kind, verdict in verdicts.items()}
        return not_seen(torch, {"kinds": kinds})

    once = "- torch, rows of zeros: not seen in these versions: "
    assert lines(rows_of_zeros="ok") == [
        f"{once}[pytorch/pytorch#41527](https://github.com/pytorch/pytorch/issues/41527)"
    ]
    [line] = lines(constant_rows="ok", wrong_gradients="ok")  # of one report
    assert line.startswith(
        "- torch, constant rows, wrong gradients: not seen in these versions: [pytorch/pytorch#188372]"
    )
    assert not lines(constant_rows="ok", wrong_gradients="fault")
    assert not lines(constant_rows="not run", rows_of_zeros="unclear", no_rows="ok")
    assert not not_seen(torch, {"why": "it was not tried"})


def test_refusals_that_are_alike_are_one() -> None:
    refused = [
        f"{dtype}: Error: n = {n} is more than 8 (width {n})" for n in (9, 16) for dtype in ("float16", "float32")
    ]
    assert refusals([*refused, "float64: Error: no (width 8)"]) == [
        "float16, float32: Error: n = 9 is more than 8 (width 9, 16)",
        "float64: Error: no (width 8)",
    ]


def test_forward_alone_is_said_and_has_empty_cells() -> None:
    kinds = {"no rows": {"verdict": "note"}}
    results = {"a": {"forward_only": True, "kinds": {}}, "b": {"forward_only": False, "kinds": kinds}}
    assert matrix(results)[:3] == ["| kind of fault | a, forward | b |", "|---|---|---|", "| no rows |  | note |"]


def test_what_was_not_run_is_shown() -> None:
    lines = section("layernorm")
    assert "- quack was not run: quack-kernels is not installed" in lines
    assert "- torch was not run: stopped after 9 s, and nothing was wrong until then; --seconds allows more" in lines
    assert "- liger was not run: it was not tried" in lines
    stopped = {"forward_only": False, "kinds": {"no rows": {"verdict": "ok", "ran": 1}}, "why": "stopped after 9 s"}
    document = DOCUMENT | {"pairs": {"rmsnorm/normgen": stopped}}
    assert "- normgen was not run in full: stopped after 9 s" in section("rmsnorm", document)
    assert "0 of 3 were run in full, 0 have a fault." in render(document)
    assert not [line for line in lines if line.startswith("|")]


def test_every_report_is_of_its_library() -> None:
    pairs = {pair.name: pair for pair in PAIRS}
    for (name, number), kinds in REPORTS.items():
        assert set(kinds) <= {one.name for one in KINDS}
        assert f"\n| {number} |" in PITFALLS.read_text()
        assert f"https://github.com/{LIBRARIES[pairs[name].library]}" in links(pairs[name], number)
        assert links(pairs[name], number) in reported(kinds[0], pairs[name])


@pytest.mark.parametrize("number", [52, 3])  # a report about quack; no row
def test_a_link_that_does_not_fit_is_an_error(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REPORTS, ("rmsnorm/liger", number), ("inputs changed",))
    with pytest.raises(LookupError, match=f"row {number} of PITFALLS.md has no report about liger"):
        render(DOCUMENT)


def test_results_are_kept_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"device": "A GPU", "torch": "2.11", "liger-kernel": None}
    monkeypatch.setattr("peers_table.versions", lambda: found)
    out = tmp_path / "peers.json"
    out.write_text(json.dumps({"versions": found, "pairs": {"layernorm/torch": {"why": "before"}}}))
    kinds = [{"kind": "no rows", "verdict": "ok", "case": "", "message": "", "failed": 0, "ran": 1}]
    answers = {
        "a.py:no_output": (2, "", "warning\nno such spec"),
        "a.py:stopped": (2, json.dumps({"faults": [{"message": f"{ROOT}/a.py stopped"}]}), ""),
        "a.py:right": (0, json.dumps({"kinds": kinds, "refused": [], "stopped": "", "faults": []}), ""),
    }

    def answer(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[1:5] == ["-m", "normgen", "verify", "specs/rmsnorm.yaml"]
        assert command[command.index("--seconds") + 1] == "7"
        implementation = command[command.index("--impl") + 1]
        assert ("--forward-only" in command) == (implementation == "a.py:right")
        end = time.monotonic() + 2
        while implementation == "a.py:right" and "rmsnorm/torch.compile" not in json.loads(out.read_text())["pairs"]:
            assert time.monotonic() < end, "what is done is not written while the next one runs"
            time.sleep(0.01)
        return subprocess.CompletedProcess(command, *answers[implementation])

    monkeypatch.setattr("subprocess.run", answer)
    pairs = [
        LIGER,
        Pair("rmsnorm", "torch", "a.py:no_output"),
        Pair("rmsnorm", "torch.compile", "a.py:stopped"),
        Pair("rmsnorm", "eager formula", "a.py:right", forward_only=True),
    ]
    run(pairs, out, jobs=1, seconds=7)
    kept = json.loads(out.read_text())["pairs"]
    assert kept["layernorm/torch"] == {"why": "before"}
    assert (kept["rmsnorm/liger"]["exit"], kept["rmsnorm/liger"]["why"]) == (None, "liger-kernel is not installed")
    assert (kept["rmsnorm/torch"]["exit"], kept["rmsnorm/torch"]["why"]) == (2, "no such spec")
    assert kept["rmsnorm/torch.compile"]["why"] == "a.py stopped"
    assert kept["rmsnorm/eager formula"]["exit"] == 0
    assert kept["rmsnorm/eager formula"]["kinds"] == {"no rows": {"verdict": "ok", "ran": 1}}
    found["torch"] = "2.12"
    with pytest.raises(SystemExit, match=r"made with .* 'torch': '2.11'.*; remove it or name another file"):
        run([LIGER], out, jobs=1, seconds=7)
