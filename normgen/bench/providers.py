"""Who computes a spec: the kernel made from it, torch, and other libraries, each as a user would call it.

A provider may round its sum, or its result, at another point than the spec: `check` allows that. What else it cannot do
of a spec makes it `Unsupported`.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from normgen.bench.cases import Sizes, dtype_of, weight_dtype
from normgen.kernels import Kernels
from normgen.modules import imported
from normgen.plan import Plan, plan
from normgen.render import render, solve
from normgen.spec import Spec

Tensors = tuple[Any, ...]
Function = Callable[..., Tensors]


class Unsupported(Exception):
    """A provider does not compute what the spec says; the message says what it lacks."""


@dataclass(frozen=True)
class Case:
    """A spec with its module, and the tensors of a call."""

    spec: Spec
    plan: Plan
    kernels: Kernels
    sizes: Sizes
    module: Any
    arguments: Tensors
    """Leaves, in the order of the plan; they want gradients where the spec has any."""
    cotangents: Tensors
    """The incoming gradients, one for each output."""
    original: Any
    """A copy of the first incoming gradient, which one library overwrites; None without a backward pass."""

    def restore(self) -> None:
        """Undo what a provider wrote over the first incoming gradient."""
        if self.original is not None:
            self.cotangents[0].copy_(self.original)


@dataclass(frozen=True)
class Offer:
    """How one provider computes a case."""

    function: Function
    """Of the arguments: the outputs of the plan, in order."""
    arguments: Tensors
    cotangents: Tensors
    direct: Callable[[], Callable[[], Tensors]] | None = None
    """For a library without autograd: runs forward, returns what computes the gradients of all arguments."""
    overwrites: bool = False
    """Whether backward writes its result over the first incoming gradient."""
    statistics: bool = False
    """Whether forward has to be asked for statistics by wanting gradients."""

    def forward(self) -> Tensors:
        """The outputs, and the statistics that the spec saves: as in training where it saves any."""
        with torch.set_grad_enabled(self.statistics):
            outputs: Tensors = self.function(*self.arguments)
        return outputs

    def backward(self) -> Callable[[], Tensors]:
        """Runs forward; the result computes the gradients of all arguments, again and again."""
        if self.direct is not None:
            return self.direct()
        outputs = self.function(*self.arguments)
        return lambda: torch.autograd.grad(outputs, self.arguments, self.cotangents, retain_graph=True)

    def both(self) -> Tensors:
        """Forward and backward, as in one step of training."""
        if self.direct is not None:
            return self.direct()()
        gradients: Tensors = torch.autograd.grad(self.function(*self.arguments), self.arguments, self.cotangents)
        return gradients


@lru_cache(maxsize=1)
def _folder() -> Path:
    """Where generated modules lie as long as this process lives; Triton reads the source of a kernel from its file."""
    folder = tempfile.TemporaryDirectory(prefix="normgen_bench_")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def load_module(made: Plan) -> Any:
    """The module generated from a plan, imported; one for each spec in a process."""
    name = f"normgen_bench_{made.spec.name}_{made.spec.digest[:8]}"
    path = _folder() / f"{name}.py"
    if not path.exists():
        # The same text as in generated/: an operator may be registered twice in a process by equal modules only.
        path.write_text(render(made, f"specs/{made.spec.name}.yaml")[f"{made.spec.name}.py"])
    return imported(name, path)


def make_case(made: Plan, sizes: Sizes, device: str = "cuda") -> Case:
    """Random normal tensors for a call, parameters too: their signs differ, and none is near 1 throughout."""
    spec = made.spec
    generator = torch.Generator(device).manual_seed(sizes.H)
    shapes = {"NH": (sizes.rows, sizes.H), "H": (sizes.H,)}

    def normal(tensor: Any) -> Any:
        dtype = getattr(torch, dtype_of(tensor, spec, sizes.dtype))
        # Drawn in the dtype itself: an fp32 copy of a large tensor would need twice its memory.
        return torch.randn(shapes[tensor.dims], dtype=dtype, device=device, generator=generator)

    cotangents = tuple(normal(tensor) for tensor in made.outputs) if made.backward else ()
    return Case(
        spec=spec,
        plan=made,
        kernels=solve(made),
        sizes=sizes,
        module=load_module(made),
        arguments=tuple(normal(tensor).requires_grad_(made.backward is not None) for tensor in made.arguments),
        cotangents=cotangents,
        original=cotangents[0].clone() if cotangents else None,
    )


def offer(name: str, case: Case) -> Offer:
    """How provider `name` computes the case. Raises Unsupported, or ImportError where a library lacks the module."""
    made: Offer = _OFFERS[name](case)
    return made


def _offer(case: Case, function: Function, arguments: Tensors | None = None, **more: Any) -> Offer:
    statistics = bool(case.plan.statistics) and case.plan.backward is not None
    return Offer(function, arguments or case.arguments, case.cotangents, statistics=statistics, **more)


def _as_tuple(results: Any) -> Tensors:
    return results if isinstance(results, tuple) else (results,)


def _names(case: Case) -> tuple[str, ...]:
    """The arguments' names in the API: x, residual, weight, bias, as far as the spec has them."""
    return tuple(tensor.api for tensor in case.plan.arguments)


