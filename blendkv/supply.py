"""Chunks for a library: from memory and stores, or computed and stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from blendkv.attaching import attachment_of
from blendkv.cache import BlendedCache, Chunk
from blendkv.chunk import ChunkCache, MissingChunk, chunk_key
from blendkv.errors import ChunkMissError
from blendkv.facts import ModelFacts
from blendkv.layout import Piece
from blendkv.loading.controller import Controller
from blendkv.loading.decision import TEXT
from blendkv.loading.guided import Guided, allowed
from blendkv.loading.pipeline import Pipeline
from blendkv.loading.progress import Progress
from blendkv.loading.sparing import Sparing
from blendkv.loading.timely import Timely
from blendkv.pace import seconds_to_compute
from blendkv.prefilling import prefill
from blendkv.report import BlendReport
from blendkv.scoring import add_scores
from blendkv.selectors import get_selector
from blendkv.stores import Budget, Pool, TieredStore, faults_of
from blendkv.stores.pool import Fetched

DEADLINE_S = 0.25
Wanted = tuple[Piece, tuple[int, ...]]
"""A piece of the prompt, and the ids that stand before it while it is computed."""
Road = Callable[[Mapping[str, Wanted], Budget], list[Fetched]]
"""Fetches chunks of pieces, by key."""


@dataclass
class Supply:
    """Finds chunks of one model, or computes them.

    Attributes:
        model: attached.
        tokenizer: its own.
        tokenizer_digest: of it.
        pool: where chunks are kept.
        pipeline: loads chunks while layers are computed; None: they are loaded first.
        controller: chooses what is loaded, or None.
        namespace, secret: part of every key.
        deadline_s: most seconds that a prompt waits for stores that are not local (`ChunkLibrary`).
        stored: scores that are computed with chunks.
        batch_tokens: most tokens of one prefill forward.
        progress: show a bar while chunks are computed.
    """

    model: nn.Module
    tokenizer: Any
    tokenizer_digest: str
    pool: Pool | TieredStore
    pipeline: Pipeline | None
    controller: Controller | None
    namespace: str
    secret: bytes | None
    deadline_s: float | None
    stored: Collection[str]
    batch_tokens: int
    progress: bool
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def keys(self, wanted: Sequence[Wanted]) -> list[str]:
        """Of the chunks of pieces."""
        made_of = attachment_of(self.model).facts.fingerprint  # looks at every weight: asked once for all
        common = self.tokenizer_digest, self.namespace, self.secret
        return [chunk_key(piece.ids, made_of, conditioning, *common) for piece, conditioning in wanted]

    def road(
        self, ids: Sequence[int], report: BlendReport, options: dict[str, Any], computes: bool = True
    ) -> Road | None:
        """How chunks of a prompt are fetched while it computes, or by a target; None if they must be there first.

        Args:
            ids: of the prompt's tokens.
            report: of the prompt.
            options: of its cache, which get the ratio that a controller chooses.
            computes: whether chunks that are missing are computed and kept before the prompt begins.
        """
        attachment = attachment_of(self.model)
        if self.pipeline is None or options["strict"] or attachment.masks != "lazy":
            return None
        selector, report.loading = get_selector(options["selector"]), Progress()

        def go(pieces: Mapping[str, Wanted], budget: Budget) -> list[Fetched]:
            assert self.pipeline is not None
            guided, counts = None, {key: len(piece.ids) for key, (piece, _) in pieces.items()}
            known = {key: (piece.ids, before) for key, (piece, before) in pieces.items()}
            spare = Sparing(ids, known, options, len(attachment.facts.rotations), computes, report.notes)
            if self.controller is not None:
                pipeline, homes = self.pipeline, attachment.homes
                comes_first = lambda place: pipeline.comes_first(place, homes)  # noqa: E731
                settings = selector, options, report, spare, pipeline.least_gap, comes_first
                guided = Guided(self.controller, attachment, len(ids), counts, *settings)
                if guided.target_s is not None:
                    compute = partial(self._computed_now, pieces, report)
                    return Timely(self.pipeline, guided, attachment.homes).fetch(list(pieces), compute)
                report.loading.on_loaded = guided.learn
            # asked once the controller has chosen a ratio: at ratio 0 the first layer is read, else often not
            first = lambda: BlendedCache((), **options).reads_from  # noqa: E731
            return self.pipeline.fetch(list(pieces), attachment.homes, budget, first, guided, report.loading, spare)

        return go

    def get(
        self, wanted: Sequence[Wanted], report: BlendReport, strict: bool, compute: bool, road: Road | None = None
    ) -> list[Chunk]:
        """Looks every piece up; computes and stores the missing ones, or says that they are missing.

        Args:
            wanted: pieces.
            report: of the prompt.
            strict: whether a chunk that cannot be stored raises.
            compute: whether missing ones are computed.
            road: fetches chunks that are still on their way; None: as the store gives them, whole.

        Raises:
            ChunkMissError: with `strict`, if a chunk could not be stored.
        """
        keys = self.keys(wanted)
        pieces: dict[str, Wanted] = {}
        for key, piece in zip(keys, wanted, strict=True):
            pieces.setdefault(key, piece)
        mine = [_same(pieces[key], piece) for key, piece in zip(keys, wanted, strict=True)]
        budget = self._budget(sum(len(piece.ids) for piece, _ in pieces.values()))
        before = {key for key in pieces if key in self.pool}
        have: dict[str, Chunk] = self.usable(pieces, report, budget, road)
        lacking = {key: piece for key, piece in pieces.items() if key not in have}
        if not compute:
            have |= {key: MissingChunk(torch.tensor(piece.ids)) for key, (piece, _) in lacking.items()}
        elif lacking:
            with self._lock:  # one prefill at a time: what another thread has just computed is not computed again
                self._fill(lacking, have, before, report, budget)
        if strict and report.put_failures:
            words = sorted({word for faults in report.store_faults.values() for word in faults})
            why = "; ".join([*words, *getattr(self.pool, "notes", ())])
            raise ChunkMissError(
                f"{report.put_failures} chunks could not be stored{f' ({why})' if why else ''}: give the store more "
                "room than the chunks of a prompt take (capacity_bytes), see its stats, or use strict=False"
            )
        # two contents under one key, as only a broken hash makes them: the second is asked for by itself
        others = [piece for piece, is_mine in zip(wanted, mine, strict=True) if not is_mine]
        rest = iter(self.get(others, report, strict, compute, road) if others else ())
        return [have[key] if is_mine else next(rest) for key, is_mine in zip(keys, mine, strict=True)]

    def usable(
        self, wanted: Mapping[str, Wanted], report: BlendReport, budget: Budget, road: Road | None = None
    ) -> dict[str, Chunk]:
        """Those chunks that the store has, and that are what their keys say; a store that fails has none."""
        if not wanted:
            return {}
        before = faults_of(self.pool)
        try:
            if road is not None:
                found = road(wanted, budget)
            else:
                found = self.pool.fetch(list(wanted), attachment_of(self.model).homes, budget)
        except Exception as error:
            report.notes.append(f"the store failed to get {len(wanted)} chunks, which were computed instead: {error!r}")
            return {}
        report.note_faults(before, faults_of(self.pool))
        have: dict[str, Chunk] = {}
        accepts, facts = self._accepts(), attachment_of(self.model).facts
        for (key, (piece, conditioning)), got in zip(wanted.items(), found, strict=True):
            if got.tier == TEXT and got.chunk is None:
                have[key] = MissingChunk(torch.tensor(piece.ids), TEXT)
            elif (chunk := self._checked(got.chunk, piece, conditioning, facts)) is not None and accepts(chunk):
                have[key] = chunk
                if got.tier != TEXT:
                    report.loaded[got.tier] = report.loaded.get(got.tier, 0) + len(chunk)
        return have

    def compute(self, pieces: Mapping[str, Piece], conditioning: tuple[int, ...]) -> list[ChunkCache]:
        """Chunks of pieces, by key, that were not in the store."""
        made = prefill(
            self.model,
            [list(piece.ids) for piece in pieces.values()],
            conditioning=conditioning,
            namespace=self.namespace,
            batch_tokens=self.batch_tokens,
            progress=self.progress,
        )
        if self.stored:
            made = add_scores(self.model, made, self.stored, self.tokenizer)
        return [
            replace(
                chunk,
                tokenizer=self.tokenizer_digest,
                text=piece.text,
                keyed="" if self.secret is None else key,
            )
            for chunk, (key, piece) in zip(made, pieces.items(), strict=True)
        ]

    def _computed_now(self, pieces: Mapping[str, Wanted], report: BlendReport, key: str) -> ChunkCache:
        """The chunk of a key, computed because that is quicker than loading it."""
        piece, conditioning = pieces[key]
        with self._lock, report.clock.stage("prefill"):
            (chunk,) = self.compute({key: piece}, conditioning)
        report.prefilled_tokens += len(chunk)
        return chunk

    def _budget(self, tokens: int) -> Budget:
        """How long this prompt may wait for stores."""
        if self.deadline_s is not None or not getattr(self.pool, "shared", False):
            return Budget(self.deadline_s)
        facts = attachment_of(self.model).facts
        weight = next(self.model.parameters())
        dtype = weight.dtype if weight.dtype.is_floating_point else facts.dtype
        return Budget(max(DEADLINE_S, 0.1 * seconds_to_compute(facts.shape, tokens, weight.device, dtype)))

    def _fill(
        self,
        lacking: dict[str, Wanted],
        have: dict[str, Chunk],
        before: Collection[str],
        report: BlendReport,
        budget: Budget,
    ) -> None:
        """Computes and stores what is lacking, by conditioning; what the store makes of it is used at once.

        What was in memory before, and is lacking all the same, was not good enough. Where a controller does not allow
        what the store makes of it, the chunk is used as it was computed.
        """
        there = {key: lacking[key] for key in lacking if key in self.pool and key not in before}
        have |= self.usable(there, report, budget)
        lacking, accepts = {key: piece for key, piece in lacking.items() if key not in have}, self._accepts()
        for conditioning in dict.fromkeys(c for _, c in lacking.values()):
            group = {key: piece for key, (piece, c) in lacking.items() if c == conditioning}
            with report.clock.stage("prefill"):
                made = self.compute(group, conditioning)
            report.prefilled_tokens += sum(map(len, made))
            for key, own, (chunk, kept) in zip(group, made, self._put(made, report, budget), strict=True):
                have[key] = chunk if accepts(chunk) else own
                report.put_failures += not kept

    def _put(
        self, chunks: Sequence[ChunkCache], report: BlendReport, budget: Budget
    ) -> Sequence[tuple[ChunkCache, bool]]:
        """Chunks as the store gives them from now on, and whether it kept them; one that fails did not."""
        before = faults_of(self.pool)
        try:
            kept = self.pool.put_many(chunks, budget)
        except Exception as error:
            report.notes.append(f"the store failed to keep {len(chunks)} chunks: {error!r}")
            return [(chunk, False) for chunk in chunks]
        report.note_faults(before, faults_of(self.pool))
        return kept

    def _accepts(self) -> Callable[[ChunkCache], bool]:
        """Says of chunks whether they lose no more than the controller allows, which is asked once for each level."""
        controller, attachment = self.controller, attachment_of(self.model)
        of = cache(lambda level: controller is None or level is None or allowed(controller, attachment, level))
        return lambda chunk: of(chunk.coded)

    def _checked(
        self, chunk: ChunkCache | None, piece: Piece, conditioning: tuple[int, ...], facts: ModelFacts
    ) -> ChunkCache | None:
        """A chunk from the store only if it is what its key says: even a broken hash serves nothing wrong."""
        if chunk is None:
            return None
        same = (
            tuple(chunk.ids.tolist()) == piece.ids
            and facts.mismatch(chunk) is None
            and chunk.conditioning == conditioning
            and chunk.tokenizer == self.tokenizer_digest
            and chunk.namespace == self.namespace
        )
        return chunk if same else None


def _same(a: Wanted, b: Wanted) -> bool:
    """Whether two pieces of a prompt have the same content."""
    return a[0].ids == b[0].ids and a[1] == b[1]
