"""The page itself: what is where, and what happens on a click. What it shows is computed in `running`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Generator
from importlib.resources import files
from typing import Any

import gradio as gr

from blendkv.errors import BlendError
from blendkv.passages import read_passages
from blendkv.web import drawing
from blendkv.web.asked import DOCUMENTS, Asked
from blendkv.web.running import ANSWER_TOKENS, Comparison, View
from blendkv.web.visitors import Visitors

TITLES = ("Saffron", "The Oresund crossing", "Octopuses", "The Rosetta Stone", "The Emu War")
"""Passages that the page begins with."""
QUESTIONS = (
    "Why is the blood of an octopus blue?",
    "When was the Oresund crossing opened?",
    "How was the Rosetta Stone deciphered?",
)
QUEUE = 16
"""Most visitors who wait for their turn."""
SELECTORS = [
    ("hkvd: keys that moved most", "hkvd"),
    ("hkvd-v: values that moved most", "hkvd-v"),
    ("attention: what the question attends to", "attention"),
    ("attention*hkvd-v^0.5: both, multiplied", "attention*hkvd-v^0.5"),
    ("boundary: first tokens of each document", "boundary"),
    ("20%boundary+attention: a budget shared", "20%boundary+attention"),
    ("every-8: every eighth token", "every-8"),
    ("random: a control", "random"),
]
ABOUT = (
    "Documents are computed once, each alone, and reused in any prompt and any order. Edit them, ask something, and "
    f"see what reuse costs and what a blend repairs. Answers are cut at {ANSWER_TOKENS} tokens. Everything runs on "
    "this machine."
)
Shown = tuple[str, str, str, str]
"""HTML of the status, the results, the prompt and the origins."""


def build(comparison: Comparison, title: str, visitors: Visitors) -> gr.Blocks:
    """The page: boxes on the left, what comes of them on the right. Arguments as for `application`."""
    passages = {passage.title: passage.text for passage in read_passages()[0]}
    texts = [passages[name] for name in TITLES]

    def tell(request: gr.Request, number: int, *given: Any) -> Generator[Shown]:
        *documents, question, ratio, selector = given
        visitor = str(request.session_hash)
        try:
            asked = Asked.of([text or "" for text in documents], question or "", ratio, selector)
            yield from map(shown, comparison.run(asked, visitors.event(visitor, number)))
        except Exception as error:
            yield drawing.status(sentence(error), error=True), drawing.results(View("")), EMPTY, EMPTY
        finally:
            visitors.end(visitor, number)

    def compare(
        documents: list[str], question: str, ratio: float = 0.15, selector: str = "hkvd"
    ) -> Generator[dict[str, Any]]:
        """Answers of the three methods, and what they cost, as they come; the last one is finished."""
        try:
            yield from map(plain, comparison.run(Asked.of(documents, question, ratio, selector)))
        except Exception as error:
            raise gr.Error(sentence(error)) from error

    with gr.Blocks(title=f"blendkv: {title}", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(
            f"<h1>blendkv</h1><p>{ABOUT}</p><p class='bk-about'>Model: {drawing.escape(title)}</p>",
            elem_classes="bk-html",
        )
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                question = gr.Textbox(QUESTIONS[0], label="Question", max_lines=1, elem_id="bk-question")
                gr.Examples(list(QUESTIONS), question, label="Questions to try")
                ratio = gr.Slider(
                    0.0, 1.0, 0.15, step=0.01, label="Share of document tokens that the blend computes again",
                    buttons=[], elem_id="bk-ratio",
                )  # fmt: skip
                selector = gr.Dropdown(
                    SELECTORS, value="hkvd", label="Selector: which tokens", allow_custom_value=True,
                    info="Or type another name, such as hkvd@per-chunk.", elem_id="bk-selector",
                )  # fmt: skip
                with gr.Row(elem_id="bk-actions"):
                    run = gr.Button("Run", variant="primary", elem_id="bk-run", min_width=100)
                    stop = gr.Button("Stop", elem_id="bk-stop", min_width=100)
                with gr.Row():
                    shuffle = gr.Button("Shuffle the documents", size="sm", elem_id="bk-shuffle", min_width=100)
                    more = gr.Button("Add a document", size="sm", elem_id="bk-more", min_width=100)
                documents = [
                    gr.Textbox(
                        texts[i] if i < len(texts) else "", label=f"Document {i + 1}", lines=2, max_lines=8,
                        visible=i < len(texts), elem_id=f"bk-document-{i + 1}",
                    )
                    for i in range(DOCUMENTS)
                ]  # fmt: skip
            with gr.Column(scale=5, min_width=300, elem_id="bk-right"):
                status = gr.HTML(drawing.status(READY), elem_id="bk-status", elem_classes="bk-html")
                results = gr.HTML(drawing.results(View("")), elem_id="bk-results", elem_classes="bk-html")
                with gr.Accordion("The prompt, token by token", open=True):
                    tokens = gr.HTML(EMPTY, elem_id="bk-tokens", elem_classes="bk-html")
                with gr.Accordion("What came from where", open=True):
                    origins = gr.HTML(EMPTY, elem_id="bk-origins", elem_classes="bk-html")

        def begin(request: gr.Request) -> tuple[int, str]:
            return visitors.begin(str(request.session_hash)), drawing.status("Waiting for a turn ...")

        def halt(request: gr.Request) -> None:  # page.js shows it: an answer might come after the run's last view
            visitors.stop(str(request.session_hash))

        def leave(request: gr.Request) -> None:
            visitors.leave(str(request.session_hash))

        hidden: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        number, boxes = gr.State(0), gr.State(len(TITLES))
        started = gr.on(
            [run.click, question.submit], begin, None, [number, status], queue=False, trigger_mode="once", **hidden
        )
        started.then(
            tell, [number, *documents, question, ratio, selector], [status, results, tokens, origins],
            concurrency_limit=1, concurrency_id="model", trigger_mode="multiple", **hidden,
        )  # fmt: skip
        stop.click(halt, queue=False, **hidden)
        shuffle.click(shuffled, documents, documents, queue=False, **hidden)
        more.click(added, boxes, [boxes, more, *documents], queue=False, **hidden)
        page.unload(leave)
        gr.api(compare, api_name="compare", concurrency_limit=1, concurrency_id="model")
    return page.queue(max_size=QUEUE)


READY = "Ready. Run, or Ctrl-Enter anywhere, asks all three."
EMPTY = '<p class="bk-about">Here after a run.</p>'


def application(comparison: Comparison, title: str, visitors: Visitors | None = None) -> Any:
    """The page for a model as an ASGI application.

    Args:
        comparison: computes what is shown.
        title: of the model, for people.
        visitors: who may be stopped, for a caller who ends them all.
    """

    async def made() -> Any:  # outside a running event loop gradio opens some of its own, and leaves them open
        return mounted(build(comparison, title, visitors or Visitors()))

    return asyncio.run(made())


def mounted(page: gr.Blocks) -> Any:
    """A page as an ASGI application that asks no other host for anything."""
    from fastapi import FastAPI

    own = files("blendkv.web")
    return gr.mount_gradio_app(
        FastAPI(openapi_url=None),
        page,
        path="/",
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        max_file_size=0,
        enable_monitoring=False,
        theme=theme(),
        css=own.joinpath("page.css").read_text(encoding="utf-8"),
        js=own.joinpath("page.js").read_text(encoding="utf-8"),
    )


def theme() -> Any:
    """Gradio's own, with the reader's fonts, and with enough contrast."""
    made = gr.themes.Default(
        primary_hue="teal", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    return made.set(
        button_primary_background_fill="#0f766e",
        button_primary_background_fill_dark="#0f766e",
        button_primary_background_fill_hover="#115e59",
        button_primary_background_fill_hover_dark="#115e59",
        block_info_text_color="#57606a",
        block_info_text_color_dark="#9da7b3",
        block_label_text_color="#424a53",
        block_label_text_color_dark="#c3cad2",
        block_title_text_color="#424a53",
        block_title_text_color_dark="#c3cad2",
    )


def shown(view: View) -> Shown:
    """A view as the page's parts."""
    empty = EMPTY if view.picture is None else ""
    return (
        drawing.status(view.doing + ("." if view.finished else " ...")),
        drawing.results(view),
        drawing.picture(view) or empty,
        drawing.origins(view) or empty,
    )