def _normgen(case: Case) -> Offer:
    function = getattr(case.module, case.spec.name)
    return _offer(case, lambda *arguments: _as_tuple(function(*arguments)))


def alone(spec: Spec, dtype: str) -> Spec:
    """The norm of a residual spec without its residual, for sums that were stored before. `dtype` is that of x."""
    assert spec.residual is not None
    update: dict[str, Any] = {"residual": None, "name": f"{spec.name[:42]}_alone"}
    if spec.residual.dtype == "float32":
        # The sum is fp32 and the result is not: both dtypes are named, where the spec derives them from x.
        output = dtype if spec.dtypes.output == "same" else spec.dtypes.output
        dtypes = {"input": ["float32"], "weight": [weight_dtype(spec, dtype)], "output": output}
        update["dtypes"] = spec.dtypes.model_copy(update=dtypes)
    return spec.model_copy(update=update)


def _separate(case: Case) -> Offer:
    spec = case.spec
    if spec.residual is None:
        raise Unsupported("there is no residual to add")
    norm_spec = alone(spec, case.sizes.dtype)
    norm = getattr(load_module(plan(norm_spec)), norm_spec.name)
    store_sum = spec.residual.store_sum

    def function(x: Any, residual: Any, *parameters: Any) -> Tensors:
        summed = torch.add(x, residual)
        y = norm(summed, *parameters)
        return (y, summed) if store_sum else (y,)

    return _offer(case, function)


def _plain(case: Case) -> Function:
    """The formula as a user of torch writes it: torch's own norm where there is one for it."""
    spec, affine = case.spec, case.spec.affine
    residual, eps, inside = spec.residual, spec.eps.value, spec.eps.placement == "inside_sqrt"
    layer = spec.norm == "layer"
    offset = affine.weight_offset if affine else 0.0
    x_dtype = getattr(torch, case.sizes.dtype)
    y_dtype = getattr(torch, dtype_of(case.plan.outputs[0], spec, case.sizes.dtype))
    rounds_x_hat = affine is not None and affine.cast == "cast_then_multiply"
    names = _names(case)
    has_own_norm = inside and not offset and not rounds_x_hat and (layer or affine is None or not affine.bias)

    def norm(s: Any, weight: Any, bias: Any) -> Any:
        if has_own_norm:
            # torch's norms want one dtype; where they are of one, nothing is done here.
            weight, bias = (None if one is None else one.to(s.dtype) for one in (weight, bias))
            if layer:
                return F.layer_norm(s, s.shape[-1:], weight, bias, eps).to(y_dtype)
            return F.rms_norm(s, s.shape[-1:], weight, eps).to(y_dtype)
        s = s.float()
        if layer:
            s = s - s.mean(-1, keepdim=True)
        var = s.square().mean(-1, keepdim=True)
        x_hat = s * torch.rsqrt(var + eps) if inside else s / (var.sqrt() + eps)
        if weight is None:
            return x_hat.to(y_dtype)
        if rounds_x_hat:
            y = (weight + offset if offset else weight) * x_hat.to(x_dtype)
        else:
            y = x_hat * (weight.float() + offset if offset else weight.float())
        return (y if bias is None else y + bias).to(y_dtype)

    def function(*arguments: Any) -> Tensors:
        named = dict(zip(names, arguments, strict=True))
        x, weight, bias = named["x"], named.get("weight"), named.get("bias")
        if residual is None:
            return (norm(x, weight, bias),)
        if residual.store_sum and not residual.normalises_stored_sum:
            summed = x.float() + named["residual"].float()
            return norm(summed, weight, bias), summed.to(x_dtype)
        summed = x + named["residual"]
        y = norm(summed, weight, bias)
        return (y, summed) if residual.store_sum else (y,)

    return function


def _torch(case: Case) -> Offer:
    return _offer(case, _plain(case))


def _compile(case: Case) -> Offer:
    # Buffers that compiled backward code may reuse are gone after one run; here it runs again and again.
    config: Any = importlib.import_module("torch._functorch.config")
    config.donated_buffer = False
    return _offer(case, torch.compile(_plain(case), dynamic=False))


def _refuse(case: Case, serves: bool, *faults: tuple[bool, str]) -> None:
    """Raise Unsupported with the first fault that holds, after those that every library has.

    `serves` says whether the library has this norm at all.
    """
    spec = case.spec
    norm = "RMSNorm" if spec.norm == "rms" else "LayerNorm"
    common = (
        (not serves, f"it has no {norm}" + " with a residual" * (spec.residual is not None)),
        (spec.eps.placement == "outside_sqrt", "eps stands inside the root"),
        (case.plan.outputs[0].dtype != "input", "the result has the dtype of x"),
    )
    for holds, words in (*common, *faults):
        if holds:
            raise Unsupported(words)


