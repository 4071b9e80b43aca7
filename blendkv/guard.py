"""An online guard: some requests are answered in full too, after their answer, and blends that go wrong are given up.

Opt-in: `ChunkLibrary(..., guard=Guard())`, then `guard.check(model, inputs, output)` after `generate`. Rules:

- A share of the requests is checked: full recompute's distributions over the answer's first tokens beside the blend's.
- The last `window` checks count. If there are at least `least` of them, and their mean KL is over `kl` or their mean
  agreement under `agreement` (or one check gave no number), the guard falls back: every request is recomputed in full
  (ratio 1), which is exact.
- While it has fallen back, requests go on being sampled, and what their blend would have been is checked. After
  `recover` such checks in a row that are each within both bounds it blends again, with an empty window.
"""

from __future__ import annotations

import math
import random
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from blendkv import _compat
from blendkv.cache import BlendedCache, Chunk
from blendkv.divergence import kl_divergence


@dataclass(frozen=True)
class ShadowCheck:
    """One request beside full recompute.

    Attributes:
        kl: nats per answer token, mean over them; NaN if a distribution was none.
        agreement: share of answer tokens whose likeliest token is the same.
        tokens: answer tokens compared.
        seconds: what the check took.
        ok: whether it is within both bounds.
        fallen_back: whether requests are recomputed in full from here on.
    """

    kl: float
    agreement: float
    tokens: int
    seconds: float
    ok: bool
    fallen_back: bool


