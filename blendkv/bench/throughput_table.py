"""Rows of `bench throughput` as tables: what each method bears, and what happens at each rate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from blendkv.bench.results import Row

RATES = ["method", "clock", "requests/s", "completed/s", "TTFT p50", "TTFT p95"]
BORNE = [
    "method", "service", "its p95", "hits", "requests/s in the long run", "of full", "requests/s at the p95", "of full",
]  # fmt: skip
_NAMES = {"full": "full recompute", "reuse": "full reuse", "prefix": "prefix reuse"}


def name_of(row: Row) -> str:
    """A method as people read it: `blend, hkvd, 15%`."""
    share = f"{100 * row['ratio']:g}%" if row["method"] == "blend" else ""
    return ", ".join(filter(None, [_NAMES.get(row["method"], row["method"]), row["selector"], share]))


def caption(rows: Sequence[Row]) -> str:
    """What the rows of a table share."""
    row = rows[0]
    used = ", ".join(f"{name} {version}" for name, version in (row.get("versions") or {}).items())
    parts = [
        f"**{row['device']}**",
        f"{row['shape']} in {row['dtype']}",
        f"{row['requests']} requests after {row['warm_requests']}, each of {row['chunks']} of {row['documents']} "
        f"documents (Zipf {row['zipf']:g}) of {row['chunk_tokens']} tokens, and {row['question_tokens']} of its own",
        f"answers of {row['new_tokens']} token{'s' * (row['new_tokens'] > 1)}",
        f"stores hold {row['room']:.0%} of the documents",
        used,
    ]
    return "; ".join(filter(None, parts)) + "."


def tables(rows: Sequence[Row]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, columns and lines of both tables of one setting."""
    methods = [next(same) for _, same in groupby(rows, key=name_of)]
    target = rows[0]["p95_target_s"]
    return [
        (f"Rate borne at a p95 of {target:.2f} s to the first token", BORNE, [_borne(row) for row in methods]),
        ("By rate", RATES, [_at_rate(row) for row in rows]),
    ]


def markdown(rows: Sequence[Row]) -> str:
    """The tables of rows of one setting, under what they share."""
    parts = [caption(rows)]
    for title, columns, lines in tables(rows):
        text = 1 + ("clock" in columns)
        head = [f"| {' | '.join(columns)} |", "|" + "---|" * text + "---:|" * (len(columns) - text)]
        parts.append("\n".join([f"{title}:", "", *head, *("| " + " | ".join(line) + " |" for line in lines)]))
    return "\n\n".join(parts)


def _borne(row: Row) -> list[str]:
    rate, of_full = row["sustained_per_s"], row["sustained_of_full"]
    return [
        name_of(row),
        f"{row['service_s']:.3f} s",
        f"{row['service_p95_s']:.3f} s",
        f"{row['hit_rate']:.0%}",
        f"{row['capacity_per_s']:.3f}",
        f"{row['capacity_of_full']:.2f}x",
        "none" if rate is None else f"{rate:.3f}",
        "" if of_full is None else f"{of_full:.2f}x",
    ]


def _at_rate(row: Row) -> list[str]:
    return [
        name_of(row),
        row["clock"],
        f"{row['rate']:g}",
        f"{row['completed_per_s']:.3f}",
        f"{row['ttft_p50_s']:.2f} s",
        f"{row['ttft_p95_s']:.2f} s",
    ]
