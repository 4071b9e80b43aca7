"""`blendkv demo`: a real model in the terminal, or on a page."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendkv._console import print_json, print_table, work
from blendkv._options import Device, Dtype, Json, load
from blendkv.sockets import LOOPBACK, listen

if TYPE_CHECKING:
    from blendkv.demo import Demo, Round

MISSING = "the page needs gradio, which is not installed: pip install 'blendkv[web]'"


def demo(
    model: Annotated[str, typer.Option(help="Hub id, folder, GGUF file, or `bundled`.")] = "bundled",
    ratio: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of chunk tokens recomputed.")] = 0.15,
    passages: Annotated[int, typer.Option(min=3, max=12, help="Passages in the prompt.")] = 12,
    web: Annotated[bool, typer.Option("--web", help="A page to try it on, in a browser (extra: web).")] = False,
    host: Annotated[
        str, typer.Option(help="With --web: address to listen on. 127.0.0.1 is reached from this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --web: port; 0 takes a free one.")] = 7860,
    store: Annotated[
        str, typer.Option(metavar="URL", help="With --web: where chunks are kept; a folder, say.")
    ] = "memory://",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Ask a real model three questions about a dozen passages, each computed once and then put in any order.

    With --web a page opens the same to your own documents and questions.
    """
    import time

    begin = time.perf_counter()
    if web:
        if as_json:
            raise typer.BadParameter("a page prints none; programs call its endpoint", param_hint="--json")
        _page(model, dtype, device, store, host, port)
        return
    with work(as_json):
        typer.echo(f"Loading {model} ...", err=True)
        from blendkv.demo import Demo, sentence

        shown = Demo(*load(model, dtype, device), ratio=ratio, passages=passages, progress=True)
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


def _page(model: str, dtype: str, device: str, store: str, host: str, port: int) -> None:
    """Serves the page until Ctrl-C."""
    import os

    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported
    with work(False):
        if find_spec("gradio") is None:
            raise ImportError(MISSING)
        with listen(host, port) as sock:  # before the model: a port in use is known at once
            typer.echo(f"Loading {model} ...", err=True)
            from blendkv.web.page import application
            from blendkv.web.running import Comparison
            from blendkv.web.server import serve
            from blendkv.web.visitors import Visitors

            comparison, visitors = Comparison(*load(model, dtype, device), store), Visitors()
            with comparison.library:
                comparison.warm_up()
                app = application(comparison, f"{model}, {comparison.about}", visitors)
                serve(app, sock, lambda: _ready(host, sock.getsockname()[1]), visitors.stop_all)


def _ready(host: str, port: int) -> None:
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"blendkv: the page is at http://{shown}:{port} (Ctrl-C ends it)", err=True)
    if host not in LOOPBACK:
        typer.echo(f"blendkv: {host} is reached from other machines, and the page asks for no password", err=True)
