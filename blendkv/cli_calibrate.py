"""`blendkv calibrate`: what loading and computing cost on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blendkv._console import print_json, print_table, work
from blendkv._options import Device, Dtype, Json, Model, load, read_lengths, read_ratios, shown_size
from blendkv.cli_precompute import chosen_codec, chosen_levels


def calibrate(
    model: Model,
    store: Annotated[
        list[str] | None, typer.Option("--store", help="URL of a store that chunks will be loaded from; repeatable.")
    ] = None,
    codec: Annotated[str, typer.Option(help="That chunks are kept with.")] = "raw",
    profile: Annotated[Path | None, typer.Option(help="File that `blendkv profile` made for the codec.")] = None,
    levels: Annotated[str, typer.Option(help="That chunks are kept at besides, such as klt@0,klt@4.")] = "",
    tokens: Annotated[str, typer.Option(help="Lengths of the prompts that are blended.")] = "256,1024",
    ratio: Annotated[str, typer.Option(help="Ratios at which they are.")] = "0,0.15,0.5,1",
    hide: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Also say how slow a device may be that this ratio still hides.")
    ] = 0.15,
    out: Annotated[
        Path | None, typer.Option(help="File to write; where `Controller()` looks for it, if left out.")
    ] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure in seconds what recomputing, loading and decoding cost here.

    A `ChunkLibrary(controller=Controller())` reads the result, and chooses from it how much it recomputes while chunks
    are loaded, and which chunks are computed from their text instead.
    """
    lengths, ratios = read_lengths(tokens), read_ratios(ratio)
    with work(as_json):
        from blendkv.attaching import attachment_of
        from blendkv.loading.controller import slowest
        from blendkv.loading.costs import asdict_of, calibration_path
        from blendkv.loading.losses import measure_losses
        from blendkv.loading.measuring import calibrate_machine
        from blendkv.stores import open_store

        loaded, tokenizer = load(model, dtype, device)
        stores = [open_store(url) for url in store or ()]
        codecs = [chosen_codec(codec, None, profile, levels), *chosen_levels(levels, profile)]
        costs = calibrate_machine(
            loaded, stores, codecs, lengths, ratios, say=lambda text: typer.echo(f"{text} ...", err=True)
        )
        costs.losses = measure_losses(loaded, tokenizer, codecs)
        path = calibration_path(costs.fingerprint) if out is None else out
        costs.write(path)
        facts = attachment_of(loaded).facts
        assert facts.shape is not None
        assert costs.compute is not None
        longest = max(lengths)
        nbytes = longest * sum(h * (k + v) for h, k, v in facts.sizes) * facts.dtype.itemsize
        needed = slowest(costs, facts.shape, longest, nbytes, hide)
    if as_json:
        print_json(
            asdict_of(costs)
            | {"path": str(path), "hides": {"ratio": hide, "tokens": longest, "bytes": nbytes, "bytes_per_s": needed}}
        )
        return
    print_table(
        ["what", "rate"],
        [
            ["linear layers", f"{costs.compute.linear_rate / 1e9:,.1f} GFLOP/s"],
            ["attention", f"{costs.compute.attention_rate / 1e9:,.1f} GFLOP/s"],
            ["of any prompt", f"{costs.compute.fixed_s * 1e3:.1f} ms"],
            ["the fit is off by at most", f"{costs.compute.error:.0%}"],
            *([f"decoding {name}", f"{shown_size(round(rate))}/s"] for name, rate in costs.decoding.items()),
            *(
                [url, f"{shown_size(round(each.bytes_per_s))}/s, {each.latency_s * 1e3:.2f} ms a request"]
                for url, each in costs.sources.items()
            ),
            *([f"lost by {_shown(level)}", f"{kl:.4f} nats of KL"] for level, kl in costs.losses.items()),
            [f"hidden by recomputing {hide:.0%}", f"raw chunks from {shown_size(round(needed))}/s on"],
        ],
        costs.machine,
    )


def _shown(level: str) -> str:
    name, _, profile = level.partition(":")
    return f"{name}, profile {profile[:8]}"
