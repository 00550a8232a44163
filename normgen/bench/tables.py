"""Measurements -> tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from normgen.bench.cases import PEERS, PROVIDERS
from normgen.bench.report import LAST_PLACE, MEASURED, ErrorRow, LatencyRow, ProfileRow, Row, excess, worse


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


def error_tables(rows: Sequence[ErrorRow]) -> list[str]:
    """For each result of each spec: a line a dtype and offset, the worst over widths and scales; then the verdict."""
    lines: list[str] = []
    for spec in dict.fromkeys(row.spec for row in rows):
        mine = [row for row in rows if row.spec == spec]
        providers = [name for name in PROVIDERS if any(row.provider == name for row in mine)]
        for name in MEASURED:
            found = [row for row in mine if getattr(row, name) is not None]
            if not found:
                continue
            lines += [f"{spec}, {name}: units in the last place, the largest error of a draw (the mean of all)"]
            table = [["dtype", "offset", *providers, "ours - torch"]]
            for dtype, offset in dict.fromkeys((row.dtype, row.offset) for row in found):
                here = [row for row in found if (row.dtype, row.offset) == (dtype, offset)]
                cells = [_error_cell([row for row in here if row.provider == one], name) for one in providers]
                most = max((more for *_, more in excess(here, name)), default=None)
                table.append([dtype, f"{offset:g}", *cells, "-" if most is None else f"{most:+.2f}"])
            lines += [*_aligned(table), ""]
        lines += _failures(dict.fromkeys((row.provider, f"{row.dtype} H {row.H}", row.error) for row in mine))
    compared = sum(1 for name in MEASURED for _ in excess(rows, name))
    found_worse = worse(rows)
    verdict = f"normgen is worse than torch by more than {LAST_PLACE:g} unit in {len(found_worse)} of {compared} errors"
    return [*lines, *found_worse, verdict]


def _error_cell(rows: Sequence[ErrorRow], name: str) -> str:
    if not rows:
        return "-"
    means = [getattr(row, f"{name}_mean") for row in rows]
    return f"{max(getattr(row, name) for row in rows):.2f} ({sum(means) / len(means):.2f})"
