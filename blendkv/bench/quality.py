"""`blendkv bench quality`: how far each method's next-token distributions are from full recompute's.

Teacher-forced KL(full || method) in nats over the first 12 greedy tokens of full recompute, mean over steps, then over
prompts. Every method answers the same prompts from the same chunks, so differences are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from blendkv.bench.measure import kl_divergence, paired_bootstrap
from blendkv.bench.methods import Blend, Case, forced_logits, greedy_answer
from blendkv.bench.tasks import Example
from blendkv.layout import encode
from blendkv.selectors import Selector, get_selector

STEPS = 12
"""Answer tokens that are compared."""
CHAT = (
    "<|im_start|>system\nAnswer the question using the passages below.<|im_end|>\n<|im_start|>user\n",
    "Question: {question}\nAnswer within 5 words.<|im_end|>\n<|im_start|>assistant\n",
)
"""Text before the chunks (a piece of its own, exact) and after them (always computed), where the model knows ChatML."""
PLAIN = ("Answer the question using the passages below.\n\n", "Question: {question}\nAnswer within 5 words.\nAnswer:")
"""The same for other models."""


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


def quality_rows(
    model: PreTrainedModel,
    tokenizer: Any,
    examples: Sequence[Example],
    ratios: Sequence[float] = (0.0, 0.15),
    selector: str | Selector = "hkvd",
    progress: bool = False,
) -> list[dict[str, Any]]:
    """One row a ratio: means over prompts with their 95% bootstrap intervals.

    Args:
        model: a transformers decoder.
        tokenizer: its tokenizer.
        examples: questions with their chunks.
        ratios: each compared with full recompute, and with the first of them, prompt by prompt.
        selector: which tokens are recomputed.
        progress: whether to show a bar on stderr.
    """
    methods = [Blend(ratio, get_selector(selector)) for ratio in ratios]
    found: list[list[Agreement]] = [[] for _ in methods]
    for example in tqdm(examples, desc="bench quality", unit="prompt", disable=not progress, leave=False):
        for agreements, agreement in zip(found, agree(model, tokenizer, example, methods), strict=True):
            agreements.append(agreement)
    rows = []
    for method, agreements in zip(methods, found, strict=True):
        kl = [a.kl for a in agreements]
        mean, low, high = paired_bootstrap(kl)
        gain = paired_bootstrap([a.kl - b.kl for a, b in zip(agreements, found[0], strict=True)])
        rows.append(
            {
                "method": "blend" if method.ratio else "reuse",
                "selector": method.selector.name if method.ratio else None,
                "ratio": method.ratio,
                "prompts": len(examples),
                "kl": mean,
                "kl_low": low,
                "kl_high": high,
                "first_kl": _mean([a.first_kl for a in agreements]),
                "same_answer": _mean([float(a.same) for a in agreements]),
                "charged_budget": _mean([a.charged_budget for a in agreements]),
                "kl_minus_first_row": gain.mean,
                "kl_minus_first_row_low": gain.low,
                "kl_minus_first_row_high": gain.high,
                "all_kl": kl,
            }
        )
    return rows


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
    kl = kl_divergence(full, other.to(full.device))
    said = answer.tolist()
    stop = next((i + 1 for i, token in enumerate(said) if token in end), len(said))
    same = other.argmax(-1)[:stop].tolist() == said[:stop]
    return Agreement(float(kl.mean()), float(kl[0]), same, charged_budget)


def lay_out(model: PreTrainedModel, tokenizer: Any, example: Example) -> Case:
    """The prompt of the protocol: prefix and chunks, each tokenised and computed alone, then the question."""
    before, after = CHAT if "<|im_start|>" in tokenizer.get_vocab() else PLAIN
    pieces = [_template(tokenizer, before), *(encode(tokenizer, chunk) for chunk in example.chunks)]
    question = _template(tokenizer, after.format(question=example.question))
    return Case.of(model, [piece for piece in pieces if piece], question)


def ends(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Ids that finish an answer."""
    settings = getattr(model, "generation_config", None)
    given = getattr(settings, "eos_token_id", None)
    listed = given if isinstance(given, list) else [given]
    return frozenset(token for token in (*listed, tokenizer.eos_token_id) if token is not None)


def _template(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text whose special tokens are meant."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
