"""`blendkv demo`: three questions to a real model, from cached chunks, beside full recompute and full reuse."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blendkv import _compat
from blendkv.bench.decode import TokenClock
from blendkv.bench.measure import kl_divergence, median
from blendkv.bench.methods import forward
from blendkv.library import ChunkLibrary
from blendkv.passages import Question, pick_passages, read_passages
from blendkv.report import BlendReport

SYSTEM = "Answer the question using the passages below."
ANSWER_TOKENS = 20
"""Most tokens of an answer."""
KL_STEPS = 12
"""Answer tokens of full recompute that the others are compared on."""


@dataclass(frozen=True)
class Reply:
    """One method's answer to one question.

    Attributes:
        method: "full recompute", "full reuse" or "blend".
        answer: its text.
        right: whether it holds the words of the right answer.
        same: whether it is full recompute's, word for word.
        ttft_s: from the passages as text to the first token.
        speedup: over full recompute.
        recomputed: share of the chunk tokens computed in the last layer.
        kl: nats per step from full recompute, its answer forced.
        report: of the blend.
    """

    method: str
    answer: str
    right: bool
    same: bool
    ttft_s: float
    speedup: float
    recomputed: float
    kl: float
    report: BlendReport | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = {name: value for name, value in vars(self).items() if name != "report"}
        return plain | {"report": self.report.to_dict() if self.report is not None else None}


@dataclass(frozen=True)
class Round:
    """A question, the order its passages stood in, and the replies: full recompute first."""

    question: Question
    order: tuple[str, ...]
    prompt_tokens: int
    replies: tuple[Reply, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            **asdict(self.question),
            "order": list(self.order),
            "prompt_tokens": self.prompt_tokens,
            "replies": [reply.to_dict() for reply in self.replies],
        }


class Demo:
    """The passages as chunks, computed once, and the questions asked of them.

    Args:
        model: a transformers decoder.
        tokenizer: its tokenizer.
        ratio: share of chunk tokens that the blend recomputes.
        passages: how many of the dozen.
        seed: of the order of the passages, another one for each question.
        progress: whether to show a bar on stderr.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        ratio: float = 0.15,
        passages: int = 12,
        seed: int = 0,
        progress: bool = False,
    ) -> None:
        texts, self.questions = read_passages()
        self.passages = pick_passages(texts, self.questions, passages)
        self.ratio, self.seed = ratio, seed
        self._model: Any = model
        self.library = ChunkLibrary(model, tokenizer, recompute_ratio=ratio, condition="system", progress=progress)
        self.tokens = 0
        self.bytes = 0

    def prefill(self) -> float:
        """Computes every passage, and the head of the prompt, once; returns the seconds it took."""
        start = time.perf_counter()
        chunks = self.library.prefill([passage.text for passage in self.passages], SYSTEM)
        self.library([], "", SYSTEM)
        self.tokens, self.bytes = sum(map(len, chunks)), sum(chunk.nbytes for chunk in chunks)
        return time.perf_counter() - start

    def rounds(self) -> Iterator[Round]:
        """Asks each question with the passages in a new order."""
        shuffle = random.Random(self.seed)
        for question in self.questions:
            order = shuffle.sample(self.passages, len(self.passages))
            yield self._round(question, [passage.title for passage in order], [passage.text for passage in order])

    def _round(self, question: Question, titles: list[str], texts: list[str]) -> Round:
        asked = f"Question: {question.question}"
        start = time.perf_counter()
        ids = torch.tensor([self.library.assemble(texts, asked, SYSTEM).ids], device=self._device)
        told, logits, full_s = self._answer({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, start)
        full_logits, forced = logits[:KL_STEPS], told[:KL_STEPS]
        full = self._text(told)
        replies = [Reply("full recompute", full, _holds(full, question), True, full_s, 1.0, 1.0, 0.0)]
        for method, ratio in (("full reuse", 0.0), ("blend", self.ratio)):
            start = time.perf_counter()
            inputs = self.library(texts, asked, SYSTEM, recompute_ratio=ratio)
            told, logits, seconds = self._answer(inputs, start)
            kl = kl_divergence(full_logits, self._forced(inputs.cache, logits[:1], forced, ids.shape[1]))
            answer = self._text(told)
            share = inputs.report.recomputed_share
            replies.append(
                Reply(
                    method,
                    answer,
                    _holds(answer, question),
                    answer == full,
                    seconds,
                    full_s / seconds,
                    share,
                    float(kl.mean()),
                    inputs.report,
                )
            )
        return Round(question, tuple(titles), ids.shape[1], tuple(replies))

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _answer(self, inputs: Any, start: float) -> tuple[Tensor, Tensor, float]:
        """New tokens `[N]`, their logits `[N, V]`, and seconds from `start` to the first of them."""
        clock = TokenClock()
        output = self._model.generate(
            **inputs,
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            streamer=clock,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = output.sequences[0, inputs["input_ids"].shape[1] :]
        return tokens, torch.cat(output.logits), clock.times[0] - start

    @torch.no_grad()
    def _forced(self, cache: Any, first: Tensor, answer: Tensor, prompt_tokens: int) -> Tensor:
        """`[N, V]` logits of a forced answer: the cache goes back to the prompt, and on from there."""
        cache.crop(_compat.crop_argument(cache.get_seq_length(), prompt_tokens))
        if len(answer) == 1:
            return first
        return torch.cat([first, forward(self._model, answer[None, :-1], cache, len(answer) - 1)[0]])

    def _text(self, tokens: Tensor) -> str:
        return self.library.tokenizer.decode(tokens, skip_special_tokens=True).strip()


def _holds(answer: str, question: Question) -> bool:
    """Whether an answer holds the right one's words, however its numbers are grouped."""
    right, said = (text.lower().replace(",", "") for text in (question.answer, answer))
    return right in said


def sentence(rounds: Sequence[Round]) -> str:
    """One sentence on what was measured."""
    full, reuse, blend = ([r.replies[i] for r in rounds] for i in range(3))
    speedup = median([reply.speedup for reply in blend])
    pace = f"{speedup:.1f}x sooner" if speedup >= 1 else f"{1 / speedup:.1f}x later"
    kl, reuse_kl = (_mean([reply.kl for reply in replies]) for replies in (blend, reuse))
    return (
        f"Recomputing {_mean([r.recomputed for r in blend]):.0%} of the chunk tokens, the blend reached its first token"
        f" {pace} than full recompute and was {'nearer' if kl < reuse_kl else 'no nearer'} to it than full reuse (KL "
        f"{kl:.3f} against {reuse_kl:.3f} nats); right answers: full recompute {_count(full)}, full reuse "
        f"{_count(reuse)}, blend {_count(blend)} of {len(rounds)}."
    )


def _count(replies: Sequence[Reply]) -> int:
    return sum(reply.right for reply in replies)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
