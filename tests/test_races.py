"""No races and no hangs: `race_hunt` on a GPU, plain and under compute-sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
SECONDS = 300  # a hang is then an error: a spec takes a tenth of it

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="programs run side by side on a GPU alone")


def hunt(spec: Path, repeats: int, *under: str) -> str:
    command = [*under, sys.executable, "-m", "tests.race_hunt", str(repeats), str(spec)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return run.stdout


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.stem)
def test_the_same_bits_a_thousand_times(spec: Path) -> None:
    lines = hunt(spec, 1000).splitlines()
    assert lines
    assert all(": 0 of 2000 calls" in line for line in lines)


@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer comes with CUDA's toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.stem)
def test_sanitized(spec: Path, tool: str) -> None:
    assert ": 0 of 2 calls" in hunt(spec, 1, "compute-sanitizer", "--tool", tool, "--error-exitcode", "3")
