"""`python -m mutation`, with PYTHONPATH=tests: plants every mutant, and writes what killed it into KILLS.md.

With names of rules: the first mutant of each of these, whose rows of the table are printed. Else verdicts are kept in
build/mutants.json, by what was run, so that a run that was stopped goes on where it was; and the table is written once
every fault is noticed and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

# No GPU is used, and kernels are interpreted: Triton reads the second when it is imported.
os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")

import torch
import triton  # noqa: F401  # for all the processes that are forked from this one

from mutation.equivalents import equivalent
from mutation.kills import TABLE, contradiction, row, table
from mutation.mutants import ROOT, Mutant, all_mutants, generated_test
from mutation.planting import Verdict, judge

KEPT = ROOT / "build" / "mutants.json"


def judged(mutants: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, Verdict]]:
    """Each mutant with the verdict of its generated test, as they come, and a line about each."""
    # What survives takes a whole test: it comes first, so that nobody waits for it in the end.
    order = sorted(mutants, key=lambda mutant: not equivalent(mutant))
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        futures = {pool.submit(judge, mutant): mutant for mutant in order}
        try:
            for count, future in enumerate(as_completed(futures), 1):
                mutant, verdict = futures[future], future.result()
                yield mutant, verdict
                said = contradiction(mutant, verdict) or row(mutant, verdict)
                print(f"{count}/{len(mutants)} {said}", file=sys.stderr, flush=True)
        finally:
            pool.shutdown(cancel_futures=True)


def digest(mutant: Mutant) -> str:
    """Of all that a verdict depends on."""
    return hashlib.sha256((mutant.source + generated_test(mutant.spec)).encode()).hexdigest()


def all_verdicts(jobs: int) -> dict[Mutant, Verdict]:
    """The verdict on every mutant, as kept or new."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    digests = {mutant: digest(mutant) for mutant in all_mutants()}
    for mutant, verdict in judged([mutant for mutant, key in digests.items() if key not in kept], jobs):
        kept[digests[mutant]] = [verdict.test, verdict.how]
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(kept))
    return {mutant: Verdict(*kept[key]) for mutant, key in digests.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__.splitlines()[0])
    parser.add_argument("rules", nargs="*", metavar="RULE", help="plant only the first mutant of each of these rules")
    processors = getattr(os, "process_cpu_count", os.cpu_count)() or 1
    parser.add_argument("--jobs", type=int, default=processors, help="mutants at a time (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rules:
        first = {mutant.rule.name: mutant for mutant in reversed(all_mutants())}
        found = dict(judged([first[name] for name in arguments.rules], arguments.jobs))
        print("\n".join(row(*one) for one in found.items() if not contradiction(*one)))
    else:
        found = all_verdicts(arguments.jobs)
    wrong = list(filter(None, itertools.starmap(contradiction, found.items())))
    if not wrong and not arguments.rules:
        TABLE.write_text(table(found))
    for said in wrong:
        print(said, file=sys.stderr)
    return bool(wrong)


sys.exit(main())
