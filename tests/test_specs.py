"""Any spec: a valid one builds, and its reference is the formula that the keys say; an invalid one is refused in place.

The formula is written here once more, in PyTorch and in fp64, from `specs/README.md` and from nothing of the compiler.
"""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normgen.errors import SpecError
from normgen.loader import load
from normgen.nodes import dotted
from normgen.plan import plan
from normgen.render import render

torch = pytest.importorskip("torch")

Row = dict[str, Any]
FLOATS = ["float16", "bfloat16", "float32"]
# Of a step in fp32: 16 roundings of 2^-24 each, all to one side. The longest step sums 100 elements, in lanes, and the
# stored sum has no error at all: rounded once in fp32 and once to a dtype with less than half the bits, it is what one
# rounding makes of the exact sum.
FP32_ERROR = 2.0**-20


def some(*values: Any) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(values), min_size=1, unique=True)


def mapping(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Row]:
    """All of the keys or, as often, some of them."""
    return st.fixed_dictionaries(keys) | st.fixed_dictionaries({}, optional=keys)


@st.composite
def specs(draw: st.DrawFn) -> Row:
    """The keys of a valid spec."""
    norm = draw(st.sampled_from(["rms", "layer"]))
    words = st.from_regex(r"[a-z][a-z0-9]{0,5}(_[a-z0-9]{0,5}){0,3}", fullmatch=True)
    eps = st.floats(1.2e-38, 3.0e38) | st.sampled_from([1e-5, 1e-6, 1e-12, 1])
    spec: Row = {
        "name": "j" + draw(words),  # as no keyword, builtin or reserved name begins
        "norm": norm,
        "eps": {"value": draw(eps)} | draw(mapping(placement=st.sampled_from(["inside_sqrt", "outside_sqrt"]))),
    }
    sizes = st.sampled_from([1, 2, 3, 17, 24, 100])
    offset = st.sampled_from([0, 1, -0.5]) | st.floats(-1e3, 1e3)
    cast = st.sampled_from(["multiply_then_cast", "cast_then_multiply"])
    affine = mapping(weight=st.just(True), bias=st.booleans(), weight_offset=offset, cast=cast)
    both = mapping(
        add=st.just("before_norm"),
        store_sum=st.just(True),
        dtype=st.sampled_from(["same", "float32"]),
        norm_of=st.sampled_from(["rounded_sum", "unrounded_sum"]),
    )
    alone = st.just({"store_sum": False}) | st.just({"store_sum": False, "norm_of": "unrounded_sum"})
    more = mapping(
        hidden=st.just("dynamic") | sizes | st.lists(sizes, min_size=1, unique=True),
        dtypes=mapping(input=some(*FLOATS), weight=some("same", *FLOATS), output=st.sampled_from(["same", *FLOATS])),
        affine=st.just("none") | affine,
        residual=st.just("none") | both | alone,
        save=st.just([]) | some(*["rstd", "mean"][: 2 if norm == "layer" else 1]),
        grad=st.booleans(),
        strategy=st.sampled_from(["auto", "single_block", "welford"]),
    )
    return spec | draw(more)


def text_of(spec: Row) -> str:
    """A key a line."""
    return "".join(f"{json.dumps(key)}: {json.dumps(value)}\n" for key, value in spec.items())


def built(spec: Row) -> Row:
    """Builds a spec; the reference of its module, by itself: what it defines, without Triton."""
    files = render(plan(load(text_of(spec).encode(), "s.yaml")), "s.yaml")
    for path, text in files.items():
        compile(text, path, "exec")
    defined = {}
    for node in ast.parse(files[f"{spec['name']}.py"]).body:
        if isinstance(node, (ast.FunctionDef, ast.Assign)):
            defined[node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node.targets[0])] = node
    needed, body = ["reference"], []
    for name in needed:
        body.append(defined[name])
        named = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)}
        needed += sorted(named & defined.keys() - set(needed))
    scope: Row = {"torch": torch}
    exec(compile(ast.Module(body, []), "reference", "exec"), scope)
    return scope


