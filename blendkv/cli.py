"""The command line. torch and transformers are imported inside the commands, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from blendkv import __version__
from blendkv._console import print_json, print_table, work
from blendkv._options import MODEL_HELP, Device, Dtype, Json, load, one_of
from blendkv.cli_bench import bench
from blendkv.cli_bench_loading import loading
from blendkv.cli_bench_serving import fairness, gateway
from blendkv.cli_bench_stores import eviction, stores
from blendkv.cli_bench_streaming import streaming
from blendkv.cli_bench_throughput import throughput
from blendkv.cli_calibrate import calibrate
from blendkv.cli_codec import profile
from blendkv.cli_demo import demo
from blendkv.cli_env import env
from blendkv.cli_precompute import precompute
from blendkv.cli_quality import check_prompts, make_suggestion, print_suggestion, read_selectors
from blendkv.cli_serve import serve
from blendkv.cli_stores import evict, inspect, ls, verify_store

main = typer.Typer(
    name="blendkv",
    help="Start an unmodified model.generate from cached, re-ordered and repaired key/value chunks.",
    epilog="Exit codes: 0 done; 1 it failed, or what was checked does not hold; 2 wrong usage; 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
main.add_typer(bench, name="bench")
main.command()(profile)
bench.command()(stores)
bench.command()(eviction)
bench.command()(throughput)
bench.command()(streaming)
bench.command()(loading)
bench.command()(fairness)
bench.command()(gateway)
for _command in (demo, precompute, calibrate, ls, inspect, evict, verify_store, serve, env):
    main.command()(_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"blendkv {__version__}")
        raise typer.Exit


@main.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Start an unmodified model.generate from cached, re-ordered and repaired key/value chunks."""


# -- verify -----------------------------------------------------------------------------------------------------------


@main.command()
def verify(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} With --tiny: families, or all.")],
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Try families of transformers, tiny, with random weights.")
    ] = False,
    write: Annotated[Path | None, typer.Option(help="With --tiny all: the guide to put the tables into.")] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    attn: Annotated[str, typer.Option(help="Attention implementation: sdpa or eager.")] = "sdpa",
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Suggest a selector and a ratio, from prompts of your own (--data).")
    ] = False,
    data: Annotated[str | None, typer.Option(help="With --suggest: file of prompts; a few of ours if not.")] = None,
    task: Annotated[str, typer.Option(help="With --suggest: how --data is read, as in bench quality.")] = "plain",
    selectors: Annotated[str, typer.Option(help="With --suggest: selectors to choose among.")] = "hkvd,boundary",
    bound: Annotated[float, typer.Option(min=0.0, help="With --suggest: most KL, nats per answer token.")] = 0.05,
    as_json: Json = False,
) -> None:
    """Prove that a model can be blended: every check with its figure. Exit code 1 if one fails."""
    one_of("--attn", attn, ("sdpa", "eager"))
    if data is not None and not suggest:
        raise typer.BadParameter("it goes with --suggest", param_hint="--data")
    if suggest and tiny:
        raise typer.BadParameter("it goes with a model, not with --tiny", param_hint="--suggest")
    if write is not None and not (tiny and models == ["all"]):
        raise typer.BadParameter("it goes with --tiny all", param_hint="--write")
    if tiny:
        _verify_tiny(models, write, as_json)
    if len(models) > 1:
        raise typer.BadParameter("one MODEL at a time (several families with --tiny)", param_hint="MODEL")
    model = models[0]
    with work(as_json):
        from tqdm import tqdm

        from blendkv.verify import verify as run_checks

        if suggest and data is not None:
            check_prompts(task, data)
        chosen = read_selectors(selectors) if suggest else []
        loaded, tokenizer = load(model, dtype, device, attn)
        checks = list(tqdm(run_checks(loaded, tokenizer), desc="verify", unit="check", leave=False))
        ok = all(check.ok for check in checks)
        suggestion = make_suggestion(loaded, tokenizer, data, task, chosen, bound) if suggest and ok else None
    if as_json:
        told = {"suggestion": suggestion and suggestion.to_dict()} if suggest else {}
        print_json({"ok": ok, "model": model, "checks": [check.to_dict() for check in checks], **told})
    else:
        rows = [
            [
                check.name,
                f"{check.value:.3g}",
                f"{'>=' if check.at_least else '<='} {check.bound:.3g}",
                "ok" if check.ok else "FAILED",
                check.detail,
            ]
            for check in checks
        ]
        print_table(["check", "figure", "bound", "", "detail"], rows, wrap=("detail",))
        failures = sum(not check.ok for check in checks)
        typer.echo(f"\n{model}: {'all' if ok else f'{failures} of'} {len(checks)} checks {'hold' if ok else 'failed'}")
        if suggestion is not None:
            print_suggestion(model, suggestion)
    raise typer.Exit(0 if ok else 1)


def _verify_tiny(names: list[str], guide: Path | None, as_json: bool) -> NoReturn:
    """Tries families; exit code 1 if one is wrong or crashes."""
    with work(as_json):
        from tqdm import tqdm

        from blendkv.survey import check_names, survey

        wanted = check_names(names)
        outcomes = list(tqdm(survey(wanted), total=len(wanted), desc="families", unit="family", leave=False))
        if guide is not None:
            from blendkv._compat import TRANSFORMERS_VERSION
            from blendkv.guide import write_guide

            write_guide(guide, TRANSFORMERS_VERSION, outcomes)
    tried = [outcome for outcome in outcomes if outcome.status != "not built"]
    counts = {status: sum(o.status == status for o in tried) for status in ("proven", "refused", "wrong", "crashed")}
    if as_json:
        not_built = [{"family": o.family, "detail": o.detail} for o in outcomes if o.status == "not built"]
        print_json({"families": [o.to_dict() for o in tried], "not_built": not_built})
    else:
        print_table(
            ["family", "status", "detail"], [[o.family, o.status, o.detail] for o in outcomes], wrap=("detail",)
        )
        told = ", ".join(f"{count} {status}" for status, count in counts.items())
        typer.echo(f"\n{len(tried)} tried: {told}; {len(outcomes) - len(tried)} not built")
    raise typer.Exit(1 if counts["wrong"] or counts["crashed"] else 0)
