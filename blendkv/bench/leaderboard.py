"""The leaderboard page: rows of `bench quality`, controls and losers included, as they were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blendkv.bench.results import Row, by_setting, kind
from blendkv.bench.settings import CONTROLS
from blendkv.bench.table import method_name

BEGIN = "<!-- leaderboard: written by `blendkv bench leaderboard --into` -->"
END = "<!-- end of leaderboard -->"
EMPTY = "No rows yet.\n"
COLUMNS = ("method", "charged", "KL (nats)", "of the reference", "same answer", "F1", "Rouge-L", "TTFT", "speed-up")
NAMES = {"nocontext": "no context (control)", "mapreduce": "MapReduce", "maprerank": "MapRerank"}


def board(rows: Iterable[Row]) -> str:
    """One table for each model, data and cell; best KL first, what has none (it has answers alone) last.

    A blend that is no better than `random` at no larger a charged budget is marked.
    """
    tables = [table for table in by_setting(rows) if kind(table[0]) == "quality"]
    return "\n".join(_table(table) for table in tables) if tables else EMPTY


def page_with_board(page: str, rows: Iterable[Row]) -> str:
    """A page with its board brought up to date.

    Raises:
        ValueError: if the page has no place for it.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the board: a line {BEGIN} and, after it, a line {END}")
    return f"{head}{begin}\n\n{board(rows)}\n{end}{tail}"


def _table(rows: Sequence[Row]) -> str:
    ordered = sorted(rows, key=lambda row: (row["kl"] is None, row["kl"] or 0.0))
    head = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    lines = [_line(row, rows) for row in ordered]
    return "\n".join([_title(rows[0]), "", *head, *lines, "", _foot(rows), ""])


def _title(row: Row) -> str:
    swept = {"chunks": "{} passages", "chunk_tokens": "chunks of {} tokens", "batch": "{} prompts at once"}
    extra = [form.format(row[name]) for name, form in swept.items() if row.get(name) not in (None, 1)]
    where = f"{row['data']}" if row.get("data") else "made by code"
    return f"### {row['model']}, {row['task']} ({', '.join([where, *extra])})"


def _foot(rows: Sequence[Row]) -> str:
    row = rows[0]
    used = ", ".join(f"{name} {version}" for name, version in (row.get("versions") or {}).items())
    parts = [
        f"{row['prompts']} prompts (records: {row.get('records') or 'all'}), {row['dtype']}, {row['device']}",
        f"KL relative to {row['relative_to'][0] or 'full reuse'} at {100 * (row['relative_to'][1] or 0):g}%",
    ]
    if row.get("full_gets_nothing") is not None:
        parts.append(f"full recompute gets nothing on {row['full_gets_nothing']:.0%}")
    if row.get("can_do") is False:
        parts.append(
            "**this model cannot do this task (full recompute no better than no context): scores rank nothing**"
        )
    if row.get("skipped"):
        parts.append(f"{row['skipped']} malformed records left out")
    commands = sorted({f"`{r['command']}` at commit {r.get('commit') or 'unknown'}" for r in rows if r.get("command")})
    return "; ".join([*parts, used]) + "." + "".join(f"\n{command}." for command in commands)


def _line(row: Row, rows: Sequence[Row]) -> str:
    name = NAMES.get(row["method"]) or method_name(row)
    name += " (control)" * (row.get("selector") in CONTROLS)
    name += " (no better than random)" * _loses(row, rows)
    cells = [
        name,
        _figure(row, "charged_budget", ".3f", interval=False),
        _figure(row, "kl", ".4f"),
        _figure(row, "relative", ".2f"),
        _figure(row, "same", ".0%"),
        _figure(row, "f1", ".3f"),
        _figure(row, "rouge_l", ".3f"),
        _figure(row, "ttft_s", ".3f", " s", interval=False),
        _figure(row, "speedup", ".2f", "x"),
    ]
    return "| " + " | ".join(cells) + " |"


def _loses(row: Row, rows: Sequence[Row]) -> bool:
    """Whether `random`, at no larger a budget, has no larger a KL."""
    if row["method"] != "blend" or row.get("selector") in CONTROLS or row["kl"] is None:
        return False
    return any(
        other.get("selector") == "random"
        and other["kl"] is not None
        and other["charged_budget"] <= row["charged_budget"] + 0.01
        and other["kl"] <= row["kl"]
        for other in rows
    )


def _figure(row: Row, field: str, form: str, unit: str = "", interval: bool = True) -> str:
    value = row.get(field)
    if value is None:
        return ""
    pair = row["ci"].get(field) if interval else None
    beside = f" ({pair[0]:{form}} to {pair[1]:{form}})" if pair and pair[0] != pair[1] else ""
    return f"{value:{form}}{unit}{beside}"
