"""Three methods on one prompt, one after the other, told as a sequence of views. Knows nothing of the page."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from blendkv import _compat
from blendkv.bench.methods import forced_logits, states_of
from blendkv.divergence import kl_divergence
from blendkv.integrations.answering import PromptTooLongError, room
from blendkv.layout import Prompt
from blendkv.library import ChunkLibrary
from blendkv.report import BlendReport
from blendkv.web.asked import Asked
from blendkv.web.telling import Told, tell
from blendkv.web.tokens import Picture, deviation_of, picture_of

METHODS = ("full recompute", "full reuse", "blend")
SYSTEM = "Answer the question using the passages below."
ANSWER_TOKENS = 32
"""Most tokens of an answer."""
KL_STEPS = 12
"""Answer tokens of full recompute that the others are compared on."""
PROMPT_TOKENS = 4_096
"""Most tokens of a prompt: full recompute of so many takes seconds on a CPU, and cannot be stopped half-way."""
WARM = Asked((8 * "The quick brown fox jumps over the lazy dog. ", 8 * "Pack my box with five dozen jugs. "), "Why?")

State = Literal["waiting", "running", "done", "stopped"]


@dataclass(frozen=True)
class Column:
    """One method, as far as it is.

    Attributes:
        method: of `METHODS`.
        state: "waiting" for its turn, "running", "done", "stopped".
        text: of the answer so far.
        ttft_s: seconds from the documents as text to the first token; None before it is there.
        recomputed: share of chunk tokens computed in every layer; None before the prompt is computed.
        kl: nats a token from full recompute, over the first tokens of its answer; None before it was measured.
        same: whether the answer is full recompute's, word for word; None before both are there.
    """

    method: str
    state: State = "waiting"
    text: str = ""
    ttft_s: float | None = None
    recomputed: float | None = None
    kl: float | None = None
    same: bool | None = None


@dataclass(frozen=True)
class Prepared:
    """How the prompt's chunks came to be in memory, before any clock started.

    Attributes:
        loaded: tokens by where they were: "memory", or the URL of a store.
        computed: tokens that nobody had, computed and kept.
        seconds: that it took.
        device: type of the device on which chunks in memory are: "cpu", "cuda".
    """

    loaded: Mapping[str, int]
    computed: int
    seconds: float
    device: str


@dataclass(frozen=True)
class View:
    """All there is to show at one moment.

    Attributes:
        doing: a sentence on what is being done.
        columns: one a method.
        prompt_tokens: of the prompt; 0 before it is laid out.
        prepared: where chunks came from.
        report: of the blend.
        picture: the prompt's tokens.
        finished: whether nothing more comes.
    """

    doing: str
    columns: tuple[Column, ...] = tuple(map(Column, METHODS))
    prompt_tokens: int = 0
    prepared: Prepared | None = None
    report: BlendReport | None = field(default=None, repr=False)
    picture: Picture | None = field(default=None, repr=False)
    finished: bool = False

    def with_column(self, index: int, **changes: Any) -> View:
        """The same with one column changed."""
        columns = list(self.columns)
        columns[index] = replace(columns[index], **changes)
        return replace(self, columns=tuple(columns))


class Comparison:
    """A model, and the chunks of whatever it was asked about. One may be shared by threads.

    Args:
        model: a transformers decoder (attached, and proven, here).
        tokenizer: its tokenizer.
        store: where chunks are kept, as in `ChunkLibrary`.
        capacity_bytes: most bytes of chunks in memory.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, store: Any = "memory://", capacity_bytes: int = 2 << 30
    ) -> None:
        self.library = ChunkLibrary(model, tokenizer, store, condition="system", capacity_bytes=capacity_bytes)
        self._warm: set[str] = set()

    @property
    def about(self) -> str:
        """The model's size, dtype and device, for people."""
        weights = list(self.library.model.parameters())
        count = sum(weight.numel() for weight in weights)
        size = f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.0f} million"
        return f"{size} parameters, {str(weights[0].dtype).removeprefix('torch.')}, on {weights[0].device.type}"

    def warm_up(self, selector: str = "hkvd") -> None:
        """Runs all methods on a short prompt, once a selector, so that the first of them is not punished."""
        if selector in self._warm:
            return
        asked = replace(WARM, selector=selector)
        prompt = self.library.assemble(asked.documents, asked.question, SYSTEM)
        self.library.inputs(prompt)
        for make in self._makers(asked, {}):
            for _ in tell(self.library, make, 2, threading.Event()):
                pass
        self._warm.add(selector)

    def run(self, asked: Asked, stopped: threading.Event | None = None) -> Generator[View]:
        """Yields views, the last one finished. Closing the generator ends what is being computed.

        Args:
            asked: documents, question and how to blend.
            stopped: set by another thread to end at the next token, with what is there.

        Raises:
            PromptTooLongError: if the prompt is longer than `PROMPT_TOKENS`, or leaves the model no room.
        """
        stopped = stopped or threading.Event()
        prompt = self.library.assemble(asked.documents, asked.question, SYSTEM)
        most = self._room(prompt)
        view = View("Warming up for this selector", prompt_tokens=len(prompt.ids))
        if asked.selector not in self._warm and not stopped.is_set():
            yield view
            self.warm_up(asked.selector)
        if not stopped.is_set():
            view = replace(view, doing="Computing the keys and values of documents that are new")
            yield view
            view = replace(view, prepared=self._prepare(asked))
        caches: dict[int, Cache] = {}
        answers: list[Told] = []
        for index, make in enumerate(self._makers(asked, caches)):
            if stopped.is_set():
                break
            view = replace(view, doing=f"Answering by {METHODS[index]}").with_column(index, state="running")
            yield view
            view = yield from self._answer(view, index, make, most, stopped, answers)
            view = self._noted(view, index, caches[index], answers)
        if stopped.is_set():
            columns = tuple(c if c.state == "done" else replace(c, state="stopped") for c in view.columns)
            yield replace(view, columns=columns, doing="Stopped", finished=True)
            return
        view = replace(view, doing="Measuring how far keys, values and answers are from full recompute")
        yield view
        yield replace(self._measured(view, prompt, caches, answers[0]), doing="Done", finished=True)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _room(self, prompt: Prompt) -> int:
        """Most tokens of an answer."""
        if (tokens := len(prompt.ids)) > PROMPT_TOKENS:
            raise PromptTooLongError(
                f"The prompt has {tokens:,} tokens, and this page takes {PROMPT_TOKENS:,}: shorten the documents or "
                "leave some out."
            )
        return min(ANSWER_TOKENS, room(self.library.model, len(prompt.ids)))

    def _prepare(self, asked: Asked) -> Prepared:
        """Brings all chunks into memory; those that are new are computed."""
        start, report = time.perf_counter(), BlendReport()
        chunks = self.library.prefill(asked.documents, SYSTEM, report)
        head = self.library([], "", SYSTEM).report
        loaded = dict(report.loaded)
        for tier, tokens in head.loaded.items():
            loaded[tier] = loaded.get(tier, 0) + tokens
        computed = report.prefilled_tokens + head.prefilled_tokens
        return Prepared(loaded, computed, time.perf_counter() - start, chunks[0].keys[0].device.type)

    def _makers(self, asked: Asked, caches: dict[int, Cache]) -> list[Callable[[], Mapping[str, Any]]]:
        """For each method what makes the inputs of `generate` from texts; the caches are kept."""

        def full() -> Mapping[str, Any]:
            ids = torch.tensor(
                [self.library.assemble(asked.documents, asked.question, SYSTEM).ids],
                device=next(self.library.model.parameters()).device,
            )
            caches[0] = DynamicCache()
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), _compat.CACHE_ARG: caches[0]}

        def blended(index: int, ratio: float) -> Callable[[], Mapping[str, Any]]:
            def make() -> Mapping[str, Any]:
                options = {"recompute_ratio": ratio, "selector": asked.selector if ratio else "none"}
                inputs = self.library(asked.documents, asked.question, SYSTEM, **options)
                caches[index] = inputs.cache
                return inputs

            return make

        return [full, blended(1, 0.0), blended(2, asked.ratio)]

    def _answer(
        self,
        view: View,
        index: int,
        make: Callable[[], Mapping[str, Any]],
        most: int,
        stopped: threading.Event,
        answers: list[Told],
    ) -> Generator[View, None, View]:
        """Tells one method's answer; returns the view with its figures."""
        for piece in (telling := _Kept(tell(self.library, make, most, stopped))):
            view = view.with_column(index, text=(view.columns[index].text + piece).lstrip())
            yield view
        told = telling.result
        answers.append(told)
        state: State = "stopped" if stopped.is_set() else "done"
        return view.with_column(index, state=state, text=told.text, ttft_s=told.ttft_s)

    @staticmethod
    def _noted(view: View, index: int, cache: Any, answers: list[Told]) -> View:
        """Adds what the report of a blend says."""
        if index == 0:
            return view.with_column(0, recomputed=1.0, kl=0.0, same=True)
        if view.columns[index].state == "done":
            view = view.with_column(index, same=answers[index].text == answers[0].text)
        view = view.with_column(index, recomputed=cache.report.recomputed_share)
        return replace(view, report=cache.report) if index == 2 else view

    @torch.no_grad()
    def _measured(self, view: View, prompt: Prompt, caches: dict[int, Any], full: Told) -> View:
        """Adds deviations of tokens and distances of answers; the caches are cut back to the prompt."""
        tokens = len(prompt.ids)
        deviation = deviation_of(states_of(caches[0]), states_of(caches[1]), tokens)
        recomputed = [int(i) for i in caches[2].recomputed[0]]
        picture = picture_of(self.library.tokenizer, prompt, deviation, recomputed)
        steps = full.tokens[:KL_STEPS]
        wanted = self._forced(caches[0], prompt, steps)
        for index in (1, 2):
            kl = kl_divergence(wanted, self._forced(caches[index], prompt, steps))
            view = view.with_column(index, kl=float(kl.mean()))
        return replace(view, picture=picture)

    def _forced(self, cache: Any, prompt: Prompt, answer: Tensor) -> Tensor:
        """`[N, V]` logits of an answer that is forced upon a cache that holds the prompt."""
        model: Any = self.library.model
        cache.crop(_compat.crop_argument(cache.get_seq_length(), len(prompt.ids) - 1))
        ids = torch.tensor([prompt.ids], device=answer.device)
        return forced_logits(model, ids, answer, cache)


class _Kept:
    """Iterates over a generator, closes it, and keeps what it returned."""

    def __init__(self, generator: Generator[str, None, Told]) -> None:
        self._generator = generator
        self.result: Any = None

    def __iter__(self) -> Generator[str]:
        try:
            self.result = yield from self._generator
        finally:
            self._generator.close()
