"""Attention of scattered rows: a few queries anywhere in the prompt, each against exactly the keys it may see.

`attach` switches a model to the implementation `blendkv_<base>`, which is `<base>` for everything but the narrowed
layers of a blend. There the mask is not a tensor but a `RowMask`: the model's own mask function (causal, sliding,
chunked, padded) evaluated at (row, key) for the rows that are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blendkv import _compat, kernels

PREFIX = "blendkv_"
BLOCK_QUERIES = {"cpu": {64: 1.0, 192: 1.2, 512: 1.3}, "cuda": {2048: 1.0}}
"""Queries (rows x query heads per KV head) per block of the SDPA path: from how many on how many keys pass in the time
of one (one thread, AVX-512, head dim 64). Blocks have as many as the smallest number or a multiple of it, up to the
largest. Each is given the keys up to its own last row only: small ones skip more keys, large ones are quicker where
rows stand close together."""
MASK_BYTES = 256 * 2**20
"""Most bytes of masks kept from layer to layer."""

blending: ContextVar[Literal["lazy", "dense"] | None] = ContextVar("blendkv_blending", default=None)
"""How masks are made while a forward of this context fills a `BlendedCache`; None in any other forward.

"lazy" is for the attention functions of `register`, "dense" (never left out) for attention that a modeling file writes
itself.
"""


class Listener(Protocol):
    """Wants to know what rows attend to."""

    def hear(self, layer: int, query: Tensor, key: Tensor, mask: RowMask, options: dict[str, Any]) -> None:
        """Called in each layer with `[B, Q, S, D]` queries, all `[B, H, T, D]` keys, and attention's options."""
        ...


@dataclass(frozen=True)
class Band:
    """A mask that kernels know: a row sees the keys up to itself, at most the last `window` of them.

    Attributes:
        window: in keys, the row itself included; None for all.
    """

    window: int | None = None


@dataclass(eq=False)
class LazyMask:
    """The arguments of one call of a mask function, evaluated when it is known which rows are wanted.

    Attributes:
        make: the base implementation's mask function with its arguments bound.
        mask_function: `(batch, head, query index, key index) -> bool tensor`, indices broadcast.
        padding: `[B, T]` False at padding, or None.
    """

    make: Callable[[], Any]
    mask_function: Callable[..., Tensor]
    padding: Tensor | None
    _dense: list = field(default_factory=list, repr=False)

    def dense(self) -> Any:
        """What the base implementation would have got for all rows (made once)."""
        if not self._dense:
            self._dense.append(self.make())
        return self._dense[0]

    def visible(self, rows: Tensor, keys: int) -> Tensor:
        """`[B, 1, S, keys]`, True where `rows [B, S]` may see key indices below `keys`."""
        device = rows.device
        batch = torch.arange(rows.shape[0], device=device)[:, None, None, None]
        head = torch.zeros(1, dtype=torch.long, device=device)[:, None, None, None]
        key = torch.arange(keys, device=device)[None, None, None]
        mask = self.mask_function(batch, head, rows[:, None, :, None], key)
        if self.padding is not None:
            mask = mask & self.padding[:, None, None, :keys].to(device)
        return mask.expand(rows.shape[0], 1, rows.shape[1], keys)

    def band(self) -> Band | None:
        """The mask function as a `Band`, if it is one."""
        found = _compat.causal_window(self.mask_function)
        return None if found is None else Band(*found)


