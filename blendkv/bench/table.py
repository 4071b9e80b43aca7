"""Rows of measurements as Markdown tables, and pages that hold them between markers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from blendkv.bench import codec_table, store_table, throughput_table
from blendkv.bench.results import METHOD, Row, by_setting, kind, read_rows

COLUMNS = (
    "context", "method", "TTFT", "full recompute", "speed-up", "FLOP limit", "of the limit", "of the floor",
    "decoding", "peak memory",
)  # fmt: skip
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def markdown(rows: Iterable[Row]) -> str:
    """One table for each setting (card, model, ...); figures of several runs stand beside each other."""
    tables = []
    for setting in by_setting(rows):
        if kind(setting[0]) in ("quality", "insights"):
            raise ValueError(
                "rows of `bench quality` are a page of their own: blendkv bench leaderboard; plot insights"
            )
        if kind(setting[0]) == "throughput":
            tables.append(throughput_table.markdown(setting))
            continue
        if kind(setting[0]) != "ttft":
            others = store_table if kind(setting[0]) in store_table.KINDS else codec_table
            tables.append(others.markdown(setting))
            continue
        beside = next((row["first_pool"] for row in setting if "of_first" in row), None)
        columns = [*COLUMNS, f"of the time from {beside}"] if beside else COLUMNS
        lines = [_line(list(runs), bool(beside)) for _, runs in groupby(_by_method(setting), key=_method_key)]
        head = ["| " + " | ".join(columns) + " |", "|---|---|" + "---:|" * (len(columns) - 2)]
        tables.append("\n".join([caption(setting), "", *head, *lines]))
    return "\n\n".join(tables) + "\n"


def caption(rows: list[Row]) -> str:
    """What the rows of a table share."""
    row = rows[0]
    parts = [row["device"], f"{row.get('shape')} in {row.get('dtype')}"]
    where = "files, read in every call" if row.get("pool") == "disk" else f"{row.get('pool')} memory"
    parts.append(f"chunks of {row.get('chunk_tokens')} tokens in {where}")
    parts.append(f"{row.get('question_tokens')} question tokens")
    if row.get("batch", 1) != 1:
        parts.append(f"batch of {row['batch']}")
    used = sorted({", ".join(f"{k} {v}" for k, v in (r.get("versions") or {}).items()) for r in rows} - {""})
    return "; ".join([f"**{parts[0]}**", *parts[1:], *(" or ".join(used),) * bool(used)]) + "."


def page_with(page: str, path: str | Path) -> str:
    """A page with the tables of one file brought up to date; paths in markers are relative to the working directory.

    Raises:
        ValueError: if the page has no place for them: `<!-- table: FILE -->` ... `<!-- end of table -->`.
    """
    found = 0

    def fill(match: re.Match[str]) -> str:
        nonlocal found
        if Path(match[2]).resolve() != Path(path).resolve():
            return match[0]
        found += 1
        return f"{match[1]}\n{markdown(read_rows(path))}\n{match[3]}"

    page = MARKED.sub(fill, page)
    if not found:
        raise ValueError(f"the page has no marker <!-- table: {path} --> with <!-- end of table --> after it")
    return page


def method_name(row: Row) -> str:
    """A method as people read it: `blend, hkvd, 15%`."""
    share = f"{100 * row['ratio']:g}%" if row["method"] == "blend" and row["ratio"] is not None else ""
    names = {"full": "full recompute", "reuse": "full reuse", "prefix": "prefix reuse"}
    layers = f"layers {row['check_layers'].replace(',', ', ')}" if row.get("check_layers") else ""
    after = f"chunks after {row['condition']}" if row.get("condition") else ""
    said = [names.get(row["method"], row["method"]), row.get("selector"), layers or share, row.get("corrector"), after]
    return ", ".join(filter(None, said))


def _by_method(rows: list[Row]) -> list[Row]:
    order = {_method_key(row): None for row in rows}
    places = {key: i for i, key in enumerate(order)}
    return sorted(rows, key=lambda row: places[_method_key(row)])


def _method_key(row: Row) -> tuple:
    return tuple(row.get(field) for field in METHOD)


def _line(runs: list[Row], beside: bool) -> str:
    row = runs[0]
    cells = [
        f"{row['tokens']:,}",
        method_name(row),
        _each(runs, "ttft_s", _seconds),
        _each(runs, "full_ttft_s", _seconds),
        _each(runs, "speedup", "{:.2f}x".format),
        "" if row.get("flop_limit") is None else f"{row['flop_limit']:.2f}x",
        _each(runs, "achieved_of_limit", "{:.0%}".format),
        _each(runs, "achieved_of_floor", "{:.0%}".format),
        _each(runs, "decode_ratio", "{:.2f}x".format),
        _each(runs[:1], "peak_bytes", lambda value: f"{value / 2**20:,.0f} MiB"),
    ]
    cells += [_each(runs, "of_first", "{:.2f}x".format)] if beside else []
    return "| " + " | ".join(cells) + " |"


def _each(runs: list[Row], field: str, form) -> str:
    """A figure of every run that has it."""
    return " / ".join(form(row[field]) for row in runs if row.get(field) is not None)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
