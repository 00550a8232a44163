"""Planting: a mutant beside the generated test of its spec, run in Triton's interpreter in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from mutation.mutants import ROOT, Mutant

LIMIT = 600.0  # seconds; a whole test takes one or two minutes
# Cheap tests that reach every kernel and every stride, and what is in the names of those that reach one function.
FIRST = ("of_each_strategy", "layout", "offsets")
REACHED = {
    "forward": ("forward_of", "mean_", "tiles"),
    "forward_chunked": ("forward_of", "mean_", "wide", "chunks"),
    "forward_slabs": ("forward_of", "mean_", "wide"),
    "statistics": ("backward_of", "far_from", "wide"),
    "backward": ("backward_of", "far_from", "tiles"),
    "backward_slabs": ("backward_of", "wide"),
    "sum_partials": ("backward_of", "wide"),
    "_sum_of_products": ("of_each_strategy", "wide"),
    "_packed": ("forward_of", "chunks", "wide"),
    "_rows": ("layout", "kept_by_kind"),
    "_check": ("refused",),
    "_empty_like": ("like_real", "layout"),
    "_Autograd": ("twice", "noticed"),
    "_absent": ("one_result",),
    "_backward": ("no_rows", "backward_of"),
    "_formula": ("reference",),
    "reference": ("reference",),
    "_gradients": ("one_result", "wanted"),
}
NO_PROGRAM = ("NameError", "UnboundLocalError", "SyntaxError")


@dataclass(frozen=True)
class Verdict:
    """What the generated test said: the test that failed first and how, or nothing at all."""

    test: str
    how: str

    @property
    def survived(self) -> bool:
        return not self.how

    @property
    def is_no_program(self) -> bool:
        """Whether it does not even import, or fails for a name that the rule made up: that is a fault of the rule."""
        return self.how in NO_PROGRAM or bool(self.how and not self.test)


class Watch:
    """A pytest plugin: puts tests first whose names have these words, and says which test runs and how one failed."""

    def __init__(self, words: tuple[str, ...], report: Connection) -> None:
        self.words, self.report = words, report

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: -sum(word in item.name for word in self.words))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.report.send(("runs", nodeid.rpartition("::")[2]))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]):
        outcome = yield
        if outcome.get_result().failed:
            error = call.excinfo.value
            while type(error).__name__ == "InterpreterError" and error.__cause__:
                error = error.__cause__
            self.report.send(("failed", type(error).__name__))


def judge(mutant: Mutant) -> Verdict:
    """The verdict of the whole generated test, which stops at its first failure."""
    spec, words = mutant.spec, (*FIRST, *REACHED.get(mutant.function, ()))
    parent, child = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder) / "tests"
        tests.mkdir()
        (Path(folder) / f"{spec}.py").write_text(mutant.source)
        test = shutil.copy(ROOT / "generated" / "tests" / f"test_{spec}.py", tests)
        process = multiprocessing.get_context("fork").Process(target=_run, args=(test, words, child))
        process.start()
        child.close()
        running, how = "", ""
        with contextlib.suppress(EOFError):
            deadline = time.monotonic() + LIMIT
            while parent.poll(max(0.0, deadline - time.monotonic())):
                said, what = parent.recv()
                if said == "runs":
                    running = what
                else:
                    how = what
                    break
            else:
                how = f"more than {LIMIT:g} s"
                process.kill()
        process.join()
    if not how and process.exitcode:
        how = f"exit code {process.exitcode}"  # less than 0: a signal
    return Verdict(running if how else "", how)


def _run(test: str, words: tuple[str, ...], report: Connection) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", f"--rootdir={Path(test).parent}"]
    code = pytest.main([*options, "-W", "ignore", test], plugins=[Watch(words, report)])
    os._exit(code)
