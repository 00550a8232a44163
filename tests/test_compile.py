"""Every shipped variant compiles without a GPU, spills no register, and moves rows 16 bytes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
# Target, dtype of x and dtype of the weight: all but float64, which is there for gradcheck. One dtype does not stand in
# for another: which registers ptxas spares differs even between float16 and bfloat16. The mixed case is compiled once.
CASES = [(target, x, x) for target in TARGETS for x in ("bfloat16", "float16", "float32")]
CASES.append(("sm_100", "bfloat16", "float32"))
# Bytes of shared memory that one program may have.
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


def compile_for(target: str, x: str, weight: str, *options: object) -> list[dict[str, Any]]:
    """What tests/compiled.py prints, from a process in which Triton compiles rather than interprets."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, ROOT / "tests" / "compiled.py", target, x, weight, *options]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


def faults(target: str, compiled: list[dict[str, Any]]) -> list[str]:
    found = []
    for one in compiled:
        name = "{kernel} of {specs}, {rows} x {columns} by {warps} warps: ".format(**one, **one["tile"])
        if one["spilled"]:
            found.append(f"{name}{one['spilled']} bytes spilled, with {one['registers']} registers")
        if one["shared"] > SHARED[target]:
            found.append(f"{name}{one['shared']} bytes of shared memory")
        found += [f"{name}{moved} bytes an instruction in `{line}`" for line, moved in one["narrow"].items()]
    return found


@pytest.mark.parametrize("target, x, weight", CASES)
def test_variants(target: str, x: str, weight: str) -> None:
    compiled = compile_for(target, x, weight)
    assert compiled
    assert faults(target, compiled) == []


def compile_one(target: str, kernel: str, *options: object) -> dict[str, Any]:
    spec = ROOT / "specs" / "layernorm_residual.yaml"
    [one] = compile_for(target, "bfloat16", "bfloat16", "--spec", spec, "--kernel", kernel, *options)
    return one


@pytest.mark.parametrize("target, columns", [("sm_90", 8192), ("gfx942", 16384)])
def test_a_rung_too_wide_is_noticed(target: str, columns: int) -> None:
    one = compile_one(target, "layernorm_residual_backward", "--tile", 1, columns, 2)
    assert one["spilled"] > 0
    assert not one["narrow"]
    assert len(faults(target, [one])) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_rows_taken_for_less_aligned_are_noticed(target: str) -> None:
    """Were the kernel told of 8 bytes only, each load and store of rows would be narrow, and is found to be."""
    one = compile_one(target, "layernorm_residual_forward", "--tile", 2, 1024, 4, "--alignment", 4)
    assert one["spilled"] == 0
    assert sorted(line.split("(")[1].split(" ")[0] for line in one["narrow"]) == [
        "out_rows",
        "residual_out_rows",
        "residual_rows",
        "x_rows",
    ]
    assert set(one["narrow"].values()) == {8}
    assert len(faults(target, [one])) == 4
