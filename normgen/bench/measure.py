"""How long a call takes on a GPU, and how much memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Run = Callable[[], Any]

# Written between calls so that no call finds its inputs in the L2 cache: larger than any GPU's.
_FLUSH_BYTES = 256 * 2**20
# Cycles of a sleep that lasts 1 ms at the 2 GHz of today's GPUs; a little more or less does no harm.
_CYCLES_A_MS = 2_000_000
_WARM_UP_MS = 25.0


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: the median, and the 20th and 80th percentiles."""

    ms: float
    ms_20: float
    ms_80: float


def quantile(samples: Sequence[float], q: float) -> float:
    """The q-quantile of `samples`, q from 0 to 1, interpolated linearly between neighbours. Needs one sample."""
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def repetitions(iteration_ms: float, budget_ms: float) -> int:
    """How often to measure what takes `iteration_ms`: as the budget allows, at least 10 times, at most 500.

    The median of 500 samples of 5 % spread is good to 0.3 %; more of them would only cost time on the device.
    """
    return max(10, min(500, int(budget_ms / max(iteration_ms, 1e-6))))


def summary(samples: Sequence[float]) -> Timing:
    """Median and percentiles of times in milliseconds."""
    return Timing(*(quantile(samples, q) for q in (0.5, 0.2, 0.8)))


def time_gpu(run: Run, prepare: Run | None = None, budget_ms: float = 150.0) -> Timing:
    """GPU time of `run` with a cold L2 cache, and without the host: the GPU sleeps until the host has queued all of it.

    `prepare` runs before each call, outside the time. It all takes about `budget_ms`.
    """
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def iteration(lead_ms: float) -> tuple[Any, Any]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if prepare is not None:
            prepare()
        flush.zero_()
        torch.cuda._sleep(int(lead_ms * _CYCLES_A_MS))
        start.record()
        run()
        end.record()
        return start, end

    trials = 5
    iteration(0.0)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(trials):
        iteration(0.0)
    host_ms = (time.perf_counter() - begin) * 1e3 / trials
    torch.cuda.synchronize()
    # A provider that waits for the GPU on its own has a host time that includes it; sleeping longer would not help.
    lead_ms = min(host_ms, 1.0)
    begin = time.perf_counter()
    for _ in range(trials):
        iteration(lead_ms)
    torch.cuda.synchronize()
    iteration_ms = (time.perf_counter() - begin) * 1e3 / trials
    # Clocks fall while something is compiled, and rise within some milliseconds.
    for _ in range(min(100, int(_WARM_UP_MS / iteration_ms))):
        iteration(lead_ms)
    events = [iteration(lead_ms) for _ in range(repetitions(iteration_ms, budget_ms))]
    torch.cuda.synchronize()
    return summary([start.elapsed_time(end) for start, end in events])


def copying(count: int, like: Any) -> tuple[int, Run]:
    """A copy on the device in rows as `like`, [N, H], has them. Returns the bytes, near `count`, read and written."""
    rows = max(1, count // (2 * like.shape[-1] * like.element_size()))
    source = torch.randn(rows, like.shape[-1], dtype=like.dtype, device=like.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes, lambda: target.copy_(source)


def time_host(run: Run) -> float:
    """Host time of `run` in microseconds a call: the median of 10 loops of 50 calls, the GPU being idle before each."""
    calls = 50
    samples = []
    for _ in range(11):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        samples.append((time.perf_counter() - begin) * 1e6 / calls)
    torch.cuda.synchronize()
    return quantile(samples[1:], 0.5)  # the first loop warms up


def time_graph(run: Run) -> float:
    """GPU time of `run` in microseconds a call inside a CUDA graph of 20 calls; its data stays in the L2 cache."""
    calls = 20
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    samples = []
    for _ in range(30):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / calls)
    return quantile(samples[5:], 0.5)  # the first replays upload the graph and raise the clocks


def peak_mb(run: Run) -> float:
    """The most memory that `run` holds beyond what was held before it, in 10^6 bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 1e6
