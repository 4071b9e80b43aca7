"""Rows of `bench stores` and `bench eviction` as tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from blendkv.bench.results import Row, kind

KINDS = ("stores", "pool", "eviction")
RATES = {"hit_rate": "hits, % of requests", "byte_hit_rate": "hits, % of tokens"}
_POLICIES = ("lru", "lfu", "gdsf", "belady", "bound")


def markdown(rows: Sequence[Row]) -> str:
    """The tables of rows of one setting, under what they share."""
    parts = [caption(rows)]
    for title, columns, lines in tables(rows):
        text = sum(name in ("store", "eviction", "popularity") for name in columns)
        head = "|" + "---|" * text + "---:|" * (len(columns) - text)
        table = [head, *("| " + " | ".join(line) + " |" for line in lines)]
        parts.append("\n".join([*(f"{title}:\n" for _ in range(bool(title))), f"| {' | '.join(columns)} |", *table]))
    return "\n\n".join(parts)


def caption(rows: Sequence[Row]) -> str:
    """What the rows of a table share."""
    row = rows[0]
    if kind(row) == "eviction":
        return (
            f"**{row['requests']:,} requests of {row['documents']:,} documents**; means of {row['seeds']} traces, with "
            "half the width of their 95% intervals."
        )
    used = ", ".join(f"{name} {version}" for name, version in (row.get("versions") or {}).items())
    told = "`Pool.get`" if kind(row) == "pool" else "medians of turns"
    return "; ".join(filter(None, [f"**{row['device']}**", told, used])) + "."


def tables(rows: Sequence[Row]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, columns and lines of the tables of one setting."""
    if kind(rows[0]) == "eviction":
        return [(title, *_eviction(rows, field)) for field, title in RATES.items()]
    return [("", *(_stores(rows) if kind(rows[0]) == "stores" else _pool(rows)))]


def _stores(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    columns = ["store", "size", "get, MB/s", "plain read", "ratio", "put, MB/s", "plain write", "ratio"]
    lines = []
    for row in rows:
        cells = [row["store"], _size(row["size"])]
        for way in ("get", "put"):
            cells += [f"{row[f'{way}_mb_s']:,.0f}", _said(row, f"plain_{way}_mb_s", "{:,.0f}")]
            cells.append(_said(row, f"{way}_ratio", "{:.2f}x"))
        lines.append(cells)
    return columns, lines


def _pool(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    lines = [
        [row["eviction"], f"{row['entries']:,}", f"{row['get_us']:.1f}", _said(row, "get_us_p99", "{:.1f}")]
        for row in sorted(rows, key=lambda row: (_place(row["eviction"]), row["entries"]))
    ]
    return ["eviction", "chunks", "get, us", "99 of 100 within"], lines


def _eviction(rows: Sequence[Row], field: str) -> tuple[list[str], list[list[str]]]:
    present = sorted({row["policy"] for row in rows}, key=_place)
    lines = []
    for (s, drift, share), same in groupby(rows, key=lambda row: (row["zipf"], row["drift"], row["capacity"])):
        own = {row["policy"]: row for row in same}
        cells = [f"Zipf {s:g}, {'shifts' if drift else 'steady'}", f"{100 * share:g}%"]
        lines.append(cells + [_percent(own.get(policy), field) for policy in present])
    return ["popularity", "room", *present], lines


def _percent(row: Row | None, field: str) -> str:
    if row is None:
        return ""
    half = (row.get(f"{field}_high", row[field]) - row.get(f"{field}_low", row[field])) / 2
    return f"{100 * row[field]:.1f} ±{100 * half:.1f}"


def _place(policy: str) -> tuple[int, str]:
    """Policies in their usual order, others before what is possible."""
    return (_POLICIES.index(policy) if policy in _POLICIES else 2, policy)


def _said(row: Row, field: str, form: str) -> str:
    return "" if row.get(field) is None else form.format(row[field])


def _size(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit:,} {name}"
    return f"{size:,} B"
