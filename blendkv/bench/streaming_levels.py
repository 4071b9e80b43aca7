"""What chunks weigh and cost at each level, and what is lost, on a model: `blendkv bench streaming`."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from blendkv.bench.bandwidth import Bandwidth
from blendkv.bench.codec import in_16_bits
from blendkv.bench.forcing import STEPS
from blendkv.bench.laying import lay_out
from blendkv.bench.measure import kl_divergence
from blendkv.bench.methods import Case, Reuse, forced_logits, greedy_answer
from blendkv.bench.records import Example
from blendkv.bench.sending import move_rows, order_rows
from blendkv.bench.streaming import Prompt
from blendkv.calibrating import calibrate
from blendkv.chunk import ChunkCache
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import Codec, Profile, get_codec
from blendkv.levelkeys import name_of
from blendkv.loading.levels import write_levels
from blendkv.loading.streaming import Item, Rung
from blendkv.passages import read_passages
from blendkv.prefilling import prefill
from blendkv.stores import RemoteStore
from blendkv.texts import Passage, digest

LEVELS = (-4, 0, 4, 8, 12)
"""Of `klt`, beside `raw`."""
CONTEXTS, CONTEXT, CONTINUATION = 16, 512, 64
"""Passages that a profile is made of if none is given: 8,192 tokens."""
FEW = 8
"""Links of each set on which orders of sending are compared, with real bytes."""


def examples() -> list[Example]:
    """Prompts of all passages that come with the package, one for each of their questions."""
    passages, questions = read_passages()
    texts = [passage.text for passage in passages]
    return [Example(question=q.question, chunks=texts, answers=[q.answer], style="qa") for q in questions]


def profile_of_topics(model: PreTrainedModel, tokenizer: Any, progress: bool = False) -> Profile:
    """A profile of `klt`, made of the longest topics of Python's own help, which is wherever Python is."""
    from pydoc_data.topics import topics

    length, made = CONTEXT + CONTINUATION, []
    for text in sorted(topics.values(), key=len, reverse=True):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= length and len(made) < CONTEXTS:
            made.append(Passage(ids[:length], (digest(text),)))
    return calibrate(model, made, ["klt"], continuation=CONTINUATION, progress=progress)["klt"]


def levels_of(profile: Profile, levels: Sequence[int] = LEVELS) -> list[Codec]:
    """Codecs of every level, `raw` first."""
    return [get_codec("raw"), *(get_codec("klt", level=level, profile=profile) for level in levels)]


@dataclass(frozen=True)
class Trial:
    """A prompt, the answer that all are forced to give, and what lossless chunks and full recompute say to it."""

    case: Case
    answer: torch.Tensor
    full: torch.Tensor
    lossless: torch.Tensor

    def logits(self, chunks: Sequence[ChunkCache]) -> torch.Tensor:
        """`[N, V]` of the prompt made of other chunks, reused as they are."""
        case = replace(self.case, chunks=tuple(chunks))
        return forced_logits(case.model, case.ids, self.answer, Reuse().cache_maker(case)())