def formula(
    spec: Row, dtype: torch.dtype, output: torch.dtype, x: Any, residual: Any, weight: Any, bias: Any, error: float = 0
) -> list[Any]:
    """What the keys say, for fp64 tensors whose values came in `dtype`: y, the stored sum, and what is saved.

    Each step of y errs by `error`, x_hat in parts of the row's largest element, all to one side. So of any errors up to
    that size y lies between its values for `error` and `-error`, since no rounding changes the order of two numbers.
    """
    eps, affine = spec["eps"], spec.get("affine", {})
    summed, saved = x, spec.get("save", [])
    results = []
    if residual is not None:
        summed = x + residual
        keys = spec["residual"]
        if keys.get("store_sum", True):
            if keys.get("norm_of", "rounded_sum") == "rounded_sum" and keys.get("dtype", "same") == "same":
                summed = rounded(summed, dtype)
            results.append(summed)
    mean = summed.mean(-1, keepdim=True) if spec["norm"] == "layer" else torch.zeros_like(summed[..., :1])
    variance = (summed - mean).square().mean(-1, keepdim=True)
    if eps.get("placement", "inside_sqrt") == "inside_sqrt":
        root = (variance + eps["value"]).sqrt()
    else:
        root = variance.sqrt() + eps["value"]
    y = (summed - mean + error * summed.abs().amax(-1, keepdim=True)) / root
    if affine != "none":
        late, offset = affine.get("cast") == "cast_then_multiply", affine.get("weight_offset", 0)
        gain = weight + offset
        error = torch.where(gain < 0, -error, error)
        y = rounded(y, dtype) if late else y
        y = y * gain + error * y.abs() * (weight.abs() + abs(offset))
        if affine.get("bias"):
            y = (rounded(y, output) if late else y) + bias
            y = y + error * y.abs()
    statistics = {"mean": mean.squeeze(-1), "rstd": 1 / root.squeeze(-1)}
    return [y, *results, *(statistics[name] for name in ("mean", "rstd") if name in saved)]


def rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value if dtype == torch.float64 else value.to(dtype).to(torch.float64)


def torch_norm(spec: Row, x: Any, residual: Any, weight: Any, bias: Any) -> torch.Tensor:
    """What torch computes itself, in fp64, where no rounding is left; for eps inside the root."""
    summed = x if residual is None else x + residual
    gain = None if weight is None else weight + spec.get("affine", {}).get("weight_offset", 0)
    if spec["norm"] == "layer":
        return torch.nn.functional.layer_norm(summed, summed.shape[-1:], gain, bias, spec["eps"]["value"])
    y = torch.nn.functional.rms_norm(summed, summed.shape[-1:], gain, spec["eps"]["value"])
    return y if bias is None else y + bias


def as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple) else [results]


