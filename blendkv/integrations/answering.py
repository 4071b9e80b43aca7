"""One answer from a library's model: at once, as a stream, or in an event loop; with one way to stop it."""

from __future__ import annotations

import asyncio
import contextvars
import math
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from blendkv.errors import BlendError
from blendkv.integrations.detokenizing import AnswerStreamer
from blendkv.layout import Prompt
from blendkv.library import ChunkLibrary
from blendkv.report import BlendReport

_END = object()


class PromptTooLongError(BlendError, ValueError):
    """The prompt leaves no room for an answer."""


@dataclass(frozen=True)
class Settings:
    """How to answer.

    Attributes:
        max_tokens: most tokens of the answer.
        temperature: 0 takes the likeliest token each time.
        top_p, top_k: as `generate` has them; None leaves them to the model's generation config.
        stop: strings that end the answer, and are not part of it.
        timeout: most seconds, after which `TimeoutError` is raised.
        blend: options of `BlendedCache` for this answer.

    Raises:
        ValueError: for a value that cannot be.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    timeout: float | None = None
    blend: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens!r}: give a whole number, at least 1")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature={self.temperature}: give 0 (the likeliest token) or more")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout}: give seconds, more than 0, or None")
        if isinstance(self.stop, str) or not all(isinstance(stop, str) and stop for stop in self.stop):
            raise ValueError(f"stop={self.stop!r}: give a list of strings that are not empty")

    @classmethod
    def of(cls, settings: Mapping[str, Any], blend: Mapping[str, Any] | None = None) -> Settings:
        """Settings as users of frameworks give them: stop strings in a list, blend options on their own.

        Raises:
            TypeError: for a setting that there is not.
            ValueError: for a value that cannot be.
        """
        names = {name.name for name in fields(cls)} - {"blend"}
        if unknown := sorted(set(settings) - names):
            raise TypeError(f"unknown settings {', '.join(unknown)}: choose among {', '.join(sorted(names))}")
        options = dict(blend or {})
        if "recompute_ratio" in options:
            options.setdefault("check_layers", None)  # a schedule of the library would outweigh it
        given = dict(settings)
        stop = given.pop("stop", None) or ()
        return cls(**given, stop=stop if isinstance(stop, str) else tuple(stop), blend=options)

    def sampling(self) -> dict[str, Any]:
        """What `generate` is told."""
        if not self.temperature:  # None: what the model's own config says of sampling would only be warned about
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {"do_sample": True} | {name: value for name, value in chosen.items() if value is not None}


@dataclass(frozen=True)
class Answer:
    """What came of it.

    Attributes:
        text: the answer, without special tokens and stop strings.
        prompt_tokens: tokens of the prompt.
        tokens: tokens of the answer that were computed, the end token and those of a stop string among them.
        finish: "stop" at an end token or a stop string, "length" at the most tokens, "cancelled".
        report: what was reused.
    """

    text: str
    prompt_tokens: int
    tokens: int
    finish: Literal["stop", "length", "cancelled"]
    report: BlendReport

    @property
    def cache_creation(self) -> int:
        """Tokens of chunks that were computed for this prompt and put into the store."""
        return self.report.prefilled_tokens

    @property
    def cache_read(self) -> int:
        """Prompt tokens that had not to be computed: keys and values were there before, and are used in every layer.

        If some chunks of the prompt were there and others were computed for it, reused tokens count by their shares.
        """
        loaded = sum(self.report.loaded.values())
        return self.report.reused_tokens * loaded // max(1, loaded + self.report.prefilled_tokens)


class _Ended(StoppingCriteria):
    """Ends `generate` at the next token: asked to, at a stop string, or out of time."""

    def __init__(self, stopped: threading.Event, streamer: AnswerStreamer, deadline: float) -> None:
        self._stopped, self._streamer, self.deadline = stopped, streamer, deadline

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        leaving = not threading.main_thread().is_alive()  # the interpreter waits for this thread, to end
        over = self._stopped.is_set() or self._streamer.stop.found or self.late or leaving
        return torch.full((len(input_ids),), over, dtype=torch.bool, device=input_ids.device)


class Asking:
    """A prompt with settings, to be answered once, in one of four ways.

    Any number may run in threads of one library. `run` answers in the thread that calls it; the others use a thread of
    their own, pass its errors on, and end it at its next token when their caller goes away.

    Args:
        library: model, tokenizer and chunks.
        prompt: laid out by `assemble` or `conversation`.
        settings: how to answer.

    Raises:
        PromptTooLongError: if the model has no room for an answer after it; no chunk is computed then.
    """

    def __init__(self, library: ChunkLibrary, prompt: Prompt, settings: Settings) -> None:
        self.library, self.prompt, self.settings = library, prompt, settings
        self.max_tokens = min(settings.max_tokens, room(library.model, len(prompt.ids)))

    def run(self, emit: Callable[[str], None] = lambda text: None, stopped: threading.Event | None = None) -> Answer:
        """Answers here and now.

        Args:
            emit: called with each new piece of text.
            stopped: set by another thread to end the answer at its next token.

        Raises:
            TimeoutError: after `settings.timeout` seconds.
        """
        library, settings, stopped = self.library, self.settings, stopped or threading.Event()
        deadline = math.inf if settings.timeout is None else time.monotonic() + settings.timeout
        streamer = AnswerStreamer(library.tokenizer, settings.stop, emit)
        ended = _Ended(stopped, streamer, deadline)
        inputs = library.inputs(self.prompt, **settings.blend)
        start, ends = inputs["input_ids"].shape[1], end_ids(library)
        if stopped.is_set() or ended.late:
            tokens: list[int] = []
        else:
            out = library.model.generate(
                **inputs,
                max_new_tokens=self.max_tokens,
                eos_token_id=ends or None,
                pad_token_id=pad_id(library.tokenizer, ends),
                num_beams=1,  # whatever the model's config says: beams have nothing to show before their end
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([ended]),
                **settings.sampling(),
            )
            tokens = out[0, start:].tolist()
            if library.guard is not None:
                library.guard.check(library.model, inputs, out)
        done = streamer.stop.found or bool(tokens and tokens[-1] in ends) or len(tokens) >= self.max_tokens
        if not done and not stopped.is_set() and ended.late:
            raise TimeoutError(
                f"no whole answer after timeout={settings.timeout} s ({len(tokens)} of at most {self.max_tokens} "
                "tokens): allow more seconds or fewer tokens"
            )
        finish: Literal["stop", "length", "cancelled"] = "cancelled"
        if done:
            finish = "stop" if streamer.stop.found or tokens[-1] in ends else "length"
        return Answer(streamer.text, start, len(tokens), finish, inputs.report)

    def stream(self) -> Generator[str, None, Answer]:
        """Yields text as it comes; returns the answer. Closing the generator ends it, and waits until it has."""
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stopped, future, context = threading.Event(), Future(), contextvars.copy_context()

        def work() -> None:
            try:
                future.set_result(context.run(self.run, items.put, stopped))
            except BaseException as error:
                future.set_exception(error)
            finally:
                items.put(_END)

        thread = threading.Thread(target=work, name="blendkv-answer")
        thread.start()
        try:
            while (item := items.get()) is not _END:
                yield item
            return future.result()
        finally:
            stopped.set()
            thread.join()

    async def arun(self) -> Answer:
        """Answers in a thread; cancelling the task ends it."""
        stopped = threading.Event()
        try:
            return await asyncio.to_thread(self.run, lambda text: None, stopped)
        finally:
            stopped.set()

    async def astream(self) -> AsyncGenerator[str | Answer]:
        """Yields text as it comes from a thread, and the answer last; cancelling or closing ends it."""
        loop, items, stopped = asyncio.get_running_loop(), asyncio.Queue(), threading.Event()

        def put(item: Any) -> None:
            with suppress(RuntimeError):  # the loop was closed: nobody waits
                loop.call_soon_threadsafe(items.put_nowait, item)

        def work() -> Answer:
            try:
                return self.run(put, stopped)
            finally:
                put(_END)

        running = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            while (item := await items.get()) is not _END:
                yield item
            yield await running
        finally:
            stopped.set()
            running.cancel()


def model_name(model: Any) -> str:
    """What a model is called: its hub id, the name of the folder that it was loaded from, or its type."""
    name = str(getattr(model.config, "name_or_path", ""))
    return (Path(name).name if Path(name).is_absolute() else name) or model.config.model_type


def room(model: Any, tokens: int) -> int:
    """Tokens that may follow a prompt.

    Raises:
        PromptTooLongError: if there is room for none.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and tokens >= limit:
        raise PromptTooLongError(
            f"the prompt has {tokens:,} tokens, and the model takes {limit:,} with its answer: retrieve fewer or "
            "shorter documents, or drop old messages"
        )
    return 2**31 if limit is None else limit - tokens


def end_ids(library: ChunkLibrary) -> list[int]:
    """Ids that end an answer: the model's, and the tokenizer's (a chat model's end of turn)."""
    config = library.model.generation_config
    given = [] if config is None or config.eos_token_id is None else config.eos_token_id
    ids = list(given) if isinstance(given, list | tuple) else [given]
    own = library.tokenizer.eos_token_id
    return list(dict.fromkeys(ids if own is None else [*ids, own]))


def pad_id(tokenizer: Any, ends: list[int]) -> int:
    """An id for padding, which a batch of one never has, so that `generate` need not guess, and say so."""
    pad = tokenizer.pad_token_id
    return pad if pad is not None else (ends[0] if ends else 0)
