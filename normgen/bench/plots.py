"""Measurements -> plots."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normgen.bench.cases import DTYPES, PROVIDERS
from normgen.bench.report import MEASURED, ErrorRow, Row

MISSING = "no plots: matplotlib is not installed"


def _pyplot() -> Any:
    """matplotlib's plotter of files; None where it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _style(provider: str) -> dict[str, Any]:
    """The line of a provider: ours is bold, and each has its colour in every plot."""
    color = f"C{PROVIDERS.index(provider)}"
    return {"marker": "o", "markersize": 3, "linewidth": 2.5 if provider == "normgen" else 1.0, "color": color}


def plot(rows: Sequence[Row], out: Path) -> str | None:
    """One PNG for each operation of each spec: GB/s and share of a copy over H. A sentence where that cannot be."""
    if not rows:
        return None
    pyplot = _pyplot()
    if pyplot is None:
        return MISSING
    for spec, mode in dict.fromkeys((row.spec, row.mode) for row in rows):
        mine = [row for row in rows if (row.spec, row.mode) == (spec, mode) and row.tb_s is not None]
        figure, (rate, share) = pyplot.subplots(1, 2, figsize=(13, 5))
        for name in PROVIDERS:
            points = sorted((row.H, row.tb_s or 0.0, row.fraction_of_copy) for row in mine if row.provider == name)
            if not points:
                continue
            style = {**_style(name), "label": name}
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


def plot_errors(rows: Sequence[ErrorRow], out: Path) -> str | None:
    """errors.png: a row of panels for each result of each spec, a panel for each dtype. Else a sentence why not.

    Each line is a provider over offsets, width by width; a point is the largest error over all scales.
    """
    wanted = [(spec, name) for spec in dict.fromkeys(row.spec for row in rows) for name in MEASURED]
    bands = [(s, n) for s, n in wanted if any(row.spec == s and getattr(row, n) is not None for row in rows)]
    if not bands:
        return None
    pyplot = _pyplot()
    if pyplot is None:
        return MISSING
    dtypes = [dtype for dtype in DTYPES if any(row.dtype == dtype for row in rows)]
    size = (5 * len(dtypes), 2.4 * len(bands) + 1)
    figure, grid = pyplot.subplots(len(bands), len(dtypes), figsize=size, squeeze=False, sharey="row")
    for (spec, name), band in zip(bands, grid, strict=True):
        for dtype, axes in zip(dtypes, band, strict=True):
            _error_panel(axes, [row for row in rows if (row.spec, row.dtype) == (spec, dtype)], name)
            axes.set_title(f"{spec}, {name}, {dtype}", fontsize=9)
        band[0].set_yscale("log")
        low, high = band[0].get_ylim()
        band[0].set_ylim(min(low, 0.3), max(high, 10.0))  # of the whole band, and no zoom into differences of nothing
        band[0].set_ylabel("units in the last place")
    handles = {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=len(handles))
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.5 / size[1]))
    figure.savefig(out / "errors.png", dpi=90)
    pyplot.close(figure)
    return None


def _error_panel(axes: Any, rows: Sequence[ErrorRow], name: str) -> None:
    places = sorted({(row.H, row.offset) for row in rows})
    for provider in PROVIDERS:
        label: str | None = provider
        for H in dict.fromkeys(H for H, _ in places):
            errors: dict[int, float] = {}
            for row in rows:
                error = getattr(row, name)
                if (row.H, row.provider) == (H, provider) and error is not None:
                    at = places.index((H, row.offset))
                    errors[at] = max(error, errors.get(at, 0.0))
            if errors:
                axes.plot(*zip(*sorted(errors.items()), strict=True), **_style(provider), label=label)
                label = None  # once for all widths
    axes.axhline(0.5, color="grey", linewidth=0.8, linestyle=":")  # of a result that is rounded correctly
    axes.grid(alpha=0.3)
    text = [f"{offset:g}" for _, offset in places]
    for H in {H for H, _ in places}:
        text[[place[0] for place in places].index(H)] += f"\nH {H}"
    axes.set_xticks(range(len(places)), text, fontsize=7)
