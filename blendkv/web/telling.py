"""One answer, told while it is computed, with the time to its first token."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from blendkv.integrations.answering import end_ids, pad_id
from blendkv.integrations.detokenizing import AnswerStreamer
from blendkv.library import ChunkLibrary

_END = object()


@dataclass(frozen=True)
class Told:
    """An answer, whole or as far as it came.

    Attributes:
        text: of the answer.
        tokens: `[N]` its token ids.
        ttft_s: seconds from the documents as text to the first token.
    """

    text: str
    tokens: Tensor
    ttft_s: float


class _Clocked(AnswerStreamer):
    """Notes when the first token reached the host."""

    def __init__(self, tokenizer: Any, emit: Callable[[str], None]) -> None:
        super().__init__(tokenizer, (), emit)
        self._puts = 0
        self.first = float("nan")

    def put(self, value: Tensor) -> None:
        """The prompt, then token by token."""
        self._puts += 1
        if self._puts == 2:
            self.first = time.perf_counter()
        super().put(value)


class _Ended(StoppingCriteria):
    """Ends `generate` at its next token, when asked to or when the program is about to leave."""

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self._stopped = stopped

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        over = self._stopped() or not threading.main_thread().is_alive()
        return torch.full((len(input_ids),), over, dtype=torch.bool, device=input_ids.device)


def tell(
    library: ChunkLibrary,
    make_inputs: Callable[[], Mapping[str, Any]],
    most: int,
    stopped: threading.Event,
) -> Generator[str, None, Told]:
    """Yields an answer's text as it comes, greedily decoded; closing the generator ends it, and waits until it has.

    Args:
        library: has the model and its tokenizer.
        make_inputs: makes what `generate` takes; its time counts.
        most: most tokens of the answer.
        stopped: set by another thread to end the answer at its next token.
    """
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    closed, ends, context = threading.Event(), end_ids(library), contextvars.copy_context()

    def work() -> Told:
        start = time.perf_counter()
        inputs = make_inputs()
        streamer = _Clocked(library.tokenizer, items.put)
        model: Any = library.model
        out = model.generate(
            **inputs,
            max_new_tokens=most,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            num_beams=1,
            eos_token_id=ends or None,
            pad_token_id=pad_id(library.tokenizer, ends),
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([_Ended(lambda: stopped.is_set() or closed.is_set())]),
        )
        return Told(streamer.text.strip(), out[0, inputs["input_ids"].shape[1] :], streamer.first - start)

    result: list[Any] = []

    def run() -> None:
        try:
            result.append(context.run(work))
        except BaseException as error:
            result.append(error)
        finally:
            items.put(_END)

    thread = threading.Thread(target=run, name="blendkv-web-answer")
    thread.start()
    try:
        while (item := items.get()) is not _END:
            yield item
    finally:
        closed.set()
        thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]