@dataclass(eq=False)
class RowMask:
    """The mask of a narrowed layer.

    Attributes:
        lazy: the layer's own mask.
        rows: `[B, S]` prompt indices of the queries, ascending.
        table: `[L, 4]` where the buffers of all layers are (`kernels.table`), if kernels do the attention.
        band: the mask as kernels know it; without it, or a table, SDPA does.
        padded: whether any key is hidden as padding.
        listener: told of every layer's queries and keys before they meet, or None.
    """

    lazy: LazyMask
    rows: Tensor
    table: Tensor | None = None
    band: Band | None = None
    padded: bool = True
    listener: Listener | None = None
    _blocks: dict = field(default_factory=dict, repr=False)
    _cuts: dict = field(default_factory=dict, repr=False)
    _bytes: int = 0

    @property
    def by_kernel(self) -> bool:
        """Whether a kernel can do it."""
        return self.table is not None and self.band is not None

    @cached_property
    def padding(self) -> Tensor | None:
        """`[B, T]` False at padding, where the rows are; None if there is none."""
        if not self.padded or self.lazy.padding is None:
            return None
        return self.lazy.padding.to(self.rows.device, torch.bool).contiguous()

    @cached_property
    def last(self) -> np.ndarray:
        """`[S]` on the host: the largest of each column of `rows`."""
        return self.rows.amax(0).cpu().numpy()

    def blocks(self, like: Tensor, groups: int, length: int) -> Iterator[tuple[slice, int, Tensor]]:
        """The queries in blocks, each with one past the last key it may see, and its additive mask.

        Args:
            like: a tensor of the layer's device and dtype.
            groups: query heads per KV head; the mask is repeated for each.
            length: number of keys.

        Yields:
            (rows, keys, mask `[B, 1, rows * groups, keys]`: 0 where visible, `hidden_score` where not). Layers that
            ask for the same get the same tensor, while they fit in `MASK_BYTES`.
        """
        for part in self._parts(like.device.type, groups):
            keys = min(length, -(-(int(self.last[part].max()) + 1) // 16) * 16)
            name = (part.start, keys, groups, like.device, like.dtype)
            mask = self._blocks.get(name)
            if mask is None:
                mask = self._additive(part, keys, groups, like)
                if self._bytes + mask.nbytes <= MASK_BYTES:
                    self._blocks[name] = mask
                    self._bytes += mask.nbytes
            yield part, keys, mask

    def _parts(self, device: str, groups: int) -> list[slice]:
        """The rows of each block, cut so that all blocks take the least time by `BLOCK_QUERIES` (a shortest path)."""
        if (device, groups) not in self._cuts:
            speeds = BLOCK_QUERIES.get(device, BLOCK_QUERIES["cuda"])
            unit, most = max(1, min(speeds) // groups), max(speeds) // min(speeds)
            speed = [max((v for q, v in speeds.items() if q <= n * min(speeds)), default=1.0) for n in range(most + 1)]
            ends = [*range(0, len(self.last), unit), len(self.last)]
            paths: list[tuple[float, int]] = [(0.0, 0)]  # by end: time up to there, where its last block begins
            for i in range(1, len(ends)):
                keys = int(self.last[ends[i] - 1]) + 1
                starts = range(max(0, i - most), i)
                paths.append(min((paths[j][0] + (ends[i] - ends[j]) * keys / speed[i - j], j) for j in starts))
            cuts, i = [], len(ends) - 1
            while i:
                cuts.append(slice(ends[paths[i][1]], ends[i]))
                i = paths[i][1]
            self._cuts[device, groups] = cuts[::-1]
        return self._cuts[device, groups]

    def _additive(self, part: slice, keys: int, groups: int, like: Tensor) -> Tensor:
        visible = self.lazy.visible(self.rows[:, part].to(like.device), keys)
        mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
        mask.masked_fill_(~visible, hidden_score(like.dtype))
        return mask.repeat_interleave(groups, dim=2) if groups > 1 else mask


def hidden_score(dtype: torch.dtype) -> float:
    """What is added to the score of a key that may not be seen: its weight is exactly 0.

    Finite, so that a row of padding that sees nothing is a mean of values and not NaN, which would spread: the keys it
    leaves behind are hidden from others with weight 0, and 0 x NaN is NaN.
    """
    return max(torch.finfo(dtype).min, -1e30) / 2


def scattered_sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """SDPA in blocks of sorted rows, query heads of one KV head folded into rows so that no key is copied.

    (SDPA's own `enable_gqa` falls back to its slowest kernel with a mask on CUDA, and is no faster on the CPU.)

    Args:
        query: `[B, Q, S, D]` of the rows in `mask`.
        key: `[B, H, T, D]`.
        value: `[B, H, T, Dv]`.
        mask: which keys each row sees.
        scaling: of the logits.
        dropout: probability, 0 outside training.

    Returns:
        `[B, S, Q, Dv]`.
    """
    b, q, s, d = query.shape
    h, groups = key.shape[1], q // key.shape[1]
    folded = query.reshape(b, h, groups, s, d).transpose(2, 3).reshape(b, h, s * groups, d)
    parts = [
        F.scaled_dot_product_attention(
            folded[:, :, rows.start * groups : rows.stop * groups],
            key[:, :, :keys],
            value[:, :, :keys],
            attn_mask=additive,
            dropout_p=dropout,
            scale=scaling,
        )
        for rows, keys, additive in mask.blocks(query, groups, key.shape[2])
    ]
    return torch.cat(parts, dim=2).view(b, h, s, groups, -1).transpose(1, 2).reshape(b, s, q, -1).contiguous()


def scattered_eager(base: Callable, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: RowMask, **kw):
    """The base's own eager attention with an additive mask `[B, 1, S, T]`: the slow, obvious twin."""
    visible = mask.lazy.visible(mask.rows.to(query.device), key.shape[2])
    additive = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
    additive.masked_fill_(~visible, hidden_score(query.dtype))
    return base(module, query, key, value, additive, **kw)


def scattered_kernel(query: Tensor, key: Tensor, value: Tensor, mask: RowMask, layer: int, **kw: Any) -> Tensor:
    """The Triton kernel, on the buffers that the mask's table names. Arguments and result as `scattered_sdpa`."""
    from blendkv.kernels.attention import scattered_attention

    assert mask.table is not None
    assert mask.band is not None
    with kernels.on(query.device):
        return scattered_attention(
            query,
            mask.rows,
            mask.table,
            layer,
            heads=key.shape[1],
            value_dim=value.shape[3],
            scaling=query.shape[3] ** -0.5 if kw.get("scaling") is None else kw["scaling"],
            window=mask.band.window,
            softcap=kw.get("softcap"),
            sinks=kw.get("s_aux"),
            padding=mask.padding,
        )


def _attention(
    base_name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kw: Any
):
    mask = attention_mask  # the name under which AFMoE passes it
    base = _compat.attention_functions(base_name)[0] or _compat.eager_attention(module)
    if not isinstance(mask, RowMask):
        looks_itself_up = "flash" in base_name  # transformers' FlashAttention picks its package by the config's name
        return base(_under(base_name, module) if looks_itself_up else module, query, key, value, mask, **kw)
    if mask.listener is not None:
        mask.listener.hear(_layer_idx(module), query, key, mask, kw)
    unusual = [n for n in ("softcap", "s_aux", "position_bias", "head_mask") if kw.get(n) is not None]
    if mask.by_kernel and not {"position_bias", "head_mask"} & set(unusual):
        return scattered_kernel(query, key, value, mask, _layer_idx(module), **kw), None
    if base_name == "eager" or unusual:
        eager = base if base_name == "eager" else _compat.eager_attention(module)
        return scattered_eager(eager, module, query, key, value, mask, **kw)
    return scattered_sdpa(query, key, value, mask, kw.get("scaling"), kw.get("dropout", 0.0)), None


class _View:
    """An object seen with some attributes of its own."""

    def __init__(self, of: Any, **own: Any) -> None:
        self.__dict__.update(own, _of=of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def _under(base_name: str, module: Any) -> Any:
    """An attention module whose config names the base implementation, as it did before `attach`."""
    return _View(module, config=_View(module.config, _attn_implementation=base_name))


def _layer_idx(module: Any) -> int:
    return module.layer_idx


def _mask(base_name: str, **kw: Any) -> Any:
    make, how = partial(_compat.attention_functions(base_name)[1], **kw), blending.get()
    if how != "lazy":
        return make() if how is None else make(allow_is_causal_skip=False)
    return LazyMask(make, kw["mask_function"], kw.get("attention_mask"))


def register(base_name: str) -> str:
    """Registers `blendkv_<base_name>` with transformers and returns that name."""
    name = PREFIX + base_name
    _compat.register_attention(name, partial(_attention, base_name), partial(_mask, base_name))
    return name
