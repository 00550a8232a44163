"""Work spread over processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


def spread(function: Callable[[Task], Result], tasks: Sequence[Task], jobs: int) -> Iterator[Result]:
    """The function of each task, in the order of the tasks; in `jobs` fresh processes, or in this one where that is 1.

    Raises what the function raises, and BrokenProcessPool where a process dies.
    """
    if jobs == 1:
        yield from map(function, tasks)
        return
    # Fresh ones: a process that has met a GPU cannot be forked.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(function, tasks)
