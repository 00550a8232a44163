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

ALONE = r"^row = tl\.program_id\(0\) \+ "  # the only row of a program
FORWARD = r"forward|forward_chunked|forward_slabs"


@dataclass(frozen=True)
class Equivalent:
    """Mutants by rule, function and spec, by their line, and by the line above it that says which row is meant."""

    rule: str
    line: str
    reason: str
    row: str = ""
    function: str = ".+"
    spec: str = ".+"
    nth: int = 0
    """Which of the lines of that text in the function, from 1; 0: any."""

    def covers(self, mutant: Mutant) -> bool:
        whole = ((self.rule, mutant.rule.name), (self.function, mutant.function), (self.spec, mutant.spec))
        parts = ((self.line, mutant.before), (self.row, mutant.row))
        meant = all(re.fullmatch(*one) for one in whole) and all(re.search(*one) for one in parts)
        return meant and self.nth in (0, mutant.nth)


EQUIVALENTS = (
    Equivalent(
        r"other is .+",
        r"^(x|residual|summed|residual_out)(_first)? = ",
        "What lies outside of a row is set to 0 before it is summed, and of rows that do not exist nothing is stored.",
        function=f"{FORWARD}|statistics",
        spec=r"layernorm.*",
    ),
    Equivalent(
        r"other is .+",
        r"^(x|dy|summed|residual|residual_out|gamma|beta) = ",
        "The second launch sums nothing over columns, and of those beyond the row it stores none.",
        function="forward_slabs|backward_slabs",
        nth=2,
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
        function="backward|backward_slabs",
    ),
    Equivalent(
        r"other is 1 .+",
        r"^(residual_out|mean|rstd) = ",
        "It is multiplied by dy, which is 0 outside of the rows that exist.",
        function=r"backward|backward_slabs",
    ),
    Equivalent(
        r"other is 1 .+",
        r"^dy = ",
        "It is multiplied by x, which is 0 outside of the row.",
        function="backward|backward_slabs",
        spec=r"rmsnorm.*",
    ),
    Equivalent(
        r"each tile walked twice",
        r"SLABS",
        "Of two such lines the first launches rows that are staged, which a GPU alone does.",
        function="_forward|_backward",
        nth=1,
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
        function="(?!sum_partials).+",  # which takes as many more columns as there are fewer rows
        spec="rmsnorm_4096",
    ),
)


def equivalent(mutant: Mutant) -> Equivalent | None:
    """What the mutant is covered by first, if anything."""
    return next((one for one in EQUIVALENTS if one.covers(mutant)), None)
