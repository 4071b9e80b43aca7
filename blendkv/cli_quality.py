"""`blendkv bench quality`, `bench insights`, `bench leaderboard`, and what `verify --suggest` prints."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from blendkv._console import print_json, print_table, work
from blendkv._options import Device, Dtype, Json, Model, load, one_of, read_lengths, read_ratios
from blendkv.cli_bench import bench

Data = Annotated[str | None, typer.Option(help="File with the task's records (JSON, or .jsonl), or a hub dataset id.")]
Task = Annotated[str, typer.Option(help="hotpot, musique, 2wikimqa, samsum, longbench, plain, synthetic, ...")]
Records = Annotated[str, typer.Option(help="Which records: all, odd, even (counted from 0), or a slice as 20:40.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave malformed records out, and count them.")]
Out = Annotated[Path | None, typer.Option(help="JSON Lines of each prompt's figures: resumed if it is there.")]
Rows = Annotated[Path | None, typer.Option("--rows", help="JSON file that the rows are merged into.")]


@bench.command()
def quality(
    model: Model,
    data: Data = None,
    task: Task = "hotpot",
    n: Annotated[int, typer.Option("--n", "--prompts", min=1, help="Prompts, from the first that are wanted.")] = 50,
    methods: Annotated[str, typer.Option(help="Of full,prefix,reuse,blend,mapreduce,maprerank.")] = "full,reuse,blend",
    selectors: Annotated[
        str, typer.Option("--selectors", "--selector", help="Which tokens blends recompute; several as hkvd,random.")
    ] = "hkvd",
    ratios: Annotated[
        str, typer.Option("--ratios", "--ratio", help="Shares of chunk tokens recomputed, as 0,0.05,0.15,0.3.")
    ] = "0,0.15",
    records: Records = "all",
    condition: Annotated[
        str, typer.Option(help="What stands before a chunk while it is computed, as none,bos,system,dummy.")
    ] = "none",
    check_layers: Annotated[
        str | None, typer.Option(help="Schedules of the first selector, layer:share, as '1:0.3,4:0.15; 2:0.15'.")
    ] = None,
    corrector: Annotated[
        str | None,
        typer.Option(help="What is done to stored states that are kept, as mean-shift-0.5,temperature-0.95."),
    ] = None,
    reference: Annotated[str, typer.Option(help="What KL is given relative to: SELECTOR:RATIO.")] = "hkvd:0.15",
    answers: Annotated[bool, typer.Option("--answers/--no-answers", help="Generate and score answers.")] = True,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer; by task if not.")] = None,
    chunks: Annotated[str | None, typer.Option(help="Sweep: passages of a prompt, as 3,6,10.")] = None,
    chunk_tokens: Annotated[str | None, typer.Option(help="Sweep: tokens of a chunk, cut anew, as 128,256.")] = None,
    batch: Annotated[str, typer.Option(help="Sweep: prompts answered at once when TTFT is measured, as 1,4.")] = "1",
    skip_bad: SkipBad = False,
    out: Out = None,
    rows_into: Rows = None,
    figure: Annotated[Path | None, typer.Option(help="SVG or PNG file that the rows are drawn into.")] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Methods, selectors and ratios beside full recompute: KL, agreement, F1, Rouge-L and time to the first token."""
    shares = read_ratios(ratios, "--ratios")
    lists = [
        [] if text is None else read_lengths(text, name)
        for text, name in ((chunks, "--chunks"), (chunk_tokens, "--chunk-tokens"), (batch, "--batch"))
    ]
    named, schedules = _reference(reference), _schedules(check_layers)
    with work(as_json):
        from blendkv.bench.laying import sweep
        from blendkv.bench.plot import plot, require_drawing
        from blendkv.bench.quality import measure_quality
        from blendkv.bench.results import require_room, write_rows
        from blendkv.bench.settings import REFERENCE, reference_of, settings_of
        from blendkv.bench.tasks import UNCUT, read_task
        from blendkv.correctors import get_corrector
        from blendkv.selectors import get_selector

        _known_task(task)
        correctors = [] if corrector is None else _list(corrector)
        _usage(lambda: [get_corrector(name) for name in correctors], "--corrector")
        varied: dict[str, Any] = {"conditions": _list(condition), "schedules": schedules, "correctors": correctors}
        chosen = _list(methods), _list(selectors), shares, answers
        _usage(lambda: [get_selector(name) for name in _list(selectors)], "--selectors")
        settings = _usage(lambda: settings_of(*chosen, **varied), "--methods")
        if named != REFERENCE and reference_of(settings, *named).key[1:3] != named:
            raise typer.BadParameter(f"{reference} is not among what is measured", param_hint="--reference")
        if out is not None and rows_into is not None and out.absolute() == rows_into.absolute():
            raise typer.BadParameter("figures and rows need a file each", param_hint="--out, --rows")
        require_room(rows_into)
        require_drawing(figure)
        wanted: dict[str, Any] = {"limit": n, "records": records, "skip_bad": skip_bad}
        read_task(task, data, UNCUT, **wanted)  # what is malformed stops here, before a model is loaded
        loaded, tokenizer = load(model, dtype, device)
        reading = read_task(task, data, tokenizer, **wanted)
        about = {"model": _named(model), "task": task, "data": _named(data), "records": records}
        found = measure_quality(
            loaded,
            tokenizer,
            reading,
            settings,
            cells=list(sweep(*lists)),
            answers=answers,
            max_new_tokens=max_new_tokens,
            reference=named,
            about=about | {"commit": commit(), "command": command(), "skipped": len(reading.skipped)},
            out=out,
            progress=True,
        )
        if rows_into is not None:
            write_rows(rows_into, found.rows)
        if figure is not None:
            plot(found.rows, figure)
    if as_json:
        told = {**about, "prompts": len(reading.examples), "skipped": reading.skipped, "left_out": found.left_out}
        print_json({**told, "computed": found.computed, "verdicts": found.verdicts, "rows": found.rows})
        return
    _print_quality(found, f"{model}: {len(reading.examples)} prompts of {task}, KL(full recompute || method)")
    if len(reading.examples) < n:
        typer.echo(f"{n} prompts were asked for, and the data has no more of them", err=True)
    for line in reading.skipped:
        typer.echo(f"skipped: {line}", err=True)


