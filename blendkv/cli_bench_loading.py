"""`blendkv bench loading`: what the road from a store costs, and what a controller makes of it."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from blendkv._console import print_json, print_table, work
from blendkv._options import Device, Dtype, Json, Model, figure, load, named_selector, read_ratios
from blendkv.cli_precompute import chosen_codec, chosen_levels


def loading(
    model: Model,
    chunks: Annotated[int, typer.Option(min=4, max=24, help="Texts of the prompt, an even number.")] = 24,
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a chunk.")] = 256,
    factors: Annotated[
        str, typer.Option(help="Links: loading takes so many times as long as computing at the floor.")
    ] = "0.2,0.5,1,2,5",
    ratio: Annotated[str, typer.Option("--ratio", help="Fixed settings.")] = "0.15,0.3,0.5,1",
    floor: Annotated[float, typer.Option(min=0.0, max=1.0, help="Smallest ratio of the controller.")] = 0.15,
    selector: Annotated[str, typer.Option("--selector", help="Which tokens are recomputed.")] = "hkvd",
    codec: Annotated[str, typer.Option(help="That chunks are kept with.")] = "raw",
    profile: Annotated[Path | None, typer.Option(help="File that `blendkv profile` made for the codec.")] = None,
    levels: Annotated[str, typer.Option(help="That they are kept at besides, such as klt@0,klt@4,klt@8.")] = "",
    max_kl: Annotated[float, typer.Option(min=0.0, help="The most that a level of the controller's may lose.")] = inf,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each; medians count.")] = 3,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="JSON file that the rows are merged into.")] = None,
    as_json: Json = False,
) -> None:
    """Time to the first token from a throttled source: loading before, while, or instead of computing."""
    ratios = read_ratios(ratio)
    try:
        wanted = [float(part) for part in factors.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{factors!r} is no list of numbers such as 0.5,1", param_hint="--factors") from None
    if any(not 0 < factor < 1e6 for factor in wanted):
        raise typer.BadParameter("each must be above 0", param_hint="--factors")
    with work(as_json):
        from blendkv.bench.loading import loading_rows
        from blendkv.bench.results import require_room, write_rows

        named_selector(selector)
        require_room(out)
        loaded, tokenizer = load(model, dtype, device)
        rows = list(
            loading_rows(
                loaded,
                tokenizer,
                chunks=chunks,
                chunk_tokens=chunk_tokens,
                factors=wanted,
                ratios=ratios,
                floor=floor,
                selector=selector,
                codec=chosen_codec(codec, None, profile, levels),
                levels=chosen_levels(levels, profile),
                max_kl=max_kl,
                repeats=repeats,
                name=model,
                on_row=_say,
            )
        )
        if out is not None:
            write_rows(out, rows)
    if as_json:
        print_json({"rows": rows})
        return
    _print(rows)


def _say(row: dict[str, Any]) -> None:
    typer.echo(
        f"{row['link_mb_s']:.1f} MB/s, {row['method']} {row['ratio']:g} {row['level']}: {row['ttft_s']:.3f} s", err=True
    )


def _print(rows: list[dict[str, Any]]) -> None:
    def beside(row: dict[str, Any]) -> str:
        if row["bound_s"] is not None:
            return f"{row['ttft_s'] / row['bound_s']:.2f} of its bound"
        if row["best_fixed_s"] is not None:
            return f"{row['ttft_s'] / row['best_fixed_s']:.2f} of the best fixed"
        return ""

    print_table(
        [
            "link",
            "load/compute",
            "method",
            "ratio",
            "level",
            "from text",
            "TTFT",
            "load",
            "compute",
            "left out",
            "KL",
            "predicted",
            "",
        ],
        [
            [
                f"{row['link_mb_s']:,.1f} MB/s",
                f"{row['factor']:g}",
                row["method"],
                f"{row['ratio']:g}",
                row["level"],
                f"{row['text']}",
                f"{row['ttft_s']:.3f} s",
                f"{row['load_s']:.3f} s",
                f"{row['compute_s']:.3f} s",
                f"{row['left_out_bytes'] / 1e6:,.1f} MB",
                f"{row['kl']:.4f}",
                figure(row["predicted_s"], ".3f", " s"),
                beside(row),
            ]
            for row in rows
        ],
        f"{rows[0]['model']}, {rows[0]['dtype']}, {rows[0]['tokens']:,} tokens, on {rows[0]['device']}",
    )
