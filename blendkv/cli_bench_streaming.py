"""`blendkv bench streaming`: adaptive streaming beside fixed levels, text and an oracle, on links that change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blendkv._console import print_json, print_table, work
from blendkv._options import Device, Dtype, Json, figure, load


def streaming(
    model: Annotated[str, typer.Argument(help="Hub id, folder, GGUF file, or `bundled`.")] = "bundled",
    traces: Annotated[
        list[str] | None,
        typer.Option(help='uniform, outages, wireless, or a file of lines {"bw": [...]}; several by naming it again.'),
    ] = None,
    links: Annotated[int, typer.Option(min=1, help="Links of each set that is made by code.")] = 50,
    loads: Annotated[
        str, typer.Option(help="Seconds of bringing raw keys and values, in seconds of recomputing them.")
    ] = "0.5,1,2,5,10,20",
    slos: Annotated[str, typer.Option(help="Targets, in seconds of recomputing everything.")] = "0.5,1,2",
    profiles: Annotated[
        Path | None, typer.Option(help="Folder with klt.safetensors; by default one is made of Python's own help.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, max=3, help="Prompts that KL is measured on.")] = 3,
    mixes: Annotated[int, typer.Option(min=0, help="Mixes of levels whose KL is measured too.")] = 8,
    enough: Annotated[float, typer.Option(min=0.0, help="KL below which nothing more is spent.")] = 0.005,
    seed: Annotated[int, typer.Option(help="Of the links.")] = 0,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Missed targets and KL of streaming policies on links that change, orders of sending, a moving client."""
    factors, targets = _positive("--loads", loads), _positive("--slos", slos)
    with work(as_json):
        from blendkv.bench.codec import load_profiles
        from blendkv.bench.links import SETS, links_of, read_links
        from blendkv.bench.results import model_device_name, versions
        from blendkv.bench.streaming import checks, streaming_rows
        from blendkv.bench.streaming_levels import Levels, examples, levels_of, profile_of_topics, sending_rows
        from blendkv.loading.policies import Adaptive, InOrder

        names = traces or list(SETS)
        for name in names:  # before anything that takes long
            if name not in SETS:
                read_links(name, 1.0)
        loaded, tokenizer = load(model, dtype, device)
        given = load_profiles(["klt"], profiles).get("klt") if profiles else None
        profile = given or profile_of_topics(loaded, tokenizer, progress=True)
        levels = Levels(loaded, tokenizer, levels_of(profile), examples()[:prompts])
        prompt = levels.prompt()
        step_s = prompt.text_s / 10
        sets = {
            Path(name).name if name not in SETS else name: links_of(name, links, step_s, seed)
            if name in SETS
            else read_links(name, step_s)
            for name in names
        }
        about = {"bench": "streaming", "model": model, "device": model_device_name(loaded)}
        chosen: list[tuple[str, ...]] = []
        rows = list(
            streaming_rows(
                prompt,
                sets,
                loads=factors,
                slos=targets,
                policies=[InOrder(), Adaptive(enough=enough)],
                about=about,
                chosen=chosen.append,
                progress=True,
            )
        )
        losses = {rung.name: rung.loss for rung in prompt.items[0].rungs}
        found = {
            "model": model,
            "device": about["device"],
            "versions": versions(),
            "text_s": prompt.text_s,
            "after_s": prompt.after_s,
            "full_s": levels.full_s(),
            "raw_bytes": prompt.raw_bytes,
            "levels": levels.rows(prompt),
            "mixes": levels.mixes(chosen, losses, mixes),
            "rows": rows,
            "checks": checks(rows),
            **sending_rows(levels, profile, sets, prompt.text_s),
        }
    if as_json:
        print_json(found)
        return
    _print(found)


def _positive(option: str, text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < float("inf") for value in values):
        raise typer.BadParameter(f"{text!r} is not a list of positive numbers such as 0.5,1,2", param_hint=option)
    return list(dict.fromkeys(values))


def _print(found: dict[str, Any]) -> None:
    print_table(
        ["level", "bits", "KL", "KL to full", "decode"],
        [
            [
                row["level"],
                f"{row['bits']:.2f}",
                f"{row['kl']:.4f}",
                f"{row['kl_full']:.4f}",
                f"{row['decode_s']:.3f} s",
            ]
            for row in found["levels"]
        ],
        f"{found['model']} on {found['device']}: {found['text_s']:.2f} s from text, "
        f"{found['raw_bytes'] / 1e6:.1f} MB raw",
    )
    rows = found["rows"]
    print_table(
        ["links", "load", "target", "policy", "missed", "KL", "TTFT", "worst/text", "text", "bytes/raw"],
        [
            [
                row["traces"],
                f"{row['load']:g}",
                f"{row['slo']:g}",
                row["policy"],
                f"{row['violations']:.0%}",
                figure(row["kl"], ".4f"),
                figure(row.get("ttft_s"), ".2f", " s"),
                figure(row.get("ttft_of_text"), ".2f"),
                figure(row.get("text"), ".0%"),
                figure(row.get("brought"), ".2f"),
            ]
            for row in rows
        ],
        "Loads and targets in seconds of recomputing everything",
    )
    print_table(
        ["links", "load", "target", "order", "usable", "refined", "nothing"],
        [
            [
                row["traces"],
                f"{row['load']:g}",
                f"{row['slo']:g}",
                row["order"],
                *(f"{row[name]:.0%}" for name in ("usable", "refined", "none")),
            ]
            for row in found["orders"]
        ],
        "What has come by the target, by the order of sending",
    )
    print_table(
        ["at", "client", "arrived", "after", "bytes"],
        [
            [
                f"{r['at']:.0%}",
                r["move"],
                f"{r['arrived']:.0%}",
                figure(r["ttft_s"], ".2f", " s"),
                f"{r['brought']:.2f}",
            ]
            for r in found["moves"]
        ],
        "A client that leaves its gateway's reach",
    )
