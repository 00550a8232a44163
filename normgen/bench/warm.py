"""Compiling ahead, in several processes: Triton and torch.compile keep what they compiled on disk.

A GPU waits while one process compiles one kernel after another; many processes fill the caches in a fraction of that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from normgen.bench.cases import Sizes
from normgen.bench.providers import make_case, offer
from normgen.plan import Plan, plan
from normgen.spec import Spec


def warm(cases: list[tuple[Plan, Sizes]], providers: list[str], jobs: int) -> str:
    """Call every provider once for every case, in `jobs` processes. Returns a sentence on how it went.

    The sizes are those that are measured: torch.compile keeps code for one shape. What fails here fails again, and is
    reported, when it is measured.
    """
    begin = time.monotonic()
    tasks = [(made.spec, sizes, providers) for made, sizes in cases]
    # The compiler's own processes would multiply with ours.
    before = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    outcome = ""
    try:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(_call_once, tasks))
    except BrokenProcessPool:
        outcome = ", and a process died: the rest is compiled when it is measured"
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
        else:
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = before
    return f"compiled {len(tasks)} cases ahead in {jobs} processes, {time.monotonic() - begin:.1f} s{outcome}"


def _call_once(task: tuple[Spec, Sizes, list[str]]) -> None:
    spec, sizes, providers = task
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