class Levels:
    """Prompts of one model, coded at every level.

    Args:
        model: a transformers decoder.
        tokenizer: its tokenizer.
        codecs: one a level.
        prompts: that KL is measured on; times and bytes are of the first one's chunks.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, codecs: Sequence[Codec], prompts: Sequence[Example]
    ) -> None:
        self.codecs = {name_of(codec): codec for codec in codecs}
        self.trials: list[Trial] = []
        for example in prompts:
            case = lay_out(model, tokenizer, example)
            answer, full = greedy_answer(model, case.ids, STEPS)
            trial = Trial(case, answer, full, full)
            self.trials.append(replace(trial, lossless=trial.logits(case.chunks)))
        self._model = model
        self._made: dict[tuple[str, str], tuple[ChunkCache, int, float]] = {}
        self._known: dict[tuple[str, ...], tuple[float, float]] = {}

    def coded(self, chunk: ChunkCache, name: str) -> tuple[ChunkCache, int, float]:
        """A chunk through a level's file, the bytes of the file, and seconds of decoding, the least of three."""
        key = (chunk.key, name)
        if key not in self._made:
            codec = self.codecs[name]
            profile = getattr(codec, "profile", None)
            known = {profile.hash: profile} if isinstance(profile, Profile) else None
            data = encode_chunk(in_16_bits(chunk), codec)
            seconds, back = _least(lambda: decode_chunk(data, profiles=known), 3)
            keys, values = (tuple(t.to(chunk.dtype) for t in states) for states in (back.keys, back.values))
            self._made[key] = (replace(chunk, keys=keys, values=values), len(data), seconds)
        return self._made[key]

    def prompt(self) -> Prompt:
        """Bytes, seconds and losses of the first prompt's chunks, without its head, which is always there."""
        losses, items, raw = {name: self.loss([name]) for name in self.codecs}, [], 0
        trial = self.trials[0]
        for chunk in trial.case.chunks[1:]:
            text_s, _ = _least(lambda c=chunk: prefill(self._model, [c.ids], progress=False), 2)
            rungs = []
            for name in self.codecs:
                _, nbytes, seconds = self.coded(chunk, name)
                rungs.append(Rung(name, nbytes, 0.0 if name == "raw" else losses[name], seconds))
            raw += 2 * sum(states.numel() for states in (*chunk.keys, *chunk.values))
            items.append(Item(tuple(rungs), text_s))
        after_s, _ = _least(lambda: trial.logits(trial.case.chunks), 2)
        return Prompt(tuple(items), after_s, raw)

    def loss(self, chosen: Sequence[str]) -> float:
        """KL from lossless chunks, nats a token, mean over prompts and answer tokens.

        Args:
            chosen: level of each chunk (or "text", which loses nothing); one for all if there is one.
        """
        return self._divergences(tuple(chosen))[0]

    def loss_from_full(self, chosen: Sequence[str]) -> float:
        """KL from full recompute, likewise: what blending loses is in it."""
        return self._divergences(tuple(chosen))[1]

    def full_s(self) -> float:
        """Seconds of a full recompute of the first prompt."""
        case = self.trials[0].case
        return _least(lambda: greedy_answer(case.model, case.ids, 1), 2)[0]

    def _divergences(self, chosen: tuple[str, ...]) -> tuple[float, float]:
        """From lossless chunks, and from full recompute; measured once."""
        if chosen not in self._known:
            found = []
            for trial in self.trials:
                head, *chunks = trial.case.chunks
                names = chosen * len(chunks) if len(chosen) == 1 else chosen
                made = [c if n == "text" else self.coded(c, n)[0] for c, n in zip(chunks, names, strict=True)]
                logits = trial.logits([head, *made])
                found.append([float(kl_divergence(each, logits).mean()) for each in (trial.lossless, trial.full)])
            first, second = (sum(each) / len(each) for each in zip(*found, strict=True))
            self._known[chosen] = first, second
        return self._known[chosen]

    def rows(self, prompt: Prompt) -> list[dict[str, Any]]:
        """What each level weighs, costs and loses; `bits` a number, `kl` from lossless chunks."""
        numbers = prompt.raw_bytes / 2
        found = []
        for name in self.codecs:
            rungs = [rung for item in prompt.items for rung in item.rungs if rung.name == name]
            found.append(
                {
                    "level": name,
                    "bytes": sum(rung.nbytes for rung in rungs),
                    "bits": 8 * sum(rung.nbytes for rung in rungs) / numbers,
                    "decode_s": sum(rung.decode_s for rung in rungs) / len(rungs),
                    "kl": self.loss([name]),
                    "kl_full": self.loss_from_full([name]),
                }
            )
        return found

    def mixes(self, chosen: Iterable[tuple[str, ...]], losses: dict[str, float], most: int) -> list[dict[str, Any]]:
        """Measured and predicted KL of the mixes that policies chose most often; predicted is the mean over chunks."""
        rows = []
        for names, times in Counter(chosen).most_common(most):
            predicted = sum(losses.get(name, 0.0) for name in names) / len(names)
            rows.append({"chosen": list(names), "times": times, "kl": self.loss(names), "kl_predicted": predicted})
        return rows


def sending_rows(
    levels: Levels, profile: Profile, sets: Mapping[str, Sequence[Bandwidth]], text_s: float
) -> dict[str, list[dict[str, Any]]]:
    """Rows of `sending`, of the first prompt's chunks in two streams, on the first links of each set."""
    codec = get_codec("klt", level=0, profile=profile, streams=2)
    store = RemoteStore(f"memory://blendkv-bench-{uuid.uuid4().hex}")
    written = []
    for chunk in levels.trials[0].case.chunks[1:]:
        written += write_levels(store, in_16_bits(chunk), [codec])
    files = [store.get(level.key) or b"" for level in written]
    few = {name: links[:FEW] for name, links in sets.items()}
    largest = max(written, key=lambda level: level.nbytes or 0)
    return {
        "orders": list(order_rows(files, codec, few, text_s)),
        "moves": list(move_rows(store, largest, next(iter(few.values())), text_s)),
    }


def _least(call: Callable[[], Any], times: int) -> tuple[float, Any]:
    """The shortest of some calls in seconds, and what the last one gave."""
    seconds, given = [], None
    for _ in range(times):
        begin = time.perf_counter()
        given = call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds), given
