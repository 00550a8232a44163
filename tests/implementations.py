"""Implementations of shipped specs for `normgen verify`: right ones, and one for each mistake that people make."""

from __future__ import annotations

import os
import time

import torch
import triton
import triton.language as tl
from torch import Tensor


def up(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def x_hat(x: Tensor, eps: float) -> Tensor:
    x = up(x)  # once: two casts have two gradients, each of them rounded
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def rms(x, weight, eps):
    return (x_hat(x, eps) * up(weight)).to(x.dtype)


class Rms(torch.autograd.Function):
    """With a backward of its own, and a place in it for a mistake."""

    @staticmethod
    def forward(ctx, x, weight, eps, mistake):
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.mistake = eps, mistake
        return rms(x, weight, eps)

    @staticmethod
    def backward(ctx, dy):
        x, weight = (ctx.saved_tensors[0], ctx.saved_tensors[1]) if ctx.mistake == "twice" else ctx.saved_tensors
        rstd = 1 / torch.sqrt(up(x).square().mean(-1, keepdim=True) + ctx.eps)
        if ctx.mistake == "narrow":
            rstd = up(rstd.to(x.dtype))
        hat, g = up(x) * rstd, up(dy) * up(weight)
        c = 0.0 if ctx.mistake == "term" else (g * hat).mean(-1, keepdim=True)
        dx = (rstd * (g - hat * c)).to(x.dtype)
        per_row = up(dy) * hat
        if ctx.mistake == "dims" and per_row.dim() > 2:
            per_row = per_row[0]
        if ctx.mistake == "in place":
            dy.copy_(dx)
        return dx, per_row.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype), None, None


def rms_function(x, weight, eps):
    return Rms.apply(x, weight, eps, "")


def dx_lacks_a_term(x, weight, eps):
    return Rms.apply(x, weight, eps, "term")


def dweight_of_the_last_dims(x, weight, eps):
    return Rms.apply(x, weight, eps, "dims")


def dy_overwritten(x, weight, eps):
    return Rms.apply(x, weight, eps, "in place")


def saved_tensors_asked_for_twice(x, weight, eps):
    return Rms.apply(x, weight, eps, "twice")


def rstd_rounded(x, weight, eps):
    return Rms.apply(x, weight, eps, "narrow")


def eps_outside(x, weight, eps):
    return (up(x) / (up(x).square().mean(-1, keepdim=True).sqrt() + eps) * up(weight)).to(x.dtype)


def eps_fixed(x, weight, eps):
    return rms(x, weight, 1e-5)


def fp16_sums(x, weight, eps):
    return (up(x) / torch.sqrt(up(x.square().mean(-1, keepdim=True)) + eps) * up(weight)).to(x.dtype)


def mean_subtracted(x, weight, eps):
    centred = up(x) - up(x).mean(-1, keepdim=True)
    return rms(centred, weight, eps).to(x.dtype)


def weight_ignored(x, weight, eps):
    return (x_hat(x, eps) + 0 * up(weight)).to(x.dtype)


def fp32_weight_ignored(x, weight, eps):
    return rms(x, weight, eps) if weight.dtype == x.dtype else weight_ignored(x, weight, eps)


def weight_at_the_row(x, weight, eps):
    rows = x.numel() // x.shape[-1]
    shifted = up(weight).repeat(rows + 1).as_strided((rows, x.shape[-1]), (1, 1))
    return (x_hat(x, eps) * shifted.reshape(x.shape)).to(x.dtype)


def stride_is_width(x, weight, eps):
    rows = x.numel() // x.shape[-1]
    return rms(x.as_strided((rows, x.shape[-1]), (x.shape[-1], 1)), weight, eps).reshape(x.shape)


def last_column_lost(x, weight, eps):
    kept = torch.arange(x.shape[-1], device=x.device) < max(1, x.shape[-1] - 1)
    var = (up(x).square() * kept).mean(-1, keepdim=True)
    return (up(x) / torch.sqrt(var + eps) * up(weight)).to(x.dtype)


def block_for_width(x, weight, eps):
    block = 1 << (x.shape[-1] - 1).bit_length()
    var = up(x).square().sum(-1, keepdim=True) / block
    return (up(x) / torch.sqrt(var + eps) * up(weight)).to(x.dtype)


def block_of_four(x, weight, eps):
    var = up(x).square().sum(-1, keepdim=True) / max(4, x.shape[-1])
    return (up(x) / torch.sqrt(var + eps) * up(weight)).to(x.dtype)


def one_column_is_dense(x, weight, eps):
    return rms(x.as_strided(x.shape, x[:].clone().stride()) if x.shape[-1] == 1 else x, weight, eps)


