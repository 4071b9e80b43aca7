"""The command line. torch and transformers are imported inside the commands, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from blendkv import __version__
from blendkv._console import print_json, print_table, work

if TYPE_CHECKING:
    from blendkv.demo import Demo, Round
    from blendkv.selectors import Selector

main = typer.Typer(
    name="blendkv",
    help="Start an unmodified model.generate from cached, re-ordered and repaired key/value chunks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure speed and quality beside full recompute.", no_args_is_help=True)
main.add_typer(bench, name="bench")

DTYPES = ("float32", "bfloat16", "float16", "auto")
_MODEL_HELP = "Hub id, folder, GGUF file, or `bundled`."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
Dtype = Annotated[str, typer.Option(help="Of the weights: float32, bfloat16, float16, or auto.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto to spread the model.")]
Ratios = Annotated[str, typer.Option("--ratio", help="Share of chunk tokens recomputed; several as 0.05,0.15.")]
SelectorName = Annotated[str, typer.Option("--selector", help="Which tokens are recomputed.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"blendkv {__version__}")
        raise typer.Exit


@main.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Start an unmodified model.generate from cached, re-ordered and repaired key/value chunks."""


# -- demo -------------------------------------------------------------------------------------------------------------


@main.command()
def demo(
    model: Annotated[str, typer.Option(help="Hub id, folder, GGUF file, or `bundled`.")] = "bundled",
    ratio: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of chunk tokens recomputed.")] = 0.15,
    passages: Annotated[int, typer.Option(min=3, max=12, help="Passages in the prompt.")] = 12,
    as_json: Json = False,
) -> None:
    """Ask a real model three questions about a dozen passages, each computed once and then put in any order."""
    import time

    begin = time.perf_counter()
    with work(as_json):
        typer.echo(f"Loading {model} ...", err=True)
        from blendkv.demo import Demo, sentence

        shown = Demo(*_load(model), ratio=ratio, passages=passages, progress=True)
        load_s = time.perf_counter() - begin
        prefill_s = shown.prefill()
        if not as_json:
            typer.echo(
                f"{len(shown.passages)} passages ({shown.tokens:,} tokens) computed once in {prefill_s:.1f} s, each "
                f"alone after the system prompt, and kept ({shown.bytes / 2**20:.0f} MiB). Each question gets them in "
                "a new order.\n"
            )
        rounds = []
        for number, done in enumerate(shown.rounds(), 1):
            rounds.append(done)
            if not as_json:
                _print_round(number, done)
        said = sentence(rounds)
    total_s = time.perf_counter() - begin
    if as_json:
        print_json(_demo_json(shown, rounds, said, {"load_s": load_s, "prefill_s": prefill_s, "total_s": total_s}))
        return
    typer.echo(f"The report of the last blend:\n\n{rounds[-1].replies[-1].report}\n\n{said}")
    typer.echo(f"({total_s:.0f} s in all, {load_s:.0f} s of it loading)", err=True)


def _print_round(number: int, done: Round) -> None:
    title = f"{number}. {done.question.question} ({done.prompt_tokens:,} prompt tokens, {done.order[0]} first)"
    rows = [
        [
            reply.method,
            reply.answer.replace("\n", " "),
            f"{reply.ttft_s:.2f} s",
            f"{reply.speedup:.1f}x",
            f"{reply.recomputed:.0%}",
            f"{reply.kl:.3f}",
        ]
        for reply in done.replies
    ]
    print_table(["method", "answer", "TTFT", "speed-up", "recomputed", "KL (nats)"], rows, title, wrap=("answer",))
    typer.echo("")


def _demo_json(shown: Demo, rounds: list[Round], said: str, seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "ratio": shown.ratio,
        "passages": len(shown.passages),
        "chunk_tokens": shown.tokens,
        "chunk_bytes": shown.bytes,
        **seconds,
        "questions": [done.to_dict() for done in rounds],
        "summary": said,
    }


# -- verify -----------------------------------------------------------------------------------------------------------


@main.command()
def verify(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help=f"{_MODEL_HELP} With --tiny: families, or all.")],
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Try families of transformers, tiny, with random weights.")
    ] = False,
    write: Annotated[Path | None, typer.Option(help="With --tiny all: the guide to put the tables into.")] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    attn: Annotated[str, typer.Option(help="Attention implementation: sdpa or eager.")] = "sdpa",
    as_json: Json = False,
) -> None:
    """Prove that a model can be blended: every check with its figure. Exit code 1 if one fails."""
    _one_of("--attn", attn, ("sdpa", "eager"))
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

        loaded, tokenizer = _load(model, dtype, device, attn)
        checks = list(tqdm(run_checks(loaded, tokenizer), desc="verify", unit="check", leave=False))
    ok = all(check.ok for check in checks)
    if as_json:
        print_json({"ok": ok, "model": model, "checks": [check.to_dict() for check in checks]})
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


# -- bench ------------------------------------------------------------------------------------------------------------


