"""The methods that are compared, behind one interface: what may be stored is prepared, then a call is timed.

A `Method` turns a `Case` (a model, a prompt and its stored chunks) into an `Answerer`, whose call answers from nothing
but what was stored. A method that is one `generate` from some cache subclasses `CacheMethod` and says which cache; one
that makes several calls (MapReduce, MapRerank) writes its own `prepare`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from blendkv import _compat, flops
from blendkv.cache import BlendedCache
from blendkv.chunk import ChunkCache
from blendkv.correctors import Corrector
from blendkv.prefilling import prefill
from blendkv.report import BlendReport
from blendkv.selectors import Selector, get_selector


@dataclass(frozen=True)
class Case:
    """A prompt made of stored pieces and a question.

    Attributes:
        model: attached (`prefill` does it).
        chunks: the prompt's pieces in order, each computed alone; the first stands at position 0 and is exact there.
        question: ids after them, never stored.
        batch: how many times the prompt is answered at once.
        read: gives the chunks to each blend anew, as from a store (`OnDisk`); None: they are at hand.
    """

    model: PreTrainedModel
    chunks: tuple[ChunkCache, ...]
    question: tuple[int, ...]
    batch: int = 1
    read: Callable[..., Sequence[ChunkCache]] | None = None

    @classmethod
    def of(
        cls, model: PreTrainedModel, pieces: Sequence[Sequence[int]], question: Sequence[int], progress: bool = False
    ) -> Case:
        """Computes and keeps the pieces' keys and values."""
        return cls(model, tuple(prefill(model, pieces, progress=progress)), tuple(question))

    @property
    def tokens(self) -> int:
        """Prompt tokens that belong to pieces, of one row."""
        return sum(map(len, self.chunks))

    @property
    def ids(self) -> Tensor:
        """`[B, T]` the whole prompt, on the model's device."""
        parts = [*(chunk.ids for chunk in self.chunks), torch.tensor(self.question, dtype=torch.long)]
        return torch.cat(parts)[None].repeat(self.batch, 1).to(next(self.model.parameters()).device)


@dataclass(frozen=True)
class Answer:
    """What a method said.

    Attributes:
        tokens: `[N]` new token ids; with a batch those of every row, one row after the other.
        logits: `[N, V]` raw logits of each, or empty if they were not asked for.
        report: of the blend, or None for methods that do not blend.
    """

    tokens: Tensor
    logits: Tensor
    report: BlendReport | None = None


class Answerer(Protocol):
    """Answers a case from what its method stored; may be called again and again."""

    def __call__(self, max_new_tokens: int, **options: Any) -> Answer:
        """Answers greedily; `options` go to `generate`."""
        ...


class Method(Protocol):
    """A way to answer a case.

    Attributes:
        name: as on the command line.
        ratio: share of chunk tokens recomputed, or None where that is not what the method does.
    """

    name: ClassVar[str]

    @property
    def ratio(self) -> float | None:
        """See the class."""
        ...

    def prepare(self, case: Case) -> Answerer:
        """Computes what this method keeps from earlier prompts: outside the clock."""
        ...

    def flop_limit(self, shape: flops.ModelShape, case: Case) -> float:
        """Largest speed-up over full recompute by operations alone."""
        ...

    def charged_budget(self, case: Case, report: BlendReport | None) -> float:
        """Linear FLOPs spent on chunk tokens / those of full prefill on the same tokens."""
        ...


@dataclass(frozen=True)
class CacheAnswerer:
    """One unmodified `generate` that starts from a new cache, which is made inside the call.

    Attributes:
        case: what to answer.
        make_cache: a cache as `generate` takes it; None lets `generate` make its own.
    """

    case: Case
    make_cache: Callable[[], Cache | None]

    def __call__(self, max_new_tokens: int, output_logits: bool = False, **options: Any) -> Answer:
        """Answers greedily."""
        ids, cache = self.case.ids, self.make_cache()
        given = {} if cache is None else {_compat.CACHE_ARG: cache}
        generate: Any = self.case.model.generate
        output = generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=output_logits,
            **given,
            **options,
        )
        logits = torch.stack(output.logits, dim=1).flatten(0, 1) if output_logits else ids.new_empty(0)
        report = cache.report if isinstance(cache, BlendedCache) else None
        return Answer(output.sequences[:, ids.shape[1] :].flatten(), logits, report)


