"""What the cases about stores share: libraries over a store, prompts of one or more documents, and their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from blendkv import BlendReport, ChunkLibrary
from blendkv.testing import byte_tokenizer
from tests.cases.common import answer, assert_same_answer

TOKENIZER = byte_tokenizer(chat=True, bos=True)
DOCUMENTS = ["The tower is 61 m high.", "It was built in 1923 by M. Ilg.", "Otters hold hands; rafts of them drift."]
QUESTION = "How high?"
Answer = tuple[Tensor, Tensor]


def library(model, store, **options) -> ChunkLibrary:
    """A library at ratio 0, where every stored number counts, and chunks stand behind nothing."""
    options = {"recompute_ratio": 0.0, "condition": "none"} | options
    return ChunkLibrary(model, options.pop("tokenizer", TOKENIZER), store, **options)


def ask(
    kv: ChunkLibrary, documents: Sequence[str] = DOCUMENTS, tokens: int = 4, **options
) -> tuple[Answer, BlendReport]:
    """What the unmodified `generate` answers, and the report."""
    inputs = kv(documents, QUESTION, **options)
    cache = inputs.cache
    return answer(kv.model, inputs["input_ids"], cache, tokens, attention_mask=inputs["attention_mask"]), cache.report


def full(kv: ChunkLibrary, documents: Sequence[str] = DOCUMENTS, tokens: int = 4) -> Answer:
    """What full prefill answers to the same prompt."""
    return answer(kv.model, torch.tensor([kv.assemble(documents, QUESTION).ids]), tokens=tokens)


def local(kv: ChunkLibrary, documents: Sequence[str] = DOCUMENTS, tokens: int = 4) -> Answer:
    """What the same blend answers with chunks that were computed here and never stored."""
    fresh = library(kv.model, "memory://", tokenizer=kv.tokenizer, condition=kv.condition)
    return ask(fresh, documents, tokens)[0]


def differ(a: Answer, b: Answer) -> bool:
    """Whether logits are visibly others, so that a mistake would show."""
    return float((a[1] - b[1]).abs().max()) > 1e-2


def assert_hit(kv: ChunkLibrary, documents: Sequence[str] = DOCUMENTS, tokens: int = 4) -> BlendReport:
    """Every chunk comes out of the store, is reused, and the answer is that of the same blend made here."""
    kv.clear()
    got, report = ask(kv, documents, tokens)
    (store,) = kv.pool.stores
    assert report.loaded == {store.url: report.chunk_tokens}
    assert report.reused_tokens == report.chunk_tokens > 0
    assert not report.prefilled_tokens
    wanted = local(kv, documents, tokens)
    assert_same_answer(got, wanted)
    assert differ(wanted, full(kv, documents, tokens))
    return report


def assert_missed(kv: ChunkLibrary, documents: Sequence[str] = DOCUMENTS, tokens: int = 4) -> BlendReport:
    """With `on_miss="recompute"`: no document is reused, each is counted, and the answer is that of full prefill."""
    assert kv.on_miss == "recompute"
    got, report = ask(kv, documents, tokens)
    assert not any(use.hit for use in report.chunks[1:])
    head, *others = report.chunks  # the template's head is a chunk too
    assert report.misses["absent"] == sum(use.found for use in others) + (0 if head.hit else head.found)
    assert report.reused_tokens == (head.found if head.hit else 0)
    assert_same_answer(got, full(kv, documents, tokens))
    return report


def files_of(folder: Path) -> list[Path]:
    """Entries of a folder."""
    return sorted(folder.glob("??/*.bkv"))


def within(seconds: float, what: Callable[[], bool]) -> float:
    """Asks again and again; how long it took until it was so."""
    begin = time.monotonic()
    while not what():
        assert time.monotonic() - begin < seconds, f"not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - begin
