"""Without a GPU and without the interpreter, CPU tensors take the reference: values, autograd, tracing, modules.

Kernels must not be interpreted here, which is decided when triton is imported: everything runs in one process of its
own, for every shipped spec.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))

PROGRAM = """
import importlib, inspect, sys
import torch

def check(name):
    module = importlib.import_module(f"generated.{name}")
    torch.manual_seed(0)
    width = 4096 if name == "rmsnorm_4096" else 24
    arguments = []
    for argument in inspect.signature(module.reference).parameters:
        if argument in ("x", "residual"):
            arguments.append(torch.randn(5, width).requires_grad_())
        elif argument in ("weight", "bias"):
            arguments.append(torch.randn(width).requires_grad_())
    function = getattr(module, name)
    tuple_of = lambda results: results if isinstance(results, tuple) else (results,)
    results, expected = tuple_of(function(*arguments)), tuple_of(module.reference(*arguments))
    assert all(map(torch.equal, results, expected)), name
    ones = [torch.randn_like(result) for result in results]
    found = torch.autograd.grad(results, arguments, ones)
    wanted = torch.autograd.grad(expected, arguments, ones)
    assert all(map(torch.equal, found, wanted)), name
    compiled = tuple_of(torch.compile(function, backend="aot_eager", fullgraph=True)(*arguments))
    assert all(map(torch.equal, compiled, expected)), name
    with torch.inference_mode():
        assert all(map(torch.equal, tuple_of(function(*[a.detach() for a in arguments])), expected)), name
    try:
        function(arguments[0].int(), *arguments[1:])
    except TypeError as error:
        assert f"{name}: x has dtype torch.int32" in str(error)
    else:
        raise AssertionError(f"{name} took integers")
    print(name, "agrees")

for name in sys.argv[1:]:
    check(name)
"""


@pytest.fixture(scope="module")
def printed():
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, *NAMES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT)
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_cpu_tensors_take_the_reference(name, printed):
    lines, errors = printed
    assert f"{name} agrees" in lines, errors[-2000:]