class Guard:
    """Checks a sample of requests against full recompute, and gives blends up where they go wrong.

    Safe to share between threads. A check costs one full prefill and one blend of the request.

    Args:
        share: of the requests that are checked, in (0, 1].
        kl: most mean KL, nats per answer token.
        agreement: least mean share of answer tokens whose likeliest token is full recompute's.
        window: checks that count.
        least: checks before anything is given up.
        recover: good checks in a row after which it blends again.
        tokens: most answer tokens compared.
        seed: of the sample.

    Raises:
        ValueError: for bounds that cannot be.
    """

    def __init__(
        self,
        share: float = 0.05,
        *,
        kl: float = 0.2,
        agreement: float = 0.7,
        window: int = 20,
        least: int = 3,
        recover: int = 10,
        tokens: int = 12,
        seed: int = 0,
    ) -> None:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share={share}: give the share of requests to check, over 0 and at most 1")
        if not kl > 0.0 or not 0.0 <= agreement <= 1.0:
            raise ValueError(f"kl={kl}, agreement={agreement}: give a KL over 0 and an agreement in [0, 1]")
        if not 1 <= least <= window or recover < 1 or tokens < 1:
            raise ValueError(
                f"window={window}, least={least}, recover={recover}, tokens={tokens}: each at least 1, and no more "
                "checks needed than the window holds"
            )
        self.share, self.kl, self.agreement = share, kl, agreement
        self.least, self.recover, self.tokens = least, recover, tokens
        self.fallen_back = False
        self.checks = self.requests = self.fallbacks = self.failures = 0
        self._recent: deque[ShadowCheck] = deque(maxlen=window)
        self._good = 0
        self._wanted: WeakKeyDictionary[BlendedCache, BlendedCache] = WeakKeyDictionary()
        self._random, self._lock = random.Random(seed), threading.Lock()

    def cache(self, chunks: Sequence[Chunk] | Sequence[Sequence[Chunk]], options: Mapping[str, Any]) -> BlendedCache:
        """The cache of a request: as its options say, or of full recompute while the guard has fallen back."""
        with self._lock:
            self.requests += 1
            sampled, back = self._random.random() < self.share, self.fallen_back
        wanted = BlendedCache(chunks, **options)
        exact: dict[str, Any] = {**options, "recompute_ratio": 1.0, "check_layers": None, "selector": "all"}
        given = BlendedCache(chunks, **exact) if back else wanted
        if back:
            given.report.remark("the guard has fallen back: full recompute")
        if sampled:
            with self._lock:
                self._wanted[given] = wanted.fork()
        return given

    def check(self, model: Any, inputs: Mapping[str, Any], output: Any) -> ShadowCheck | None:
        """Compares an answer with full recompute, if its request is in the sample. Call it after the answer is out.

        A check that fails (no memory, say) is counted in `failures` and warned of, and never raised.

        Args:
            model: attached.
            inputs: what `generate` was given: `input_ids` of one prompt and its cache.
            output: what `generate` returned: ids, or an object with `sequences`.
        """
        cache = next((inputs[name] for name in _compat.CACHE_NAMES if name in inputs), None)
        with self._lock:
            shadow = self._wanted.pop(cache, None) if isinstance(cache, BlendedCache) else None
        if shadow is None:
            return None
        begin = time.perf_counter()
        try:
            prompt = inputs["input_ids"]
            answer = getattr(output, "sequences", output)[:1, prompt.shape[1] :][:, : self.tokens]
            if len(prompt) != 1 or not answer.shape[1]:
                return None
            kl, agreement = compare(model, prompt, answer, shadow)
        except Exception as error:
            with self._lock:
                self.failures += 1
            warnings.warn(f"a shadow check failed, and says nothing: {type(error).__name__}: {error}", stacklevel=2)
            return None
        return self._note(kl, agreement, answer.shape[1], time.perf_counter() - begin)

    def report(self) -> dict[str, Any]:
        """Counts and the window's means, for logs and metrics."""
        with self._lock:
            kl, agreement = self._means()
            return {
                "requests": self.requests,
                "checks": self.checks,
                "failures": self.failures,
                "fallbacks": self.fallbacks,
                "fallen_back": self.fallen_back,
                "window": len(self._recent),
                "kl": kl,
                "agreement": agreement,
                "seconds": sum(check.seconds for check in self._recent),
            }

    def _note(self, kl: float, agreement: float, tokens: int, seconds: float) -> ShadowCheck:
        ok = kl <= self.kl and agreement >= self.agreement  # a NaN is never within a bound
        with self._lock:
            self.checks += 1
            if self.fallen_back:
                self._good = self._good + 1 if ok else 0
                if self._good >= self.recover:
                    self.fallen_back, self._good = False, 0
                    self._recent.clear()
            check = ShadowCheck(kl, agreement, tokens, seconds, ok, self.fallen_back)
            self._recent.append(check)
            mean_kl, mean_agreement = self._means()
            within = mean_kl <= self.kl and mean_agreement >= self.agreement
            enough = len(self._recent) >= self.least or math.isnan(kl)
            if not self.fallen_back and enough and not within:
                self.fallen_back, self._good = True, 0
                self.fallbacks += 1
                check = ShadowCheck(kl, agreement, tokens, seconds, ok, True)
                self._recent[-1] = check
        return check

    def _means(self) -> tuple[float, float]:
        count = len(self._recent)
        if not count:
            return 0.0, 1.0
        return sum(c.kl for c in self._recent) / count, sum(c.agreement for c in self._recent) / count


@torch.no_grad()
def compare(model: Any, prompt: Tensor, answer: Tensor, cache: BlendedCache) -> tuple[float, float]:
    """KL(full || blend) and agreement over an answer that both are forced to give.

    Args:
        model: attached.
        prompt: `[1, T]` ids.
        answer: `[1, N]` ids after it.
        cache: an empty one over the prompt's chunks.
    """
    full = _forced(model, prompt, answer, DynamicCache())
    blend = _forced(model, prompt, answer, cache)
    kl = kl_divergence(full, blend.to(full.device)).mean()
    return float(kl), float((full.argmax(-1) == blend.argmax(-1)).float().mean())


def _forced(model: Any, prompt: Tensor, answer: Tensor, cache: Cache) -> Tensor:
    """`[N, V]` logits of each step of an answer; the prompt is a forward of its own, as in `generate`."""
    keyword = {_compat.cache_keyword(model.forward): cache}
    logits = [model(input_ids=prompt, use_cache=True, logits_to_keep=1, **keyword).logits[0]]
    if answer.shape[1] > 1:
        rest = answer[:, :-1].to(prompt.device)
        logits.append(model(input_ids=rest, use_cache=True, logits_to_keep=rest.shape[1], **keyword).logits[0])
    return torch.cat(logits)
