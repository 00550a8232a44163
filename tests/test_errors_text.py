"""What the READMEs say of errors is what the committed table holds; a failed test shows the sentence that is due."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from normgen.bench.report import LAST_PLACE, MEASURED, ErrorRow, excess

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks/results/h200/errors.json"


@pytest.fixture(scope="module")
def rows() -> list[ErrorRow]:
    return [ErrorRow(**row) for row in json.loads(TABLE.read_text())["errors"]]


def said(path: str) -> str:
    """The text of a file without its line breaks."""
    return " ".join((ROOT / path).read_text().split())


def counted(rows: Sequence[ErrorRow]) -> str:
    found = [one for name in MEASURED for one in excess(rows, name)]
    ahead = sum(more < -LAST_PLACE for *_, more in found)
    behind = [(ours.dtype, more) for ours, _, more in found if more > LAST_PLACE]
    (count,), (draws,) = {row.rows for row in rows}, {row.draws for row in rows}
    how = f"the largest error in {count} rows" + f" (the median of {draws} draws)" * (draws > 1)
    torchs = f"eager torch is more than one unit behind ours in {ahead} of {len(found)} cases"
    text = f"By {how}, of y and of all gradients, {torchs}, ours behind torch in"
    if not behind:
        return f"{text} none."
    dtypes = " and ".join(sorted({dtype for dtype, _ in behind}))
    return f"{text} {len(behind)}: all {dtypes}, by up to {max(more for _, more in behind):.1f}."


def listed(rows: Sequence[ErrorRow]) -> str:
    """Where, and in how many cases each."""
    kinds = Counter(
        f"{name} of {ours.spec}, H {ours.H}"
        for name in MEASURED
        for ours, _, more in excess(rows, name)
        if more > LAST_PLACE
    )
    found = "; ".join(f"{kind} ({count})" if count > 1 else kind for kind, count in kinds.items())
    return f"ours is more than one unit behind torch in: {found or 'no case'}."


def lost(rows: Sequence[ErrorRow]) -> str:
    """By LayerNorm in float32, where the mean is 1000 times the spread."""
    parts = []
    for name in ("y", "dx", "dweight"):
        most: dict[str, float] = {}
        for row in rows:
            if (row.spec, row.dtype, row.offset) == ("layernorm", "float32", 1000) and row.error is None:
                most[row.provider] = max(getattr(row, name), most.get(row.provider, 0.0))
        ours, others = most.pop("normgen"), most.values()
        parts.append((f"{ours:.0f}", f"{min(others):.0f} to {max(others):.0f}"))
    (y, ys), (dx, dxs), (dweight, dweights) = parts
    return (
        f"LayerNorm's y is off by up to {y} units (the others: {ys}), dx by {dx} ({dxs}) and dweight by {dweight} "
        f"({dweights})"
    )


def test_readme(rows: list[ErrorRow]) -> None:
    text = said("README.md")
    assert counted(rows) in text
    assert lost(rows) in text


def test_list_of_those_that_are_worse(rows: list[ErrorRow]) -> None:
    assert listed(rows) in said("benchmarks/README.md")


def test_ours_is_never_a_unit_behind_torch(rows: list[ErrorRow]) -> None:
    """But for luck, which medians leave out."""
    for name in MEASURED:
        assert [ours for ours, _, more in excess(rows, name) if more > LAST_PLACE] == []
