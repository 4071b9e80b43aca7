"""MapReduce and MapRerank, LangChain's ways to answer from many chunks: each chunk is asked alone.

Map: the question is answered from each chunk alone. Reduce: the question is answered from those answers. Rerank: the
answer whose own likelihood is best, by the mean log-probability of its tokens (LangChain asks the model for a score in
words, which small models cannot give). Nothing is stored: every forward is inside the clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicCache

from blendkv import flops
from blendkv.bench.answering import Stops, go_on
from blendkv.bench.methods import METHODS, Answer, Case, forward
from blendkv.layout import encode
from blendkv.report import BlendReport

MAPPING = ("mapreduce", "maprerank")
QUALITY_METHODS = (*METHODS, *MAPPING)
"""What `bench quality` compares."""


@dataclass(frozen=True)
class Mapped:
    """Answers from each chunk alone, in the chunks' order.

    Attributes:
        answers: tokens of each, without what follows its end.
        likelihoods: mean log-probability of their tokens, -inf for one that says nothing.
    """

    answers: list[list[int]]
    likelihoods: list[float]

    @property
    def best(self) -> list[int]:
        """The likeliest answer; the first of several."""
        return self.answers[max(range(len(self.answers)), key=lambda i: self.likelihoods[i])]


class _Finished(StoppingCriteria):
    """Ends each row where its answer ends."""

    def __init__(self, prompt: int, stops: Stops) -> None:
        self.prompt, self.stops = prompt, stops

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        done = [self.stops.finished(row) for row in input_ids[:, self.prompt :].tolist()]
        return torch.tensor(done, device=input_ids.device)


@torch.no_grad()
def map_chunks(case: Case, stops: Stops, limit: int) -> Mapped:
    """Answers the question from each chunk alone (head, chunk, question), all chunks in one batch.

    Args:
        case: its first piece is the head; its stored keys and values are not used.
        stops: where an answer ends.
        limit: most tokens of one.
    """
    head, chunks = case.chunks[0], case.chunks[1:]
    question = torch.tensor(case.question, dtype=torch.long)
    rows = [torch.cat([head.ids, chunk.ids, question]) for chunk in chunks]
    longest = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(2))
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :], mask[i, longest - len(row) :] = row, 1
    device = next(case.model.parameters()).device
    generate: Any = case.model.generate
    output = generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=limit,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        stopping_criteria=StoppingCriteriaList([_Finished(longest, stops)]),
    )
    said = output.sequences[:, longest:]
    likely = torch.stack([step.float().log_softmax(-1) for step in output.logits], dim=1)
    chosen = likely.gather(-1, said[..., None])[..., 0].cpu()
    answers = [_counted(row, stops) for row in said.tolist()]
    means = [float(chosen[i, : len(a)].mean()) if stops.text(a) else float("-inf") for i, a in enumerate(answers)]
    return Mapped(answers, means)


def reduce_ids(case: Case, mapped: Mapped, stops: Stops) -> Tensor:
    """`[1, T]` the prompt of the reduce step: the head, every answer as a passage, the question."""
    texts = [stops.text(answer) for answer in mapped.answers]
    passages = [token for text in texts if text for token in encode(stops.tokenizer, f"{text}\n\n")]
    ids = [*case.chunks[0].ids.tolist(), *passages, *case.question]
    return torch.tensor([ids], device=next(case.model.parameters()).device)


@torch.no_grad()
def reduce_first(case: Case, mapped: Mapped, stops: Stops) -> tuple[DynamicCache, int]:
    """The reduce step's cache and its first token."""
    cache = DynamicCache()
    return cache, int(forward(case.model, reduce_ids(case, mapped, stops), cache)[0, -1].argmax())


@dataclass(frozen=True)
class _Mapping(ABC):
    """What both methods share.

    Args:
        stops: where an answer ends.
        limit: most tokens of an answer from one chunk.
    """

    stops: Stops
    limit: int = 32
    ratio: float | None = None
    name: ClassVar[str]

    def prepare(self, case: Case) -> Callable[..., Answer]:
        """Nothing is stored: each call does all of it."""

        def answer(max_new_tokens: int, **options: Any) -> Answer:
            mapped = map_chunks(case, self.stops, self.limit)
            return Answer(torch.tensor(self.finish(case, mapped, max_new_tokens)), torch.empty(0))

        return answer

    @abstractmethod
    def finish(self, case: Case, mapped: Mapped, limit: int) -> list[int]:
        """The answer out of those from each chunk."""

    def flop_limit(self, shape: flops.ModelShape, case: Case) -> float:
        """Full prefill over the prompts of all chunks; what is generated is not counted."""
        head, question = len(case.chunks[0]), len(case.question)
        alone = sum(flops.full_flops(shape, head + len(chunk), question) for chunk in case.chunks[1:])
        return flops.full_flops(shape, case.tokens, question) / alone

    def charged_budget(self, case: Case, report: BlendReport | None) -> float:
        """Every chunk token is computed once."""
        return 1.0


@dataclass(frozen=True)
class MapReduce(_Mapping):
    """The question answered from the answers."""

    name = "mapreduce"

    def finish(self, case: Case, mapped: Mapped, limit: int) -> list[int]:
        """Answers greedily from the answers."""
        cache, first = reduce_first(case, mapped, self.stops)
        return go_on(case.model, cache, [first], self.stops, limit)


@dataclass(frozen=True)
class MapRerank(_Mapping):
    """The likeliest of the answers."""

    name = "maprerank"

    def finish(self, case: Case, mapped: Mapped, limit: int) -> list[int]:
        """Chooses it."""
        return mapped.best[:limit]


def _counted(tokens: list[int], stops: Stops) -> list[int]:
    """A row's tokens up to the one that finishes the answer."""
    for n in range(1, len(tokens) + 1):
        if stops.finished(tokens[:n]):
            return tokens[:n]
    return tokens
