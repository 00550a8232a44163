"""DRAM bytes of one call, counted by Nsight Compute.

`ncu` profiles a whole process, so the call runs in one of its own: `python -m normgen.bench.profile`.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from normgen.bench.cases import Mode, Sizes
from normgen.bench.providers import make_case, offer
from normgen.loader import load_at
from normgen.plan import plan

_READ, _WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"


def ncu() -> str | None:
    """The path of Nsight Compute's command line, if it is installed."""
    return shutil.which("ncu")


def profile(tool: str, source: str, sizes: Sizes, provider: str, mode: Mode) -> dict[str, Any]:
    """The counts of a ProfileRow, or its `error`.

    Caches are flushed before each kernel; what the last kernel leaves in the L2 cache is not counted as written.
    """
    case = json.dumps([source, sizes.H, sizes.rows, sizes.dtype, provider, mode])
    command = [tool, "--metrics", f"{_READ},{_WRITTEN}", "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--csv", "--print-units", "base", sys.executable, "-m", "normgen.bench.profile", case]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"ncu: {error}"}
    counts = parse(run.stdout)
    if run.returncode or not counts:
        said = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
        return {"error": f"ncu exit code {run.returncode}: {said[-1][:200] if said else 'it said nothing'}"}
    return counts


def parse(text: str) -> dict[str, Any]:
    """Kernels and bytes from the CSV that ncu prints after lines of its own; empty where there is none."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return {}
    totals = {_READ: 0, _WRITTEN: 0}
    kernels = set()
    for row in csv.DictReader(lines[start:]):
        if row["Metric Name"] in totals:
            kernels.add(row["ID"])
            totals[row["Metric Name"]] += round(float(row["Metric Value"].replace(",", "")))
    if not kernels:
        return {}
    return {"kernels": len(kernels), "dram_read_bytes": totals[_READ], "dram_write_bytes": totals[_WRITTEN]}


def _driver(source: str, H: int, rows: int, dtype: str, provider: str, mode: Mode) -> None:
    """The call between the marks that ncu looks for; a first one has compiled it."""
    case = make_case(plan(load_at(Path(source))), Sizes(H, rows, dtype))
    offered = offer(provider, case)
    call = offered.backward() if mode == "backward" else getattr(offered, mode)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    _driver(*json.loads(sys.argv[1]))
