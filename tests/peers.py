"""Norms of torch and of other libraries, as `normgen verify` calls them.

normgen verify specs/rmsnorm.yaml --impl tests/peers.py:liger_rms
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F


def torch_rms(x: Any, weight: Any, eps: float) -> Any:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def torch_layer(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def eager_rms(x: Any, weight: Any, eps: float) -> Any:
    """The formula in fp32, as it is usually written."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def eager_layer(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """The same, with the variance as the mean square less the square of the mean."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = wide.square().mean(-1, keepdim=True) - mean.square()
    return ((wide - mean) * torch.rsqrt(variance + eps) * weight.float() + bias.float()).to(x.dtype)


def eager_add_rms(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    summed = x + residual
    return eager_rms(summed, weight, eps), summed


# Beyond a few recompilations torch.compile goes on in eager mode, which is not what is looked at.
torch._dynamo.config.recompile_limit = 1000
torch._dynamo.config.fail_on_recompile_limit_hit = True
compiled_rms = torch.compile(eager_rms, dynamic=True)
compiled_layer = torch.compile(torch_layer, dynamic=True)
compiled_add_rms = torch.compile(eager_add_rms, dynamic=True)


def liger_rms(x: Any, weight: Any, eps: float) -> Any:
    """In its mode that rounds once, as the spec does."""
    function = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return function.apply(x, weight, eps, 0.0, "gemma")


class WithACopyOfDy(torch.autograd.Function):
    """The same tensor, whose backward is given a gradient that nobody else holds, laid out as the one that came in."""

    @staticmethod
    def forward(ctx: Any, y: Any) -> Any:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        memory = dy.untyped_storage().clone()
        return dy.new_empty(0).set_(memory, dy.storage_offset(), dy.shape, dy.stride())


def liger_rms_with_a_copy(x: Any, weight: Any, eps: float) -> Any:
    return WithACopyOfDy.apply(liger_rms(x, weight, eps))


def liger_layer(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction.apply(x, weight, bias, eps)


def liger_add_rms(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    function = importlib.import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
    return function.apply(x, residual, weight, eps, 0.0, "gemma")


def quack_rms(x: Any, weight: Any, eps: float) -> Any:
    return importlib.import_module("quack.rmsnorm").rmsnorm(x, weight, eps=eps)


def quack_add_rms(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    return importlib.import_module("quack.rmsnorm").rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)


def quack_layer(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Without autograd: `--forward-only`. It takes fp32 parameters."""
    return importlib.import_module("quack.rmsnorm").layernorm_fwd(x, weight, bias, eps)
