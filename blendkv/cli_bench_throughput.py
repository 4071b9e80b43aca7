"""`blendkv bench throughput`: requests a second."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blendkv._console import print_json, print_table, work
from blendkv._options import (
    Device,
    Dtype,
    Json,
    Ratios,
    load,
    named_selector,
    read_names,
    read_ratios,
)


def throughput(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, folder, GGUF file, or `bundled`.")],
    rates: Annotated[str, typer.Option(help="Requests a second, as 0.1,0.2,0.5.")] = "0.1,0.2,0.5,1,2",
    methods: Annotated[str, typer.Option(help="Of full, prefix, reuse, blend.")] = "full,prefix,reuse,blend",
    ratio: Ratios = "0.15",
    selector: Annotated[
        str, typer.Option("--selector", help="Which tokens blends recompute; several as hkvd,boundary.")
    ] = "hkvd",
    documents: Annotated[int, typer.Option(min=1, help="Documents in all.")] = 40,
    chunks: Annotated[int, typer.Option(min=1, help="Documents of a request.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a document.")] = 256,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a question.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 1,
    requests: Annotated[int, typer.Option(min=1, help="Requests, each served once by every method.")] = 40,
    warm_requests: Annotated[
        int | None, typer.Option(min=0, help="Requests before them, to fill the stores; as many, if not given.")
    ] = None,
    zipf: Annotated[float, typer.Option(min=0.0, help="Exponent of the law of popularity.")] = 0.9,
    room: Annotated[float, typer.Option(help="Room of each store, as a share of all documents.")] = 0.5,
    p95: Annotated[
        float | None, typer.Option(help="Seconds to the first token to bear; twice full recompute's, if not given.")
    ] = None,
    real_rate: Annotated[
        float | None, typer.Option(help="Serve once more by the clock, so many requests a second, as a check.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of documents, requests and arrivals.")] = 0,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="JSON file that the rows are merged into.")] = None,
    as_json: Json = False,
) -> None:
    """Requests a second that one worker bears: time to the first token, waiting included, by the rate of requests."""
    ratios, wanted = read_ratios(ratio), _read_rates(rates)
    with work(as_json):
        from blendkv.bench.methods import METHODS
        from blendkv.bench.results import by_setting, require_room, write_rows
        from blendkv.bench.throughput import throughput_rows
        from blendkv.bench.throughput_table import caption, tables

        names = read_names("--methods", methods, METHODS)
        chosen = [named_selector(name) for name in dict.fromkeys(selector.split(","))]
        require_room(out)
        rows = throughput_rows(
            load(model, dtype, device)[0],
            rates=wanted,
            methods=names,
            ratios=ratios,
            selectors=chosen,
            documents=documents,
            chunks=chunks,
            chunk_tokens=chunk_tokens,
            question_tokens=question_tokens,
            requests=requests,
            warm_requests=warm_requests,
            zipf=zipf,
            room=room,
            new_tokens=new_tokens,
            target_s=p95,
            real_rate=real_rate,
            seed=seed,
            shape=model,
            progress=True,
        )
        if out is not None:
            write_rows(out, rows)
    if as_json:
        print_json({"rows": rows})
        return
    [setting] = by_setting(rows)
    typer.echo(caption(setting).replace("**", ""))
    for title, columns, lines in tables(setting):
        print_table(columns, lines, title, wrap=["clock"] if "clock" in columns else ())
        typer.echo("")


def _read_rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < float("inf") for rate in rates):
        raise typer.BadParameter(f"{text!r} is not a list of rates above 0 such as 0.1,0.5", param_hint="--rates")
    return list(dict.fromkeys(rates))