@bench.command()
def ttft(
    model: Model,
    tokens: Annotated[int, typer.Option(min=1, help="Context tokens, all in chunks.")] = 4096,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 256,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens after the context.")] = 32,
    ratio: Ratios = "0.15",
    methods: Annotated[str, typer.Option(help="Of full, prefix, reuse, blend.")] = "full,prefix,reuse,blend",
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each; the median counts.")] = 3,
    selector: SelectorName = "hkvd",
    decode_tokens: Annotated[int, typer.Option(min=0, help="Tokens decoded after the first; 0 for none.")] = 64,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Time to the first token of an unmodified generate, warm, cache made inside the clock."""
    ratios, names = _ratios(ratio), [name.strip() for name in methods.split(",") if name.strip()]
    with work(as_json):
        from blendkv.bench.methods import METHODS
        from blendkv.bench.ttft import ttft_rows

        for name in names or [""]:
            _one_of("--methods", name, METHODS)
        chosen = _selector(selector)
        rows = ttft_rows(
            _load(model, dtype, device)[0],
            tokens=tokens,
            chunk_tokens=chunk_tokens,
            question_tokens=question_tokens,
            ratios=ratios,
            methods=names,
            repeats=repeats,
            selector=chosen,
            decode_tokens=decode_tokens,
            progress=True,
        )
    if as_json:
        print_json({"model": model, "dtype": dtype, "chunk_tokens": chunk_tokens, "repeats": repeats, "rows": rows})
        return
    print_table(
        ["method", "ratio", "TTFT", "speed-up", "FLOP limit", "of limit", "charged", "peak", "decode"],
        [
            [
                row["method"],
                "" if row["ratio"] is None else f"{row['ratio']:g}",
                f"{row['ttft_s']:.3f} s",
                f"{row['speedup']:.2f}x",
                f"{row['flop_limit']:.2f}x",
                f"{row['achieved_of_limit']:.0%}",
                f"{row['charged_budget']:.3f}",
                f"{row['peak_bytes'] / 2**20:.0f} MiB",
                "" if row["decode_tokens_per_s"] is None else f"{row['decode_tokens_per_s']:.1f}/s",
            ]
            for row in rows
        ],
        f"{model}: {tokens:,} + {question_tokens} tokens on {rows[0]['device_name'] or rows[0]['device']}",
    )


@bench.command()
def quality(
    model: Model,
    data: Annotated[str, typer.Option(help="File with the task's records (JSON, or .jsonl).")],
    task: Annotated[str, typer.Option(help="hotpot or musique.")] = "hotpot",
    prompts: Annotated[int, typer.Option(min=1, help="Records read, from the first.")] = 20,
    ratio: Ratios = "0,0.15",
    selector: SelectorName = "hkvd",
    source: Annotated[str, typer.Option(help="What HKVD compares: k, v or kv.")] = "k",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """KL to full recompute over the first 12 answer tokens, and how often the answer is the same."""
    ratios = _ratios(ratio)
    _one_of("--source", source, ("k", "v", "kv"))
    with work(as_json):
        from blendkv.bench.quality import quality_rows
        from blendkv.bench.tasks import READERS, read_examples

        _one_of("--task", task, sorted(READERS))
        chosen = _selector(selector, source)
        loaded, tokenizer = _load(model, dtype, device)
        examples = read_examples(task, data, tokenizer, prompts)
        if not examples:
            raise ValueError(f"{data} holds no records")
        rows = quality_rows(loaded, tokenizer, examples, ratios, chosen, progress=True)
    if as_json:
        print_json({"model": model, "task": task, "prompts": len(examples), "rows": rows})
        return
    print_table(
        ["method", "ratio", "KL (nats)", "95% interval", "first token", "same answer", "charged", "minus first row"],
        [
            [
                row["method"] if row["selector"] is None else f"{row['method']}, {row['selector']}",
                f"{row['ratio']:g}",
                f"{row['kl']:.3f}",
                f"{row['kl_low']:.3f} to {row['kl_high']:.3f}",
                f"{row['first_kl']:.3f}",
                f"{row['same_answer']:.0%}",
                f"{row['charged_budget']:.3f}",
                f"{row['kl_minus_first_row']:+.3f}",
            ]
            for row in rows
        ],
        f"{model}: {len(examples)} prompts of {task}, KL(full recompute || method)",
    )


# -- what commands are given ------------------------------------------------------------------------------------------


def _load(model: str, dtype: str = "float32", device: str = "cpu", attn: str | None = None) -> tuple[Any, Any]:
    _one_of("--dtype", dtype, DTYPES)
    from blendkv.models import load_model

    return load_model(model, dtype=dtype, device=device, attn_implementation=attn)


def _ratios(text: str) -> list[float]:
    """The numbers in a list such as `0,0.15`."""
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 0.05,0.15", param_hint="--ratio") from None
    for ratio in ratios:
        if not 0.0 <= ratio <= 1.0:
            raise typer.BadParameter(f"{ratio:g} is outside [0, 1]", param_hint="--ratio")
    return ratios


def _selector(name: str, source: Any = "k") -> Selector:
    """The selector of a name."""
    from blendkv.selectors import HKVD, get_selector, selector_names

    _one_of("--selector", name, selector_names())
    return HKVD(source) if name == "hkvd" else get_selector(name)


def _one_of(option: str, value: str, choices: Any) -> None:
    if value not in choices:
        raise typer.BadParameter(f"{value!r}: choose one of {', '.join(choices)}", param_hint=option)
