"""Small work, where the host and the start of a kernel decide: times of a call in microseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from normgen.bench.check import Truth, check_outputs, poison
from normgen.bench.measure import time_graph, time_host
from normgen.bench.providers import Case, Offer


def latency(case: Case, offered: Offer, expected: Truth) -> dict[str, Any]:
    """The times of a LatencyRow. What cannot be measured is left out, and `error` says why."""
    found: dict[str, Any] = {}
    function, arguments = offered.function, offered.arguments
    poison(case, case.plan.results)
    with torch.no_grad():
        fault = check_outputs(case, expected, function(*arguments))
        if fault:
            return {"error": fault}
        _attempt(found, "graph_us", lambda: time_graph(lambda: function(*arguments)))
        _attempt(found, "host_us", lambda: time_host(lambda: function(*arguments)))
    if case.plan.backward is not None:
        _attempt(found, "host_grad_us", lambda: time_host(offered.both))
    return found


def _attempt(found: dict[str, Any], name: str, measure: Callable[[], float]) -> None:
    """One of the times may fail (a call that a CUDA graph cannot hold) where the others do not."""
    try:
        found[name] = measure()
    except Exception as error:
        found.setdefault("error", f"{name}: {failure(error)}")


def failure(error: Exception) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