@bench.command()
def insights(
    model: Model,
    data: Data = None,
    task: Task = "synthetic",
    n: Annotated[int, typer.Option("--n", "--prompts", min=1, help="Prompts, from the first that are wanted.")] = 10,
    ratios: Annotated[
        str, typer.Option("--ratios", "--ratio", help="Shares of chunk tokens recomputed.")
    ] = "0,0.05,0.1,0.15,0.2,0.3,0.5,1",
    selector: Annotated[str, typer.Option(help="Which tokens are recomputed.")] = "hkvd",
    records: Records = "all",
    skip_bad: SkipBad = False,
    rows_into: Rows = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """The two observations that CacheBlend rests on, on this model: see `bench plot` for the figures."""
    shares = read_ratios(ratios, "--ratios")
    with work(as_json):
        from blendkv.bench.insights import insight_rows
        from blendkv.bench.results import require_room, write_rows
        from blendkv.bench.tasks import UNCUT, read_task
        from blendkv.selectors import get_selector

        _known_task(task)
        chosen = _usage(lambda: get_selector(selector), "--selector")
        require_room(rows_into)
        wanted: dict[str, Any] = {"limit": n, "records": records, "skip_bad": skip_bad}
        read_task(task, data, UNCUT, **wanted)
        loaded, tokenizer = load(model, dtype, device, "eager")
        reading = read_task(task, data, tokenizer, **wanted)
        about = {"model": _named(model), "task": task, "data": _named(data)}
        rows = insight_rows(loaded, tokenizer, reading.examples, shares, chosen, about=about, progress=True)
        if rows_into is not None:
            write_rows(rows_into, rows)
    if as_json:
        print_json({**about, "prompts": len(reading.examples), "skipped": reading.skipped, "rows": rows})
        return
    print_table(
        ["figure", "layer", "ratio", "value"],
        [
            [row["figure"], _said(row["layer"], "d"), _said(row["ratio"], "g"), _said(row["value"], ".3f")]
            for row in rows
            if row["layer"] is None or row["figure"] != "attention deviation"
        ],
        f"{model}: {len(reading.examples)} prompts of {task}, selector {chosen.name}",
    )


@bench.command()
def leaderboard(
    files: Annotated[list[Path], typer.Argument(help="JSON files that `bench quality --rows` wrote.")],
    into: Annotated[Path | None, typer.Option(help="Page to write between its markers; printed if not given.")] = None,
) -> None:
    """Render the rows of `bench quality` as the leaderboard page."""
    with work(False):
        from blendkv.bench.leaderboard import board, page_with_board
        from blendkv.bench.results import read_rows

        rows = [row for file in files for row in read_rows(file)]
        if into is None:
            typer.echo(board(rows), nl=False)
            return
        into.write_text(page_with_board(into.read_text(encoding="utf-8"), rows), encoding="utf-8")


def check_prompts(task: str, data: str) -> None:
    """Refuses prompts that `verify --suggest` could not read, before a model is loaded."""
    from blendkv.bench.tasks import UNCUT, read_task

    _known_task(task)
    read_task(task, data, UNCUT)


def read_selectors(text: str) -> list[str]:
    """The selectors in a list such as `hkvd,boundary`."""
    from blendkv.selectors import get_selector

    for name in _list(text):
        _usage(lambda name=name: get_selector(name), "--selectors")
    return _list(text)


def make_suggestion(
    loaded: Any, tokenizer: Any, data: str | None, task: str, selectors: list[str], bound: float
) -> Any:
    """What `verify --suggest` finds."""
    from blendkv.bench.suggest import suggest

    return suggest(loaded, tokenizer, task=task, data=data, selectors=selectors, bound=bound, progress=True)


def print_suggestion(model: str, found: Any) -> None:
    """What `verify --suggest` says."""
    typer.echo("")
    print_table(
        ["selector", "ratio", "charged", "KL (nats)", "95% interval", "same answer", ""],
        [
            [
                row["selector"] or row["method"],
                _said(row["ratio"], "g"),
                _said(row["charged_budget"], ".3f"),
                _said(row["kl"], ".4f"),
                _interval(row["ci"]["kl"], ".4f"),
                _said(row["same"], ".0%"),
                row["holds"],
            ]
            for row in found.rows
        ],
        f"{model}: {found.prompts} prompts of {found.source}; bound: KL {found.bound:g} nats",
    )
    typer.echo(f"\n{found.told}")


def _line_name(row: dict[str, Any]) -> str:
    after = f"after {row['condition']}" if row["condition"] else None
    return ", ".join(filter(None, [row["method"], row["selector"], row["check_layers"], row["corrector"], after]))


def _print_quality(found: Any, title: str) -> None:
    for verdict in found.verdicts:
        place = (verdict["chunks"], verdict["chunk_tokens"], verdict["batch"])
        rows = [row for row in found.rows if (row["chunks"], row["chunk_tokens"], row["batch"]) == place]
        scored = verdict["can_do"] is not False and any(row["f1"] is not None for row in rows)
        names = ("passages", "tokens a chunk", "prompts at once")
        where = [f"{value} {name}" for value, name in zip(place, names, strict=True) if value not in (None, 1)]
        columns = [
            "method",
            "ratio",
            "charged",
            "KL (nats)",
            "95% interval",
            "of the reference",
            "same",
            "TTFT",
            "faster",
        ]
        print_table(
            columns + ["F1", "Rouge-L"] * scored,
            [
                [
                    _line_name(row),
                    _said(row["ratio"], "g"),
                    _said(row["charged_budget"], ".3f"),
                    _said(row["kl"], ".3f"),
                    _interval(row["ci"]["kl"], ".3f"),
                    _said(row["relative"], ".2f"),
                    _said(row["same"], ".0%"),
                    _said(row["ttft_s"], ".3f", " s"),
                    _said(row["speedup"], ".2f", "x"),
                    *([_said(row["f1"], ".3f"), _said(row["rouge_l"], ".3f")] if scored else []),
                ]
                for row in rows
            ],
            ", ".join([title, *where]),
        )
        typer.echo(f"{verdict['told']}\n")


def commit() -> str | None:
    """The commit of the checkout that this package is run from, with a + if files differ from it; None elsewhere."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout

    try:
        if not git("ls-files", "blendkv/__init__.py"):
            return None
        return git("rev-parse", "--short=12", "HEAD").strip() + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return None


def command() -> str:
    """The command line, with names of files in place of their paths on this machine."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join(["blendkv", *words])


def _reference(text: str) -> tuple[str, float]:
    name, _, ratio = text.rpartition(":")
    try:
        return name, float(ratio)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not SELECTOR:RATIO, such as hkvd:0.15", param_hint="--reference"
        ) from None


