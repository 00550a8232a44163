"""The solver on toy stages: which lines a kernel gets, and in which order. No torch, no triton."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from normgen.equations import (
    Accumulate,
    Equation,
    EquationError,
    Fold,
    Let,
    Load,
    Meet,
    Reload,
    Step,
    Store,
    System,
    Take,
    Walk,
    Walks,
    chunked,
    packed,
    parse,
    parse_fold,
    plus,
    single,
    substitute,
    whole_rows,
)
from normgen.stages.base import Dims, Role, Tensor

X_MEAN = "total = tl.sum(x, axis=1, keep_dims=True)\nmean = total * (1.0 / H)\n"
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
        return f"load {step.tensor.value}{'_first' if step.first else ''}{' raw' if step.raw else ''}"
    if isinstance(step, Let):
        return " ".join([*step.equation.comment, step.equation.target, "=", step.equation.expression])
    if isinstance(step, Accumulate):
        return f"{step.tensor.value} += {step.expression}"
    if isinstance(step, Take):
        return f"take {step.value}{' raw' if step.raw else ''}"
    if isinstance(step, Reload):
        return f"reload {step.value} from {step.tensor.value}"
    if isinstance(step, Meet):
        return "meet"
    assert isinstance(step, Store)
    return f"store {step.tensor.value} {step.value}"


def lines(steps: Iterable[Step]) -> list[str]:
    return [line(step) for step in steps]


def walk(one: Walk) -> tuple[list[str], list[str], list[str]]:
    """What stands in front of the loop of a walk, in it, and after it."""
    return [*lines(one.before), *one.begin], [*lines(one.inside), *one.each], [*one.end, *lines(one.after)]


def zeros(name: str) -> str:
    return f"{name}_lanes = tl.zeros([BLOCK_N, BLOCK_SIZE], compute)"


def across(name: str) -> str:
    return f"{name} = tl.sum({name}_lanes, axis=1, keep_dims=True)"


def flat(solved: Walks) -> list[str]:
    """The lines of all walks in the order of the page, of sums their last line alone."""
    found = lines(solved.hoisted)
    for one in solved.walks:
        found += [*lines(one.before), *lines(one.inside), *one.end, *lines(one.after)]
    return found


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


def test_plus_takes_a_product_in_one_instruction() -> None:
    assert plus("total", "a * b") == "tl.fma(a, b, total)"
    assert plus("total", "(a + b) * c") == "tl.fma(a + b, c, total)"
    assert plus("total", "a * b * c") == "tl.fma(a * b, c, total)"
    assert plus("total[block]", "a") == "total[block] + a"
    assert plus("total", "tl.abs(a * b)") == "total + tl.abs(a * b)"
    # A quotient and a sum are rounded first: they are no one instruction.
    assert plus("total", "a / b") == "total + a / b"


def test_whole_rows() -> None:
    first, second = whole_rows(system(X_MEAN + "y = (x - mean) * gamma")).walks
    assert walk(first) == ([zeros("total")], ["load x", "total_lanes = total_lanes + x"], [across("total")])
    assert (first.kept, first.sums) == ((("x", "x"),), ("total",))
    assert walk(second) == (
        ["mean = total * (1.0 / H)"],
        ["take x", "load gamma", "y = (x - mean) * gamma", "store y y"],  # gamma as late as possible: after the sum
        [],
    )
    assert (second.kept, second.sums) == ((), ())


def test_whole_rows_keep_what_a_later_walk_needs() -> None:
    """What was computed, not what it was computed of; and from the walk that computed it, however far back."""
    text = """
    # told once
    scaled = x * 2.0
    total = tl.sum(scaled, axis=1, keep_dims=True)
    centered = scaled - total
    squares = tl.sum(centered * centered, axis=1, keep_dims=True)
    y = centered * squares * scaled
    """
    first, second, third = whole_rows(system(text)).walks
    assert walk(first)[1] == ["load x", "# told once scaled = x * 2.0", "total_lanes = total_lanes + scaled"]
    assert first.kept == (("scaled", "scaled"),)
    assert walk(second)[1] == [
        "take scaled",
        "centered = scaled - total",
        "squares_lanes = tl.fma(centered, centered, squares_lanes)",
    ]
    assert second.kept == (("centered", "centered"),)
    assert walk(third)[1] == ["take centered", "take scaled", "y = centered * squares * scaled", "store y y"]
    assert third.kept == ()


def test_whole_rows_keep_nothing_without_need() -> None:
    [one] = whole_rows(system("y = x * gamma")).walks
    assert (walk(one), one.kept) == (([], ["load x", "load gamma", "y = x * gamma", "store y y"], []), ())


def test_row_values_are_made_once() -> None:
    """They are numbers a row, which every later walk has."""
    text = """
    scale = first(x)
    total = tl.sum(x * scale, axis=1, keep_dims=True)
    y = x * scale * total
    """
    for solved in (whole_rows(system(text)), chunked(system(text))):
        first, second = solved.walks
        assert walk(first)[0] == ["load x_first", zeros("total")]
        assert walk(second)[0] == []


def test_aliases_are_propagated() -> None:
    text = "a = x\nb = a\nc = b * 2.0\nd = c\ny = d"
    assert flat(whole_rows(system(text))) == ["load x", "c = x * 2.0", "store y c"]


def test_what_is_not_needed_is_absent() -> None:
    text = "# unused\nunused = x * gamma\nwasted = tl.sum(unused, axis=1, keep_dims=True)\ny = x * 2.0"
    for solve in (whole_rows, chunked, single):
        [one] = solve(system(text)).walks
        assert walk(one) == ([], ["load x", "y = x * 2.0", "store y y"], [])


def test_a_loadable_tensor_overrides_its_equation() -> None:
    text = "total = tl.sum(x * x, axis=1, keep_dims=True)\nrstd = _divide(1.0, total)\ny = x * rstd"
    assert "rstd = _divide(1.0, total)" in flat(whole_rows(system(text)))
    [one] = whole_rows(system(text, [X, RSTD])).walks
    assert walk(one) == (["load rstd"], ["load x", "y = x * rstd", "store y y"], [])


def test_a_later_equation_overrides_an_earlier_one() -> None:
    equations = [*parse("a = x * 2.0\ny = a"), *parse("a = x * 3.0")]
    assert flat(whole_rows(System.of(equations, [X], [Y]))) == ["load x", "a = x * 3.0", "store y a"]


def test_sums_of_one_level_stand_side_by_side() -> None:
    text = """
    one = tl.sum(x, axis=1, keep_dims=True)
    scaled = x * gamma
    two = tl.sum(scaled, axis=1, keep_dims=True)
    centered = x - one
    three = tl.sum(centered, axis=1, keep_dims=True)
    y = centered * two * three
    """
    first, second, third = whole_rows(system(text)).walks
    assert walk(first) == (
        [zeros("one"), zeros("two")],
        [
            "load x",
            "load gamma",
            "scaled = x * gamma",
            "one_lanes = one_lanes + x",
            "two_lanes = two_lanes + scaled",
        ],
        [across("one"), across("two")],
    )
    assert (first.kept, first.sums) == ((("x", "x"),), ("one", "two"))
    assert walk(second) == (
        [zeros("three")],
        ["take x", "centered = x - one", "three_lanes = three_lanes + centered"],
        [across("three")],
    )
    assert walk(third) == ([], ["take centered", "y = centered * two * three", "store y y"], [])


@pytest.mark.parametrize("solve", [whole_rows, chunked])
def test_a_store_follows_its_value(solve: Callable[[System], Walks]) -> None:
    text = "summed = x * 2.0\nrstd = tl.sum(summed, axis=1, keep_dims=True)\ny = summed * rstd * gamma"
    stores = [Y, tensor("summed", role="output"), RSTD]
    first, second = solve(system(text, stores=stores)).walks
    assert walk(first) == (
        [zeros("rstd")],
        ["load x", "summed = x * 2.0", "store summed summed", "rstd_lanes = rstd_lanes + summed"],
        [across("rstd"), "store rstd rstd", *(["meet"] if solve is chunked else [])],
    )
    again = "take summed" if solve is whole_rows else "reload summed from summed"
    assert walk(second) == ([], [again, "load gamma", "y = summed * rstd * gamma", "store y y"], [])


def test_one_value_in_two_tensors() -> None:
    stores = [Y, tensor("copy", role="output")]
    assert flat(whole_rows(system("y = x * 2.0\ncopy = y", stores=stores))) == [
        "load x",
        "y = x * 2.0",
        "store y y",
        "store copy y",
    ]


def test_first_of_a_load() -> None:
    text = "# less the first\nshift = first(x)\ny = x - shift"
    [one] = whole_rows(system(text)).walks
    assert walk(one) == (["load x_first"], ["load x", "# less the first y = x - x_first", "store y y"], [])


def test_first_goes_through_a_chain_of_equations() -> None:
    residual = tensor("residual")
    text = """
    # rounded
    summed = (x + residual).to(input_dtype)
    scaled = summed * 2.0
    shift = first(scaled)
    y = scaled - shift
    """
    [one] = whole_rows(system(text, [X, residual])).walks
    assert walk(one) == (
        [
            "load x_first",
            "load residual_first",
            "summed_first = (x_first + residual_first).to(input_dtype)",
            "scaled_first = summed_first * 2.0",
        ],
        [
            "load x",
            "load residual",
            "# rounded summed = (x + residual).to(input_dtype)",
            "scaled = summed * 2.0",
            "y = scaled - scaled_first",
            "store y y",
        ],
        [],
    )


def test_first_that_nobody_needs_is_gone() -> None:
    text = X_MEAN + "other = y2 * 2.0\nshift = first(other)\nunused = x - shift\ny = x * 2.0\ny2 = gamma"
    assert flat(whole_rows(system(text))) == ["load x", "y = x * 2.0", "store y y"]


def test_first_of_a_reduction_is_refused() -> None:
    with pytest.raises(EquationError, match=r"^first\(total\) would need a row sum$"):
        system("total = tl.sum(x, axis=1, keep_dims=True)\nshift = first(total)\ny = x - shift")


@pytest.mark.parametrize("text", ["y = x * lost", "shift = first(lost)\ny = x - shift", "y = lost"])
@pytest.mark.parametrize("solve", [whole_rows, chunked, single])
def test_an_undefined_name_is_named(text: str, solve: Callable[[System], Walks]) -> None:
    with pytest.raises(EquationError, match=r"^lost is neither an equation nor a tensor of this kernel$"):
        solve(system(text))


def test_a_store_without_a_value_is_named() -> None:
    with pytest.raises(EquationError, match=r"^y is neither an equation nor a tensor of this kernel$"):
        whole_rows(system("a = x"))
    with pytest.raises(EquationError, match=r"^dgamma is neither an equation nor a tensor of this kernel$"):
        whole_rows(system("y = x", stores=[DGAMMA]))


DY = tensor("dy")
BACKWARD = "gain = gamma + 1.0\ndx = dy * gain\ndgamma = dy * x\ndbeta = dy"
GRADIENTS = [tensor("dx", role="output"), DGAMMA, tensor("dbeta", "H", "output")]


def test_persistent_rows_hoist_what_they_share() -> None:
    """In front of the loop over rows, as it is in memory; what is made of it is made for each row."""
    solved = packed(system(BACKWARD, [DY, X, GAMMA], GRADIENTS), persistent=True)
    assert (lines(solved.hoisted), solved.hoisted_kept) == (["load gamma raw"], (("gamma", "gamma_raw"),))
    [one] = solved.walks
    made = ["take gamma raw", "gain = gamma + 1.0", "dx = dy * gain"]
    assert walk(one) == ([], ["load dy", *made, "store dx dx", "load x", "dgamma += dy * x", "dbeta += dy"], [])
    assert one.kept == ()


def test_packed_rows_keep_what_is_in_memory_and_make_the_rest_again() -> None:
    text = X_MEAN + "# Why.\ncentered = x - mean\nsquares = tl.sum(centered * centered, axis=1, keep_dims=True)\n"
    first, second, third = packed(system(text + "y = centered * squares * gamma")).walks
    assert (lines(first.inside), first.kept) == (["load x raw"], (("x", "x_raw"),))
    assert (lines(second.inside), second.kept) == (["take x raw", "# Why. centered = x - mean"], ())
    made = ["take x raw", "centered = x - mean", "load gamma", "y = centered * squares * gamma", "store y y"]
    assert (lines(third.inside), third.kept) == (made, ())


def test_packed_rows_keep_what_is_stored_unless_the_store_rounds() -> None:
    residual = tensor("residual")
    text = "summed = x + residual\ntotal = tl.sum(summed, axis=1, keep_dims=True)\ny = summed * total"
    out = Tensor("summed", "NH", "output", "input", "", "", stem="residual_out")
    first, second = packed(system(text, [X, residual], [Y, out])).walks
    stored = ["load x", "load residual", "summed = x + residual", "store summed summed"]
    assert (lines(first.inside), first.kept) == (stored, (("summed", "summed.to(residual_out_ptr.dtype.element_ty)"),))
    assert lines(second.inside) == ["take summed raw", "y = summed * total", "store y y"]
    first, second = packed(system(text, [X, residual], [Y, replace(out, faithful=False)])).walks
    assert first.kept == (("x", "x_raw"), ("residual", "residual_raw"))
    again = ["take x raw", "take residual raw", "summed = x + residual"]
    assert lines(second.inside) == [*again, "y = summed * total", "store y y"]


def test_rows_of_one_tile_hoist_nothing() -> None:
    solved = whole_rows(system(BACKWARD, [DY, X, GAMMA], GRADIENTS))
    assert (solved.hoisted, solved.hoisted_kept) == ((), ())
    assert lines(solved.walks[0].inside)[:3] == ["load dy", "load gamma", "gain = gamma + 1.0"]


def test_sums_over_rows_are_taken_in_the_earliest_walk() -> None:
    """There they need no register longer than the row has anyway."""
    text = """
    dx_hat = dy * gamma
    slope = tl.sum(dx_hat * x, axis=1, keep_dims=True)
    dx = dx_hat - x * slope
    dgamma = dy * x
    dbeta = dy
    late = dy * slope
    """
    stores = [*GRADIENTS, tensor("late", "H", "output")]
    solved = packed(system(text, [DY, X, GAMMA], stores), persistent=True)
    first, second = solved.walks
    assert (lines(solved.hoisted), solved.hoisted_kept) == (["load gamma raw"], (("gamma", "gamma_raw"),))
    assert walk(first) == (
        [zeros("slope")],
        [
            "load dy raw",
            "take gamma raw",
            "dx_hat = dy * gamma",
            "load x raw",
            "dgamma += dy * x",
            "dbeta += dy",
            "slope_lanes = tl.fma(dx_hat, x, slope_lanes)",
        ],
        [across("slope")],
    )
    assert first.kept == (("dy", "dy_raw"), ("x", "x_raw"))
    assert walk(second)[1] == [
        "take dy raw",
        "take gamma raw",
        "dx_hat = dy * gamma",
        "take x raw",
        "dx = dx_hat - x * slope",
        "store dx dx",
        "late += dy * slope",
    ]


def test_a_summand_that_is_used_elsewhere_keeps_its_line() -> None:
    text = "dgamma = x * 2.0\ny = dgamma * 3.0"
    assert flat(whole_rows(system(text, stores=[Y, DGAMMA]))) == [
        "load x",
        "dgamma = x * 2.0",
        "y = dgamma * 3.0",
        "store y y",
        "dgamma += dgamma",
    ]


def test_single_takes_a_row_sum_in_one_line() -> None:
    """What a program does with its block of columns, for every row: no loop, so nothing before or in one."""
    text = "gain = gamma + 1.0\ndx_hat = dy * gain\nslope = tl.sum(dx_hat * x, axis=1, keep_dims=True)"
    slope = tensor("slope", "N", "scratch")
    solved = single(system(text, [DY, X, GAMMA], [slope]))
    assert (solved.hoisted, solved.hoisted_kept) == ((), ())
    [one] = solved.walks
    assert walk(one) == (
        [],
        ["load dy", "load gamma", "gain = gamma + 1.0", "dx_hat = dy * gain", "load x"],
        ["slope = _sum_of_products(dx_hat, x)", "store slope slope"],
    )
    assert (one.begin, one.each, one.kept) == ((), (), ())


def test_single_with_its_sums_given_is_one_walk() -> None:
    text = """
    dx_hat = dy * gamma
    slope = tl.sum(dx_hat * x, axis=1, keep_dims=True)
    dslope = slope * (1.0 / H)
    dx = dx_hat - x * dslope
    dgamma = dy * x
    dbeta = dy
    """
    solved = single(system(text, [DY, X, GAMMA, tensor("slope", "N", "scratch")], GRADIENTS))
    assert solved.hoisted == ()
    [one] = solved.walks
    assert walk(one) == (
        ["load slope", "dslope = slope * (1.0 / H)"],
        [
            "load dy",
            "load gamma",
            "dx_hat = dy * gamma",
            "load x",
            "dx = dx_hat - x * dslope",
            "store dx dx",
            "dgamma += dy * x",
            "dbeta += dy",
        ],
        [],
    )


def test_chunked_takes_a_walk_more_than_there_are_dependent_sums() -> None:
    first, second, third = chunked(
        system(
            "# told once\nscaled = x * 2.0\n"
            "total = tl.sum(scaled, axis=1, keep_dims=True)\nmean = total * (1.0 / H)\n"
            "centered = scaled - mean\nsquares = tl.sum(centered * centered, axis=1, keep_dims=True)\n"
            "rstd = _divide(1.0, squares)\ny = centered * rstd * gamma",
            stores=[Y, RSTD],
        )
    ).walks
    assert walk(first) == (
        [zeros("total")],
        ["load x", "# told once scaled = x * 2.0", "total_lanes = total_lanes + scaled"],
        [across("total")],
    )
    assert walk(second) == (
        ["mean = total * (1.0 / H)", zeros("squares")],
        [
            "load x",
            "scaled = x * 2.0",
            "centered = scaled - mean",
            "squares_lanes = tl.fma(centered, centered, squares_lanes)",
        ],
        [across("squares"), "rstd = _divide(1.0, squares)", "store rstd rstd"],
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
    assert [one.kept for one in (first, second, third)] == [(), (), ()]
    assert [one.sums for one in (first, second, third)] == [("total",), ("squares",), ()]


def test_chunked_without_a_sum_is_one_walk() -> None:
    [one] = chunked(system("y = x * gamma")).walks
    assert walk(one) == ([], ["load x", "load gamma", "y = x * gamma", "store y y"], [])


def test_chunked_takes_independent_sums_in_one_walk() -> None:
    text = """
    one = tl.sum(x, axis=1, keep_dims=True)
    two = tl.sum(x * x, axis=1, keep_dims=True)
    y = x * one * two
    """
    first, second = map(walk, chunked(system(text)).walks)
    assert first[1] == ["load x", "one_lanes = one_lanes + x", "two_lanes = tl.fma(x, x, two_lanes)"]
    assert second == ([], ["load x", "y = x * one * two", "store y y"], [])


def test_chunked_reads_back_what_it_stored() -> None:
    """In the place of all that the value was made of, in every later walk, and not in the walk that stored it.

    Threads meet once, behind that walk.
    """
    residual = tensor("residual")
    text = """
    summed = (x + residual).to(input_dtype)
    total = tl.sum(summed, axis=1, keep_dims=True)
    centered = summed - total
    squares = tl.sum(centered * centered, axis=1, keep_dims=True)
    y = centered * squares
    """
    first, second, third = chunked(system(text, [X, residual], [Y, tensor("summed", role="output")])).walks
    assert lines(first.inside) == [
        "load x",
        "load residual",
        "summed = (x + residual).to(input_dtype)",
        "store summed summed",
    ]
    assert [lines(one.after).count("meet") for one in (first, second, third)] == [1, 0, 0]
    assert lines(second.inside) == ["reload summed from summed", "centered = summed - total"]
    assert lines(third.inside) == [
        "reload summed from summed",
        "centered = summed - total",
        "y = centered * squares",
        "store y y",
    ]


def test_chunked_makes_again_what_was_stored_rounded() -> None:
    """Where the tensor holds another value than the one that is normalised, it is no source of it."""
    text = "summed = x + gamma\ntotal = tl.sum(summed, axis=1, keep_dims=True)\ny = summed * total"
    rounded = replace(tensor("summed", role="output"), faithful=False)
    first, second = chunked(system(text, stores=[Y, rounded])).walks
    assert "meet" not in lines(first.after)
    assert lines(second.inside) == ["load x", "load gamma", "summed = x + gamma", "y = summed * total", "store y y"]


FOLD = """
begin:
mean = tl.zeros([BLOCK_N, 1], compute)
squares = tl.zeros([BLOCK_N, 1], compute)
each:
# merge
delta = x - mean
mean += delta * gamma
squares += delta * delta
row:
spread = squares - mean * mean
"""


def fold_of(text: str) -> Fold:
    found = parse_fold(text)
    assert found is not None
    return found


def test_fold() -> None:
    fold = fold_of(FOLD)
    assert fold.row == tuple(parse("spread = squares - mean * mean"))
    assert (fold.targets, fold.uses, fold.end) == (("mean", "squares"), ("x", "gamma"), ())
    assert parse_fold("\n  \n") is None
    text = X_MEAN + SQUARES + "y = x * squares + mean"
    first, second = chunked(system(text, folds=[fold])).walks
    assert walk(first) == (
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
    assert first.sums == ("mean", "squares")
    assert walk(second) == ([], ["load x", "y = x * squares + mean", "store y y"], [])


def test_a_fold_is_cut_to_what_is_wanted() -> None:
    fold = fold_of(FOLD)
    first, _ = map(walk, chunked(system(X_MEAN + SQUARES + "y = x * mean", folds=[fold])).walks)
    assert first == (
        ["mean = tl.zeros([BLOCK_N, 1], compute)"],
        ["load x", "load gamma", "# merge", "delta = x - mean", "mean += delta * gamma"],
        [],
    )


def test_a_loaded_statistic_needs_no_fold() -> None:
    fold = fold_of(FOLD)
    mean, squares = tensor("mean", "N", "statistic"), tensor("squares", "N", "statistic")
    [one] = chunked(system("y = x * squares + mean", [X, mean, squares], folds=[fold])).walks
    assert walk(one) == (["load squares", "load mean"], ["load x", "y = x * squares + mean", "store y y"], [])


def hints(solved: Walks) -> list[list[str]]:
    """Walk by walk, the lines in the loop that have an eviction policy, and it."""
    return [
        [f"{line(step)}: {hint}" for step in one.inside if (hint := solved.eviction(number, step))]
        for number, one in enumerate(solved.walks)
    ]


def test_eviction() -> None:
    """A cache keeps what a later walk reads again and what all rows read, and lets go of what was read for the last."""
    solved = chunked(system(X_MEAN + SQUARES + "y = centered * squares * gamma"))
    assert hints(solved) == [
        ["load x: evict_last"],
        ["load x: evict_last"],
        ["load x: evict_first", "load gamma: evict_last", "store y y: evict_first"],
    ]


def test_eviction_of_what_is_read_back() -> None:
    """It is the stored sum that later walks read: what it was made of leaves no trace, nor does its store."""
    text = """
    summed = x * 2.0
    mean = tl.sum(summed, axis=1, keep_dims=True)
    centered = summed - mean
    squares = tl.sum(centered * centered, axis=1, keep_dims=True)
    y = centered * squares
    """
    assert hints(chunked(system(text, stores=[Y, tensor("summed", role="output")]))) == [
        [],
        ["reload summed from summed: evict_last"],
        ["reload summed from summed: evict_first", "store y y: evict_first"],
    ]


def test_eviction_matters_not_where_all_is_read_once() -> None:
    assert hints(chunked(system("y = x * gamma"))) == [[]]
    [one] = chunked(system("y = x * gamma")).walks
    assert [line(step) for step in one.inside] == ["load x", "load gamma", "y = x * gamma", "store y y"]


def test_single_keeps_what_a_second_sum_needs() -> None:
    """A sum that needs another takes what the first was made of, and does not make it again."""
    text = """
    twice = x * 2.0
    total = tl.sum(twice, axis=1, keep_dims=True)
    apart = twice - total
    square = tl.sum(apart * apart, axis=1, keep_dims=True)
    """
    sums = [tensor("total", "N", "word"), tensor("square", "N", "word")]
    first, second = single(system(text, [X], sums)).walks
    assert walk(first) == (
        [],
        ["load x", "twice = x * 2.0"],
        ["total = tl.sum(twice, axis=1, keep_dims=True)", "store total total"],
    )
    assert walk(second) == (
        [],
        ["take twice", "apart = twice - total"],
        ["square = _sum_of_products(apart, apart)", "store square square"],
    )


def test_the_first_element_can_be_stored() -> None:
    text = "shift = first(x)\nshifted = x - shift"
    stores = [tensor("shift", "N", "scratch"), tensor("shifted", "NH", "output")]
    found = flat(single(system(text, [X], stores)))
    assert "store shift x_first" in found
    assert found.index("load x_first") < found.index("store shift x_first")
