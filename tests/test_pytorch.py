"""Generated modules amid PyTorch's own machinery: torch.func, DTensor, compiled callers, ways to import."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from normgen.loader import load  # noqa: E402
from normgen.modules import imported  # noqa: E402
from normgen.plan import plan  # noqa: E402
from normgen.render import render  # noqa: E402

ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H = 48


def generated(name: str) -> ModuleType:
    return imported(f"generated.{name}", ROOT / "generated" / f"{name}.py")


def from_file(name: str, path: Path) -> ModuleType:
    """A module that its importer does not put into sys.modules, as the shortest recipe leaves it."""
    found = importlib.util.spec_from_file_location(name, path)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap() -> None:
    torch.manual_seed(1)
    function = generated("layernorm_residual").layernorm_residual
    arguments = randn(3, 5, H), randn(3, 5, H), randn(H), randn(H)
    mapped = torch.func.vmap(function, in_dims=(0, 0, None, None))(*arguments)
    assert all(map(torch.equal, mapped, function(*arguments)))


@pytest.fixture
def mesh() -> Iterator[object]:
    distributed = pytest.importorskip("torch.distributed")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield pytest.importorskip("torch.distributed.tensor").init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.skipif(DEVICE == "cuda", reason="the mesh is one of CPUs")
def test_distributed_tensors_are_refused(mesh: object) -> None:
    """By name, and never taken for the part of them that lies here."""
    tensors = torch.distributed.tensor
    function, x, weight = generated("rmsnorm").rmsnorm, randn(2, 4, H), randn(H)
    everywhere = tensors.distribute_tensor(weight, mesh, [tensors.Replicate()])
    for placement in (tensors.Shard(0), tensors.Shard(1), tensors.Shard(2), tensors.Replicate()):
        shared = tensors.distribute_tensor(x, mesh, [placement])
        with pytest.raises(NotImplementedError, match=r"rmsnorm\.default does not have a sharding strategy"):
            function(shared, everywhere)
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            function(shared, weight)


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")


def test_two_norms_share_a_parameter_in_a_graph() -> None:
    """Scale and shift of both are parts of one parameter, whose gradient is put together of four."""
    torch.manual_seed(2)
    norm = generated("layernorm").layernorm

    def twice(x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = shared.chunk(4)
        return norm(norm(x, first, second) + x, third, fourth)

    leaves = [randn(70, H).requires_grad_(), randn(4 * H).requires_grad_()]
    cotangent = randn(70, H)
    wanted = torch.autograd.grad(twice(*leaves), leaves, cotangent)
    for _ in range(2):
        found = torch.autograd.grad(compiled(twice)(*leaves), leaves, cotangent)
        assert all(map(torch.equal, found, wanted))


def test_compiled_module_in_a_compiled_function() -> None:
    torch.manual_seed(3)
    norm = generated("layernorm").Layernorm(H, device=DEVICE)
    inner = compiled(norm)
    x = randn(5, H)
    assert torch.equal(inner(x), norm(x))
    assert torch.equal(compiled(lambda x: 2 * inner(x))(x), 2 * norm(x))


SPEC = "name: twice\nnorm: rms\neps: {value: %s}\n"


def test_one_operator_however_often_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under two names, again, and beside one of the same name with another eps; but not with other code."""
    torch.manual_seed(4)
    paths = []
    for index, eps in enumerate((1e-6, 1e-1)):
        text = render(plan(load((SPEC % eps).encode(), "twice.yaml")), "twice.yaml")["twice.py"]
        for name in (f"a{index}.py", f"b{index}.py"):
            paths.append(tmp_path / name)
            paths[-1].write_text(text)
    one, copy, other, _ = (from_file(path.stem, path) for path in paths)
    assert one._operator is copy._operator is not other._operator
    monkeypatch.syspath_prepend(tmp_path)
    again = importlib.reload(importlib.import_module("a0"))
    assert again._operator is one._operator
    leaves, dy = [randn(3, H).requires_grad_(), randn(H).requires_grad_()], randn(3, H)

    def results(module: ModuleType, *eps: float) -> list[torch.Tensor]:
        y = module.twice(*leaves, *eps)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y = torch.nn.functional.rms_norm(exact[0], (H,), exact[1], 1e-6)
    for found, wanted in zip(results(one), [y, *torch.autograd.grad(y, exact, dy.double())], strict=True):
        assert (found - wanted).abs().max() <= 2.0**-20 * wanted.abs().max()
    for module in (copy, again):
        assert all(map(torch.equal, results(module), results(one)))
    assert all(map(torch.equal, results(other), results(one, 1e-1)))
    assert not any(map(torch.equal, results(other), results(one)))
    paths[1].write_text(paths[1].read_text() + "# other code\n")
    with pytest.raises(ImportError, match="an operator of this spec is registered already, by a module with other"):
        from_file("b0", paths[1])


def test_imports_are_quick_and_touch_no_gpu() -> None:
    """Less than 0.3 s of processor time each, after torch and triton, on the average of all."""
    names = [path.stem for path in (ROOT / "generated").glob("*.py")]
    program = (
        "import importlib, sys, time, torch, triton\n"
        "start = time.process_time()\n"
        "for name in sys.argv[1:]: importlib.import_module(f'generated.{name}')\n"
        "print(time.process_time() - start)\n"
        "assert not torch.cuda.is_initialized()"
    )
    run = subprocess.run([sys.executable, "-c", program, *names], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(run.stdout) < 0.3 * len(names)