def assert_equal(found: list[Any], wanted: list[Any], last_places: float) -> None:
    """To so many units of fp64's last place of the largest element."""
    assert [one.shape for one in found] == [one.shape for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= last_places * 2.0**-52 * other.abs().max()


@settings(max_examples=2000, deadline=None, derandomize=True)
@given(specs(), st.data())
def test_reference_is_the_formula_that_the_keys_say(spec: Row, data: st.DataObject) -> None:
    scope = built(spec)
    inputs = [getattr(torch, name) for name in spec.get("dtypes", {}).get("input", FLOATS)]
    dtype = data.draw(st.sampled_from([*inputs, torch.float64]))
    hidden = spec.get("hidden", "dynamic")
    width = 24 if hidden == "dynamic" else data.draw(st.sampled_from(hidden if isinstance(hidden, list) else [hidden]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    weight_dtypes = [torch.float64]
    if dtype != torch.float64:
        weight_dtypes = [
            dtype if name == "same" else getattr(torch, name)
            for name in spec.get("dtypes", {}).get("weight", ["same", "float32"])
        ]
    weight_dtype = data.draw(st.sampled_from(weight_dtypes))
    affine, keys = spec.get("affine", {}), spec.get("residual", "none")
    tensors: Row = {"x": torch.randn(5, width).to(dtype), "residual": None, "weight": None, "bias": None}
    stored = dtype
    if keys != "none":
        stored = torch.promote_types(dtype, torch.float32) if keys.get("dtype") == "float32" else dtype
        tensors["residual"] = torch.randn(5, width).to(stored)
    if affine != "none":
        tensors["weight"] = torch.randn(width).to(weight_dtype)
        if affine.get("bias"):
            tensors["bias"] = torch.randn(width).to(weight_dtype)
    arguments = [tensor for tensor in tensors.values() if tensor is not None]

    named = spec.get("dtypes", {}).get("output", "same")
    output = dtype if named == "same" or dtype == torch.float64 else getattr(torch, named)
    exact = {name: None if tensor is None else tensor.double() for name, tensor in tensors.items()}
    wanted = formula(spec, dtype, output, **exact)
    found = scope["_formula"](*arguments, spec["eps"]["value"], torch.float64, dtype)
    assert_equal(as_list(found), wanted, 2**10)

    results = as_list(scope["reference"](*arguments))
    stores = [stored] if keys != "none" and keys.get("store_sum", True) else []
    assert [result.dtype for result in results] == [output, *stores]
    if dtype == torch.float64:
        assert_equal(results, wanted[: len(results)], 2**10)
        if spec["eps"].get("placement", "inside_sqrt") == "inside_sqrt":
            assert_equal(results[:1], [torch_norm(spec, **tensors)], 2**10)
        # A row of one column, or of two less their mean, has an x_hat of signs and no slope: what is left is rounding.
        if width > (2 if spec["norm"] == "layer" else 1):
            leaves = [tensor.requires_grad_() for tensor in arguments]
            exact = dict(zip([name for name in tensors if tensors[name] is not None], leaves, strict=True))
            again = formula(spec, dtype, output, **(dict.fromkeys(tensors) | exact))[: len(results)]
            cotangents = list(map(torch.randn_like, results))
            gradients = torch.autograd.grad(as_list(scope["reference"](*leaves)), leaves, cotangents)
            assert_equal(list(gradients), list(torch.autograd.grad(again, leaves, cotangents)), 2**20)
    else:
        sides = [formula(spec, dtype, output, **exact, error=error) for error in (-FP32_ERROR, FP32_ERROR)]
        for result, *values in zip(results, *(side[: len(results)] for side in sides), strict=True):
            low, high = torch.stack(values).to(result.dtype).aminmax(dim=0)
            assert (low <= result).all()
            assert (result <= high).all()


# What is no value of a key, by the kind of the key, in YAML.
WRONG = {
    "word": ["1", "true", "null", "[]", "{}", '"A"', '"a-b"', '""', '"class"', '"é"', "2a", "'a b'", "torch", "1e-6"],
    "choice": ["1", "true", "null", "[]", "{}", "nonsense", '""', "Rms", '\'"""\'', "{{7*7}}", "'{% raw %}'"],
    "number": ["true", "null", "[1]", "{}", '"1"', ".inf", ".nan", "1_0", "010", "0x1", "12:30", "1e999", "one"],
    "boolean": ["1", "0", "null", "[]", "{}", '"true"', "yes", "off"],
    "widths": ["0", "-1", "1048577", "1.5", "true", "null", '"8"', "[8, 8]", "[]", "{}", "[0]", "dynamo", "9" * 30],
    "choices": ["1", "true", "null", "{}", "nonsense", "[nonsense]", "[1]", "[null]", "[[]]"],
    "mapping": ["1", "true", "null", "[]", "nonsense", '""'],
}
KINDS = {
    "name": "word",
    "norm": "choice",
    "hidden": "widths",
    "eps": "mapping",
    "eps.value": "number",
    "eps.placement": "choice",
    "dtypes": "mapping",
    "dtypes.input": "choices",
    "dtypes.weight": "choices",
    "dtypes.output": "choice",
    "affine": "mapping",
    "affine.weight": "boolean",
    "affine.bias": "boolean",
    "affine.weight_offset": "number",
    "affine.cast": "choice",
    "residual": "mapping",
    "residual.add": "choice",
    "residual.store_sum": "boolean",
    "residual.dtype": "choice",
    "residual.norm_of": "choice",
    "save": "choices",
    "grad": "boolean",
    "strategy": "choice",
}
MARK = "to be put in"


@settings(max_examples=700, deadline=None, derandomize=True)
@given(specs(), st.sampled_from(sorted(KINDS)), st.data())
def test_what_is_wrong_is_refused_where_it_stands(spec: Row, path: str, data: st.DataObject) -> None:
    wrong = data.draw(st.sampled_from(WRONG[KINDS[path]]))
    key, _, below = path.partition(".")
    inside = spec.get(key) if isinstance(spec.get(key), dict) else {}
    spec = spec | {key: {**inside, below: MARK} if below else MARK}
    text = text_of(spec).replace(json.dumps(MARK), wrong)
    assert_refused(text, path, 1 + list(spec).index(key))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(specs(), st.data())
def test_keys_that_are_none_are_refused_where_they_stand(spec: Row, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(["epsilon", "Name", "__class__", "model_config", "on", "{{7*7}}", 'a"""', "größe"]))
    inside = data.draw(st.sampled_from([None, *(name for name in spec if isinstance(spec[name], dict))]))
    if inside is None:
        spec, line, path = spec | {key: 1}, len(spec) + 1, key
    else:
        spec, line, path = spec | {inside: spec[inside] | {key: 1}}, 1 + list(spec).index(inside), f"{inside}.{key}"
    assert_refused(text_of(spec), path, line)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(specs(), st.data())
def test_keys_that_stand_twice_or_nowhere_are_refused(spec: Row, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(list(spec)))
    assert_refused(text_of(spec) + f"{key}: {json.dumps(spec[key])}\n", key, len(spec) + 1)
    missing = data.draw(st.sampled_from(["name", "norm", "eps"]))
    assert_refused(text_of({name: value for name, value in spec.items() if name != missing}), missing, 1)


def assert_refused(text: str, path: str, line: int) -> None:
    """By a fault of that key in that line; all faults in print, and in one line each."""
    with pytest.raises(SpecError) as caught:
        load(text.encode(), "s.yaml")
    faults = caught.value.faults
    assert all(str(fault).isprintable() for fault in faults)
    key = dotted(path.split("."))
    assert any(fault.line == line and fault.key.startswith(key) for fault in faults), (text, faults)
