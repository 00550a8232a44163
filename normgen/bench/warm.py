"""Compiling ahead, in several processes: Triton and torch.compile keep what they compiled on disk.

A GPU waits while one process compiles one kernel after another; many processes fill the caches in a fraction of that.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from normgen.bench.cases import Sizes
from normgen.bench.providers import make_case, offer
from normgen.plan import Plan, plan
from normgen.processes import spread
from normgen.spec import Spec


def warm(cases: list[tuple[Plan, Sizes]], providers: list[str], jobs: int) -> str:
    """Call every provider once for every case, in `jobs` processes. Returns a sentence on how it went.

    The sizes are those that are measured: torch.compile keeps code for one shape. What fails here fails again, and is
    reported, when it is measured.
    """
    begin = time.monotonic()
    tasks = [(made.spec, sizes, providers) for made, sizes in cases]
    outcome = ""
    try:
        for _ in spread(_call_once, tasks, jobs):
            pass
    except BrokenProcessPool:
        outcome = ", and a process died: the rest is compiled when it is measured"
    return f"compiled {len(tasks)} cases ahead in {jobs} processes, {time.monotonic() - begin:.1f} s{outcome}"


def compile_here() -> None:
    """Keep torch's compiler to this process: processes of its own would multiply with ours."""
    compiler: Any = importlib.import_module("torch._inductor.config")
    compiler.compile_threads = 1


def _call_once(task: tuple[Spec, Sizes, list[str]]) -> None:
    spec, sizes, providers = task
    compile_here()
    with contextlib.suppress(Exception):
        torch.compiler.reset()
        case = make_case(plan(spec), sizes)
        for name in providers:
            with contextlib.suppress(Exception):
                offered = offer(name, case)
                offered.forward()
                if case.plan.backward is not None:
                    offered.backward()()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