def plain(view: View) -> dict[str, Any]:
    """A view as plain values, for programs."""
    return {
        "doing": view.doing,
        "finished": view.finished,
        "prompt_tokens": view.prompt_tokens,
        "methods": [vars(column) for column in view.columns],
        "loaded": None if view.prepared is None else dict(view.prepared.loaded),
        "computed": None if view.prepared is None else view.prepared.computed,
    }


def sentence(error: Exception) -> str:
    """What went wrong, for people; what nobody expected is named, too."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if isinstance(error, BlendError) else f"This did not work ({type(error).__name__}): {said}"


def shuffled(*documents: str) -> list[str]:
    """Another order of the documents that are not blank; boxes that are empty stay at the end."""
    texts = [text for text in documents if text and text.strip()]
    order = texts
    while len(set(texts)) > 1 and order == texts:
        order = random.sample(texts, len(texts))
    return order + [""] * (len(documents) - len(order))


def added(boxes: int) -> tuple[int, dict[str, Any], *tuple[dict[str, Any], ...]]:
    """One more box: how many there are then, the button that adds them, and all boxes."""
    boxes = min(DOCUMENTS, boxes + 1)
    shown = (gr.update(visible=True) if i < boxes else gr.skip() for i in range(DOCUMENTS))
    return boxes, gr.update(interactive=boxes < DOCUMENTS), *shown
