"""Rows of `bench codec` and `bench joint` as tables and as a figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from blendkv.bench.results import Row, kind

MARKERS = {"raw": "x", "cachegen": "^", "klt": "o", "klt-xl": "s"}


def markdown(rows: Sequence[Row]) -> str:
    """The table of rows of one setting, under what they share."""
    columns, lines = cells(rows)
    head = "|" + "".join("---|" if name in ("codec", "change") else "---:|" for name in columns)
    table = ["| " + " | ".join(columns) + " |", head, *("| " + " | ".join(line) + " |" for line in lines)]
    return "\n".join([caption(rows), "", *table])


def cells(rows: Sequence[Row], intervals: bool = True) -> tuple[list[str], list[list[str]]]:
    """Columns and lines of the table of one setting, if wanted with the intervals of differences."""
    return _codec(rows) if kind(rows[0]) == "codec" else _joint(rows, intervals)


def caption(rows: Sequence[Row]) -> str:
    """What the rows of a table share."""
    row = rows[0]
    used = ", ".join(f"{name} {version}" for name, version in (row.get("versions") or {}).items())
    if kind(row) == "codec":
        told = f"{row['contexts']} contexts of {row['tokens']} tokens, KL over {row['continuation']} tokens after them"
    else:
        told = f"{row['prompts']} prompts of {row['task']}, KL to full recompute, selector {row['selector']}"
    return "; ".join(filter(None, [f"**{row['device']}**", f"{row['model']} in {row['dtype']}", told, used])) + "."


def curves(rows: Iterable[Row]) -> dict[float, dict[str, list[tuple[float, float]]]]:
    """For each ratio and codec, unchanged, points (bits, KL) by bits."""
    found: dict[float, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if not row["change"]:
            point = row["bits_per_element"], row["kl"]
            found.setdefault(row["ratio"], {}).setdefault(row["codec"], []).append(point)
    return {ratio: {codec: sorted(points) for codec, points in own.items()} for ratio, own in sorted(found.items())}


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """KL over bits of `bench joint`: a colour for each ratio, a marker for each codec, 16 bits dashed."""
    for number, (ratio, own) in enumerate(curves(rows).items()):
        for codec, points in own.items():
            if codec == "raw":
                axes.axhline(points[0][1], color=f"C{number}", linestyle="--", linewidth=1)
                continue
            axes.plot(
                *zip(*points, strict=True),
                color=f"C{number}",
                marker=MARKERS.get(codec, "d"),
                markersize=4,
                label=f"{codec}, {100 * ratio:g}%",
            )
    axes.set_yscale("log")
    axes.set_xlabel("bits a number, whole files")
    axes.set_ylabel("KL to full recompute, nats (dashed: 16 bits)")
    row = rows[0]
    axes.set_title(f"{row['model']}, {row['dtype']}, {row['prompts']} prompts of {row['task']}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, title="codec, recomputed", title_fontsize=8)


def _codec(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    levels = [row for row in rows if row["level"] is not None]
    short = sorted(int(field[5:]) for field in levels[0] if field.startswith("bits_") and field[5:].isdigit())
    columns = ["codec", "level", "bits", "ratio", *(f"at {n}" for n in short), "KL", "top-1"]
    columns += ["encode", "decode", "zstd -1", "of zstd", "zstd bits"]
    lines = [
        [
            row["codec"],
            f"{row['level']}",
            f"{row['bits_per_element']:.2f}",
            f"{row['ratio_16bit']:.2f}x",
            *(_said(row.get(f"ratio_{n}"), "{:.2f}x") for n in short),
            f"{row['kl']:.4f}",
            f"{row['top1']:.1%}",
            f"{row['encode_mb_s']:,.0f}",
            f"{row['decode_mb_s']:,.0f}",
            _said(row.get("zstd1_decode_mb_s"), "{:,.0f}"),
            _said(row["zstd1_decode_mb_s"] and row["decode_mb_s"] / row["zstd1_decode_mb_s"], "{:.2f}"),
            _said(row.get("zstd1_bits_per_element"), "{:.2f}"),
        ]
        for row in levels
    ]
    for row in rows:
        if row["level"] is None and row.get("bits_at_kl_0.005") is not None:
            bits = row["bits_at_kl_0.005"]
            told = [row["codec"], "", f"{bits:.2f}", f"{16 / bits:.2f}x", *[""] * len(short), "0.005"]
            lines.append(told + [""] * (len(columns) - len(told)))
    return columns, lines


def _joint(rows: Sequence[Row], intervals: bool) -> tuple[list[str], list[list[str]]]:
    ratios = sorted({row["ratio"] for row in rows})
    columns = ["codec", "level", "change", "bits", *(f"KL at {100 * ratio:g}%" for ratio in ratios)]
    columns += [f"less plain, {100 * ratio:g}%" for ratio in ratios if any(_changed(r, ratio) for r in rows)]
    shown = [ratio for ratio in ratios if any(_changed(r, ratio) for r in rows)]
    lines = []
    for (codec, level, change), same in groupby(rows, key=lambda row: (row["codec"], row["level"], row["change"])):
        own = {row["ratio"]: row for row in same}
        first = next(iter(own.values()))
        cells = [codec, str(level), change, f"{first['bits_per_element']:.2f}"]
        cells += [_beside(own.get(ratio), "kl", "kl_minus_raw" * intervals, "{:.3f}") for ratio in ratios]
        cells += [_beside(own.get(ratio), "kl_minus_plain", "kl_minus_plain" * intervals, "{:+.3f}") for ratio in shown]
        lines.append(cells)
    return columns, lines


def _changed(row: Row, ratio: float) -> bool:
    return row["ratio"] == ratio and row.get("kl_minus_plain") is not None


def _beside(row: Row | None, field: str, difference: str, form: str) -> str:
    """A figure with the interval of a difference, if one is named."""
    if row is None or row.get(field) is None:
        return ""
    low, high = row.get(f"{difference}_low"), row.get(f"{difference}_high")
    if low is None or high is None or row["codec"] == "raw":
        return form.format(row[field])
    return f"{form.format(row[field])} ({low:+.3f} to {high:+.3f})"


def _said(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
