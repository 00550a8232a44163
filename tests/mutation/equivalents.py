"""Mutants that no generated test can notice without a GPU.

They are no fault, since what they compute is what the module computes; a reason that begins "A fault" says what else
notices it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mutation.mutants import Mutant

POSTED = r"^row = tile \+ tl"
FINISHED = r"^row = tile - (2 \* )?programs \+ "
ALONE = r"^row = tl\.program_id\(0\) \+ "  # the only row of a program
FORWARD = r"forward|forward_chunked|forward_slabs"
ONE_SUM = r"rmsnorm(?!_eps_outside).*"  # of a row in each kernel
SUM_STORED = r"\w+_residual(?<!_post_residual)|rmsnorm_residual_fp32"
NOT_ADDED = r"(?!\w+_residual).+"


@dataclass(frozen=True)
class Equivalent:
    """Mutants by rule, function and spec, by their line, and by the line above it that says which row is meant."""

    rule: str
    line: str
    reason: str
    row: str = ""
    function: str = ".+"
    spec: str = ".+"

    def covers(self, mutant: Mutant) -> bool:
        whole = ((self.rule, mutant.rule.name), (self.function, mutant.function), (self.spec, mutant.spec))
        parts = ((self.line, mutant.before), (self.row, mutant.row))
        return all(re.fullmatch(*one) for one in whole) and all(re.search(*one) for one in parts)


EQUIVALENTS = (
    Equivalent(
        r"other is .+",
        r"^(x|residual|summed|residual_out)(_first)?(_loaded|_next)? = ",
        "What lies outside of a row is set to 0 before it is summed, and of rows that do not exist nothing is stored.",
        function=f"{FORWARD}|statistics",
        spec=r"layernorm.*",
    ),
    Equivalent(
        r"other is .+",
        r"_raw = |_posted if POST else ",
        "When a row is finished nothing is summed over its columns, and of those beyond it none is stored.",
        row=FINISHED,
    ),
    Equivalent(
        r"other is .+",
        r"^(gamma|beta) = ",
        "A weight or bias beyond the row meets nothing that is summed or stored.",
        function=FORWARD,
    ),
    Equivalent(
        r"other is .+",
        r"^dresidual_out = ",
        "It is added to what is stored, and beyond the row nothing is stored.",
        function="backward",
    ),
    Equivalent(
        r"other is 1 .+",
        r"^(residual_out(_loaded)?|mean|rstd) = ",
        "It is multiplied by dy, which is 0 outside of the rows that exist.",
        function=r"backward|backward_slabs",
    ),
    Equivalent(
        r"row mask lost|no mask on a load of .+|other is .+",
        r"mask=row_mask[,)]|^mask = row_mask & col_mask",
        "Only rows that exist are in work.",
        function="forward_slabs|backward_slabs",
    ),
    Equivalent(
        r"row mask lost|no mask on .+",
        r"\brow_mask\b",
        "A program is launched for the one row that it walks.",
        row=ALONE,
    ),
    Equivalent(
        r"offsets of 32 bits",
        r"",
        "The row's number counts words, of which 2^31 would be those of more elements than any memory holds.",
        row=POSTED,
        function="forward_slabs",
        spec=NOT_ADDED,
    ),
    Equivalent(
        r"offsets of 32 bits",
        r"",
        "A fault: test_9_strides of the checklist notices it; by its values a GPU alone, with 2^31 elements.",
        row=f"{POSTED}|{FINISHED}",
        function="forward_slabs",
        spec=SUM_STORED,
    ),
    Equivalent(
        r"sums exchanged, collected|(first|second) sum posted twice|first sum taken for the second"
        r"|one word read for both sums, float64|(last slab left out|lanes beyond the slabs), second sum",
        r"",
        "A kernel that exchanges one sum posts it twice and takes the first.",
        spec=ONE_SUM,
    ),
    Equivalent(
        r"sign of the first sum in the second",
        r"",
        "The first of two sums is one of squares, or the second is not taken.",
        spec=r"rmsnorm.*",
    ),
    Equivalent(
        r"last block or chunk alone",
        r"^shifted_sum_lanes = ",
        "A mean that some columns were left out of is corrected, as one that was rounded is.",
        function="forward|forward_chunked|statistics",
        spec=r"layernorm(?!_welford).*",
    ),
    Equivalent(
        r"drift left out of the mean",
        r"",
        "The drift is what the rounding of the sum has left: added to the sum it is rounded off again.",
        function="forward_slabs",
    ),
    Equivalent(
        r"drift left out of the mean",
        r"",
        "The drift of merged chunks is what the rounding of the sum has left: added to it, it is rounded off again.",
        spec="layernorm_welford",
    ),
    Equivalent(
        r"column mask lost|.+ column skipped|one column too many|a column beyond the row stored"
        r"|(lanes|BLOCK_SIZE) in place of H|blocks one short",
        r"",
        "Rows of 4096 are one whole block.",
        spec="rmsnorm_4096",
    ),
    Equivalent(
        r"other is .+|no mask on .+",
        r"mask=col_mask",
        "Rows of 4096 are one whole block, whose columns all exist.",
        spec="rmsnorm_4096",
    ),
)


def equivalent(mutant: Mutant) -> Equivalent | None:
    """What the mutant is covered by first, if anything."""
    return next((one for one in EQUIVALENTS if one.covers(mutant)), None)