class CacheMethod(ABC):
    """A method that is one `generate` from a cache. Subclasses say which."""

    name: ClassVar[str]

    def prepare(self, case: Case) -> CacheAnswerer:
        """See `Method`."""
        return CacheAnswerer(case, self.cache_maker(case))

    @abstractmethod
    def cache_maker(self, case: Case) -> Callable[[], Cache | None]:
        """Computes what is stored; returns what makes a new cache from it for each call."""


@dataclass(frozen=True)
class Full(CacheMethod):
    """Full recompute: `generate` without any cache given."""

    ratio: float | None = None
    name = "full"

    def cache_maker(self, case: Case) -> Callable[[], Cache | None]:
        """Nothing is stored."""
        return lambda: None

    def flop_limit(self, shape: flops.ModelShape, case: Case) -> float:
        """1: this is what the others are compared with."""
        return 1.0

    def charged_budget(self, case: Case, report: BlendReport | None) -> float:
        """1, likewise."""
        return 1.0


@dataclass(frozen=True)
class Prefix(CacheMethod):
    """Prefix reuse, as serving engines do it: exact keys and values of the prompt's first piece, the rest computed.

    Documents arrive in another order each time, so the first piece (the template's head, or the first document) is the
    longest prefix that was seen before.
    """

    ratio: float | None = None
    name = "prefix"

    def cache_maker(self, case: Case) -> Callable[[], Cache | None]:
        """Stores a `DynamicCache`'s tensors of the first piece."""
        config = case.model.config.get_text_config()
        stored = DynamicCache(config=config)
        with torch.no_grad():
            forward(case.model, case.ids[:1, : len(case.chunks[0])], stored)
        states = states_of(stored)

        def make() -> Cache:
            cache = DynamicCache(config=config)
            for i, (keys, values) in enumerate(states):
                cache.update(keys.expand(case.batch, -1, -1, -1), values.expand(case.batch, -1, -1, -1), i)
            return cache

        return make

    def flop_limit(self, shape: flops.ModelShape, case: Case) -> float:
        """Full prefill over full prefill less the prefix."""
        full = flops.full_flops(shape, case.tokens, len(case.question))
        return full / (full - flops.full_flops(shape, len(case.chunks[0])) + shape.head_flops)

    def charged_budget(self, case: Case, report: BlendReport | None) -> float:
        """The share of chunk tokens after the prefix."""
        return 1 - len(case.chunks[0]) / case.tokens


@dataclass(frozen=True)
class Blend(CacheMethod):
    """A `BlendedCache` over all pieces.

    Args:
        ratio: share of chunk tokens recomputed.
        selector: name or `Selector`: which.
        check_layers: the schedule, or None.
        corrector: what is done to stored states that are kept.
    """

    ratio: float | None = 0.15
    selector: Selector = field(default_factory=lambda: get_selector("hkvd"))
    check_layers: Mapping[int, float] | None = None
    corrector: Corrector | None = None
    name = "blend"

    def cache_maker(self, case: Case) -> Callable[[], Cache | None]:
        """The pieces are stored already."""
        options: dict[str, Any] = {"recompute_ratio": self.kept, "selector": self.selector}
        options |= {"check_layers": self.check_layers, "corrector": self.corrector}
        ids, read = case.ids[0], case.read
        return lambda: BlendedCache(case.chunks if read is None else read(ids, **options), **options)

    @property
    def kept(self) -> float:
        """The ratio, unless the selector has its own."""
        return float(self.ratio or 0.0) if self.selector.ratio is None else self.selector.ratio

    def flop_limit(self, shape: flops.ModelShape, case: Case) -> float:
        """See `flops.flop_limit`."""
        static = "deviation" not in self.selector.needs
        return flops.flop_limit(shape, case.tokens, len(case.question), self.kept, static=static)

    def charged_budget(self, case: Case, report: BlendReport | None) -> float:
        """What the blend reported."""
        return report.charged_budget if report is not None else float("nan")


