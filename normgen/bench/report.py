"""What was measured: rows, and the JSON and CSV they are kept in."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


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


@dataclass(frozen=True)
class ErrorRow:
    """Errors of one provider for rows of one kind, in units in the last place of the dtype the spec gives the result.

    Of each result the largest error of a draw of rows, the median over draws, and the mean error of all draws; None for
    what the spec does not have. `ulps.errors` says what a unit is.
    """

    spec: str
    dtype: str
    """Of x; weight and bias have the same where the spec allows it."""
    H: int
    rows: int
    offset: float
    """The mean of x, and of a residual, in units of their spread."""
    scale: float
    """The spread of x, and of a residual."""
    provider: str
    draws: int = 1
    y: float | None = None
    y_mean: float | None = None
    dx: float | None = None
    dx_mean: float | None = None
    dweight: float | None = None
    dweight_mean: float | None = None
    dbias: float | None = None
    dbias_mean: float | None = None
    error: str | None = None


MEASURED = ("y", "dx", "dweight", "dbias")
"""The results of which errors are measured."""
LAST_PLACE = 1.0
"""Units by which an error of ours may exceed that of torch: two roundings of the same value differ by as much."""


def excess(rows: Iterable[ErrorRow], name: str) -> Iterator[tuple[ErrorRow, ErrorRow, float]]:
    """Wherever both were measured: ours, that of eager torch, and by how much the largest error of ours is larger."""
    found: dict[tuple[Any, ...], dict[str, ErrorRow]] = {}
    for row in rows:
        if getattr(row, name) is not None:
            found.setdefault((row.spec, row.dtype, row.H, row.rows, row.offset, row.scale), {})[row.provider] = row
    for beside in found.values():
        if {"normgen", "torch"} <= set(beside):
            ours, torchs = beside["normgen"], beside["torch"]
            yield ours, torchs, getattr(ours, name) - getattr(torchs, name)


def worse(rows: Sequence[ErrorRow]) -> list[str]:
    """A sentence for each largest error of ours that exceeds that of eager torch by more than LAST_PLACE."""
    return [
        f"worse than torch: {name} of {ours.spec}, {ours.dtype}, H {ours.H}, offset {ours.offset:g}, "
        f"scale {ours.scale:g}: {shown(ours, name)} against {shown(torchs, name)}"
        for name in MEASURED
        for ours, torchs, more in excess(rows, name)
        if more > LAST_PLACE
    ]


def shown(row: ErrorRow, name: str) -> str:
    """The largest error of a result, and the mean."""
    return f"{getattr(row, name):.2f} ({getattr(row, f'{name}_mean'):.2f})"


@dataclass
class Results:
    """Everything that a run found. `save` keeps it on disk."""

    header: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    latency: list[LatencyRow] = field(default_factory=list)
    profile: list[ProfileRow] = field(default_factory=list)
    errors: list[ErrorRow] = field(default_factory=list)
    stopped: str | None = None
    """Why the run ended before its end."""
    name: str = "bench"
    """Of the JSON file."""

    @property
    def failed(self) -> bool:
        """Whether a kernel of ours was wrong, worse than torch or did not run, or the run was stopped."""
        found = [(row.provider, row.error) for part in (self.rows, self.latency, self.errors) for row in part]
        ours = any(provider == "normgen" and error is not None for provider, error in found)
        return self.stopped is not None or ours or bool(worse(self.errors))

    def document(self) -> dict[str, Any]:
        """The content of the JSON file."""
        parts: dict[str, list[Any]] = {
            "rows": self.rows,
            "latency": self.latency,
            "profile": self.profile,
            "errors": self.errors,
        }
        stopped = {"stopped": self.stopped} if self.stopped else {}
        return {
            **self.header,
            **stopped,
            **{name: [asdict(row) for row in part] for name, part in parts.items() if part},
        }

    def save(self, out: Path) -> None:
        """Write JSON, and a CSV of each kind of rows, into `out`. A kill at any moment leaves the last whole file.

        Raises OSError.
        """
        out.mkdir(parents=True, exist_ok=True)
        # One row a line: a file that git can compare.
        document = self.document()
        texts = {f"{self.name}.json": _json_text(document)}
        for name, part in (("bench", self.rows), ("latency", self.latency), ("profile", self.profile)):
            if part:
                texts[f"{name}.csv"] = csv_text(part)
        if self.errors:
            texts["errors.csv"] = csv_text(self.errors)
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


def csv_text(rows: Sequence[Row | LatencyRow | ProfileRow | ErrorRow]) -> str:
    """The rows as CSV with a line of names; what was not measured is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.name for column in fields(rows[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()
