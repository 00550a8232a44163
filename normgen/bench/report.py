"""Measurements -> files and text: JSON, CSV, tables for a terminal, plots."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from normgen.bench.cases import PEERS, PROVIDERS


@dataclass(frozen=True)
class Row:
    """One measurement: one provider, one operation, one width.

    A failure has its text in `error` and no time; an operation that the provider does not have starts with
    `unsupported: `, a result that is not what the spec computes with `wrong: `.
    """

    op: str
    spec: str
    mode: str
    H: int
    rows: int
    elements: int
    """Of x: H times rows."""
    dtype: str
    provider: str
    bytes: int
    """What `tb_s` counts: the same for every provider of an operation."""
    ms: float | None = None
    """Median GPU time of a call, in milliseconds, with a cold L2 cache."""
    ms_20: float | None = None
    """The 20th percentile, in milliseconds."""
    ms_80: float | None = None
    """The 80th percentile, in milliseconds."""
    tb_s: float | None = None
    """10^12 bytes a second."""
    fraction_of_copy: float | None = None
    """`tb_s` over that of a device-to-device copy that moves as many bytes."""
    peak_mb: float | None = None
    """The most memory held during a call, beyond what was held before it, in 10^6 bytes."""
    error: str | None = None


@dataclass(frozen=True)
class LatencyRow:
    """One provider on small work, all times in microseconds a call."""

    op: str
    spec: str
    H: int
    rows: int
    dtype: str
    provider: str
    graph_us: float | None = None
    """GPU time of a forward call inside a CUDA graph; the data stays in the L2 cache."""
    host_us: float | None = None
    """Host time of an eager forward call without gradients."""
    host_grad_us: float | None = None
    """Host time of an eager forward call and its backward."""
    error: str | None = None


@dataclass(frozen=True)
class ProfileRow:
    """DRAM traffic of one call, as Nsight Compute counts it."""

    op: str
    spec: str
    mode: str
    H: int
    rows: int
    dtype: str
    provider: str
    bytes: int
    """What the operation must move."""
    kernels: int | None = None
    dram_read_bytes: int | None = None
    dram_write_bytes: int | None = None
    error: str | None = None


@dataclass
class Results:
    """Everything that a run found. `save` keeps it on disk."""

    header: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    latency: list[LatencyRow] = field(default_factory=list)
    profile: list[ProfileRow] = field(default_factory=list)

    stopped: str | None = None
    """Why the run ended before its end."""

    @property
    def failed(self) -> bool:
        """Whether a kernel of ours was wrong or did not run, or the run was stopped."""
        found = [(row.provider, row.error) for row in self.rows] + [(row.provider, row.error) for row in self.latency]
        return self.stopped is not None or any(provider == "normgen" and error is not None for provider, error in found)

    def document(self) -> dict[str, Any]:
        """The content of bench.json."""
        parts: dict[str, list[Any]] = {"rows": self.rows, "latency": self.latency, "profile": self.profile}
        stopped = {"stopped": self.stopped} if self.stopped else {}
        return {
            **self.header,
            **stopped,
            **{name: [asdict(row) for row in part] for name, part in parts.items() if part},
        }

    def save(self, out: Path) -> None:
        """Write bench.json and a CSV of each kind of rows into `out`. A kill at any moment leaves the last whole file.

        Raises OSError.
        """
        out.mkdir(parents=True, exist_ok=True)
        # One row a line: a file that git can compare.
        document = self.document()
        texts = {"bench.json": _json_text(document)}
        for name, part in (("bench", self.rows), ("latency", self.latency), ("profile", self.profile)):
            if part:
                texts[f"{name}.csv"] = csv_text(part)
        for name, text in texts.items():
            temporary = out / f"{name}.tmp"
            temporary.write_text(text)
            os.replace(temporary, out / name)


def _json_text(document: dict[str, Any]) -> str:
    entries = []
    for key, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"
        else:
            text = json.dumps(value)
        entries.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def csv_text(rows: Sequence[Row] | Sequence[LatencyRow] | Sequence[ProfileRow]) -> str:
    """The rows as CSV with a line of names; what was not measured is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.name for column in fields(rows[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def tables(rows: Sequence[Row]) -> list[str]:
    """For each operation of each spec: a line a width, TB/s and share of a copy of each provider, ours over the best.

    A provider that has not the operation shows as -, a failure as `fails` or `wrong`; their texts stand below.
    """
    lines: list[str] = []
    for spec, mode in dict.fromkeys((row.spec, row.mode) for row in rows):
        mine = [row for row in rows if (row.spec, row.mode) == (spec, mode)]
        op = next((row.op for row in mine if row.op != "copy"), "copy")
        lines += [*([""] if lines else []), f"{spec}, {op}, {mine[0].dtype}: TB/s (share of a copy of the same bytes)"]
        providers = [name for name in PROVIDERS if any(row.provider == name for row in mine)]
        table = [["H", "rows", *providers, "best peer", "ours/best"]]
        for H, count in sorted({(row.H, row.rows) for row in mine}):
            found = {row.provider: row for row in mine if (row.H, row.rows) == (H, count)}
            best = best_peer(found.values())
            ours = found.get("normgen")
            ratio = ours.tb_s / best.tb_s if ours and best and ours.tb_s and best.tb_s else None
            cells = [_cell(found[name]) if name in found else "" for name in providers]
            comparison = [best.provider if best else "-", "-" if ratio is None else f"{ratio:.2f}"]
            table.append([str(H), str(count), *cells, *comparison])
        lines += _aligned(table)
        lines += _failures((row.provider, str(row.H), row.error) for row in mine)
    return lines


def best_peer(rows: Iterable[Row]) -> Row | None:
    """The fastest of the peers; neither the copy nor a kernel of ours is one."""
    timed = [row for row in rows if row.provider in PEERS and row.tb_s]
    return max(timed, key=lambda row: row.tb_s or 0.0, default=None)


def _cell(row: Row) -> str:
    if row.tb_s is None:
        return _short(row.error)
    share = f" ({row.fraction_of_copy:.2f})" if row.fraction_of_copy is not None and row.provider != "copy" else ""
    return f"{row.tb_s:.3f}{share}"


def _short(error: str | None) -> str:
    if error is None or error.startswith("unsupported"):
        return "-"
    return "wrong" if error.startswith("wrong") else "fails"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table]


def _failures(found: Iterable[tuple[str, str, str | None]]) -> list[str]:
    """Each text once a provider, with where it occurred."""
    places: dict[tuple[str, str], list[str]] = {}
    for provider, place, error in found:
        if error:
            places.setdefault((provider, error), []).append(place)
    return [
        f"  {provider}: {error}" if error.startswith("unsupported") else f"  {provider} at {', '.join(where)}: {error}"
        for (provider, error), where in places.items()
    ]


def latency_tables(rows: Sequence[LatencyRow]) -> list[str]:
    """For each spec: a line a size, and for each provider the three times in microseconds."""
    lines: list[str] = []
    for spec in dict.fromkeys(row.spec for row in rows):
        mine = [row for row in rows if row.spec == spec]
        lines += [
            *([""] if lines else []),
            f"{spec}, {mine[0].dtype}: us a call: GPU in a CUDA graph / host / host, forward and backward",
        ]
        providers = [name for name in PROVIDERS if any(row.provider == name for row in mine)]
        table = [["rows", "H", *providers]]
        for size in dict.fromkeys((row.rows, row.H) for row in mine):
            found = {row.provider: row for row in mine if (row.rows, row.H) == size}
            table.append([*map(str, size), *(_times(found[name]) if name in found else "" for name in providers)])
        lines += _aligned(table)
        lines += _failures((row.provider, f"{row.rows} x {row.H}", row.error) for row in mine)
    return lines


def _times(row: LatencyRow) -> str:
    times = (row.graph_us, row.host_us, row.host_grad_us)
    if all(time is None for time in times):
        return _short(row.error)
    return " / ".join("-" if time is None else f"{time:.1f}" for time in times)


def profile_tables(rows: Sequence[ProfileRow]) -> list[str]:
    """DRAM bytes of each call beside what the operation must move, in 10^6 bytes."""
    if not rows:
        return []
    table = [["operation", "H", "provider", "kernels", "read MB", "written MB", "must move MB"]]
    for row in rows:
        counted = [
            "-" if n is None else f"{n / 1e6:.1f}" for n in (row.dram_read_bytes, row.dram_write_bytes, row.bytes)
        ]
        table.append([row.op, str(row.H), row.provider, "-" if row.kernels is None else str(row.kernels), *counted])
    return ["DRAM traffic of a call", *_aligned(table), *_failures((r.provider, str(r.H), r.error) for r in rows)]


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
