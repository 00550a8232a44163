"""The mutation proof: rules that apply, and a sample of the mutants planted."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
from mutation import mutants
from mutation.equivalents import EQUIVALENTS, Equivalent, equivalent
from mutation.kills import TABLE, change
from mutation.mutants import ROOT, SPECS, all_mutants, source_of
from mutation.rules import RULES, Rule

# Of each of these rules the first mutant; `make mutants` plants all.
SAMPLE = (
    "a running sum in fp16",
    "eps moved out of the root",
    "row offset on the weight",
    "stride of x taken as H",
    "BLOCK_SIZE in place of H",
    "no mask on a load of rows",
    "no mask on a store of rows",
    "variance in fp16",
    "1/rstd stored for rstd",
    "statistics of the row before",
    "shift term dropped",
    "partial sums of one program left out",
)


def test_each_rule_makes_programs() -> None:
    found = all_mutants()
    assert {mutant.rule.name for mutant in found if not equivalent(mutant)} == {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert len({mutant.source for mutant in found}) >= 0.9 * len(found)  # two rules may meet in one line
    assert {mutant.spec for mutant in found} == set(SPECS)
    for mutant in found:
        module, mutated = source_of(mutant.spec).splitlines(), mutant.source.splitlines()
        assert [new.strip() for old, new in zip(module, mutated, strict=True) if old != new] == [mutant.after]
        ast.parse(mutant.source)


def test_a_rule_that_applies_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "RULES", (*RULES, Rule("sum of cubes", r"cube_sum", "square_sum")))
    with pytest.raises(
        LookupError, match="rule 'sum of cubes' is a fault in no generated module: /cube_sum/ in forward"
    ):
        all_mutants()


def test_a_kind_of_equivalent_that_there_is_none_of_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "EQUIVALENTS", (*EQUIVALENTS, Equivalent(r".+", r"cube_sum", "Nobody sums cubes.")))
    with pytest.raises(LookupError, match="no mutant is equivalent for this reason: Nobody sums cubes"):
        all_mutants()


def test_the_sample_is_killed() -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    run = subprocess.run(
        [sys.executable, "-m", "mutation", *SAMPLE, "--jobs", "1"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert len(run.stdout.splitlines()) == len(SAMPLE)


def test_the_table_is_of_these_mutants() -> None:
    """`make mutants` writes it anew; it names tests that there are, and reasons that are still given."""
    lines = [line for line in TABLE.read_text().splitlines() if " | `" in line]
    rows = dict(line.removesuffix(" |").rsplit(" | ", 1) for line in lines)
    found = {change(mutant).removesuffix(" |"): mutant for mutant in all_mutants()}
    assert rows.keys() == found.keys()
    for key, mutant in found.items():
        kind = equivalent(mutant)
        if kind:
            assert rows[key] == kind.reason
        else:
            test = (ROOT / "generated" / "tests" / f"test_{mutant.spec}.py").read_text()
            name = rows[key].partition("[")[0].partition(" ")[0]
            assert f"\ndef {name}(" in test