def squares_by_matmul(x, weight, eps):
    wide = up(x)
    var = wide.square() @ wide.new_ones(x.shape[-1], 1) / x.shape[-1]
    return (wide / torch.sqrt(var + eps) * up(weight)).to(x.dtype)


def waits_for_the_gpu(x, weight, eps):
    return rms(x, weight, eps) if x.detach().abs().max().item() >= 0 else x


held: dict[str, Tensor] = {}


def shares_memory(x, weight, eps):
    kept = held.setdefault(f"{x.shape} {x.dtype}", torch.empty_like(x))
    kept.copy_(x.detach())
    torch.cuda._sleep(2 * 10**7)  # as a long kernel: longer than a slow host takes to ask for the next call
    return rms(x - (x - kept).detach(), weight, eps)


def shares_a_variable(x, weight, eps):
    held["x"] = x
    time.sleep(0.01)
    return rms(held["x"], weight, eps)


def offsets_of_32_bits(x, weight, eps):
    y = rms(x, weight, eps)
    y.view(-1)[2**31 :] = 0
    return y


def rows_leak(x, weight, eps):
    return rms(x, weight, eps) + 0 * x.detach().sum()


def x_changed(x, weight, eps):
    y = rms(x, weight, eps)
    x.detach().mul_(2)
    return y


def always_fp32(x, weight, eps):
    return rms(x, weight, eps) if x.dtype.itemsize > 2 else rms(up(x), weight, eps)


def needs_a_view(x, weight, eps):
    return rms(x.view(-1, x.shape[-1]), weight, eps).view(x.shape)


def detached(x, weight, eps):
    return rms(x.detach(), weight.detach(), eps)


def fp32_only(x, weight, eps):
    if x.dtype != torch.float32:
        raise TypeError(f"no kernel for {x.dtype}")
    return rms(x, weight, eps)


def layer(x, weight, bias, eps):
    exact = x.double()
    centred = exact - exact.mean(-1, keepdim=True)
    normed = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.double() + bias.double()).to(x.dtype)


def bias_missing(x, weight, bias, eps):
    return layer(x, weight, 0 * bias, eps)


def one_pass(x, weight, bias, eps):
    mean = up(x).mean(-1, keepdim=True)
    var = up(x).square().mean(-1, keepdim=True) - mean.square()
    return ((up(x) - mean) / torch.sqrt(var + eps) * up(weight) + up(bias)).to(x.dtype)


def add_rms(x, residual, weight, eps):
    summed = (up(x) + up(residual)).to(x.dtype)
    return rms(summed, weight, eps), summed


def strides_are_alike(x, residual, weight, eps):
    if not (x.is_contiguous() or residual.is_contiguous()):
        residual = residual.as_strided(residual.shape, x.stride())
    return add_rms(x, residual, weight, eps)


def residual_left_out(x, residual, weight, eps):
    return rms(x, weight, eps), add_rms(x, residual, weight, eps)[1]


@triton.jit
def rms_kernel(x_ptr, y_ptr, w_ptr, H, eps, BLOCK: tl.constexpr, READ: tl.constexpr, WRITTEN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * H + col, mask=col < H + READ, other=0.0).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / H + eps)
    w = tl.load(w_ptr + col, mask=col < H, other=0.0)
    # In the dtype of x, which the interpreter has to be taught for bf16.
    tl.store(y_ptr + row * H + col, (x * rstd).to(y_ptr.dtype.element_ty) * w, mask=col < H + WRITTEN)


def launched(x, weight, eps, read=0, written=0):
    """A kernel whose masks let it read or write so many elements more than a row has."""
    H = x.shape[-1]
    rows = x.reshape(-1, H).contiguous()
    y = torch.empty_like(rows)
    if rows.shape[0]:
        rms_kernel[(rows.shape[0],)](rows, y, weight.contiguous(), H, eps, triton.next_power_of_2(H + 1), read, written)
    return y.view(x.shape)


def triton_rms(x, weight, eps):
    return launched(x, weight, eps)


def reads_too_far(x, weight, eps):
    return launched(x, weight, eps, read=1)


def writes_too_far(x, weight, eps):
    return launched(x, weight, eps, written=1)


def other_names(x, gamma, eps):
    return rms(x, gamma, eps)


def two_results(x, weight, eps):
    return x, weight


def raises(x, weight, eps):
    raise RuntimeError("out of order\nat the second line")


def sleeps(x, weight, eps):
    time.sleep(600)


def aborts(x, weight, eps):
    if x.shape[-1] == 17:
        os.abort()
    return rms(x, weight, eps)


def leaves(x, weight, eps):
    if x.shape[-1] == 17:
        os._exit(0)
    return rms(x, weight, eps)


a_number = 3
