"""One prompt being filled: which rows are computed in which layer, and where every key and value comes from."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from blendkv import flops
from blendkv.attention import LazyMask, RowMask, blending
from blendkv.cache import BlendedCache
from blendkv.chunk import ChunkCache
from blendkv.errors import UnsupportedModelError
from blendkv.plan import RowPlan, chunks_per_row, plan_row, require_hits
from blendkv.report import BlendReport, ChunkUse, LayerRows
from blendkv.rope import Rotation, on_device
from blendkv.selectors import Candidates


@dataclass(frozen=True)
class ModelFacts:
    """What a blend must know of a model; `attach` finds it out (`learning.learn`).

    Attributes:
        fingerprint: `weights.model_fingerprint` of the weights as they are now.
        rotations: one a layer.
        rotary: the model's rotary module, or None.
        dtype: of keys and values.
        sizes: for each layer (KV heads, key dim, value dim).
        shape: what a row costs in each layer, for the charged budget; None if the layers could not be counted.
    """

    fingerprint: str
    rotations: tuple[Rotation, ...]
    rotary: nn.Module | None
    dtype: torch.dtype
    sizes: tuple[tuple[int, int, int], ...]
    shape: flops.ModelShape | None

    def mismatch(self, chunk: ChunkCache) -> str | None:
        """Why a chunk must not be used with this model, or None."""
        if chunk.fingerprint != self.fingerprint:
            return "fingerprint"
        if any(t.dtype != self.dtype for t in (*chunk.keys, *chunk.values)):
            return "dtype"
        if len(chunk.keys) != len(self.rotations):
            return "layers"
        sizes = ((k.shape[0], k.shape[2], v.shape[2]) for k, v in zip(chunk.keys, chunk.values, strict=True))
        return None if tuple(sizes) == self.sizes else "shape"


class Blend:
    """The state of a `BlendedCache` during its first forward.

    Args:
        cache: the cache to fill.
        facts: of the model.
        input_ids: `[B, T]`.
        positions: `[B, T]` position ids.
        visible: `[B, T]` False at padding, or None.
    """

    def __init__(
        self, cache: BlendedCache, facts: ModelFacts, input_ids: Tensor, positions: Tensor, visible: Tensor | None
    ) -> None:
        self.cache, self.facts, self.positions = cache, facts, positions
        self.ids = input_ids
        self.length = input_ids.shape[1]
        self.report: BlendReport = cache.report
        self.rows: Tensor | None = None
        """`[B, S]` prompt indices computed in the current layer, ascending; None while that is all of them."""
        self.rows_by_layer: list[Tensor | None] = []
        """Rows with fresh keys and values, by layer."""
        self.reads_all = True
        """Whether somebody reads the last layer's output for more than the last `logits_to_keep` rows."""
        self._angles: dict = {}
        self._masks: dict = {}
        self._last = np.empty(0, np.int64)
        self._placed: set[int] = set()
        self._probed: dict[int, int] = {}
        self._open = ExitStack()
        self._outputs = min(cache.logits_to_keep or 1, self.length)
        ids = input_ids.cpu().numpy()
        real = np.ones(ids.shape, bool) if visible is None else visible.cpu().numpy().astype(bool)
        self.plans: list[RowPlan] = []
        for b, chunks in enumerate(chunks_per_row(cache.chunks, len(ids))):
            hidden = np.where(real[b], ids[b], -1)
            self.plans.append(plan_row(b, hidden, chunks, facts.mismatch, self.length - self._outputs))
            if cache.strict:
                require_hits(self.plans[-1], chunks)
        self._tokens = int(real.sum())
        self._chunk_total = sum(plan.chunk_tokens for plan in self.plans)

    @property
    def uses(self) -> list[ChunkUse]:
        """What became of each chunk."""
        return [use for plan in self.plans for use in plan.uses]

    def begin(self) -> None:
        """From here on the cache is being filled, masks are made lazily, and time counts."""
        self.report.chunks, self.report.tokens = self.uses, self._tokens
        self.report.chunk_bytes = sum(plan.chunk_bytes for plan in self.plans)
        self._open.callback(blending.reset, blending.set(True))
        self._open.enter_context(self.report.clock.stage("recompute", self.ids.device))

    def end(self) -> None:
        """The forward is over, well or not."""
        self._open.close()

    # -- in front of each layer -------------------------------------------------------------------------------------

    def wants_probe(self, layer_idx: int) -> bool:
        """Whether this layer's fresh keys and values of the current rows are to be compared with stored ones."""
        compares = self.cache.selector.needs == "deviation" and self.cache.schedule.get(layer_idx, 0.0) > 0
        return compares and self._chunk_total > 0

    def wants_selection(self, layer_idx: int) -> bool:
        """Whether rows are dropped in front of this layer."""
        return layer_idx in self.cache.schedule and self._chunk_total > 0

    def select(self, layer_idx: int, keys: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        """Chooses the rows to compute from this layer on.

        Args:
            layer_idx: the layer about to run.
            keys: `[B, H, S, D]` fresh keys of the current rows at this layer, or None.
            values: `[B, H, S, Dv]` fresh values.

        Returns:
            `[B, S']` indices into the current rows, ascending.
        """
        ratio = self.cache.schedule[layer_idx]
        deviation = None if keys is None or values is None else self._deviation(layer_idx, keys, values)
        device = keys.device if keys is not None else self.ids.device
        current = self.rows.cpu().numpy() if self.rows is not None else None
        kept = []
        for b, plan in enumerate(self.plans):
            row = np.arange(self.length) if current is None else current[b]
            row, at = np.unique(row, return_index=True)  # without the padding of ragged batches
            candidate = ~plan.fresh[row]
            budget = min(round(ratio * plan.chunk_tokens), int(candidate.sum()))
            chosen = np.zeros(len(row), bool)
            if budget:
                view = self._candidates(b, row[candidate], at[candidate], deviation, device)
                order = torch.sort(self.cache.selector.score(view), descending=True, stable=True).indices
                chosen[np.flatnonzero(candidate)[order[:budget].cpu().numpy()]] = True
            kept.append((row[chosen | ~candidate], at[chosen | ~candidate]))
        width = max(1, max(len(row) for row, _ in kept))
        rows, keep = (np.stack([_left_pad(pair[i], width) for pair in kept]) for i in (0, 1))
        self._set_rows(rows, device)
        return torch.from_numpy(keep).to(device)

    def wants_last_only(self, layer_idx: int) -> bool:
        """Whether this is the last layer of a narrowed forward, whose output is read for the last rows only.

        Of the others only keys and values are wanted there: one probe instead of a layer.
        """
        last = layer_idx == len(self.facts.rotations) - 1
        return last and self.rows is not None and not self.reads_all and self.rows.shape[1] > self._outputs

    def select_last(self) -> Tensor:
        """Keeps the last rows, those whose logits are wanted: `[B, outputs]` indices into the current rows."""
        assert self.rows is not None
        width, device = self.rows.shape[1], self.rows.device
        self._set_rows(self.rows[:, -self._outputs :].cpu().numpy(), device)
        return torch.arange(width - self._outputs, width, device=device).expand(len(self.plans), -1)

    def _set_rows(self, rows: np.ndarray, device: torch.device) -> None:
        self.rows = torch.from_numpy(rows).to(device)
        self._last = rows.max(0)
        self._masks.clear()

    def row_mask(self, lazy: LazyMask) -> RowMask:
        """The mask of the current rows for a layer that would have been given `lazy`."""
        if self.rows is None:
            raise ValueError("all rows are computed: the mask is lazy.dense()")
        if id(lazy) not in self._masks:
            self._masks[id(lazy)] = RowMask(lazy, self.rows, self._last)
        return self._masks[id(lazy)]

    def _candidates(self, b: int, rows: np.ndarray, at: np.ndarray, deviation, device: torch.device) -> Candidates:
        which = np.empty(self.length, np.int64)
        offset = np.empty(self.length, np.int64)
        length = np.empty(self.length, np.int64)
        for i, (span, _) in enumerate(self.plans[b].placed):
            part = slice(span.start, span.stop)
            which[part], offset[part], length[part] = i, np.arange(span.length), span.length
        tensors = [torch.from_numpy(a).to(device) for a in (rows, which[rows], offset[rows], length[rows])]
        index = torch.from_numpy(at).to(device)
        distances = deviation or (None, None)
        return Candidates(*tensors, *(None if d is None else d[b, index] for d in distances))

    def _deviation(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """`[B, S]` squared distances of fresh from stored keys and values, as far as the selector wants them."""
        layer = self.cache.blended[layer_idx]
        self._place(layer_idx, keys, values)
        self._probed[layer_idx] = self._chunk_rows(self.rows)
        distances: dict[str, Tensor | None] = {"k": None, "v": None}
        for source, fresh, buffer in (("k", keys, layer._keys), ("v", values, layer._values)):
            if source in self.cache.selector.sources:
                stored = buffer[:, :, : self.length] if self.rows is None else _gather(buffer, self.rows)
                distances[source] = (fresh - stored).float().square_().sum((1, 3))
        return distances["k"], distances["v"]

    # -- inside each layer ------------------------------------------------------------------------------------------

    def fill(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Joins fresh states of the current rows with stored ones.

        Args:
            layer_idx: index of the layer.
            keys: `[B, H, S, D]` fresh, rotated by the model.
            values: `[B, H, S, Dv]`.

        Returns:
            `[B, H, T, D]` and `[B, H, T, Dv]` of the whole prompt.
        """
        layer, keys, values = self.cache.blended[layer_idx], keys.detach(), values.detach()
        if layer_idx == len(self.rows_by_layer):
            self.rows_by_layer.append(self.rows)
        if self.rows is None:
            if layer_idx not in self._placed:
                layer.allocate(keys, values, self.length)
            layer._keys[:, :, : self.length] = keys
            layer._values[:, :, : self.length] = values
        else:
            self._place(layer_idx, keys, values)
            _scatter(layer._keys, self.rows, keys)
            _scatter(layer._values, self.rows, values)
        return layer.resize(self.length)

    def _place(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Writes the layer's stored keys, rotated to the prompt's positions, and values (once)."""
        if layer_idx in self._placed:
            return
        self._placed.add(layer_idx)
        device = keys.device
        with self.report.clock.stage("place", device):
            to_keys, to_values = self.cache.blended[layer_idx].allocate(keys, values, self.length)
            rotation = self.facts.rotations[layer_idx]
            angles = self._angles_of(rotation, device)
            for b, plan in enumerate(self.plans):
                for run in plan.runs:
                    here = slice(run[0][0].start, run[-1][0].stop)
                    stored = _join([span.of(chunk.keys[layer_idx]) for span, chunk in run], device)
                    turn = None if angles is None else (angles[0][b : b + 1, :, here], angles[1][b : b + 1, :, here])
                    rotation.rotate(stored[None], turn, out=to_keys[b : b + 1, :, here])
                    to_values[b, :, here] = _join([span.of(chunk.values[layer_idx]) for span, chunk in run], device)

    def _angles_of(self, rotation: Rotation, device: torch.device) -> tuple[Tensor, Tensor] | None:
        if (rotation, device) not in self._angles:
            self._angles[rotation, device] = on_device(rotation.angles(self.facts.rotary, self.positions), device)
        return self._angles[rotation, device]

    # -- after the last layer ---------------------------------------------------------------------------------------

    def _chunk_rows(self, rows: Tensor | None) -> int:
        """Chunk tokens among rows `[B, S]` (None: all), over the batch."""
        if rows is None:
            return self._chunk_total
        computed = (np.unique(row) for row in rows.cpu().numpy())  # without the padding of ragged batches
        return sum(int((~plan.fresh[row]).sum()) for plan, row in zip(self.plans, computed, strict=True))

    def finish(self) -> None:
        """Writes the partition of rows and the cost into the report."""
        missed = sum(plan.missed for plan in self.plans)
        fresh = self._tokens - self._chunk_total - missed
        last_only = self.rows is not None and self.rows is not self.rows_by_layer[-1]
        counted: dict[int, int] = {}
        for i, rows in enumerate(self.rows_by_layer):
            if id(rows) not in counted:
                counted[id(rows)] = self._chunk_rows(rows)
            computed = counted[id(rows)]
            self.report.layers.append(
                LayerRows(
                    reused=self._chunk_total - computed,
                    recomputed=computed,
                    fresh=fresh,
                    missed=missed,
                    probed=self._probed.get(i, 0),
                    through=computed + fresh + missed,
                )
            )
        last = self.report.layers[-1]
        if last_only:
            last.through = self._outputs * len(self.plans)
        if self.facts.shape is not None:
            spent = [
                flops.LayerRows(full=layer.recomputed)
                if rows is None
                else flops.LayerRows(probed=layer.probed, selected=layer.recomputed)
                for rows, layer in zip(self.rows_by_layer, self.report.layers, strict=True)
            ]
            if last_only:
                spent[-1] = flops.LayerRows(probed=max(last.probed, last.recomputed))
            self.report.charged_budget = flops.charged_budget(self.facts.shape, spent, self._chunk_total)
        self.report.cache_bytes = sum(t.nbytes for la in self.cache.blended for t in (la._keys, la._values))

    def expand(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """`[B, S, ...]` of computed rows as `[B, T, ...]`, NaN where nothing was computed.

        What has T rows although fewer were computed (the embeddings) stays as it is.

        Raises:
            UnsupportedModelError: if the number of rows is neither, so that nobody could say which they are.
        """
        computed = self.length if rows is None else rows.shape[1]
        if rows is None or hidden.shape[1] != computed:
            if hidden.shape[1] == self.length:
                return hidden
            raise UnsupportedModelError(
                f"an output of {hidden.shape[1]} rows where {computed} of {self.length} were computed: leave out "
                "output_hidden_states and output_attentions for a blend with this model"
            )
        full = hidden.new_full((hidden.shape[0], self.length, *hidden.shape[2:]), float("nan"))
        batch = torch.arange(hidden.shape[0], device=hidden.device)[:, None]
        full[batch, rows.to(hidden.device)] = hidden
        return full


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `[B or 1, T, ...]` at `index [B, S]`: `[B, S, ...]`."""
    index = index.to(x.device)
    if x.shape[0] == 1 and index.shape[0] == 1:
        return x.index_select(1, index[0])
    batch = torch.arange(index.shape[0], device=x.device)[:, None] if x.shape[0] > 1 else torch.zeros_like(index)
    return x[batch, index]


def _join(parts: list[Tensor], device: torch.device) -> Tensor:
    """`[H, n, D]` parts joined along tokens, on a device."""
    here = [part.to(device, non_blocking=True) for part in parts]
    return here[0] if len(here) == 1 else torch.cat(here, dim=1)


def _gather(buffer: Tensor, rows: Tensor) -> Tensor:
    """`[B, H, S, D]` of a buffer `[B, H, capacity, D]` at `rows [B, S]`."""
    index = rows.to(buffer.device)[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
    return buffer.gather(2, index)


def _scatter(buffer: Tensor, rows: Tensor, states: Tensor) -> None:
    """Writes `[B, H, S, D]` into a buffer `[B, H, capacity, D]` at `rows [B, S]`."""
    rows = rows.to(buffer.device)
    if rows.shape[0] == 1:
        buffer.index_copy_(2, rows[0], states)
    else:
        buffer.scatter_(2, rows[:, None, :, None].expand_as(states), states)


def _left_pad(row: np.ndarray, width: int) -> np.ndarray:
    """Repeats the first entry so that rows of a batch get equal length."""
    return np.concatenate([np.full(width - len(row), row[0], row.dtype), row])
