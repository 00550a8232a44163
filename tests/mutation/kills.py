"""The kill table."""

from __future__ import annotations

from mutation.equivalents import equivalent
from mutation.mutants import ROOT, Mutant
from mutation.planting import Verdict

LINE = "\n"
TABLE = ROOT / "tests" / "mutation" / "KILLS.md"


def change(mutant: Mutant) -> str:
    """A row of the table, up to its last column."""
    before, after = (f"`{text}`".replace("|", "\\|") for text in (mutant.before, mutant.after))
    return f"| {mutant.rule.name} | {mutant.spec} | {mutant.place} | {before} | {after} |"


def row(mutant: Mutant, verdict: Verdict) -> str:
    """A row of the table, with who killed the mutant or why it survives."""
    kind = equivalent(mutant)
    if kind:
        return f"{change(mutant)} {kind.reason} |"
    how = "" if verdict.how == "AssertionError" else f" ({verdict.how})"
    return f"{change(mutant)} {verdict.test}{how} |"


def contradiction(mutant: Mutant, verdict: Verdict) -> str:
    """What is wrong with a verdict, if anything."""
    if verdict.is_no_program:
        return f"the rule makes no program: {change(mutant)} {verdict.how}"
    if verdict.survived and not equivalent(mutant):
        return f"not noticed: {change(mutant)}"
    if equivalent(mutant) and not verdict.survived:
        return f"not equivalent, {verdict.test} fails: {row(mutant, verdict)}"
    return ""


def table(verdicts: dict[Mutant, Verdict]) -> str:
    killed = [row(*one) for one in verdicts.items() if not one[1].survived]
    survivors = [row(*one) for one in verdicts.items() if one[1].survived]
    rules, specs = {mutant.rule.name for mutant in verdicts}, {mutant.spec for mutant in verdicts}
    columns = "| fault | spec | place | line | becomes |"
    return f"""\
# What kills each mutant

{len(verdicts)} mutants, by the {len(rules)} rules of `rules.py`, of the modules of {len(specs)} specs.
Generated tests kill {len(killed)}; {len(survivors)} survive, for a reason each. `make mutants` makes this table.
The test named is the first of the file that fails in Triton's interpreter, with an AssertionError unless it says so.

## Killed

{columns} killed by |
|---|---|---|---|---|---|
{LINE.join(killed)}

## Survivors

{columns} why it survives |
|---|---|---|---|---|---|
{LINE.join(survivors)}
"""