@dataclass(frozen=True)
class Reuse(Blend):
    """Full reuse: every piece as it was computed alone, re-rotated, nothing recomputed."""

    ratio: float | None = 0.0
    name = "reuse"


METHODS = ("full", "prefix", "reuse", "blend")


def make_methods(
    names: Sequence[str],
    ratios: Sequence[float] = (0.15,),
    selectors: str | Selector | Sequence[str | Selector] = "hkvd",
) -> list[Method]:
    """The methods of some names, in that order; "blend" once for each selector and ratio (unless it has its own).

    Raises:
        ValueError: for an unknown name or selector, or a ratio outside [0, 1].
    """
    given = [selectors] if isinstance(selectors, str | Selector) else selectors
    chosen = [get_selector(selector) for selector in given]
    makers: dict[str, Callable[[], list[Method]]] = {
        "full": lambda: [Full()],
        "prefix": lambda: [Prefix()],
        "reuse": lambda: [Reuse()],
        "blend": lambda: [
            Blend(ratio, selector)
            for selector in chosen
            for ratio in (ratios if selector.ratio is None else [selector.ratio])
        ],
    }
    for ratio in ratios:
        BlendedCache((), ratio)  # refuses what is out of range
    unknown = [name for name in names if name not in makers]
    if unknown or not names:
        raise ValueError(f"unknown method {', '.join(map(repr, unknown))}; choose among {', '.join(METHODS)}")
    return [method for name in names for method in makers[name]()]


@torch.no_grad()
def forced_logits(model: PreTrainedModel, ids: Tensor, answer: Tensor, cache: Cache | None) -> Tensor:
    """Logits of every step of a given answer (teacher forcing).

    Args:
        model: the model.
        ids: `[1, T]` the prompt.
        answer: `[N]` tokens that follow it, whatever the method would say.
        cache: an empty cache; None for a `DynamicCache`.

    Returns:
        `[N, V]` logits, those of step n computed after the prompt and n answer tokens.
    """
    cache = DynamicCache() if cache is None else cache
    logits = [forward(model, ids[:, cache.get_seq_length() :], cache, keep=1)]
    if len(answer) > 1:
        logits.append(forward(model, answer[None, :-1].to(ids.device), cache, keep=len(answer) - 1))
    return torch.cat(logits, dim=1)[0]


@torch.no_grad()
def greedy_answer(
    model: PreTrainedModel, ids: Tensor, tokens: int, cache: Cache | None = None
) -> tuple[Tensor, Tensor]:
    """Full recompute's own answer: `[N]` tokens by argmax, past any end of text, and `[N, V]` their logits.

    The cache, an empty one if none is given, holds the prompt and all tokens but the last afterwards.
    """
    cache, given = DynamicCache() if cache is None else cache, ids
    answer, logits = [], []
    for _ in range(tokens):
        logits.append(forward(model, given, cache, keep=1)[0])
        given = logits[-1].argmax(-1)[None]
        answer.append(given[0])
    return torch.cat(answer), torch.cat(logits)


def states_of(cache: Cache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer, `[B, H, T, D]`."""
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


def forward(model: PreTrainedModel, ids: Tensor, cache: Cache, keep: int = 1) -> Tensor:
    """`[1, keep, V]` logits of the last tokens of one forward; the cache goes on growing."""
    keyword = {_compat.cache_keyword(model.forward): cache}
    return model(input_ids=ids, use_cache=True, logits_to_keep=keep, **keyword).logits