def _liger(case: Case) -> Offer:
    spec, affine, residual = case.spec, case.spec.affine, case.spec.residual
    eps = spec.eps.value
    offset = affine.weight_offset if affine else 0.0
    bias = affine is not None and affine.bias
    # gemma: all in fp32 and one rounding; llama: x_hat is rounded before the product.
    cast = "llama" if affine and affine.cast == "cast_then_multiply" else "gemma"
    if residual is not None:
        _refuse(
            case,
            spec.norm == "rms",
            (affine is None or bias, "its norm with a residual has a weight and no bias"),
            (not residual.store_sum, "its norm with a residual stores the sum"),
            (not residual.rounds, "its sum is stored in the dtype of x, and normalised as stored"),
        )
        add = importlib.import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
        return _offer(case, lambda x, r, w: tuple(add.apply(x, r, w, eps, offset, cast)))
    if spec.norm == "layer":
        weights = (not bias or offset != 0, "its LayerNorm has a weight without offset, and a bias")
        _refuse(case, True, weights, (cast == "llama", "its LayerNorm rounds once"))
        layer = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
        return _offer(case, lambda x, w, b: (layer.apply(x, w, b, eps),))
    _refuse(case, True, (bias, "its RMSNorm has no bias"))
    rms = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    # Its default writes dx over dy; without that it would fill dx with zeros first.
    return _offer(case, lambda x, w=None: (rms.apply(x, w, eps, offset, cast),), overwrites=True)


def _fp32_parameters(case: Case) -> Tensors:
    """The arguments with parameters in fp32, for libraries that take no others."""
    count = len(case.plan.inputs)
    parameters = tuple(p.detach().float().requires_grad_(p.requires_grad) for p in case.arguments[count:])
    return case.arguments[:count] + parameters


def _quack(case: Case) -> Offer:
    spec, affine, residual = case.spec, case.spec.affine, case.spec.residual
    offset = affine.weight_offset if affine else 0.0
    rounds_x_hat = affine is not None and affine.cast == "cast_then_multiply"
    once = (rounds_x_hat, "it rounds once")
    if spec.norm == "layer":
        weights = (affine is None or offset != 0, "its LayerNorm has a weight without offset")
        _refuse(case, residual is None, once, weights)
        # The package has a function of the name of this module.
        return _quack_layer(case, importlib.import_module("quack.rmsnorm"))
    _refuse(case, True, once)
    function = importlib.import_module("quack.rmsnorm").rmsnorm
    prenorm = residual is not None and residual.store_sum
    names = _names(case)

    def rms(*arguments: Any) -> Tensors:
        named = dict(zip(names, arguments, strict=True))
        return _as_tuple(
            function(
                named["x"],
                named.get("weight"),
                bias=named.get("bias"),
                residual=named.get("residual"),
                eps=spec.eps.value,
                prenorm=prenorm,
                weight_offset=offset,
            )
        )

    return _offer(case, rms)


def _quack_layer(case: Case, module: Any) -> Offer:
    """Its LayerNorm: forward and backward functions without autograd, parameters in fp32."""
    eps, statistics = case.spec.eps.value, set(case.spec.save)
    has_bias = case.spec.affine is not None and case.spec.affine.bias
    arguments = tuple(argument.detach() for argument in _fp32_parameters(case))

    def function(x: Any, weight: Any, bias: Any = None) -> Tensors:
        results = module.layernorm_fwd(
            x, weight, bias, eps, return_rstd="rstd" in statistics, return_mean="mean" in statistics
        )
        return (_as_tuple(results)[0],)

    def direct() -> Callable[[], Tensors]:
        x, weight, *bias = arguments
        _, rstd, mean = module.layernorm_fwd(x, weight, *(bias or [None]), eps, return_rstd=True, return_mean=True)

        def run() -> Tensors:
            gradients = module.layernorm_bwd(x, weight, case.cotangents[0], rstd, mean, has_bias)
            return tuple(gradients[: len(arguments)])

        return run

    return _offer(case, function, arguments, direct=direct)


def _cudnn(case: Case) -> Offer:
    spec, affine = case.spec, case.spec.affine
    offset = affine.weight_offset if affine else 0.0
    _refuse(
        case,
        spec.residual is None,
        (affine is not None and affine.cast == "cast_then_multiply", "it rounds once"),
        (offset != 0, "its weight has no offset"),
        (spec.norm == "rms" and affine is None, "its RMSNorm has a weight"),
    )
    module = importlib.import_module("cudnn.ops.norm")
    eps = spec.eps.value
    if spec.norm == "layer":
        layer = module.layer_norm
        # It computes with fp32 parameters, and would convert others in every call.
        arguments = _fp32_parameters(case)
        return _offer(case, lambda x, w=None, b=None: (layer(x, x.shape[-1:], w, b, eps),), arguments)
    rms = module.rms_norm
    return _offer(case, lambda x, w, b=None: (rms(x, w, b, eps),))


_OFFERS: dict[str, Callable[[Case], Offer]] = {
    "normgen": _normgen,
    "separate": _separate,
    "torch": _torch,
    "compile": _compile,
    "liger": _liger,
    "quack": _quack,
    "cudnn": _cudnn,
}
LIBRARIES = {"liger": "liger_kernel", "quack": "quack", "cudnn": "cudnn"}
"""The package that a provider needs besides torch."""
