"""No races and no hangs: `race_hunt` on a GPU, plain and under compute-sanitizer."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
SECONDS = 300  # a hang is then an error: a spec takes a tenth of it

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="programs run side by side on a GPU alone")


def hunt(spec: Path, repeats: int, *under: str, alone: bool = False) -> str:
    """What it prints. What hangs is killed with all its children: one left on the GPU would disturb other tests."""
    command = [*under, sys.executable, "-m", "tests.race_hunt", *["--alone"] * alone, str(repeats), str(spec)]
    # Without blocks that PyTorch keeps, an access beside a tensor is one beside an allocation.
    environ = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if under else {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, env=environ, text=True, start_new_session=True, **pipes) as run:
        try:
            output, _ = run.communicate(timeout=SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, output[-4000:]
    return output


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.stem)
def test_the_same_bits_a_thousand_times(spec: Path) -> None:
    lines = [line for line in hunt(spec, 1000).splitlines() if line.endswith("calls with other bits")]
    assert lines
    assert all(": 0 of 2000 calls" in line for line in lines)


@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer comes with CUDA's toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.stem)
def test_sanitized(spec: Path, tool: str) -> None:
    """Kernels of the module alone: what multiplies matrices beside them races with itself, says racecheck.

    All kernels under initcheck: it calls initialised what a kernel has written that it watched. On one stream under
    racecheck, which looks at the threads of a program, and itself breaks down when kernels run side by side.
    """
    checked = () if tool == "initcheck" else ("--kernel-name", f"kernel_substring={spec.stem}")
    under = ("compute-sanitizer", "--tool", tool, *checked, "--error-exitcode", "3")
    assert ": 0 of 2 calls" in hunt(spec, 1, *under, alone=tool == "racecheck")
