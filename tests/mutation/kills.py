"""The kill table, and why what survives is no fault."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mutation.mutants import ROOT, Mutant
from mutation.planting import Verdict

LINE = "\n"
TABLE = ROOT / "tests" / "mutation" / "KILLS.md"


@dataclass(frozen=True)
class Equivalent:
    """Mutants that compute what the module does, by rule, spec, place and line: regular expressions."""

    rule: str
    spec: str
    place: str
    before: str
    reason: str


EQUIVALENTS = (
    Equivalent(
        r"other is .+",
        r"layernorm.*",
        r"(forward|forward_chunked|forward_slabs|statistics).*",
        r"^(x|residual|summed|residual_out)(_first|_first_next|_loaded|_raw)? = ",
        "What lies outside of a row is set to 0 before it is summed, and of rows that do not exist nothing is stored.",
    ),
    Equivalent(
        r".+", r"rmsnorm_4096", r"_columns", r"col_mask", "Rows of 4096 are one whole block: no column is masked."
    ),
)


def reason(mutant: Mutant) -> str:
    """Why a mutant may survive, or nothing."""
    for one in EQUIVALENTS:
        said = ((one.rule, mutant.rule.name), (one.spec, mutant.spec), (one.place, mutant.place))
        if all(re.fullmatch(pattern, text) for pattern, text in said) and re.search(one.before, mutant.before):
            return one.reason
    return ""


def unused_reasons(verdicts: dict[Mutant, Verdict]) -> list[str]:
    """Reasons that no survivor needs."""
    used = {reason(mutant) for mutant, verdict in verdicts.items() if verdict.survived}
    return [one.reason for one in EQUIVALENTS if one.reason not in used]


def change(mutant: Mutant) -> str:
    """A row of the table, up to its last column."""
    before, after = (f"`{text}`".replace("|", "\\|") for text in (mutant.before, mutant.after))
    return f"| {mutant.rule.name} | {mutant.spec} | {mutant.place} | {before} | {after} |"


def row(mutant: Mutant, verdict: Verdict) -> str:
    """A row of the table, with who killed the mutant or why it lives."""
    how = "" if verdict.how in ("", "AssertionError") else f" ({verdict.how})"
    return f"{change(mutant)} {reason(mutant) if verdict.survived else verdict.test + how} |"


def table(verdicts: dict[Mutant, Verdict]) -> str:
    killed = [row(*one) for one in verdicts.items() if not one[1].survived]
    survivors = [row(*one) for one in verdicts.items() if one[1].survived]
    rules, specs = {mutant.rule.name for mutant in verdicts}, {mutant.spec for mutant in verdicts}
    columns = "| fault | spec | place | line | becomes |"
    return f"""\
# What kills each mutant

{len(verdicts)} mutants, by the {len(rules)} rules of `rules.py`, of the modules of {len(specs)} specs.
Generated tests kill {len(killed)}; {len(survivors)} are equivalent. `make mutants` makes this table.
The test named is the first of the file that fails in Triton's interpreter, with an AssertionError unless it says so.

## Killed

{columns} killed by |
|---|---|---|---|---|---|
{LINE.join(killed)}

## Survivors

{columns} why it is equivalent |
|---|---|---|---|---|---|
{LINE.join(survivors)}
"""
