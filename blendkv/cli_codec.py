"""`blendkv profile`, `bench codec` and `bench joint`: what codecs know of a model, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blendkv._console import print_json, print_table, work
from blendkv._options import (
    Device,
    Dtype,
    Json,
    Model,
    SelectorName,
    load,
    named_selector,
    one_of,
    read_integers,
    read_lengths,
    read_names,
    read_ratios,
)
from blendkv.cli_bench import bench

Texts = Annotated[
    list[Path], typer.Option(help="Texts: .json, .jsonl or plain; a file named twice gives two of them a turn.")
]
Codecs = Annotated[str, typer.Option(help="Names of codecs.")]
Levels = Annotated[str, typer.Option(help="Of codecs that have some; coarser above 0, finer below.")]
Profiles = Annotated[Path | None, typer.Option(help="Folder of CODEC.safetensors that `blendkv profile --out` wrote.")]
Continuation = Annotated[int, typer.Option(min=1, help="Tokens after a context.")]
Out = Annotated[Path | None, typer.Option(help="JSON file that the rows are merged into.")]

ENOUGH = 8 * 1024
"""Tokens of context from which a profile is about as good as one of more (docs/lab-log.md)."""


def profile(
    model: Model,
    data: Texts,
    codec: Codecs = "cachegen,klt,klt-xl",
    out: Annotated[Path | None, typer.Option(help="Folder for CODEC.safetensors; by default found by hash.")] = None,
    passages: Annotated[int, typer.Option(min=2, help="Passages of text.")] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a passage that are a context.")] = 1024,
    continuation: Continuation = 128,
    unit_layers: Annotated[
        int, typer.Option(min=0, help="Layers that klt-xl transforms together; 0: up to three.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the model's own continuations.")] = 0,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Calibrate profiles of a model: what lossy codecs must know of its keys and values, once."""
    with work(as_json):
        from blendkv._paths import require_writable
        from blendkv.calibrating import FITS, calibrate
        from blendkv.codecs.profile import profile_folder
        from blendkv.texts import passages as read_passages

        names = read_names("--codec", codec, FITS)
        require_writable(profile_folder() if out is None else out)
        loaded, tokenizer = load(model, dtype, device)
        texts = read_passages(data, tokenizer, tokens + continuation, passages)
        if len(texts) < 2:
            raise ValueError(
                f"--data has one passage of {tokens + continuation:,} tokens, and a profile is made of two or more: "
                "give more files (of a long text only the beginning is used), or a .jsonl with a text a line"
            )
        made = calibrate(
            loaded, texts, names, continuation=continuation, unit_layers=unit_layers, name=model, seed=seed
        )
        if len(texts) * tokens < ENOUGH:
            typer.echo(
                f"blendkv: {len(texts)} passages of {tokens} tokens are little to learn from: with fewer than "
                f"{ENOUGH:,} tokens of context codecs take more bits, or lose more; give more --data",
                err=True,
            )
        paths = {name: one.save(None if out is None else out / f"{name}.safetensors") for name, one in made.items()}
    if as_json:
        rows = [{"codec": n, "hash": p.hash, "bytes": p.nbytes, "file": str(paths[n])} for n, p in made.items()]
        print_json({"model": model, "passages": len(texts), "rows": rows})
        return
    print_table(
        ["codec", "hash", "size", "file"],
        [[name, one.hash, f"{one.nbytes / 1e6:.2f} MB", str(paths[name])] for name, one in made.items()],
        f"{model}: {len(texts)} passages of {tokens} + {continuation} tokens",
        wrap=("file",),
    )


@bench.command()
def codec(
    model: Model,
    data: Texts,
    codecs: Codecs = "raw,cachegen,klt,klt-xl",
    levels: Levels = "-4,-2,0,2,4",
    contexts: Annotated[int, typer.Option(min=1, help="Passages of text.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a context, one chunk.")] = 1024,
    continuation: Continuation = 128,
    short: Annotated[str, typer.Option(help="Tokens of shorter chunks whose size is measured too.")] = "64,256",
    profiles: Profiles = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls for each context; the median counts.")] = 3,
    out: Out = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Bits, KL and speed of codecs, from whole chunk files, on texts that their profiles were not made of."""
    wanted, lengths = read_integers("--levels", levels, "-4,0,4"), read_lengths(short, "--short")
    with work(as_json):
        from blendkv.bench.codec import codec_rows, load_profiles
        from blendkv.bench.results import require_room, write_rows
        from blendkv.codecs import codec_names
        from blendkv.texts import count_known, passages

        made = load_profiles(read_names("--codecs", codecs, codec_names()), profiles)
        require_room(out)
        loaded, tokenizer = load(model, dtype, device)
        known = {text for one in made.values() if one is not None for text in one.about.get("texts", ())}
        rows = codec_rows(
            loaded,
            passages(data, tokenizer, tokens + continuation, contexts, known),
            made,
            levels=wanted,
            context=tokens,
            short=lengths,
            repeats=repeats,
            about={"model": model, "dtype": dtype, "texts_left_out": count_known(data, known)},
            progress=True,
        )
        if out is not None:
            write_rows(out, rows)
    _print(rows, as_json)


@bench.command()
def joint(
    model: Model,
    data: Annotated[Path, typer.Option(help="File with the task's records (JSON, or .jsonl).")],
    task: Annotated[str, typer.Option(help="hotpot or musique.")] = "hotpot",
    prompts: Annotated[int, typer.Option(min=1, help="Records, the first that no profile was made of.")] = 20,
    codecs: Codecs = "raw,cachegen,klt,klt-xl",
    levels: Levels = "-4,0,4,8",
    ratios: Annotated[str, typer.Option(help="Shares of chunk tokens recomputed.")] = "0,0.05,0.15,0.3",
    controls: Annotated[
        int | None, typer.Option(help="Level of klt at which bits are spent elsewhere too; by default not.")
    ] = None,
    selector: SelectorName = "hkvd",
    profiles: Profiles = None,
    out: Out = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """KL of blended answers to full recompute, by codec, level and share recomputed."""
    wanted, shares = read_integers("--levels", levels, "-4,0,4"), read_ratios(ratios, "--ratios")
    with work(as_json):
        from blendkv.bench.codec import load_profiles
        from blendkv.bench.joint import joint_rows, unseen_examples
        from blendkv.bench.results import require_room, write_rows
        from blendkv.bench.tasks import READERS
        from blendkv.codecs import codec_names

        one_of("--task", task, sorted(READERS))
        chosen = named_selector(selector)
        made = load_profiles(read_names("--codecs", codecs, codec_names()), profiles)
        require_room(out)
        loaded, tokenizer = load(model, dtype, device)
        rows = joint_rows(
            loaded,
            tokenizer,
            unseen_examples(task, data, tokenizer, made, prompts),
            made,
            levels=wanted,
            ratios=shares,
            controls=controls,
            selector=chosen,
            about={"model": model, "dtype": dtype, "task": task},
            progress=True,
        )
        if out is not None:
            write_rows(out, rows)
    _print(rows, as_json)


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"rows": rows})
        return
    from blendkv.bench.codec_table import caption, cells

    print_table(*cells(rows, intervals=False), caption(rows), wrap=("change",))
