"""One prompt being filled: which rows are computed in which layer, and where every key and value comes from."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from blendkv.attention import LazyMask, RowMask, blending
from blendkv.buffers import Buffers
from blendkv.cache import BlendedCache
from blendkv.choosing import candidates_of, is_known_ahead, keep_best
from blendkv.correcting import write_corrected
from blendkv.facts import ModelFacts, kernels_unusable
from blendkv.graphs import GraphPass
from blendkv.kernelbuffers import KernelBuffers, new_tables
from blendkv.kernels.table import upload
from blendkv.plan import RowPlan, chunks_per_row, nothing_found, plan_row, require_hits
from blendkv.question import Enough, Question
from blendkv.report import BlendReport, ChunkUse
from blendkv.rows import TakenRows, left_pad
from blendkv.selectors import Candidates


class Blend:
    """The state of a `BlendedCache` during its first forward.

    Args:
        cache: the cache to fill.
        facts: of the model.
        input_ids: `[B, T]`.
        positions: `[B, T]` position ids.
        visible: `[B, T]` False at padding, or None.
        graphs: CUDA graphs to use, or None.
    """

    def __init__(
        self,
        cache: BlendedCache,
        facts: ModelFacts,
        input_ids: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        graphs: GraphPass | None = None,
    ) -> None:
        self.cache, self.facts, self.positions = cache, facts, positions
        self.ids = input_ids
        self.length = input_ids.shape[1]
        self.report: BlendReport = cache.report
        self.graphs = graphs
        self.rows: Tensor | None = None
        """`[B, S]` prompt indices computed in the current layer, ascending; None while that is all of them."""
        self.filled: list[tuple[Tensor | None, list[Tensor] | None]] = []
        """By layer: rows with fresh keys and values, and for each batch row those of chunks among them (None: all)."""
        self.reads_all = True
        """Whether somebody reads the last layer's output for more than the last `logits_to_keep` rows."""
        self.collects = False
        """Whether somebody wants the hidden states or attentions of every layer."""
        self.masks: Literal["lazy", "dense"] = "lazy"
        """What layers are given as a mask (`attention.blending`)."""
        self.asking = False
        """Whether the forward under way is the question pass."""
        self.until: int | None = None
        """In front of which layer the forward under way ends, if it is one that catches up."""
        self.again: Callable[[], object] = _nothing
        """Runs the decoder once more with the arguments of this forward, for passes beside it."""
        self._question: Question | None = None
        self._padded = visible is not None
        self.taken = TakenRows(None)
        """What tensors are at `rows`."""
        self.probed: dict[int, int] = {}
        """By layer, chunk tokens whose fresh keys and values were compared with stored ones."""
        self._ahead: dict[int, list[Tensor]] = {}
        self._open = ExitStack()
        self.outputs = min(cache.logits_to_keep or 1, self.length)
        """Last rows whose logits are wanted: always computed."""
        ids = input_ids.cpu().numpy()
        self._real = np.ones(ids.shape, bool) if visible is None else visible.cpu().numpy().astype(bool)
        self._ids = np.where(self._real, ids, -1)
        self._chunks = chunks_per_row(cache.chunks, len(ids))
        self.plans: list[RowPlan] = []
        """One a batch row, once `prepare` was called."""
        self.chunk_total = 0
        """Tokens filled from chunks unless they are recomputed, over all batch rows."""
        self.chosen: list[Tensor] = []
        """For each batch row the chunk tokens among the rows computed in the current layer, once rows were dropped."""

    @property
    def uses(self) -> list[ChunkUse]:
        """What became of each chunk."""
        return [use for plan in self.plans for use in plan.uses]

    def begin(self, devices: Sequence[torch.device]) -> None:
        """From here on the cache is being filled, masks are made lazily, and time counts.

        Args:
            devices: one a layer.
        """
        if self.graphs is not None:
            self._open.callback(self.graphs.close)
        self._open.callback(blending.reset, blending.set(self.masks))
        self._open.enter_context(self.report.clock.stage("recompute", self.ids.device))
        facts, reason = self.facts, kernels_unusable(self.facts, devices)
        given = (self.cache.blended, facts.rotations, facts.rotary, self.positions, self.plans, self.report.clock)
        if reason is not None:
            self.report.kernels = f"torch and SDPA ({reason})"
            self.buffers = Buffers(*given)
        else:
            tables = self.graphs.tables if self.graphs is not None else new_tables(devices)
            self.buffers = KernelBuffers(*given, sizes=facts.sizes, dtype=facts.dtype, devices=devices, tables=tables)
            self._open.callback(self.buffers.close)
            self.report.kernels = "Triton" if self.graphs is None else "Triton; CUDA graphs of layers that are short"
        if reason is not None or self.cache.strict or not self.first_narrowed or self._may_ask:
            self.prepare()

    @property
    def first_narrowed(self) -> int | None:
        """The first layer in front of which rows are dropped."""
        return min(self.cache.schedule, default=None)

    def prepare(self) -> None:
        """Finds the chunks in the prompt and places them (once): on a GPU while it computes the layers before.

        Raises:
            ChunkMissError: if the cache is strict and a chunk cannot be used.
            CacheStateError: if the ids are not those of a whole prompt.
        """
        if self.plans:
            return
        try:
            for b, chunks in enumerate(self._chunks):
                self.plans.append(plan_row(b, self._ids[b], chunks, self.facts.mismatch, self.length - self.outputs))
                if self.cache.strict:
                    require_hits(self.plans[-1], chunks)
            if nothing_found(self.uses, self.cache.chunks, self.length):
                self.report.remark("no chunk was found in the prompt: plain prefill")
        except BaseException:  # nothing is lost: the cache is empty still
            self.cache.layers, self.cache._failed = [], False
            raise
        self.report.tokens = int(self._real.sum())
        self.count()
        if self.chunk_total and self.first_narrowed is not None:
            self.buffers.prepare(0 if self._may_ask else self.first_narrowed)

    def count(self) -> None:
        """Notes how much of the prompt comes from chunks."""
        self.chunk_total = sum(plan.chunk_tokens for plan in self.plans)
        self.report.chunks = self.uses
        self.report.chunk_bytes = sum(plan.chunk_bytes for plan in self.plans)

    def end(self) -> None:
        """The forward is over, well or not."""
        self._open.close()

    # -- in front of each layer -------------------------------------------------------------------------------------

    @property
    def _may_ask(self) -> bool:
        return "question" in self.cache.selector.needs and any(self.cache.schedule.values())

    @property
    def wants_question(self) -> bool:
        """Whether the selector wants to know what the question attends to."""
        return self._may_ask and self.chunk_total > 0

    @contextmanager
    def ask(self) -> Generator[None]:
        """Inside it a forward of the decoder is the question pass: fresh rows alone, over full reuse.

        Keys and values of those rows go into the cache's own buffers, where the blend writes over them.
        """
        selector = self.cache.selector
        layers, device = len(self.facts.rotations), self.ids.device
        self.asking = True
        try:
            with self.report.clock.stage("question", device):
                self._question = Question(self.plans, layers, selector.layers, selector.last, device, self.graphs)
                self.set_rows(self._question.rows, graphs=None)
                try:
                    yield
                except Enough as enough:
                    enough.__traceback__ = None  # its frames hold hidden states
        finally:
            if self.graphs is not None:
                self.graphs.leave()
            if self._question is not None:
                self._question.over()
            self.asking, self.rows, self.taken = False, None, TakenRows(None)
            for layer in self.cache.blended:
                layer.resize(0)

    def wants_probe(self, layer_idx: int) -> bool:
        """Whether this layer's fresh keys and values of the current rows are to be compared with stored ones."""
        compares = "deviation" in self.cache.selector.needs and self.cache.schedule.get(layer_idx, 0.0) > 0
        return compares and self.chunk_total > 0

    def wants_selection(self, layer_idx: int) -> bool:
        """Whether rows are dropped in front of this layer."""
        return not self.aside and layer_idx in self.cache.schedule and self.chunk_total > 0

    def select(self, layer_idx: int, keys: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        """Chooses the rows to compute from this layer on.

        Args:
            layer_idx: the layer about to run.
            keys: `[B, H, S, D]` fresh keys of the current rows at this layer, or None.
            values: `[B, H, S, Dv]` fresh values.

        Returns:
            `[B, S']` indices into the current rows, ascending.
        """
        deviation = (None, None) if keys is None or values is None else self._deviation(layer_idx, keys, values)
        device = keys.device if keys is not None else self.ids.device
        before = self.rows
        kept = self._ahead.pop(layer_idx, None) or self._best(layer_idx, device, deviation)
        self.chosen = kept
        fresh = [upload(np.flatnonzero(plan.fresh), device) for plan in self.plans]
        rows = [torch.cat(pair).sort().values for pair in zip(kept, fresh, strict=True)]
        width = max(map(len, rows))
        width = width if self.graphs is None else self.graphs.width(width)
        now = torch.stack([left_pad(row, width) for row in rows])
        self.set_rows(now)
        return now if before is None else torch.searchsorted(before, now)

    def chosen_at(self, layer_idx: int) -> list[Tensor] | None:
        """For each batch row the chunk tokens that will be among the rows computed in a layer that is about to run.

        None where nobody knows that yet: what is stored for all chunk tokens may be read. It is what `select` will
        choose, until `forget` is called.
        """
        corrector = self.cache.corrector
        ahead = is_known_ahead(self.cache.selector, self.cache.schedule, corrector)
        compares = corrector is not None and corrector.compares
        if self.asking or compares or (self.wants_selection(layer_idx) and not ahead):
            return None
        if not self.wants_selection(layer_idx):
            return self.chosen if self.rows is not None else None
        if layer_idx not in self._ahead:
            self._ahead[layer_idx] = self._best(layer_idx, self.ids.device)
        return self._ahead[layer_idx]

    def forget(self) -> None:
        """The plans have changed, and with them what will be chosen."""
        self._ahead.clear()

    def _best(
        self, layer_idx: int, device: torch.device, deviation: Sequence[Tensor | None] = (None, None)
    ) -> list[Tensor]:
        """For each batch row the chunk tokens, of those that are computed now, that are computed from a layer on."""
        kept = []
        for b, plan in enumerate(self.plans):
            candidates = self.chosen[b] if self.chosen else upload(np.flatnonzero(~plan.fresh), device)

            def view(b: int = b, candidates: Tensor = candidates) -> Candidates:
                at = candidates if self.rows is None else torch.searchsorted(self.rows[b], candidates)
                return self._candidates(b, candidates, [None if d is None else d[b, at] for d in deviation])

            budget = round(self.cache.schedule[layer_idx] * plan.chunk_tokens)
            kept.append(keep_best(self.cache.selector, candidates, budget, view))
        return kept

    def wants_last_only(self, layer_idx: int) -> bool:
        """Whether nothing but keys and values is needed of most rows from this layer on: nobody reads their output."""
        last = layer_idx == len(self.facts.rotations) - 1 and not self.aside
        return last and not self.reads_all and self.rows is not None and self.outputs < self.rows.shape[1]

    def select_last(self) -> Tensor:
        """Leaves the rows whose logits are wanted; `[B, outputs]` indices into the current rows."""
        assert self.rows is not None
        width, device = self.rows.shape[1], self.rows.device
        self.set_rows(self.rows[:, -self.outputs :].contiguous(), graphs=False)
        return torch.arange(width - self.outputs, width, device=device).expand(len(self.plans), -1)

    def set_rows(self, rows: Tensor, graphs: bool | None = True) -> None:
        """From here on `rows [B, S]` are computed, ascending prompt indices.

        CUDA graphs do it if those are wanted; None: they know already.
        """
        self.rows, self.taken = rows, TakenRows(rows)
        self._rows_at: dict[torch.device, Tensor] = {}
        self._masks: dict[tuple[int, torch.device], RowMask] = {}
        if self.graphs is not None and graphs:
            self.graphs.enter(rows)
        elif self.graphs is not None and graphs is not None:
            self.graphs.leave()

    def _rows_on(self, device: torch.device) -> Tensor:
        """The current rows on a layer's device (CUDA graphs read their own copy)."""
        if device not in self._rows_at:
            own = self.graphs.rows(device) if self.graphs is not None else None
            assert self.rows is not None
            self._rows_at[device] = self.rows.to(device) if own is None else own
        return self._rows_at[device]

    def row_mask(self, lazy: LazyMask, layer_idx: int) -> RowMask:
        """The mask of the current rows for a layer that would have been given `lazy`."""
        if self.rows is None:
            raise ValueError("all rows are computed: the mask is lazy.dense()")
        table = None if self.collects else self.buffers.table(layer_idx)
        device = self.rows.device if table is None else table.device
        if (id(lazy), device) not in self._masks:
            band = None if table is None else lazy.band()
            listener = self._question if self.asking else None
            mask = RowMask(lazy, self._rows_on(device), table, band, self._padded, listener)
            self._masks[id(lazy), device] = mask
            if band is None and table is not None:
                self.report.remark("an attention mask that the kernels do not know: SDPA for its layers")
        return self._masks[id(lazy), device]

    def _candidates(self, b: int, rows: Tensor, deviation: Sequence[Tensor | None]) -> Candidates:
        plan, selector = self.plans[b], self.cache.selector
        for name in selector.stored:
            if plan.scores(name, self.length)[torch.from_numpy(~plan.fresh)].isnan().any():
                self.report.remark(f"chunks without stored scores {name!r}: their tokens are recomputed last")
        attention = self._question.attention(b, rows) if self._question is not None else {}
        return candidates_of(plan, selector, self.length, rows, *deviation, attention)

    def _deviation(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """`[B, S]` squared distances of fresh from stored keys and values, as far as the selector wants them."""
        self.buffers.place(layer_idx, keys, values)
        self.probed[layer_idx] = sum(map(len, self.chosen)) if self.chosen else self.chunk_total
        wanted = self.cache.selector.sources
        fresh = (("k", keys), ("v", values))
        k, v = (
            self.buffers.distance(layer_idx, self.rows, x, source) if source in wanted else None for source, x in fresh
        )
        return k, v

    # -- chunks that are on their way while layers run --------------------------------------------------------------

    @property
    def aside(self) -> bool:
        """Whether the forward under way is a pass beside the blend."""
        return self.asking or self.until is not None

    def still_of_chunks(self, chosen: Sequence[Tensor]) -> list[Tensor]:
        """Those of chosen tokens, for each batch row, whose chunks were not given up."""
        return [
            rows[~torch.from_numpy(plan.fresh).to(rows.device)[rows]]
            for rows, plan in zip(chosen, self.plans, strict=bool(chosen))
        ]

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
        keys, values = keys.detach(), values.detach()
        corrector, new = self.cache.corrector, layer_idx == len(self.filled) and not self.aside
        if self.rows is None:
            self.buffers.write_all(layer_idx, keys, values)
        elif corrector is not None and new:
            rows = self._rows_on(keys.device)
            write_corrected(corrector, self.buffers, layer_idx, rows, keys, values, self.chosen)
        else:
            self.buffers.write(layer_idx, self._rows_on(keys.device), keys, values)
        self.note(layer_idx)
        layer = self.cache.blended[layer_idx]
        return layer.keys, layer.values

    def ready(self, layer_idx: int) -> None:
        """A CUDA graph may be about to run the layer."""
        if self.rows is not None:
            self.buffers.ready(layer_idx)

    def note(self, layer_idx: int) -> None:
        """A layer's keys and values are there, written by `fill` or by a CUDA graph."""
        if layer_idx == len(self.filled) and not self.aside:
            self.filled.append((self.rows, self.chosen if self.rows is not None else None))
        if self.asking and self._question is not None:
            self._question.note(layer_idx)
        self.cache.blended[layer_idx].resize(self.length)


def _nothing() -> None:
    """No forward is under way."""
