"""How far a method's next-token distributions are from full recompute's, on one prompt.

Teacher-forced KL(full || method) in nats over the first 12 greedy tokens of full recompute. Every method answers the
same prompt from the same chunks, so differences are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from blendkv.bench.answering import ends
from blendkv.bench.laying import lay_out
from blendkv.bench.measure import kl_divergence
from blendkv.bench.methods import Blend, Case, forced_logits, greedy_answer
from blendkv.bench.records import Example

STEPS = 12
"""Answer tokens that are compared."""


@dataclass(frozen=True)
class Agreement:
    """How one method did on one prompt.

    Attributes:
        kl: nats per step, mean over the steps.
        first_kl: nats of the first step.
        same: whether the greedy answer is full recompute's (at every step, up to its end of text, the argmax agrees).
        charged_budget: of the blend.
    """

    kl: float
    first_kl: float
    same: bool
    charged_budget: float = float("nan")


@dataclass(frozen=True)
class Reference:
    """A prompt and what full recompute says to it.

    Attributes:
        case: the prompt.
        answer: `[N]` its greedy answer.
        logits: `[N, V]` of each step.
        end: ids that finish an answer.
    """

    case: Case
    answer: Tensor
    logits: Tensor
    end: frozenset[int]

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: Any, example: Example) -> Reference:
        """Lays out a prompt, computes its chunks, and answers it in full."""
        case = lay_out(model, tokenizer, example)
        return cls(case, *greedy_answer(model, case.ids, STEPS), ends(model, tokenizer))

    def agreement(self, method: Blend, case: Case | None = None) -> Agreement:
        """Compares a method with full recompute; `case` is the same prompt with other chunks."""
        case = self.case if case is None else case
        cache = method.cache_maker(case)()
        logits = forced_logits(case.model, case.ids, self.answer, cache)
        budget = method.charged_budget(case, getattr(cache, "report", None))
        return compare(self.logits, logits, self.answer, self.end, budget)


def agree(model: PreTrainedModel, tokenizer: Any, example: Example, methods: Sequence[Blend]) -> list[Agreement]:
    """Compares methods with full recompute on one prompt."""
    reference = Reference.of(model, tokenizer, example)
    return [reference.agreement(method) for method in methods]


def compare(
    full: Tensor, other: Tensor, answer: Tensor, end: frozenset[int], charged_budget: float = float("nan")
) -> Agreement:
    """Compares `[N, V]` logits of the same forced answer `[N]`; tokens in `end` finish an answer."""
    kl = kl_divergence(full, other.to(full.device)).tolist()
    said = answer.tolist()
    stop = next((i + 1 for i, token in enumerate(said) if token in end), len(said))
    same = other.argmax(-1)[:stop].tolist() == said[:stop]
    return Agreement(sum(kl) / len(kl), kl[0], same, charged_budget)
