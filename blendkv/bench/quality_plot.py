"""Figures of `bench quality` and `bench insights`.

Times are drawn relative to full recompute, prompt by prompt (`speedup`), where rows have that, else in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from blendkv.bench.insights import ATTENTION, HELD, RANKS
from blendkv.bench.results import Row, by_setting, kind
from blendkv.bench.settings import CONTROLS
from blendkv.bench.table import method_name

Panel = tuple[str, Sequence[Row]]
"""What a panel shows, and its rows."""
SWEPT = {"chunks": "passages of a prompt", "chunk_tokens": "tokens of a chunk", "batch": "prompts at once"}
TIME = ", time"
"""Marks a panel of times over what was swept."""
LABELS = {"ttft_s": "time to the first token, s", "speedup": "time to the first token / full recompute's"}
EXACT = ("full", "prefix", "nocontext")
_APART = ("model", "dtype", "device", "task", "data", "records")


def panels(rows: Iterable[Row]) -> list[Panel]:
    """KL over charged budget and over TTFT for each table; KL and time over what was swept; two for insights."""
    tables = by_setting(rows)
    sweeps = [(name, group) for name in SWEPT for group in _swept([r for r in rows_of(tables) if r.get(name)], name)]
    swept = {id(row) for name, group in sweeps for row in group if name != "batch" or row["batch"] > 1}
    found: list[Panel] = []
    for table in tables:
        if kind(table[0]) == "quality" and id(table[0]) not in swept:
            found.append(("charged_budget", table))
            if time := "speedup" if _timed(table) else "ttft_s" if any(row["ttft_s"] for row in table) else "":
                found.append((time, table))
    for name, group in sweeps:
        if name != "batch":  # which changes nothing but times
            found.append((name, group))
        if name == "batch" or _timed(group):
            found.append((f"{name}{TIME}", group))
    for table in tables:
        if kind(table[0]) == "insights":
            found += [(ATTENTION, table), (RANKS, table)]
    return found


def rows_of(tables: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of `bench quality` among some tables."""
    return [row for table in tables for row in table if kind(row) == "quality"]


def lines_over(rows: Sequence[Row], field: str) -> dict[str, list[tuple[float, float, float, float]]]:
    """By selector (or method) points (x, KL, low, high) by x; nothing without a KL, or for the exact methods."""
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows:
        if row["kl"] is None or row.get(field) is None or row["method"] in EXACT:
            continue
        low, high = row["ci"]["kl"]
        x = 1 / row["speedup"] if field == "speedup" else row[field]
        lines.setdefault(_series(row), []).append((x, row["kl"], low, high))
    return {name: sorted(points) for name, points in lines.items()}


def _series(row: Row) -> str:
    """What points of one line share: all but the ratio."""
    name = row["selector"] or method_name(row | {"condition": None})
    after = f"chunks after {row['condition']}" if row.get("condition") else None
    more = [row.get("check_layers"), row.get("corrector"), after]
    return ", ".join([name, *filter(None, more)])


def _timed(rows: Sequence[Row]) -> bool:
    """Whether all rows that have a time have it relative to full recompute."""
    return any(row.get("speedup") for row in rows) and all(row.get("speedup") for row in rows if row["ttft_s"])


def draw(axes: Any, what: str, rows: Sequence[Row]) -> None:
    """One panel."""
    if what in (ATTENTION, RANKS):
        _draw_insight(axes, what, rows)
    elif what.removesuffix(TIME) in SWEPT:
        _draw_sweep(axes, what.removesuffix(TIME), rows, what.endswith(TIME))
    else:
        _draw_quality(axes, what, rows)
    row = rows[0]
    axes.set_title(
        f"{row['model']}, {row['dtype']}, {row['prompts']} prompts of {row['task']}\n{row['device']}", fontsize=9
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_quality(axes: Any, field: str, rows: Sequence[Row]) -> None:
    for name, points in lines_over(rows, field).items():
        x, kl, low, high = zip(*points, strict=True)
        errors = [[k - a for k, a in zip(kl, low, strict=True)], [b - k for k, b in zip(kl, high, strict=True)]]
        style = "--" if name in CONTROLS else "-"
        axes.errorbar(x, kl, yerr=errors, marker="o", markersize=4, linestyle=style, capsize=2, label=name)
    exact = next((row for row in rows if row["method"] == "full"), None)
    at = None if field not in LABELS or exact is None else 1.0 if field == "speedup" else exact[field]
    if at is not None:
        axes.axvline(at, color="grey", linewidth=0.8, label="full recompute")
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
    axes.set_xlim(left=-0.02 * axes.get_xlim()[1])
    axes.set_xlabel(LABELS.get(field, "charged budget"))
    axes.set_ylabel("KL to full recompute, nats (95% intervals)")


def _draw_sweep(axes: Any, name: str, rows: Sequence[Row], time: bool) -> None:
    field = ("speedup" if _timed(rows) else "ttft_s") if time else "kl"
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get(field) is not None and (time or row["method"] not in EXACT):
            lines.setdefault(method_name(row), []).append((row[name], row[field]))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=label)
    axes.set_xlabel(SWEPT[name])
    axes.set_ylabel({**LABELS, "speedup": "first token, times faster"}.get(field, "KL to full recompute, nats"))
    axes.set_ylim(bottom=0)


def _draw_insight(axes: Any, what: str, rows: Sequence[Row]) -> None:
    if what == ATTENTION:
        points = sorted((r["ratio"], r["value"]) for r in rows if r["figure"] == ATTENTION and r["layer"] is None)
        axes.plot(
            *zip(*points, strict=True), marker="o", markersize=4, label=f"mean over layers, {rows[0]['selector']}"
        )
        axes.set_xlabel("share of chunk tokens recomputed")
        axes.set_ylabel("attention deviation (relative L2)")
        axes.set_ylim(bottom=0)
        return
    for figure in (RANKS, HELD):
        points = sorted((r["layer"], r["value"]) for r in rows if r["figure"] == figure and r["value"] is not None)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=figure)
    axes.set_xlabel("layer (correlation: with the next one)")
    axes.set_ylabel("rank correlation, or share")


def _swept(rows: Sequence[Row], name: str) -> Iterator[list[Row]]:
    """Rows that differ in one swept field and in the setting measured, if it has several values."""
    others = [field for field in SWEPT if field != name]
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(field) for field in (*_APART, *others)), []).append(row)
    for group in groups.values():
        if len({row[name] for row in group}) > 1:
            yield group
