"""A worker of each method with a bounded store of its own, for `blendkv bench throughput`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from blendkv import _compat
from blendkv.attaching import attach, attachment_of
from blendkv.bench.methods import Blend, Method, states_of
from blendkv.bench.workload import Request, Workload
from blendkv.cache import BlendedCache
from blendkv.chunk import ChunkCache, chunk_key
from blendkv.prefilling import prefill
from blendkv.stores import Pool


class Served(NamedTuple):
    """What a request took, from when the worker began with it.

    Attributes:
        first_s: seconds to the first token.
        total_s: seconds to the last.
        hits: tokens of documents whose keys and values were in the store.
    """

    first_s: float
    total_s: float
    hits: int


class Worker(ABC):
    """Answers requests one after another with one method.

    Args:
        model: on its device.
        workload: whose requests they are.
        new_tokens: of an answer.
    """

    def __init__(self, model: PreTrainedModel, workload: Workload, new_tokens: int = 1) -> None:
        self.model, self.workload, self.new_tokens = model, workload, new_tokens
        self.device = next(model.parameters()).device

    @abstractmethod
    def start(self, request: Request) -> tuple[Cache | None, int]:
        """The cache that `generate` starts from (None: its own), and how many document tokens the store had."""

    def keep(self, request: Request, cache: Cache | None) -> None:
        """Keeps what the method reuses later; off the clock, since engines keep it where it was computed."""
        return

    def warm(self, request: Request) -> None:
        """Leaves the store as if the request had been served."""
        self.start(request)

    def serve(self, request: Request) -> Served:
        """Answers a request."""
        ids = torch.tensor([self.workload.ids(request)])
        _synchronize(self.device)
        begin = time.perf_counter()
        cache, hits = self.start(request)
        first_s = self._generate(ids.to(self.device), cache) - begin
        _synchronize(self.device)
        total_s = time.perf_counter() - begin
        self.keep(request, cache)
        return Served(first_s, total_s, hits)

    def _generate(self, ids: Tensor, cache: Cache | None) -> float:
        """Answers greedily; returns when the first token was there."""
        listener = _FirstToken()
        given = {} if cache is None else {_compat.CACHE_ARG: cache}
        generate: Any = self.model.generate
        length = {"max_new_tokens": self.new_tokens, "min_new_tokens": self.new_tokens}
        generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=listener, **length, **given
        )
        return listener.times[1]


class FullWorker(Worker):
    """Full recompute: nothing is kept."""

    def start(self, request: Request) -> tuple[Cache | None, int]:
        """Nothing."""
        return None, 0


class PrefixWorker(Worker):
    """Prefix reuse, as serving engines do it: documents are found again behind the very same documents only.

    Args:
        capacity_bytes: of all that is kept; least recently used goes first.
    """

    def __init__(self, *args: Any, capacity_bytes: int) -> None:
        super().__init__(*args)
        self.capacity_bytes, self.bytes = capacity_bytes, 0
        self._kept: OrderedDict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = OrderedDict()

    def start(self, request: Request) -> tuple[Cache | None, int]:
        """A `DynamicCache` of the longest prefix that is kept."""
        found: list[list[tuple[Tensor, Tensor]]] = []
        for prefix in _prefixes(request):
            if prefix not in self._kept:
                break
            found.append(self._kept[prefix])
        cache = DynamicCache()
        for layer, parts in enumerate(zip(*found, strict=True)):
            keys, values = (torch.cat(states, dim=2) for states in zip(*parts, strict=True))
            cache.update(keys, values, layer)
        return cache, sum(len(self.workload.documents[number]) for number in request.documents[: len(found)])

    def keep(self, request: Request, cache: Cache | None) -> None:
        """Keeps each document's own part of the prompt's states."""
        assert cache is not None
        start = 0
        for prefix in _prefixes(request):
            stop = start + len(self.workload.documents[prefix[-1]])
            if prefix not in self._kept:
                states = [(k[:, :, start:stop].clone(), v[:, :, start:stop].clone()) for k, v in states_of(cache)]
                self._kept[prefix] = states
                self.bytes += _bytes(states)
            start = stop
        for prefix in reversed(_prefixes(request)):  # the longest goes first: without the shorter nobody gets to it
            self._kept.move_to_end(prefix)
        while self.bytes > self.capacity_bytes:
            self.bytes -= _bytes(self._kept.popitem(last=False)[1])

    def warm(self, request: Request) -> None:
        """States behind other documents are only had by computing them there."""
        self.serve(request)


class BlendWorker(Worker):
    """A `BlendedCache` from a pool of documents; what is missing is computed alone, kept, and part of the time.

    Args:
        method: with ratio and selector.
        capacity_bytes: of the pool.
    """

    def __init__(self, *args: Any, method: Blend, capacity_bytes: int) -> None:
        super().__init__(*args)
        self.method, self.pool = method, Pool(capacity_bytes)
        fingerprint = attachment_of(attach(self.model)).facts.fingerprint
        self._keys = [chunk_key(ids, fingerprint) for ids in self.workload.documents]

    def start(self, request: Request) -> tuple[Cache | None, int]:
        """Chunks out of the pool, or computed and put there."""
        chunks: list[ChunkCache | None] = list(self.pool.get_many([self._keys[n] for n in request.documents]))
        missing = [i for i, chunk in enumerate(chunks) if chunk is None]
        texts = [self.workload.documents[request.documents[i]] for i in missing]
        for i, chunk in zip(missing, prefill(self.model, texts, progress=False), strict=True):
            self.pool.put(chunk)
            chunks[i] = chunk
        ready = [chunk for chunk in chunks if chunk is not None]
        hits = sum(map(len, ready)) - sum(map(len, texts))
        return BlendedCache(ready, self.method.kept, self.method.selector), hits


def make_worker(method: Method, model: PreTrainedModel, workload: Workload, new_tokens: int, capacity: int) -> Worker:
    """The worker of a method (`methods.make_methods`) with room for `capacity` bytes in its store."""
    if isinstance(method, Blend):
        return BlendWorker(model, workload, new_tokens, method=method, capacity_bytes=capacity)
    if method.name == "prefix":
        return PrefixWorker(model, workload, new_tokens, capacity_bytes=capacity)
    return FullWorker(model, workload, new_tokens)


class _FirstToken:
    """A streamer of `generate`: it is given the prompt, then each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to show."""


def _prefixes(request: Request) -> list[tuple[int, ...]]:
    return [request.documents[: i + 1] for i in range(len(request.documents))]


def _bytes(states: Sequence[tuple[Tensor, Tensor]]) -> int:
    return sum(k.nbytes + v.nbytes for k, v in states)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
