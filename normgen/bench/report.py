"""What was measured: rows, and the JSON and CSV they are kept in."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
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
