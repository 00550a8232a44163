"""A tiny Llama with random weights on generated norms.

Shown, original against replaced model: the same logits and, after one loss, the same gradients of every parameter, with
each `LlamaRMSNorm` replaced in two ways:

- norms: by `RmsnormLlama`, which rounds where Llama rounds; nothing else changes;
- norms and adds: the second norm of each layer does the residual add before it too, as `RmsnormResidual`.

In float32 the two models differ by no more than a few roundings a norm. In bfloat16, where one flipped rounding shows,
the replaced model is at most twice as far from the float32 model with the same weights as the original is. That runs on
a GPU only: Triton's interpreter truncates where it casts float32 to bfloat16, and would show its own rounding.

That kernels did the work is shown by their exact number of launches. Exits 1 when a bound is missed.

    python examples/llama.py
"""

import copy
import sys

import torch
from evidence import (
    DEVICE,
    INTERPRETED,
    Evidence,
    count_launches,
    difference,
    gradient_difference,
    largest,
    rounding_bound,
)
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from generated.rmsnorm_llama import RmsnormLlama
from generated.rmsnorm_residual import RmsnormResidual

CONFIG = LlamaConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=128,
    max_position_embeddings=64,
    # Wide enough that the layers, and with them the norms inside, matter for the logits.
    initializer_range=0.1,
)


class FusedDecoderLayer(nn.Module):
    """LlamaDecoderLayer with the add after attention inside the norm that follows; parameters keep their names."""

    def __init__(self, layer: LlamaDecoderLayer) -> None:
        super().__init__()
        self.self_attn = layer.self_attn
        self.mlp = layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = generate(RmsnormResidual, layer.post_attention_layernorm)

    def forward(self, hidden_states: Tensor, **others: object) -> Tensor:
        attention, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **others)
        normed, residual = self.post_attention_layernorm(attention, hidden_states)
        return residual + self.mlp(normed)


def generate(kind: type[nn.Module], norm: LlamaRMSNorm) -> nn.Module:
    """The generated module of class `kind` in place of `norm`, with its weight, eps, device and dtype."""
    weight = norm.weight
    module = kind(weight.numel(), eps=norm.variance_epsilon, device=weight.device, dtype=weight.dtype)
    module.load_state_dict(norm.state_dict())
    return module


def replace_norms(original: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy of the model with a generated module in place of every LlamaRMSNorm."""
    model = copy.deepcopy(original)
    for name, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):
            model.set_submodule(name, generate(RmsnormLlama, module))
    return model


def replace_norms_and_adds(original: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy of the model where the second norm of each layer does the add before it too."""
    model = copy.deepcopy(original)
    for place, layer in enumerate(model.model.layers):
        model.model.layers[place] = FusedDecoderLayer(layer)
    return replace_norms(model)


def make_model(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):  # they start as all ones, where a weight that is ignored goes unseen
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.to(DEVICE, dtype).eval()


def step(model: LlamaForCausalLM) -> Tensor:
    """Logits of a fixed batch; leaves the gradients of predicting each next token in the parameters."""
    tokens = torch.randint(CONFIG.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    return logits.detach()


DTYPES = [torch.float32] if DEVICE == "cpu" or INTERPRETED else [torch.float32, torch.bfloat16]
LAYERS = CONFIG.num_hidden_layers
# How the norms are replaced, and how many of them each generated module then stands for.
WAYS = {
    "norms": (replace_norms, {"rmsnorm_llama": 2 * LAYERS + 1}),
    "norms and adds": (replace_norms_and_adds, {"rmsnorm_llama": LAYERS + 1, "rmsnorm_residual": LAYERS}),
}


def show(way: str, dtype: torch.dtype, evidence: Evidence) -> None:
    """Compare logits and gradients of the model and its copy; every norm must launch forward and backward once."""
    replace, norms = WAYS[way]
    original = make_model(dtype)
    replaced = replace(original)
    name = f"{way}, {str(dtype).removeprefix('torch.')}"
    expected = step(original)
    with count_launches() as counts:
        found = step(replaced)
    expected_launches = {
        f"{norm}_{direction}": launches for norm, launches in norms.items() for direction in ("forward", "backward")
    }
    evidence.expect_launches(counts, expected_launches)
    if dtype == torch.float32:
        depth = 2 * LAYERS + 1
        off = difference(found, expected)
        evidence.max_abs_diff = largest([evidence.max_abs_diff, off])
        evidence.hold(f"{name}: logits", off / expected.abs().max().item(), rounding_bound(depth))
        evidence.hold(f"{name}: gradients", gradient_difference(replaced, original), rounding_bound(2 * depth))
    else:
        truth = copy.deepcopy(original).float()
        exact = step(truth)
        evidence.hold(f"{name}: logits", difference(found, exact), 2 * difference(expected, exact))
        off = gradient_difference(replaced, truth)
        evidence.hold(f"{name}: gradients", off, 2 * gradient_difference(original, truth))


def main() -> int:
    evidence = Evidence()
    for dtype in DTYPES:
        for way in WAYS:
            show(way, dtype, evidence)
    return evidence.conclude()


if __name__ == "__main__":
    sys.exit(main())
