"""Generated modules in larger systems: child processes, kernel caches, graphs with dynamic shapes, AOTInductor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from normgen.loader import load  # noqa: E402
from normgen.modules import imported  # noqa: E402
from normgen.plan import plan  # noqa: E402
from normgen.render import render  # noqa: E402

ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H = 48
ROWS = (2, 3, 70)
"""Numbers of rows of calls that share a graph."""


def run(program: str, *arguments: str, folder: Path, environ: dict[str, str] | None = None) -> str:
    """What a program prints, in a process of its own."""
    path = folder / "program.py"
    path.write_text(program)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = os.environ | {"PYTHONPATH": paths} | (environ or {})
    done = subprocess.run([sys.executable, path, *arguments], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# No call may start CUDA before the fork, so the device comes as an argument.
CHILD = """\
import multiprocessing, sys, torch
from generated import rmsnorm

def computed(device):
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape).to(device).requires_grad_() for shape in ((3, 48), (48,)))
    y = rmsnorm.rmsnorm(x, weight)
    return [tensor.tolist() for tensor in (y, *torch.autograd.grad(y.square().sum(), (x, weight)))]

def in_child(method, device):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.apply(computed, (device,))

if __name__ == "__main__":
    method, device = sys.argv[1:]
    if (method, device) == ("fork", "cuda"):
        early = in_child(method, device)
        assert early == computed(device)
        try:
            in_child(method, device)
        except RuntimeError as error:
            assert "Cannot re-initialize CUDA in forked subprocess" in str(error), error
        else:
            raise AssertionError("no error of torch in a child that CUDA does not work in")
    else:
        assert computed(device) == in_child(method, device)
    print("the same")
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_processes(method: str, tmp_path: Path) -> None:
    """The same bits there, after the parent has computed; where CUDA forbids that after a fork, before."""
    assert run(CHILD, method, DEVICE, folder=tmp_path) == "the same\n"


# Compiles all that the module in a file launches, which needs no GPU.
COMPILED = """\
import hashlib, sys
from pathlib import Path
from normgen.launches import Call, gpu, launches, module_at, runtime
from normgen.loader import load
from normgen.plan import plan

spec, path = sys.argv[1:]
made = plan(load(Path(spec).read_bytes(), spec))
_, triton = runtime()
for launch in launches(Call(spec, made, path, "bfloat16", "bfloat16", 64, 2**19, True, True), "cuda:90"):
    function = getattr(module_at(path), launch.kernel)
    source = triton.compiler.ASTSource(function, launch.signature, launch.constants, launch.attributes)
    text = triton.compile(source, target=gpu(triton, "cuda:90"), options=launch.options).asm["ptx"]
    print(launch.kernel, hashlib.sha256(text.encode()).hexdigest())
"""


def test_a_module_regenerated_beside_a_warm_cache(tmp_path: Path) -> None:
    """Kernels of one name, in one file, and each compiles to what it says now: eps is added elsewhere."""
    path, spec = tmp_path / "again.py", tmp_path / "again.yaml"

    def compiled(placement: str, cache: str) -> dict[str, str]:
        spec.write_text(f"name: again\nnorm: rms\neps: {{value: 1e-6, placement: {placement}}}\n")
        path.write_text(render(plan(load(spec.read_bytes(), str(spec))), spec.name)["again.py"])
        environ = {"TRITON_CACHE_DIR": str(tmp_path / cache), "TRITON_INTERPRET": "0"}
        lines = run(COMPILED, str(spec), str(path), folder=tmp_path, environ=environ).splitlines()
        return dict(line.split() for line in lines)

    before, after = compiled("inside_sqrt", "warm"), compiled("outside_sqrt", "warm")
    assert after == compiled("outside_sqrt", "cold")
    assert before.keys() == after.keys() >= {"again_forward", "again_backward"}
    assert all(before[kernel] != after[kernel] for kernel in ("again_forward", "again_backward"))


class Block(torch.nn.Module):
    """A norm among operators that a graph may fuse with one another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        found = imported("generated.layernorm_residual", ROOT / "generated" / "layernorm_residual.py")
        self.norm = found.LayernormResidual(H, device=DEVICE)
        for parameter in self.norm.parameters():
            torch.nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, summed = self.norm(2 * x, residual)
        return y + 1, summed


def inputs(rows: int) -> list[torch.Tensor]:
    return [torch.randn(rows, H, device=DEVICE) for _ in range(2)]


def test_one_graph_for_every_shape() -> None:
    """Forward and backward, compiled once."""
    block = Block()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for rows in ROWS:
        leaves = [tensor.requires_grad_() for tensor in inputs(rows)]
        cotangents = inputs(rows)
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = compiled(*leaves)
        wanted = block(*leaves)
        assert all(map(torch.equal, found, wanted))
        everything = [*leaves, *block.parameters()]
        gradients = [torch.autograd.grad(results, everything, cotangents) for results in (found, wanted)]
        assert all(map(torch.equal, *gradients))


def exported() -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=2, max=4096)
    return torch.export.export(Block(), tuple(inputs(3)), dynamic_shapes=({0: rows}, {0: rows}))


def test_export() -> None:
    """The norm is one operator of the program, whatever the number of rows."""
    program = exported()
    targets = [str(node.target) for node in program.graph.nodes]
    assert len([target for target in targets if target.endswith(".layernorm_residual.default")]) == 1
    for rows in ROWS:
        arguments = inputs(rows)
        assert all(map(torch.equal, program.module()(*arguments), Block()(*arguments)))


AHEAD = """\
import sys
sys.path.insert(0, sys.argv[1])
import torch
from test_systems import ROWS, Block, exported, inputs

package = torch._inductor.aoti_compile_and_package(exported(), package_path=sys.argv[2])
loaded = torch._inductor.aoti_load_package(package)
for rows in ROWS:
    arguments = inputs(rows)
    assert all(map(torch.equal, loaded(*arguments), Block()(*arguments)))
print("the same")
"""


def test_aot_inductor(tmp_path: Path) -> None:
    """Compiled ahead into a package, which calls the operator of a module that its process has imported.

    In a process of its own: torch 2.11 crashed on a GPU while it loaded the package.
    """
    assert run(AHEAD, str(Path(__file__).parent), str(tmp_path / "block.pt2"), folder=tmp_path).endswith("the same\n")
