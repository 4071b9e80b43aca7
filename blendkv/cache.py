"""The cache that `generate` is given: empty at first, it fills itself from chunks in the first forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from blendkv import _compat
from blendkv.chunk import ChunkCache, MissingChunk
from blendkv.compiling import refuse_compiled
from blendkv.correctors import Corrector, get_corrector
from blendkv.errors import CacheStateError, NotAttachedError
from blendkv.report import BlendReport
from blendkv.selectors import Selector, get_selector

if TYPE_CHECKING:
    from blendkv.blend import Blend
    from blendkv.decoding import Step

Chunk = ChunkCache | MissingChunk


class BlendedLayer(CacheLayerMixin):
    """Keys and values of one layer in buffers with room to grow.

    `keys` and `values` are views `[B, H, T, D]` of the filled part; a decoded token is written in place, not
    concatenated.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, reserve: int = 256) -> None:
        self._keys = self._values = torch.empty(0, 0, 0, 0)
        self.length = 0
        self.reserve = reserve
        super().__init__()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for the tokens given plus the reserve."""
        self.allocate(key_states, value_states, key_states.shape[-2])

    def allocate(self, key_states: Tensor, value_states: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Makes room for `tokens` plus the reserve, shaped like `[B, H, *, D]` states; returns both buffers."""
        (batch, heads, _, dim), value_dim = key_states.shape, value_states.shape[-1]
        return self.allocate_for(batch, heads, dim, value_dim, tokens, key_states.dtype, key_states.device)

    def allocate_for(
        self, batch: int, heads: int, dim: int, value_dim: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Makes room for `tokens` plus the reserve; returns the buffers of keys and values."""
        self._keys, self._values = (
            torch.empty(batch, heads, tokens + self.reserve, d, dtype=dtype, device=device) for d in (dim, value_dim)
        )
        self.device, self.dtype = device, dtype
        self.is_initialized = True
        return self._keys, self._values

    @property
    def keys(self) -> Any:
        """`[B, H, T, D]` view of the filled part, or None."""
        return self._keys[:, :, : self.length] if self.is_initialized else None

    @keys.setter
    def keys(self, value: Any) -> None:
        """What the base class begins with; nothing to keep."""

    @property
    def values(self) -> Any:
        """`[B, H, T, Dv]` view of the filled part, or None."""
        return self._values[:, :, : self.length] if self.is_initialized else None

    @values.setter
    def values(self, value: Any) -> None:
        """What the base class begins with; nothing to keep."""

    def resize(self, length: int) -> tuple[Tensor, Tensor]:
        """Declares the first `length` tokens of the buffers filled; returns the views."""
        self.length = length
        return self.keys, self.values

    def make_room(self, tokens: int) -> None:
        """Sees to it that `tokens` more can be written in place."""
        if self._keys.is_inference() and not torch.is_inference_mode_enabled():
            self._map_batch(torch.clone)  # filled under inference_mode: such tensors cannot be written to outside it
        if self.length + tokens > self._keys.shape[2]:
            old_keys, old_values = self.keys, self.values
            new_keys, new_values = self.allocate(old_keys, old_values, self.length + tokens)
            new_keys[:, :, : self.length] = old_keys
            new_values[:, :, : self.length] = old_values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends `[B, H, n, D]` states; returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        key_states, value_states = key_states.detach(), value_states.detach()
        start, stop = self.length, self.length + key_states.shape[-2]
        self.make_room(stop - start)
        self._keys[:, :, start:stop] = key_states
        self._values[:, :, start:stop] = value_states
        return self.resize(stop)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(key length, key offset) that a mask for `query_length` more tokens needs."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Number of tokens held."""
        return self.length

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, argument: int) -> None:
        """As `Cache.crop` of the installed transformers: buffers stay, the length falls."""
        if self.is_initialized:
            self.resize(_compat.crop_length(argument, self.length))

    def reset(self) -> None:
        """Drops everything."""
        self.__init__(self.reserve)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders the batch for beam search."""
        self._map_batch(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row of the batch."""
        self._map_batch(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows of the batch."""
        self._map_batch(lambda t: t[torch.as_tensor(indices, device=t.device)])

    def offload(self) -> None:
        """Moves the buffers to the CPU."""
        if self.is_initialized:
            self._map_batch(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Moves the buffers back to the layer's device."""
        if self.is_initialized:
            self._map_batch(lambda t: t.to(self.device, non_blocking=True))

    def _map_batch(self, function) -> None:
        if self.is_initialized:
            self._keys, self._values = function(self._keys), function(self._values)


class BlendedCache(Cache):
    """A `transformers.Cache` that starts empty and fills itself from chunks in the first forward.

    The model must be attached (`blendkv.attach`). In the first forward the chunks are found in `input_ids`, their keys
    rotated to where they stand, a share of their tokens recomputed, and everything else computed as usual. After that
    it is an ordinary growing cache. Run another prompt with `fork()`, or a new cache from the same chunks.

    Args:
        chunks: chunks of the prompt, in any order; for a batch with different chunks a list of lists, one per row.
        recompute_ratio: share of chunk tokens to recompute, in [0, 1]; the same as `check_layers={1: ratio}` for
            selectors that compare, `{0: ratio}` for those that need only positions.
        selector: name or `Selector`: which tokens.
        check_layers: schedule of gradual filtering (CacheBlend, section 4): layer -> share of chunk tokens kept from
            there on, never growing; overrides `recompute_ratio`.
        strict: raise `ChunkMissError` if a chunk cannot be used, instead of computing its tokens.
        reserve: tokens of room beyond the prompt, and the step by which the buffers grow.
        corrector: name or `Corrector`: what is done to stored states that are kept; None for nothing.

    Raises:
        ValueError: for a ratio outside [0, 1], a growing schedule, an unknown selector or corrector.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk] | Sequence[Sequence[Chunk]],
        recompute_ratio: float = 0.15,
        selector: str | Selector = "hkvd",
        check_layers: Mapping[int, float] | None = None,
        strict: bool = False,
        reserve: int = 256,
        corrector: str | Corrector | None = None,
    ) -> None:
        if reserve < 1:
            raise ValueError(f"reserve={reserve}: give at least one token of room")
        super().__init__(layers=[])
        self.selector, self.corrector = get_selector(selector), get_corrector(corrector)
        self.schedule = make_schedule(self.selector, recompute_ratio, check_layers)
        self.chunks = _as_rows(chunks)
        self.strict = strict
        self.reserve = reserve
        corrects = "" if self.corrector is None else self.corrector.name
        self.report = BlendReport(selector=self.selector.name, schedule=dict(self.schedule), corrector=corrects)
        self.ids: Tensor | None = None
        self.logits_to_keep: int | None = None
        self.mask_length: int | None = None
        self.work: Blend | Step | None = None
        self.recomputed: list[Tensor] = []
        """Once filled, for each row of the batch: `[N]` prompt indices of chunk tokens computed in every layer."""
        self._failed = False

    @property
    def chunk_tokens(self) -> int:
        """Tokens of all chunks, over all rows."""
        return sum(len(chunk) for row in self.chunks for chunk in row)

    @property
    def blended(self) -> list[BlendedLayer]:
        """The layers, as what they are."""
        return cast("list[BlendedLayer]", self.layers)

    @property
    def is_filled(self) -> bool:
        """Whether the first forward has been done."""
        return self.ids is not None

    @property
    def reads_from(self) -> int:
        """The first layer whose stored keys and values are read."""
        asks = "question" in self.selector.needs and any(self.schedule.values())
        return 0 if asks else min(self.schedule, default=0)

    def fork(self) -> BlendedCache:
        """An empty cache over the same chunks (shared, not copied) with the same options, for another prompt."""
        twin = object.__new__(type(self))
        BlendedCache.__init__(twin, (), 0.0, self.selector, None, self.strict, self.reserve, self.corrector)
        twin.chunks, twin.schedule = self.chunks, self.schedule
        twin.report.schedule = dict(self.schedule)
        return twin

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes the fresh `[B, H, S, D]` states of a layer; returns those of the whole prompt so far."""
        refuse_compiled()
        if self.work is not None:
            return self.work.fill(layer_idx, key_states, value_states)
        self.check_usable()
        if not self.is_filled:
            raise NotAttachedError(
                "this model has no blendkv hooks: call blendkv.attach(model) before you pass it a BlendedCache"
            )
        return self.blended[layer_idx].update(key_states, value_states)

    def check_usable(self) -> None:
        """Raises if a forward failed half-way.

        Raises:
            CacheStateError: with what to do.
        """
        if self._failed:
            raise CacheStateError("the first forward of this cache failed half-way; go on with cache.fork()")

    def check_continues(self, input_ids: Tensor, attention_mask: Tensor | None) -> None:
        """Checks ids that `generate` is about to slice against what the cache holds.

        Args:
            input_ids: `[B, T]`, the full ids, or only the new ones if the mask is longer by the tokens held.
            attention_mask: `[B, T]` or None.

        Raises:
            CacheStateError: if the cache holds another prompt, or all of this one.
            ValueError: if ids and mask have lengths that do not belong together.
        """
        self.check_usable()
        held, given = self.get_seq_length(), input_ids.shape[1]
        masked, self.mask_length = self.mask_length, None  # what `generate` was given, seen once
        if attention_mask is not None and attention_mask.ndim == 2:
            masked = attention_mask.shape[1]
        masked = given if masked is None else masked
        if masked not in (given, held + given):
            raise ValueError(
                f"input_ids have {given} tokens, attention_mask {masked}, the cache {held}: pass the ids of the whole "
                "prompt and a mask of the same length (or no mask)"
            )
        if self.ids is None or (held and masked == held + given):
            return
        start = input_ids[:, :held].to(self.ids.device)
        if start.shape != self.ids.shape or not torch.equal(start, self.ids):
            raise CacheStateError(
                f"this cache already holds another prompt ({held} tokens) that the ids given ({given} tokens) do not "
                "continue; use cache.fork(), or a new BlendedCache from the same chunks"
            )
        if given == held:
            raise CacheStateError(
                f"all {given} ids are already in this cache, so there is nothing to compute logits from; use "
                "cache.fork() to run the prompt again"
            )

    def new_ids(self, input_ids: Tensor) -> Tensor:
        """The ids that the cache does not hold yet: `input_ids`, or their end if they begin with all that is held.

        Assisted decoding hands over the whole prompt in its first step, filled cache or not.
        """
        if self.ids is None or input_ids.shape[1] <= self.ids.shape[1] or not self.ids.shape[1]:
            return input_ids
        start = input_ids[:, : self.ids.shape[1]].to(self.ids.device)
        whole = start.shape == self.ids.shape and torch.equal(start, self.ids)
        return input_ids[:, self.ids.shape[1] :] if whole else input_ids

    def record(self, input_ids: Tensor) -> None:
        """Remembers the ids that were appended."""
        self.ids = input_ids if self.ids is None else torch.cat([self.ids, input_ids.to(self.ids.device)], dim=1)

    def crop(self, *args: int, **kwargs: int) -> None:
        """As `Cache.crop` of the installed transformers; the recorded ids follow."""
        super().crop(*args, **kwargs)
        if self.ids is not None and not self.get_seq_length():
            self.reset()
        elif self.ids is not None:
            self.ids = self.ids[:, : self.get_seq_length()]

    def reset(self) -> None:
        """Empties the cache, so that it can be filled again from the same chunks."""
        twin = self.fork()
        self.__dict__.update(twin.__dict__)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders the batch for beam search."""
        super().reorder_cache(beam_idx)
        self._map_ids(lambda ids: ids.index_select(0, beam_idx.to(ids.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row of the batch."""
        super().batch_repeat_interleave(repeats)
        self._map_ids(lambda ids: ids.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows of the batch."""
        super().batch_select_indices(indices)
        self._map_ids(lambda ids: ids[torch.as_tensor(indices, device=ids.device)])

    def _map_ids(self, function) -> None:
        if self.ids is not None:
            self.ids = function(self.ids)

    def __repr__(self) -> str:
        """A line for people."""
        state = f"{self.get_seq_length()} tokens" if self.is_filled else "empty"
        return f"BlendedCache({sum(map(len, self.chunks))} chunks, {self.selector.name} {self.schedule}, {state})"


def make_schedule(
    selector: Selector, recompute_ratio: float, check_layers: Mapping[int, float] | None = None
) -> dict[int, float]:
    """Layer -> share of chunk tokens kept from there on; empty if nothing is ever narrowed.

    Raises:
        ValueError: for a ratio outside [0, 1], a negative layer, or a schedule that grows.
    """
    if selector.ratio is not None:
        recompute_ratio, check_layers = selector.ratio, None
    first = 1 if "deviation" in selector.needs else 0
    schedule = dict(sorted((check_layers if check_layers is not None else {first: recompute_ratio}).items()))
    last = 1.0
    for layer, ratio in schedule.items():
        if not isinstance(layer, int) or layer < 0:
            raise ValueError(f"check_layers: {layer!r} is not a layer index")
        if not 0.0 <= float(ratio) <= 1.0:
            raise ValueError(f"recompute ratio {ratio} at layer {layer} is outside [0, 1]")
        if ratio > last:
            raise ValueError(
                f"check_layers={schedule}: the share kept may not grow (layer {layer}); a token dropped at one layer "
                "has no hidden state at the next"
            )
        last = ratio
    if check_layers is None and recompute_ratio == 0.0:
        return {0: 0.0}  # nothing will be recomputed, so nothing needs comparing
    return {layer: float(ratio) for layer, ratio in schedule.items() if ratio < 1.0}


def _as_rows(chunks: Sequence) -> tuple[tuple[Chunk, ...], ...]:
    """One tuple of chunks per row of the batch; a flat list serves every row."""
    rows = [chunks] if not chunks or not isinstance(chunks[0], list | tuple) else list(chunks)
    for row in rows:
        for chunk in row:
            if not isinstance(chunk, ChunkCache | MissingChunk):
                raise TypeError(f"expected ChunkCache objects (see blendkv.prefill), not {type(chunk).__name__}")
    return tuple(tuple(row) for row in rows)
