"""Measurements -> plots."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from normgen.bench.cases import PROVIDERS
from normgen.bench.report import Row


def plot(rows: Sequence[Row], out: Path) -> str | None:
    """One PNG for each operation of each spec: GB/s and share of a copy over H. A sentence where that cannot be."""
    if not rows:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        return "no plots: matplotlib is not installed"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for spec, mode in dict.fromkeys((row.spec, row.mode) for row in rows):
        mine = [row for row in rows if (row.spec, row.mode) == (spec, mode) and row.tb_s is not None]
        figure, (rate, share) = pyplot.subplots(1, 2, figsize=(13, 5))
        for name in PROVIDERS:
            points = sorted((row.H, row.tb_s or 0.0, row.fraction_of_copy) for row in mine if row.provider == name)
            if not points:
                continue
            style = {"marker": "o", "markersize": 3, "linewidth": 2.5 if name == "normgen" else 1.0, "label": name}
            rate.plot([H for H, *_ in points], [1000 * tb_s for _, tb_s, _ in points], **style)
            shares = [(H, part) for H, _, part in points if part is not None]
            share.plot([H for H, _ in shares], [part for _, part in shares], **style)
        for axes, label in ((rate, "GB/s"), (share, "share of a copy")):
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("H")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
        rate.legend()
        figure.suptitle(f"{spec}, {mode}")
        figure.tight_layout()
        figure.savefig(out / f"{spec}_{mode}.png", dpi=120)
        pyplot.close(figure)
    return None
