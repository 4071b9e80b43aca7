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
Files = Annotated[list[Path], typer.Argument(help="JSON files that `bench ttft --out` wrote.")]
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
    pool: Annotated[str, typer.Option(help="Where chunks lie: cuda, cpu, pinned; auto: where computed.")] = "auto",
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
    ratios, lengths = _ratios(ratio), _lengths(tokens)
    with work(as_json):
        from blendkv.bench.methods import METHODS
        from blendkv.bench.prompts import POOLS
        from blendkv.bench.results import read_rows, write_rows
        from blendkv.bench.ttft import ttft_rows
        from blendkv.selectors import selector_names

        names = _names("--methods", methods, METHODS)
        _one_of("--pool", pool, POOLS)
        chosen = [_selector(name) for name in _names("--selector", selector, selector_names())]
        if out is not None and out.exists():
            read_rows(out)  # before hours of work, not after
        loaded = _load(model, dtype, device)[0] if model is not None else _shaped(str(shape), dtype, device)
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
            pool=pool,
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
        ["method", "ratio", "tokens", "TTFT", "speed-up", "FLOP limit", "of limit", "charged", "peak", "decode"],
        [
            [
                row["method"] if row["selector"] is None else f"{row['method']} {row['selector']}",
                _number(row["ratio"], "g"),
                _number(row["tokens"], ","),
                _number(row["ttft_s"], ".4f", " s"),
                _number(row["speedup"], ".2f", "x"),
                _number(row["flop_limit"], ".2f", "x"),
                _number(row["achieved_of_limit"], ".0%"),
                _number(row["charged_budget"], ".3f"),
                _number(row["peak_bytes"] / 2**20, ",.0f", " MiB"),
                _number(row["decode_tokens_per_s"], ".1f", "/s"),
            ]
            for row in rows
        ],
        f"{rows[0]['shape']}, {rows[0]['dtype']}, {rows[0]['question_tokens']} question tokens, batch "
        f"{rows[0]['batch']}, chunks in {rows[0]['pool']} memory, on {rows[0]['device']}",
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
                _number(row["ratio"], "g"),
                _number(row["tokens"], ","),
                mib(row["peak_bytes"]),
                mib(row["expected_peak_bytes"]),
                _number(row["expected_peak_bytes"] and row["peak_bytes"] / row["expected_peak_bytes"], ".0%"),
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
    """Print the rows that `bench ttft --out` kept as Markdown tables."""
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
    lengths = _lengths(tokens)
    with work(as_json):
        from blendkv.bench.coding import coding_rows
        from blendkv.bench.kernels import kernel_rows
        from blendkv.bench.loading import loading_rows

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
) -> None:
    """Draw speed-up over context length with FLOP limits dashed (needs matplotlib)."""
    with work(False):
        from blendkv.bench.plot import plot as draw
        from blendkv.bench.results import read_rows

        draw([row for file in files for row in read_rows(file)], out)


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


def _shaped(shape: str, dtype: str, device: str) -> Any:
    """A model of a known shape."""
    from blendkv.bench.shapes import SHAPES, shape_model

    _one_of("--shape", shape, SHAPES)
    if dtype == "auto":
        raise typer.BadParameter("a shape has no dtype of its own: name one", param_hint="--dtype")
    _one_of("--dtype", dtype, DTYPES)
    _check_device("cuda" if device == "auto" else device)
    import torch

    return shape_model(shape, dtype=getattr(torch, dtype), device=device)


def _check_device(device: str) -> None:
    """Refuses a device that torch does not know or see."""
    import torch

    if device == "auto":
        return
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise typer.BadParameter(f"{device!r} is not a device: cpu, cuda, cuda:1, ...", param_hint="--device") from None
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(
            f"{device!r}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices here",
            param_hint="--device",
        )


def _load(model: str, dtype: str = "float32", device: str = "cpu", attn: str | None = None) -> tuple[Any, Any]:
    _one_of("--dtype", dtype, DTYPES)
    _check_device(device)
    from blendkv.models import load_model

    return load_model(model, dtype=dtype, device=device, attn_implementation=attn)


def _number(value: float | None, form: str, unit: str = "") -> str:
    """A figure, or nothing where there is none."""
    return "" if value is None else f"{value:{form}}{unit}"


def _ratios(text: str) -> list[float]:
    """The numbers in a list such as `0,0.15`."""
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 0.05,0.15", param_hint="--ratio") from None
    for ratio in ratios:
        if not 0.0 <= ratio <= 1.0:
            raise typer.BadParameter(f"{ratio:g} is outside [0, 1]", param_hint="--ratio")
    return list(dict.fromkeys(ratios))


def _lengths(text: str) -> list[int]:
    """The numbers in a list such as `2048,4096`."""
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers such as 2048,4096", param_hint="--tokens"
        ) from None
    for length in lengths:
        if length < 1:
            raise typer.BadParameter(f"{length} is not a number of tokens: at least 1", param_hint="--tokens")
    return list(dict.fromkeys(lengths))


def _names(option: str, text: str, choices: Any) -> list[str]:
    """The names in a list such as `full,blend`, each once."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names or [""]:
        _one_of(option, name, choices)
    return names


def _selector(name: str, source: Any = "k") -> Selector:
    """The selector of a name."""
    from blendkv.selectors import HKVD, get_selector, selector_names

    _one_of("--selector", name, selector_names())
    return HKVD(source) if name == "hkvd" else get_selector(name)


def _one_of(option: str, value: str, choices: Any) -> None:
    if value not in choices:
        raise typer.BadParameter(f"{value!r}: choose one of {', '.join(choices)}", param_hint=option)
