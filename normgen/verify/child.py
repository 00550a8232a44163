"""The process that runs the battery: pytest on the rendered file, each step written down as it happens.

Started by `normgen.verify.run`, which reads what is written even where this process crashes or hangs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from normgen.verify.subject import Subject, Unusable, find, use

Write = Callable[[dict[str, object]], None]


class Recorder:
    """Writes what becomes of each test: its name, its case, and where it fails, the message."""

    def __init__(self, write: Write) -> None:
        self.write = write

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.write({"event": "found", "id": item.nodeid, **_case(item)})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write({"event": "start", "id": nodeid})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, Unusable):
            self.write({"event": "unusable", "message": str(error)})
        elif report.skipped:
            self.write({"event": "skipped", "id": item.nodeid, "message": str(getattr(error, "msg", None) or error)})
        elif error is not None:
            message = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            what = "skipped" if _is_memory(error) else "failed"
            self.write({"event": what, "id": item.nodeid, "message": message})
            if isinstance(error, torch.AcceleratorError):  # the GPU is lost to this process: the rest would fail too
                os._exit(1)
        return report

    def pytest_exception_interact(self, call: pytest.CallInfo[None], report: object) -> None:
        if isinstance(report, pytest.CollectReport) and call.excinfo:
            error = call.excinfo.value
            message = str(error) if isinstance(error, Unusable) else f"{type(error).__name__}: {error}"
            self.write({"event": "unusable", "message": message})

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write({"event": "finish", "id": nodeid})


def _case(item: pytest.Item) -> dict[str, object]:
    """The test and the case in words: width and dtype, and whatever else it varies."""
    assert isinstance(item, pytest.Function)
    parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    width = parameters.pop("width", item.module.H)
    dtype = str(parameters.pop("dtype", item.module.PRECISE)).removeprefix("torch.")
    unsaid = ("strategy", "which", "wanted")
    more = [f"{name} {value}".replace("torch.", "") for name, value in parameters.items() if name not in unsaid]
    case = ", ".join([f"width {width}", dtype, *more])
    return {"test": item.function.__name__, "width": width, "dtype": dtype, "case": case}


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def run(battery: Path, subject: Subject, write: Write, options: Sequence[str] = ()) -> int:
    """Run the battery in this process and return pytest's exit code. `options` are further ones of pytest."""
    use(subject)
    empty = battery.with_name("pytest.ini")
    empty.write_text("[pytest]\n")  # whatever the settings around are, they are not for this
    return pytest.main(
        [
            f"--config-file={empty}",
            f"--rootdir={battery.parent}",
            f"--confcutdir={battery.parent}",
            "--import-mode=importlib",
            *("-p", "no:cacheprovider", "-p", "no:warnings"),
            *("-q", "--capture=no", "--tb=no", "--no-summary"),
            *options,
            str(battery),
        ],
        plugins=[Recorder(write)],
    )


def main() -> None:
    """`python -m normgen.verify.child JOB`, where JOB holds the battery, the implementation, its arguments, results."""
    job = json.loads(Path(sys.argv[1]).read_text())
    with Path(job["record"]).open("w", encoding="utf-8") as record:

        def write(step: dict[str, object]) -> None:
            record.write(json.dumps(step) + "\n")
            record.flush()

        try:
            subject = Subject(find(job["implementation"]), job["arguments"], job["results"])
        except Unusable as error:
            write({"event": "unusable", "message": str(error)})
        else:
            code = run(Path(job["battery"]), subject, write)
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                sys.exit(code)  # not all tests were run
            write({"event": "end", "refused": subject.refused})


if __name__ == "__main__":
    main()
