"""`blendkv bench stores` and `bench eviction`: what keeps chunks, and what gives way."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from blendkv._console import print_json, print_table, work
from blendkv._options import Json

Out = Annotated[Path | None, typer.Option(help="JSON file that the rows are merged into.")]
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def stores(
    store: Annotated[
        list[str] | None, typer.Option(help="Folder or URL; several by naming it again. By default a temporary folder.")
    ] = None,
    size: Annotated[str, typer.Option(help="Of entries, in bytes; K, M and G are powers of 1024.")] = "1M,4M,16M,64M",
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each size; the median counts.")] = 200,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Get and put of a store, of a folder beside a plain file in turn; and the pool's get."""
    sizes = read_sizes("--size", size)
    with work(as_json):
        from blendkv.bench.results import require_room
        from blendkv.bench.stores import pool_rows, store_rows

        require_room(out)
        rows = [row for url in store or [None] for row in store_rows(url, sizes, repeats)] + list(pool_rows())
        _keep(out, rows)
    _print(rows, as_json)


def eviction(
    documents: Annotated[int, typer.Option(min=2, help="Documents of a trace.")] = 2000,
    requests: Annotated[int, typer.Option(min=2, help="Requests of a trace.")] = 20_000,
    seeds: Annotated[int, typer.Option(min=1, help="Traces of each kind.")] = 20,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Hit rates of the pool's eviction policies on Zipf traces, beside one that knows the future, and a bound."""
    with work(as_json):
        from blendkv.bench.eviction import eviction_rows
        from blendkv.bench.results import require_room

        require_room(out)
        rows = eviction_rows(documents=documents, requests=requests, seeds=seeds, progress=True)
        _keep(out, rows)
    _print(rows, as_json)


def read_sizes(option: str, text: str) -> list[int]:
    """Bytes in a list such as `64K,1M`, each once."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*([KMG]?)(?:i?B)?\s*", part, re.IGNORECASE)
        if match is None or int(match[1]) == 0:
            raise typer.BadParameter(f"{text!r} is not a list of sizes such as 64K,1M,16M", param_hint=option)
        found.append(int(match[1]) * _UNITS[match[2].upper()])
    return list(dict.fromkeys(found))


def _keep(out: Path | None, rows: list[dict[str, Any]]) -> None:
    if out is not None:
        from blendkv.bench.results import write_rows

        write_rows(out, rows)


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"rows": rows})
        return
    from blendkv.bench.results import by_setting
    from blendkv.bench.store_table import caption, tables

    for setting in by_setting(rows):
        typer.echo(caption(setting).replace("**", ""))
        for title, columns, lines in tables(setting):
            print_table(columns, lines, title)
        typer.echo("")
