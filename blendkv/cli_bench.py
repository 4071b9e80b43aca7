"""`blendkv bench`: speed and quality beside full recompute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blendkv._console import print_json, print_table, work
from blendkv._options import (
    Device,
    Dtype,
    Json,
    Ratios,
    figure,
    load,
    named_selector,
    read_lengths,
    read_names,
    read_ratios,
    shaped_model,
)

bench = typer.Typer(help="Measure speed and quality beside full recompute.", no_args_is_help=True)
Files = Annotated[list[Path], typer.Argument(help="JSON files that `bench ... --out` wrote.")]


@bench.command()
def ttft(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Hub id, folder, GGUF file, or `bundled`; or use --shape.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Random weights of a known shape, such as llama-8b.")] = None,
    tokens: Annotated[str, typer.Option(help="Context tokens, all in chunks; several as 2048,4096.")] = "4096",
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 256,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens after the context.")] = 32,
    ratio: Ratios = "0.15",
    methods: Annotated[str, typer.Option(help="Of full, prefix, reuse, blend.")] = "full,prefix,reuse,blend",
    selector: Annotated[
        str, typer.Option("--selector", help="Which tokens are recomputed; several as hkvd,boundary.")
    ] = "hkvd",
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each; the median counts.")] = 3,
    full_repeats: Annotated[int | None, typer.Option(min=1, help="Of full recompute, if not as many.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="How often all of it is measured.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Prompts answered at once; they share the chunks.")] = 1,
    pool: Annotated[
        str, typer.Option(help="Where chunks lie: cuda, cpu, pinned, disk; auto: where computed; several in turns.")
    ] = "auto",
    decode_tokens: Annotated[int, typer.Option(min=0, help="Tokens decoded after the first; 0 for none.")] = 64,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="JSON file that each row is merged into when measured.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Print the peak beside what it may be, by parts.")] = False,
    as_json: Json = False,
) -> None:
    """Time to the first token of an unmodified generate, warm, cache made inside the clock."""
    if (model is None) == (shape is None):
        raise typer.BadParameter("give either MODEL or --shape NAME, one of the two", param_hint="MODEL")
    ratios, lengths = read_ratios(ratio), read_lengths(tokens)
    with work(as_json):
        from blendkv.bench.methods import METHODS
        from blendkv.bench.prompts import POOLS
        from blendkv.bench.results import require_room, write_rows
        from blendkv.bench.ttft import ttft_rows

        names = read_names("--methods", methods, METHODS)
        pools = read_names("--pool", pool, POOLS)
        chosen = [named_selector(name) for name in dict.fromkeys(selector.split(","))]
        require_room(out)
        loaded = load(model, dtype, device)[0] if model is not None else shaped_model(str(shape), dtype, device)
        rows = ttft_rows(
            loaded,
            tokens=lengths,
            chunk_tokens=chunk_tokens,
            question_tokens=question_tokens,
            ratios=ratios,
            methods=names,
            selectors=chosen,
            repeats=repeats,
            full_repeats=full_repeats,
            runs=runs,
            batch=batch,
            pool=pools,
            decode_tokens=decode_tokens,
            shape=shape or model,
            on_row=(lambda row: write_rows(out, [row])) if out is not None else (lambda row: None),
            progress=True,
        )
    if as_json:
        print_json({"model": model, "shape": shape, "dtype": dtype, "repeats": repeats, "rows": rows})
        return
    _print_ttft(rows)
    if memory:
        _print_memory(rows)


def _print_ttft(rows: list[dict[str, Any]]) -> None:
    print_table(
        [
            "method",
            "ratio",
            "tokens",
            "chunks in",
            "TTFT",
            "of first",
            "speed-up",
            "FLOP limit",
            "of limit",
            "charged",
            "peak",
            "decode",
        ],
        [
            [
                row["method"] if row["selector"] is None else f"{row['method']} {row['selector']}",
                figure(row["ratio"], "g"),
                figure(row["tokens"], ","),
                row["pool"],
                figure(row["ttft_s"], ".4f", " s"),
                figure(row.get("of_first"), ".2f"),
                figure(row["speedup"], ".2f", "x"),
                figure(row["flop_limit"], ".2f", "x"),
                figure(row["achieved_of_limit"], ".0%"),
                figure(row["charged_budget"], ".3f"),
                figure(row["peak_bytes"] / 2**20, ",.0f", " MiB"),
                figure(row["decode_tokens_per_s"], ".1f", "/s"),
            ]
            for row in rows
        ],
        f"{rows[0]['shape']}, {rows[0]['dtype']}, {rows[0]['question_tokens']} question tokens, batch "
        f"{rows[0]['batch']}, on {rows[0]['device']}",
    )


def _print_memory(rows: list[dict[str, Any]]) -> None:
    def mib(value: int | None) -> str:
        return "" if value is None else f"{value / 2**20:,.1f}"

    typer.echo("")
    print_table(
        ["method", "ratio", "tokens", "peak", "may be", "of that", "placed", "selected rows", "full rows", "pool"],
        [
            [
                row["method"] if row["selector"] is None else f"{row['method']} {row['selector']}",
                figure(row["ratio"], "g"),
                figure(row["tokens"], ","),
                mib(row["peak_bytes"]),
                mib(row["expected_peak_bytes"]),
                figure(row["expected_peak_bytes"] and row["peak_bytes"] / row["expected_peak_bytes"], ".0%"),
                *(mib((row["expected_parts"] or {}).get(part)) for part in ("placed", "selected_rows", "full_rows")),
                mib(row["pool_bytes"]),
            ]
            for row in rows
        ],
        "Peak memory of the first token in MiB, beyond weights and pool",
    )


@bench.command()
def table(
    files: Files,
    into: Annotated[
        Path | None, typer.Option(help="Page to bring up to date: tables between <!-- table: FILE --> markers.")
    ] = None,
) -> None:
    """Print the rows that `--out` kept as Markdown tables."""
    with work(False):
        from blendkv.bench.results import read_rows
        from blendkv.bench.table import markdown, page_with

        if into is None:
            typer.echo(markdown([row for file in files for row in read_rows(file)]), nl=False)
            return
        page = into.read_text(encoding="utf-8")
        for file in files:
            page = page_with(page, file)
        into.write_text(page, encoding="utf-8")


@bench.command()
def kernels(
    tokens: Annotated[str, typer.Option(help="Context tokens; several as 8192,16384.")] = "4096,8192,16384,32768",
    ratio: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of context rows computed.")] = 0.15,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each; the median counts.")] = 20,
    as_json: Json = False,
) -> None:
    """GPU kernels beside a matrix product and a copy on the same card (Llama-3.1-8B's attention, bfloat16)."""
    lengths = read_lengths(tokens)
    with work(as_json):
        from blendkv.bench.coding import coding_rows
        from blendkv.bench.expanding import loading_rows
        from blendkv.bench.kernels import kernel_rows

        rows = [
            *kernel_rows(lengths, ratio, repeats=repeats),
            *coding_rows(repeats=repeats),
            *loading_rows(repeats=repeats),
        ]
    if as_json:
        print_json({"rows": rows})
        return
    print_table(
        ["tokens", "rows", "kernel", "time", "rate", "of the ceiling"],
        [
            [
                f"{row['tokens']:,}",
                f"{row['rows']:,}",
                row["kernel"],
                f"{row['seconds'] * 1e3:.3f} ms",
                f"{row['rate']:,.0f} {row['unit']}",
                f"{row['of_ceiling']:.0%} of {row['ceiling']:,.0f}",
            ]
            for row in rows
        ],
        rows[0]["device"],
    )


@bench.command()
def plot(
    files: Files,
    out: Annotated[Path, typer.Option(help="Figure to write: .svg, .png, ...")],
    every: Annotated[
        bool, typer.Option("--every", help="Draw rows of every kind beside each other, not of the first alone.")
    ] = False,
) -> None:
    """Draw rows: speed-up over context, KL over bits, KL over budget and TTFT, insights (needs matplotlib)."""
    with work(False):
        from blendkv.bench.plot import plot as draw
        from blendkv.bench.results import read_rows

        draw([row for file in files for row in read_rows(file)], out, every)
