"""`python -m mutation`, with PYTHONPATH=tests: plants every mutant, and writes what killed it into KILLS.md.

With names of rules: the first mutant of each of these, whose rows of the table are printed. Else verdicts are kept in
build/mutants.json, by what was run, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys

# No GPU is used, and kernels are interpreted: Triton reads the second when it is imported.
os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")

import torch
import triton  # noqa: F401  # for all the processes that are forked from this one

from mutation.kills import TABLE, change, reason, row, table, unused_reasons
from mutation.mutants import ROOT, Mutant, all_mutants
from mutation.planting import Verdict, judge

KEPT = ROOT / "build" / "mutants.json"


def verdicts(mutants: list[Mutant]) -> dict[Mutant, Verdict]:
    """The verdict on each mutant, as kept or from its generated test."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    found = {}
    # Those that survive take a whole test: they come last.
    for count, mutant in enumerate(sorted(mutants, key=lambda mutant: bool(reason(mutant))), 1):
        test = (ROOT / "generated" / "tests" / f"test_{mutant.spec}.py").read_text()
        digest = hashlib.sha256((mutant.source + test).encode()).hexdigest()
        if digest not in kept:
            verdict = judge(mutant)
            kept[digest] = [verdict.test, verdict.how]
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps(kept))
        found[mutant] = Verdict(*kept[digest])
        print(f"{count}/{len(mutants)} {mutant.rule.name}, {mutant.spec} {mutant.place}: {found[mutant]}", flush=True)
    return {mutant: found[mutant] for mutant in mutants}


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    mutants = all_mutants()
    if names:
        first = {mutant.rule.name: mutant for mutant in reversed(mutants)}
        found = {first[name]: judge(first[name]) for name in names}
        print("\n".join(itertools.starmap(row, found.items())))
    else:
        found = verdicts(mutants)
        TABLE.write_text(table(found))
        for explanation in unused_reasons(found):
            print(f"nothing survives for this reason: {explanation}")
    unexplained = [mutant for mutant, verdict in found.items() if verdict.survived and not reason(mutant)]
    for mutant in unexplained:
        print(f"not noticed: {change(mutant)}")
    return bool(unexplained or (not names and unused_reasons(found)))


sys.exit(main(sys.argv[1:]))
