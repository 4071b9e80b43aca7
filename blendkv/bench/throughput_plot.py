"""Figure of `bench throughput`: time to the first token, and completed requests, over the rate of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blendkv.bench.results import Row
from blendkv.bench.throughput_table import name_of

PANELS = ("ttft_p95_s", "completed_per_s")
_LABELS = {
    "ttft_p95_s": "seconds to the first token, p95 (dotted: p50)",
    "completed_per_s": "completed requests a second",
}


def lines_over_rate(rows: Sequence[Row], field: str) -> dict[str, list[tuple[float, float]]]:
    """By method points (rate, figure) of the virtual queue, by rate."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["clock"] == "virtual":
            lines.setdefault(name_of(row), []).append((row["rate"], row[field]))
    return {name: sorted(points) for name, points in lines.items()}


def draw(axes: Any, what: str, rows: Sequence[Row]) -> None:
    """One panel of the rows of one setting."""
    dotted = lines_over_rate(rows, "ttft_p50_s") if what == "ttft_p95_s" else {}
    for name, points in lines_over_rate(rows, what).items():
        [line] = axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
        if name in dotted:
            axes.plot(*zip(*dotted[name], strict=True), ":", color=line.get_color(), linewidth=1)
    real = [row for row in rows if row["clock"] == "real"]
    if real:
        axes.plot([r["rate"] for r in real], [r[what] for r in real], "k+", label="by the clock")
    if what == "ttft_p95_s":
        axes.set_yscale("log")
        axes.axhline(rows[0]["p95_target_s"], color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("requests a second")
    axes.set_ylabel(_LABELS[what])
    row = rows[0]
    axes.set_title(
        f"{row['shape']}, {row['dtype']}, {row['chunks']} x {row['chunk_tokens']} tokens, stores of {row['room']:.0%}\n"
        f"{row['device']}",
        fontsize=9,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
