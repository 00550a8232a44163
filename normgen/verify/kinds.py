"""The kinds of fault, in plain words, and the tests that look for each.

A line of an assertion's message that starts with the name of a kind and a colon belongs to that kind; a failure without
such a line belongs to the kind of its test. After a first line `in full` the lines name all that there is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A way in which a normalisation kernel can be wrong."""

    name: str
    tests: tuple[str, ...]
    """Functions of the battery whose failures are of this kind, unless their message names another."""
    named_by: tuple[str, ...] = ()
    """Functions whose message names this kind."""
    absolute: bool = False
    """Whether these tests compare with the formula, not with another call: wrong plain calls make them fail as well."""
    note: bool = False
    """Said, and never counted as wrong: no values depend on it, or only places that nobody but a spec promises."""


FORWARD, BACKWARD = "test_forward_of_each_strategy", "test_backward_of_each_strategy"
"""Plain calls: contiguous rows of ordinary values."""


KINDS = (
    Kind("wrong values", (FORWARD, "test_forward", "test_agrees_with_torch", "test_eps_is_used")),
    Kind("denominator is not the width", ("test_denominator_is_the_width",)),
    Kind("mask, first or last columns", ("test_every_column_counts",)),
    Kind("reads outside the rows", ("test_only_the_rows_are_touched",)),
    Kind("writes outside the result", (), ("test_only_the_rows_are_touched", "test_forward", "test_backward")),
    Kind("mean subtracted or kept", ("test_mean_is_kept", "test_mean_is_subtracted")),
    Kind("eps ignored or moved", ("test_eps_stands_where_it_should",)),
    Kind("an argument left out", ("test_every_argument_counts",)),
    Kind("row offset on weight or bias", ("test_equal_rows_have_equal_results",)),
    Kind("dtype of the result", (), ("test_forward", "test_weight_dtypes")),
    Kind("weight in another dtype", ("test_weight_dtypes",), absolute=True),
    Kind("squares in fp16", ("test_squares_may_leave_fp16",)),
    Kind("fp16 outliers, sums past 65504", ("test_fp16_outlier", "test_fp16_sum_past_65504"), absolute=True),
    Kind("eps narrowed to fp16", ("test_small_eps_is_not_narrowed",), absolute=True),
    Kind("large mean cancels", ("test_mean_far_larger_than_spread",), absolute=True),
    Kind("constant rows", ("test_constant_rows_are_the_bias",), absolute=True),
    Kind("rows of zeros", ("test_zero_rows",), absolute=True),
    Kind("no rows", ("test_no_rows", "test_no_rows_have_zero_gradients")),
    Kind("NaN or inf leaks into other rows", ("test_bad_rows_stay_alone",)),
    Kind(
        "inputs changed", (), ("test_forward", "test_backward", "test_layouts", "test_gradients_arrive_in_any_layout")
    ),
    Kind("rank, leading dimensions", ("test_ranks",), absolute=True),
    Kind("rows of 1 to 3 elements", ("test_one_column_and_few",), absolute=True),
    Kind("stride taken for width", ("test_layouts", "test_layouts_of_one_column")),
    Kind("one stride for all tensors", ("test_each_has_a_stride_of_its_own",)),
    Kind("columns apart", (), ("test_layouts", "test_layouts_of_one_column")),
    Kind("start not aligned", (), ("test_layouts", "test_layouts_of_one_column")),
    Kind("expanded or permuted rows", ("test_expanded_and_permuted",), ("test_layouts", "test_layouts_of_one_column")),
    Kind("strides of size-1 dimensions", ("test_strides_that_say_nothing",)),
    Kind("layout of weight or bias", ("test_weight_layouts",)),
    Kind("offsets past 2^31", ("test_offsets_past_2_31",)),
    Kind("more than 2^31 elements", ("test_large_tensors",)),
    Kind("sums over many rows", ("test_sums_over_many_rows",), absolute=True),
    Kind("wrong gradients", (BACKWARD, "test_backward", "test_gradcheck"), absolute=True),
    Kind("gradients of rows far from zero", ("test_gradients_far_from_zero",), absolute=True),
    Kind(
        "layout of the incoming gradient",
        ("test_gradients_arrive_in_any_layout",),
        ("test_expanded_and_permuted", "test_layouts_of_one_column"),
    ),
    Kind("some gradients wanted, others not", ("test_only_wanted_gradients",)),
    Kind("one result used alone", ("test_one_result_used",), absolute=True),
    Kind("backward twice", ("test_backward_twice",)),
    Kind("computed again in backward", ("test_checkpointed",)),
    Kind("second-order gradients", ("test_double_backward",), absolute=True),
    Kind("input changed before backward", ("test_changed_input_is_noticed",)),
    Kind("values under autocast", ("test_autocast_leaves_the_values",)),
    Kind("captured in a CUDA graph", ("test_cuda_graph",)),
    Kind("two streams at once", ("test_two_streams",)),
    Kind("threads at once", ("test_threads",)),
    Kind("another GPU is current", ("test_current_device_is_another",)),
    Kind("not the same bits again", ("test_same_bits_again_and_in_any_batch",), note=True),
    Kind("other bits in another batch", (), ("test_same_bits_again_and_in_any_batch",), note=True),
    Kind("layout of the result", (), ("test_layouts",), note=True),
    Kind("copies of rows that could be read in place", ("test_rows_are_read_in_place",), note=True),
    Kind("pattern of NaN and inf", (), ("test_bad_rows_stay_alone",), note=True),
    Kind("variance past fp32", ("test_variance_past_fp32",), note=True),
    Kind("mean that fp32 does not hold", ("test_mean_that_fp32_does_not_hold",), note=True),
    Kind("gradients rounded on the way", ("test_gradients_are_rounded_once",), note=True),
)
