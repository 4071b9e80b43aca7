"""Figures: speed-up over context length beside its limit; KL over bits, budget and TTFT; insights; throughput."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from blendkv._paths import require_writable
from blendkv.bench import codec_table, quality_plot, throughput_plot
from blendkv.bench.measure import median
from blendkv.bench.results import Row, by_setting, kind
from blendkv.bench.table import method_name

Line = list[tuple[int, float, float | None]]
"""(tokens, speed-up, FLOP limit), by tokens."""


def lines_of(rows: Iterable[Row]) -> dict[str, Line]:
    """One line for each method, selector and ratio; several runs are one point, their median."""
    points: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        if row["method"] != "full":
            points.setdefault(method_name(row), {}).setdefault(row["tokens"], []).append(row)
    return {
        name: [(n, median(r["speedup"] for r in at[n]), at[n][0].get("flop_limit")) for n in sorted(at)]
        for name, at in points.items()
    }


def plot(rows: Iterable[Row], out: str | Path, every: bool = False) -> None:
    """Draws one panel for each setting (card, model, ...).

    Rows of `bench ttft` are drawn if there are any, measured with dots and FLOP limits dashed; otherwise those of
    `bench joint`, of `bench throughput`, of `bench quality` and of `bench insights` (`quality_plot.panels`).

    Args:
        rows: of any number of files.
        out: `.svg`, `.png` or whatever else matplotlib can write.
        every: draw rows of every kind beside each other.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: there is nothing to draw.
    """
    tables = by_setting(rows)
    kinds: list[list[tuple[Row, Any]]] = [
        [(table[0], lines) for table in tables if kind(table[0]) == "ttft" and (lines := lines_of(table))],
        [(table[0], table) for table in tables if kind(table[0]) == "joint"],
        [
            (table[0], (what, table))
            for table in tables
            if kind(table[0]) == "throughput"
            for what in throughput_plot.PANELS
        ],
        [(shown[0], (what, shown)) for what, shown in quality_plot.panels(row for t in tables for row in t)],
    ]
    panels = [panel for some in kinds for panel in some] if every else next(filter(None, kinds), [])
    if not panels:
        raise ValueError(
            "nothing to draw: no row is of a method other than full recompute, or of `bench joint`, `bench quality`, "
            "`bench insights` or `bench throughput`"
        )
    figure = _figure(panels)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if Path(out).suffix == ".svg" else None  # the same rows make the same file
    figure.savefig(out, metadata=metadata)


def require_drawing(out: Path | None) -> None:
    """Refuses a figure that could not be drawn, before the hours of work that make its rows.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: it writes no such files.
        OSError: the folder cannot be written to.
    """
    if out is None:
        return
    known = _matplotlib("backend_bases").FigureCanvasBase.get_supported_filetypes()
    if out.suffix[1:] not in known:
        raise ValueError(f"{out.name}: matplotlib draws {', '.join(sorted(known))}, named by what follows the dot")
    require_writable(out.absolute().parent)


def _figure(panels: list[tuple[Row, Any]]) -> Any:
    _matplotlib().rcParams.update({"svg.hashsalt": "blendkv", "svg.fonttype": "none", "font.size": 9})
    columns = len(panels) if kind(panels[0][0]) in ("ttft", "joint") else 2
    rows = -(-len(panels) // columns)
    figure = _matplotlib("figure").Figure(figsize=(6.4 * columns, 4.4 * rows), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in places[len(panels) :]:
        axes.remove()
    for axes, (row, drawn) in zip(places, panels, strict=False):
        if kind(row) == "ttft":
            _draw_speed(axes, row, drawn)
        elif kind(row) == "joint":
            codec_table.draw(axes, drawn)
        elif kind(row) == "throughput":
            throughput_plot.draw(axes, *drawn)
        else:
            quality_plot.draw(axes, *drawn)
    return figure


def _draw_speed(axes: Any, row: Row, lines: dict[str, Line]) -> None:
    ticker = _matplotlib("ticker")
    for name, line in lines.items():
        [drawn] = axes.plot([n for n, _, _ in line], [s for _, s, _ in line], marker="o", markersize=4, label=name)
        limits = [(n, limit) for n, _, limit in line if limit is not None]
        axes.plot(*zip(*limits, strict=True) if limits else ([], []), "--", color=drawn.get_color(), linewidth=1)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = sorted({n for line in lines.values() for n, _, _ in line})
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.set_xlabel("context tokens")
    axes.set_ylabel("speed-up of the first token (dashed: FLOP limit)")
    batch = f", batch {row['batch']}" if row.get("batch", 1) != 1 else ""
    axes.set_title(f"{row.get('shape')}, {row.get('dtype')}{batch}\n{row['device']}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _matplotlib(part: str = "") -> Any:
    """Matplotlib or one of its modules: an extra, so never imported but to draw."""
    try:
        return import_module(".".join(filter(None, ["matplotlib", part])))
    except ImportError as error:
        raise ModuleNotFoundError(
            "drawing needs matplotlib, which is not installed: pip install 'blendkv[bench]'"
        ) from error