def _schedules(text: str | None) -> list[dict[int, float]]:
    """`1:0.3,4:0.15; 2:0.15` as two schedules."""
    found = []
    for part in filter(None, map(str.strip, (text or "").split(";"))):
        pairs = [pair.partition(":") for pair in _list(part)]
        try:
            schedule = {int(layer): float(share) for layer, _, share in pairs}
        except ValueError:
            schedule = {}
        if len(schedule) != len(pairs) or not schedule:
            raise typer.BadParameter(
                f"{part!r} is not LAYER:SHARE,LAYER:SHARE, such as 1:0.3,4:0.15", param_hint="--check-layers"
            )
        found.append(schedule)
    return found


def _known_task(task: str) -> None:
    from blendkv.bench.tasks import READERS, SAMSUM, SYNTHETIC

    one_of("--task", task, sorted({*READERS, SAMSUM, SYNTHETIC}))


def _usage(make: Any, option: str) -> Any:
    """What `make` makes; its ValueError is one of usage."""
    try:
        return make()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _list(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _named(data: str | None) -> str | None:
    """A model or data as rows name it: files by their names."""
    return data if data is None or not Path(data).exists() else Path(data).name


def _said(value: Any, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def _interval(pair: Any, form: str) -> str:
    return "" if pair is None else f"{pair[0]:{form}} to {pair[1]:{form}}"
