"""The solver on toy stages: which lines a kernel gets, and in which order. No torch, no triton."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from normgen.equations import (
    Accumulate,
    Equation,
    EquationError,
    Fold,
    Let,
    Load,
    Pass,
    Step,
    System,
    chunked,
    parse,
    parse_fold,
    persistent,
    straight,
    substitute,
)
from normgen.stages.base import Dims, Role, Tensor

X_MEAN = "total = tl.sum(x, axis=1, keep_dims=True)\nmean = _divide(total, width)\n"
SQUARES = "centered = x - mean\nsquares = tl.sum(centered * centered, axis=1, keep_dims=True)\n"


def tensor(value: str, dims: Dims = "NH", role: Role = "input") -> Tensor:
    return Tensor(value, dims, role, "input", value, "")


X, Y = tensor("x"), tensor("y", role="output")
GAMMA = tensor("gamma", "H", "parameter")
DGAMMA = tensor("dgamma", "H", "output")
RSTD = tensor("rstd", "N", "statistic")


def system(
    text: str, loads: Iterable[Tensor] = (X, GAMMA), stores: Iterable[Tensor] = (Y,), folds: Iterable[Fold] = ()
) -> System:
    return System.of(parse(text), loads, stores, folds)


def line(step: Step) -> str:
    if isinstance(step, Load):
        return f"load {step.tensor.value}{'_first' if step.first else ''}"
    if isinstance(step, Let):
        return " ".join([*step.equation.comment, step.equation.target, "=", step.equation.expression])
    if isinstance(step, Accumulate):
        return f"{step.tensor.value} += {step.expression}"
    return f"store {step.tensor.value} {step.value}"


def lines(steps: Iterable[Step]) -> list[str]:
    return [line(step) for step in steps]


def walk(one: Pass) -> tuple[list[str], list[str], list[str]]:
    """What stands in front of the loop of a pass, in it, and after it."""
    return [*lines(one.before), *one.begin], [*lines(one.inside), *one.each], [*one.end, *lines(one.after)]


def test_parse() -> None:
    text = "# one\n\n# two\na = x*2\nb = a # not kept\n"
    assert parse(text) == [Equation("a", "x * 2", ("# one", "# two")), Equation("b", "a")]
    assert parse("") == []


def test_uses_are_in_order_of_appearance_once_each() -> None:
    [equation] = parse("a = tl.where(col_mask, z - x.to(input_dtype), z) + first(q)")
    assert equation.uses == ("z", "x", "q")
    assert parse("a = z - y")[0].uses == ("z", "y")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tl.store(a, b)", "not an equation of the form name = expression: tl.store(a, b)"),
        ("a += b", "not an equation of the form name = expression: a += b"),
        ("a = b = c", "not an equation of the form name = expression: a = b = c"),
        ("a.b = c", "not an equation of the form name = expression: a.b = c"),
        ("a, b = c", "not an equation of the form name = expression: a, b = c"),
        ("row = x", "row is a reserved name: row = x"),
        ("a = x\na = y", "a is defined twice: a = y"),
        ("a = 1.0 + tl.sum(x, axis=1, keep_dims=True)", "a row sum must be the whole right-hand side: a = 1.0"),
        ("a = tl.sum(x, axis=0, keep_dims=True)", "a row sum must be the whole right-hand side: a = tl.sum"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(EquationError) as error:
        parse(text)
    assert str(error.value).startswith(message)


def test_reductions() -> None:
    total, plain = parse("total = tl.sum(x * x, axis=1, keep_dims=True)\nplain = x * x")
    assert (total.reduces, total.summand) == (True, "x * x")
    assert not plain.reduces


def test_substitute_takes_whole_names_and_no_attributes() -> None:
    assert substitute("a + ab + b.a + a.b", {"a": "z"}) == "z + ab + b.a + z.b"
    assert substitute("a + b", {"a": "b", "b": "a"}) == "b + a"
    assert substitute("a", {}) == "a"


def test_straight() -> None:
    text = X_MEAN + "y = (x - mean) * gamma"
    assert lines(straight(system(text))) == [
        "load x",
        "total = tl.sum(x, axis=1, keep_dims=True)",
        "mean = _divide(total, width)",
        "load gamma",  # as late as possible: after the reduction
        "y = (x - mean) * gamma",
        "store y y",
    ]


def test_aliases_are_propagated() -> None:
    text = "a = x\nb = a\nc = b * 2.0\nd = c\ny = d"
    assert lines(straight(system(text))) == ["load x", "c = x * 2.0", "store y c"]


def test_what_is_not_needed_is_absent() -> None:
    text = "# unused\nunused = x * gamma\nwasted = tl.sum(unused, axis=1, keep_dims=True)\ny = x * 2.0"
    assert lines(straight(system(text))) == ["load x", "y = x * 2.0", "store y y"]


def test_a_loadable_tensor_overrides_its_equation() -> None:
    text = "total = tl.sum(x * x, axis=1, keep_dims=True)\nrstd = _divide(1.0, total)\ny = x * rstd"
    assert "rstd = _divide(1.0, total)" in lines(straight(system(text)))
    assert lines(straight(system(text, [X, RSTD]))) == ["load x", "load rstd", "y = x * rstd", "store y y"]


def test_a_later_equation_overrides_an_earlier_one() -> None:
    equations = [*parse("a = x * 2.0\ny = a"), *parse("a = x * 3.0")]
    assert lines(straight(System.of(equations, [X], [Y]))) == ["load x", "a = x * 3.0", "store y a"]


def test_reductions_of_one_level_stand_side_by_side() -> None:
    text = """
    one = tl.sum(x, axis=1, keep_dims=True)
    scaled = x * gamma
    two = tl.sum(scaled, axis=1, keep_dims=True)
    centered = x - one
    three = tl.sum(centered, axis=1, keep_dims=True)
    y = centered * two * three
    """
    assert lines(straight(system(text))) == [
        "load x",
        "load gamma",
        "scaled = x * gamma",
        "one = tl.sum(x, axis=1, keep_dims=True)",
        "two = tl.sum(scaled, axis=1, keep_dims=True)",
        "centered = x - one",
        "three = tl.sum(centered, axis=1, keep_dims=True)",
        "y = centered * two * three",
        "store y y",
    ]


def test_a_store_follows_its_value() -> None:
    text = "summed = x * 2.0\nrstd = tl.sum(summed, axis=1, keep_dims=True)\ny = summed * rstd * gamma"
    stores = [Y, tensor("summed", role="output"), RSTD]
    assert lines(straight(system(text, stores=stores))) == [
        "load x",
        "summed = x * 2.0",
        "store summed summed",
        "rstd = tl.sum(summed, axis=1, keep_dims=True)",
        "store rstd rstd",
        "load gamma",
        "y = summed * rstd * gamma",
        "store y y",
    ]


def test_one_value_in_two_tensors() -> None:
    stores = [Y, tensor("copy", role="output")]
    assert lines(straight(system("y = x * 2.0\ncopy = y", stores=stores))) == [
        "load x",
        "y = x * 2.0",
        "store y y",
        "store copy y",
    ]


def test_first_of_a_load() -> None:
    text = "# less the first\nshift = first(x)\ny = x - shift"
    assert lines(straight(system(text))) == ["load x", "load x_first", "# less the first y = x - x_first", "store y y"]


def test_first_goes_through_a_chain_of_equations() -> None:
    residual = tensor("residual")
    text = """
    # rounded
    summed = (x + residual).to(input_dtype)
    scaled = summed * 2.0
    shift = first(scaled)
    y = scaled - shift
    """
    assert lines(straight(system(text, [X, residual]))) == [
        "load x",
        "load residual",
        "# rounded summed = (x + residual).to(input_dtype)",
        "scaled = summed * 2.0",
        "load x_first",
        "load residual_first",
        "summed_first = (x_first + residual_first).to(input_dtype)",
        "scaled_first = summed_first * 2.0",
        "y = scaled - scaled_first",
        "store y y",
    ]


def test_first_that_nobody_needs_is_gone() -> None:
    text = X_MEAN + "other = y2 * 2.0\nshift = first(other)\nunused = x - shift\ny = x * 2.0\ny2 = gamma"
    assert lines(straight(system(text))) == ["load x", "y = x * 2.0", "store y y"]


def test_first_of_a_reduction_is_refused() -> None:
    with pytest.raises(EquationError, match=r"^first\(total\) would need a row sum$"):
        system("total = tl.sum(x, axis=1, keep_dims=True)\nshift = first(total)\ny = x - shift")


@pytest.mark.parametrize("text", ["y = x * lost", "shift = first(lost)\ny = x - shift", "y = lost"])
def test_an_undefined_name_is_named(text: str) -> None:
    with pytest.raises(EquationError, match=r"^lost is neither an equation nor a tensor of this kernel$"):
        straight(system(text))


def test_a_store_without_a_value_is_named() -> None:
    with pytest.raises(EquationError, match=r"^y is neither an equation nor a tensor of this kernel$"):
        straight(system("a = x"))
    with pytest.raises(EquationError, match=r"^dgamma is neither an equation nor a tensor of this kernel$"):
        straight(system("y = x", stores=[DGAMMA]))


def test_persistent() -> None:
    text = "gain = gamma + 1.0\ndx = dy * gain\ndgamma = dy * x\ndbeta = dy"
    dy = tensor("dy")
    stores = [tensor("dx", role="output"), DGAMMA, tensor("dbeta", "H", "output")]
    hoisted, body = persistent(system(text, [dy, X, GAMMA], stores))
    assert lines(hoisted) == ["load gamma", "gain = gamma + 1.0"]
    assert lines(body) == ["load dy", "dx = dy * gain", "store dx dx", "load x", "dgamma += dy * x", "dbeta += dy"]


def test_a_summand_that_is_used_elsewhere_keeps_its_line() -> None:
    text = "dgamma = x * 2.0\ny = dgamma * 3.0"
    assert lines(straight(system(text, stores=[Y, DGAMMA]))) == [
        "load x",
        "dgamma = x * 2.0",
        "y = dgamma * 3.0",
        "store y y",
        "dgamma += dgamma",
    ]


def test_chunked_takes_a_pass_more_than_there_are_dependent_sums() -> None:
    first, second, third = chunked(
        system(
            "# told once\nscaled = x * 2.0\n"
            "total = tl.sum(scaled, axis=1, keep_dims=True)\nmean = _divide(total, width)\n"
            "centered = scaled - mean\nsquares = tl.sum(centered * centered, axis=1, keep_dims=True)\n"
            "rstd = _divide(1.0, squares)\ny = centered * rstd * gamma",
            stores=[Y, RSTD],
        )
    )
    zeros = "tl.zeros([BLOCK_N, BLOCK_SIZE], compute)"
    assert walk(first) == (
        [f"total_lanes = {zeros}"],
        ["load x", "# told once scaled = x * 2.0", "total_lanes += scaled"],
        ["total = tl.sum(total_lanes, axis=1, keep_dims=True)"],
    )
    assert walk(second) == (
        ["mean = _divide(total, width)", f"squares_lanes = {zeros}"],
        ["load x", "scaled = x * 2.0", "centered = scaled - mean", "squares_lanes += centered * centered"],
        [
            "squares = tl.sum(squares_lanes, axis=1, keep_dims=True)",
            "rstd = _divide(1.0, squares)",
            "store rstd rstd",
        ],
    )
    assert walk(third) == (
        [],
        [
            "load x",
            "scaled = x * 2.0",
            "centered = scaled - mean",
            "load gamma",
            "y = centered * rstd * gamma",
            "store y y",
        ],
        [],
    )


def test_chunked_without_a_sum_is_one_pass() -> None:
    [one] = chunked(system("y = x * gamma"))
    assert walk(one) == ([], ["load x", "load gamma", "y = x * gamma", "store y y"], [])


def test_chunked_takes_independent_sums_in_one_pass() -> None:
    text = """
    one = tl.sum(x, axis=1, keep_dims=True)
    two = tl.sum(x * x, axis=1, keep_dims=True)
    y = x * one * two
    """
    first, second = map(walk, chunked(system(text)))
    assert first[1] == ["load x", "one_lanes += x", "two_lanes += x * x"]
    assert second == ([], ["load x", "y = x * one * two", "store y y"], [])


def test_chunked_stores_as_soon_as_the_value_exists() -> None:
    text = "summed = x * 2.0\ntotal = tl.sum(summed, axis=1, keep_dims=True)\ny = summed * total"
    first, second = map(walk, chunked(system(text, stores=[Y, tensor("summed", role="output")])))
    assert "store summed summed" in first[1]
    assert "store summed summed" not in second[1]


FOLD = """
begin:
mean = tl.zeros([BLOCK_N, 1], compute)
squares = tl.zeros([BLOCK_N, 1], compute)
each:
# merge
delta = x - mean
mean += delta * gamma
squares += delta * delta
"""


def test_fold() -> None:
    fold = parse_fold(FOLD)
    assert fold is not None
    assert (fold.targets, fold.uses, fold.end) == (("mean", "squares"), ("x", "gamma"), ())
    assert parse_fold("\n  \n") is None
    text = X_MEAN + SQUARES + "y = x * squares + mean"
    first, second = map(walk, chunked(system(text, folds=[fold])))
    assert first == (
        ["mean = tl.zeros([BLOCK_N, 1], compute)", "squares = tl.zeros([BLOCK_N, 1], compute)"],
        [
            "load x",
            "load gamma",
            "# merge",
            "delta = x - mean",
            "mean += delta * gamma",
            "squares += delta * delta",
        ],
        [],
    )
    assert second == ([], ["load x", "y = x * squares + mean", "store y y"], [])


def test_a_fold_is_cut_to_what_is_wanted() -> None:
    fold = parse_fold(FOLD)
    assert fold is not None
    first, _ = map(walk, chunked(system(X_MEAN + SQUARES + "y = x * mean", folds=[fold])))
    assert first == (
        ["mean = tl.zeros([BLOCK_N, 1], compute)"],
        ["load x", "load gamma", "# merge", "delta = x - mean", "mean += delta * gamma"],
        [],
    )


def test_a_loaded_statistic_needs_no_fold() -> None:
    fold = parse_fold(FOLD)
    assert fold is not None
    mean, squares = tensor("mean", "N", "statistic"), tensor("squares", "N", "statistic")
    [one] = chunked(system("y = x * squares + mean", [X, mean, squares], folds=[fold]))
    assert walk(one) == (["load squares", "load mean"], ["load x", "y = x * squares + mean", "store y y"], [])
