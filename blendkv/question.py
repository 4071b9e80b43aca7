"""The question pass: what the question attends to, before any chunk token is recomputed.

The fresh rows alone run through the layers against reused keys, in the cache's own buffers; in each layer the attention
that every key gets from the question's rows is kept (ProphetKV 2602.02579, section 3; FusionRAG; A3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blendkv import kernels
from blendkv.attention import RowMask
from blendkv.errors import UnsupportedModelError
from blendkv.graphs import GraphPass, Shape
from blendkv.kernels.table import upload
from blendkv.mass import attention_mass
from blendkv.plan import RowPlan


class Enough(Exception):
    """Ends the pass: the last layer that was wanted has been heard."""


class Question:
    """Hears what the question attends to.

    Args:
        plans: one a batch row.
        layers: number of the model's.
        wanted: which of them count; None for all.
        last: how many of the question's last rows count; None for all.
        device: where rows are made.
        graphs: CUDA graphs to use, or None.
    """

    def __init__(
        self,
        plans: Sequence[RowPlan],
        layers: int,
        wanted: Sequence[int] | None,
        last: int | None,
        device: torch.device,
        graphs: GraphPass | None = None,
    ) -> None:
        self.wanted = tuple(range(layers)) if wanted is None else tuple(sorted(set(wanted)))
        if not self.wanted or not 0 <= self.wanted[0] <= self.wanted[-1] < layers:
            raise ValueError(f"a question pass over layers {wanted}: the model has layers 0 to {layers - 1}")
        self.mass: dict[int, Tensor] = {}
        fresh = [np.flatnonzero(plan.fresh) for plan in plans]
        asks = [np.flatnonzero(plan.asks)[-(last or 0) :] for plan in plans]
        width, count = max(map(len, fresh)), max(map(len, asks))
        if graphs is not None:
            width = graphs.width(width)
            count = min(graphs.width(count), width)
        self.rows = upload(np.stack([np.pad(row, (width - len(row), 0), "edge") for row in fresh]), device)
        """`[B, S]` prompt indices of the rows that run, ascending; the shorter are padded with their first."""
        at = np.tile(np.arange(width - count, width), (len(plans), 1))
        for row, (f, a) in enumerate(zip(fresh, asks, strict=True)):
            at[row, count - len(a) :] = np.searchsorted(f, a) + width - len(f)
        self._whole = bool((at == np.arange(width - count, width)).all())
        self._at = upload(at, device)
        self._asking = upload(np.stack([_pad(row, count, -1) for row in asks]), device)
        self._tokens = _rounded(len(plans[0].fresh))
        self._own: Shape | None = None
        if graphs is not None:
            kind = "question", self._tokens, count, self._whole, self.wanted
            self._own = graphs.enter(self.rows, kind, self.wanted[-1], {"at": self._at, "asking": self._asking})
        self._masks: dict[int, tuple[RowMask, RowMask]] = {}

    def hear(self, layer: int, query: Tensor, key: Tensor, mask: RowMask, options: dict[str, Any]) -> None:
        """Keeps the attention that a layer's keys get.

        Raises:
            Enough: after the last layer wanted.
            UnsupportedModelError: if this layer adds something to its logits that would have to be known.
        """
        if layer in self.wanted:
            if any(options.get(name) is not None for name in ("position_bias", "head_mask")):
                raise UnsupportedModelError(
                    f"layer {layer} adds a bias to its attention that a question pass does not know: choose a selector "
                    "without attention, such as 'hkvd'"
                )
            mass = self._mass(layer, query, key, mask, options)
            self.mass[layer] = mass if self._own is None else self._own.put(layer, mass)
        if layer == self.wanted[-1]:
            raise Enough

    def note(self, layer: int) -> None:
        """A layer ran, perhaps by a CUDA graph, which leaves what it heard where it did before."""
        if self._own is not None and layer in self._own.outputs:
            self.mass[layer] = self._own.outputs[layer]

    def over(self) -> None:
        """The pass is over: masks, which tell this, are held no longer."""
        self._masks.clear()

    def attention(self, b: int, rows: Tensor) -> dict[int, Tensor]:
        """For each of the layers wanted `[N]`: what prompt indices `rows [N]` of batch row `b` get.

        Raises:
            UnsupportedModelError: if a layer was not heard.
        """
        silent = [layer for layer in self.wanted if layer not in self.mass]
        if silent:
            raise UnsupportedModelError(
                f"the attention of layer {silent[0]} does not go through transformers' attention interface, so a "
                "question pass sees nothing: choose a selector without attention, such as 'hkvd'"
            )
        return {layer: self.mass[layer][b].to(rows.device)[rows] for layer in self.wanted}

    def _mass(self, layer: int, query: Tensor, key: Tensor, mask: RowMask, options: dict[str, Any]) -> Tensor:
        """`[B, T]` fp32."""
        if self._whole:
            query = query[:, :, -self._at.shape[1] :]
        else:
            at = self._held("at", self._at, query.device)[:, None, :, None]
            query = query.gather(2, at.expand(-1, query.shape[1], -1, query.shape[3]))
        scaling = query.shape[3] ** -0.5 if options.get("scaling") is None else options["scaling"]
        asking = self._held("asking", self._asking, query.device)
        if not mask.by_kernel:
            if id(mask) not in self._masks:
                self._masks[id(mask)] = mask, RowMask(mask.lazy, asking.clamp_min(0), padded=mask.padded)
            own = self._masks[id(mask)][1]
            return attention_mass(query, key, own, asking >= 0, scaling, options.get("softcap"), options.get("s_aux"))
        from blendkv.kernels import mass

        assert mask.table is not None
        assert mask.band is not None
        with kernels.on(query.device):
            return mass.attention_mass(
                query,
                asking,
                mask.table,
                layer,
                heads=key.shape[1],
                tokens=self._tokens,
                scaling=scaling,
                window=mask.band.window,
                softcap=options.get("softcap"),
                sinks=options.get("s_aux"),
                padding=mask.padding,
            )

    def _held(self, name: str, value: Tensor, device: torch.device) -> Tensor:
        """`value` on a device, where CUDA graphs read it."""
        return value.to(device) if self._own is None else self._own.held[device, name]


def _rounded(tokens: int) -> int:
    """Up by an eighth at most, so that prompts of about this length share graphs."""
    step = max(64, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


def _pad(row: np.ndarray, width: int, value: int) -> np.ndarray:
    """Puts a value in front of a row until it is `width` long."""
    return np.concatenate([np.full(width - len(row), value, np.int64), row.astype(np.int64)])
