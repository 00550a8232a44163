"""Runs the battery on an implementation and says which kinds of fault it has."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from normgen.errors import Fault, ToolError
from normgen.plan import Plan
from normgen.render import render_battery
from normgen.verify.kinds import BACKWARD, FORWARD, KINDS, Kind

Verdict = Literal["ok", "fault", "unclear", "note", "not run"]


@dataclass(frozen=True)
class Finding:
    """What became of one kind of fault.

    `unclear`: its tests fail, as they must where plain calls are wrong already.
    """

    kind: str
    verdict: Verdict
    case: str
    """The smallest case that shows it, or why nothing was run."""
    message: str
    failed: int
    ran: int


@dataclass(frozen=True)
class Findings:
    """What the battery found, and for which dtypes and widths the implementation raised an error."""

    kinds: list[Finding]
    refused: list[str]
    stopped: str = ""
    """Why not all of it was run, where nothing that was run is wrong."""

    @property
    def wrong(self) -> bool:
        return any(finding.verdict == "fault" for finding in self.kinds)


@dataclass(frozen=True)
class Ending:
    """How the process ended before its time: in words, and whether by itself."""

    words: str
    crashed: bool


def verify(plan: Plan, implementation: str, forward_only: bool, seconds: int) -> Findings:
    """Run the battery of `plan` on `implementation`, in a process of its own and for no longer than `seconds`.

    Raises ToolError where it cannot be run.
    """
    for needed in ("torch", "triton", "pytest"):
        if importlib.util.find_spec(needed) is None:
            raise ToolError("normgen verify", f"{needed} is not installed; normgen's extra `verify` brings it")
    with tempfile.TemporaryDirectory(prefix="normgen-verify-") as name:
        folder = Path(name).resolve()
        job = prepare(plan, implementation, forward_only, folder)
        ending, output = _run(folder, seconds)
        record = Path(job["record"])
        steps = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    for step in steps:
        if step["event"] == "unusable":
            raise ToolError(implementation, step["message"])
    if not any(step["event"] == "start" for step in steps):
        last = next((line for line in reversed(output.splitlines()) if line.strip()), "it said nothing")
        how = ending.words if ending else "the process ended"
        raise ToolError(implementation, f"{how} before the first test: {last}")
    if not ending and steps[-1]["event"] != "end":
        ending = Ending("the process ended before all tests were run", True)
    found = judge(steps, ending)
    if ending and not found.wrong:
        more = "" if ending.crashed else "; --seconds allows more"
        return replace(found, stopped=f"{ending.words}, and nothing was wrong until then{more}")
    return found


def prepare(plan: Plan, implementation: str, forward_only: bool, folder: Path) -> dict[str, Any]:
    """Write into `folder` what the process that runs the battery reads, and return its job."""
    for file, text in render_battery(plan, forward_only).items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    job = {
        "battery": str(folder / "battery.py"),
        "record": str(folder / "record.jsonl"),
        "implementation": implementation,
        "arguments": [tensor.api for tensor in plan.arguments],
        "results": [tensor.api for tensor in plan.outputs],
    }
    (folder / "job.json").write_text(json.dumps(job))
    return job


def _run(folder: Path, seconds: int) -> tuple[Ending | None, str]:
    """How the process ended, if before its time, and what it printed."""
    # As in `python -m`: modules beside the person who calls are found, and pytest has no plugins but its own.
    paths = [os.getcwd(), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
        "PYTEST_PLUGINS": "",
    }
    command = [sys.executable, "-m", "normgen.verify.child", str(folder / "job.json")]
    with (folder / "output").open("w+b") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            ending = Ending(f"the process {how}", True) if code else None
        except subprocess.TimeoutExpired:
            ending = Ending(f"stopped after {seconds} s", False)
        finally:  # whatever it started goes with it, also where the person who calls gives up
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return ending, output.read().decode(errors="replace")


@dataclass
class Test:
    """A test of the battery, and what became of it."""

    name: str
    width: int
    dtype: str
    case: str
    state: Literal["not run", "running", "passed", "skipped", "failed", "in full"] = "not run"
    """`in full`: failed, and its message names all that is wrong."""
    why: str = ""


@dataclass(frozen=True)
class Failure:
    """What a failed test says about a kind."""

    test: Test
    message: str


def judge(steps: Iterable[dict[str, Any]], ending: Ending | None = None) -> Findings:
    """The verdict on each kind, from what the process wrote."""
    tests: dict[str, Test] = {}
    failures: dict[str, list[Failure]] = {}
    refused: dict[str, list[int]] = {}
    for step in steps:
        event = step["event"]
        if event == "found":
            why = ending.words if ending else ""
            tests[step["id"]] = Test(step["test"], step["width"], step["dtype"], step["case"], why=why)
        elif event == "end":
            refused = step["refused"]
        elif step.get("id") in tests:
            test = tests[step["id"]]
            if event == "start":
                test.state = "running"
            elif event == "finish" and test.state == "running":
                test.state = "passed"
            elif event == "skipped":
                test.state, test.why = "skipped", step["message"]
            elif event == "failed":
                test.state = "in full" if step["message"].startswith("in full\n") else "failed"
                for kind, message in _kinds(test.name, step["message"]):
                    failures.setdefault(kind, []).append(Failure(test, message))
    for test in tests.values():
        if ending and ending.crashed and test.state == "running":
            failures.setdefault(_kind_of(test.name), []).append(Failure(test, f"{ending.words} in this case"))
    found = [_finding(kind, list(tests.values()), failures.get(kind.name, [])) for kind in KINDS]
    widths = {what: ", ".join(map(str, sorted(set(of)))) for what, of in refused.items()}
    return Findings([one for one in found if one], [f"{what} (width {of})" for what, of in widths.items()])


def _kinds(test: str, message: str) -> list[tuple[str, str]]:
    """The kinds that a failure shows, each with what it says of it."""
    named = {kind.name for kind in KINDS}
    lines = [line.strip() for line in message.splitlines()] or [""]  # pytest indents all but the first
    found = [(kind, rest.strip()) for kind, _, rest in (line.partition(":") for line in lines) if kind in named]
    return found or [(_kind_of(test), lines[0])]


def _kind_of(test: str) -> str:
    return next(kind.name for kind in KINDS if test in kind.tests)


def _finding(kind: Kind, tests: list[Test], failures: list[Failure]) -> Finding | None:
    """The verdict on a kind; None where the battery of this spec holds no test of it."""
    mine = [test for test in tests if test.name in kind.tests + kind.named_by]
    passed = sum(test.state in ("passed", "in full") for test in mine)
    if failures:
        plain = {FORWARD} if BACKWARD in kind.tests else {FORWARD, BACKWARD}
        wrong = {test.dtype for test in tests if test.name in plain and test.state == "failed"}
        own = [failure for failure in failures if not (kind.absolute and failure.test.dtype in wrong)]
        verdict: Verdict = "note" if kind.note else "fault" if own else "unclear"
        first = min(own or failures, key=lambda failure: failure.test.width)
        failed = len({id(failure.test) for failure in failures})
        others = sum(test.state == "passed" for test in mine)
        return Finding(kind.name, verdict, first.test.case, first.message, failed, failed + others)
    if not mine:
        return None
    unfinished = [test for test in mine if test.state in ("not run", "running")]
    if unfinished:
        return Finding(kind.name, "not run", unfinished[0].why, "", 0, 0)
    if not passed:
        skipped = all(test.state == "skipped" for test in mine)
        return Finding(kind.name, "not run", mine[0].why if skipped else "other faults came first", "", 0, 0)
    return Finding(kind.name, "ok", "", "", 0, passed)


def table(found: Findings) -> list[str]:
    """Kind, verdict and smallest case, for people."""
    wide = max(len(finding.kind) for finding in found.kinds)
    lines = []
    for finding in found.kinds:
        said = f"{finding.case}: {finding.message}" if finding.message else finding.case
        if finding.verdict == "unclear":
            said = "these tests fail with any wrong plain call"
        count = f"in {finding.failed} of {finding.ran} tests; " if finding.failed else ""
        lines.append(f"{finding.kind:<{wide}}  {finding.verdict:<7}  {count}{said}".rstrip())
    if found.refused:
        lines += ["", "refused with an error, and so not tested:", *(f"  {line}" for line in found.refused)]
    faults = sum(finding.verdict == "fault" for finding in found.kinds)
    if faults:
        return [*lines, "", f"{faults} {'kind' if faults == 1 else 'kinds'} of fault"]
    return lines if found.stopped else [*lines, "", "no fault found"]


def findings(found: Findings, implementation: str) -> list[Fault]:
    """The faults alone, for programs; or why there may be more."""
    if found.stopped:
        return [Fault(implementation, 0, 0, "", found.stopped)]
    return [
        Fault(implementation, 0, 0, finding.kind, f"{finding.case}: {finding.message}")
        for finding in found.kinds
        if finding.verdict == "fault"
    ]
