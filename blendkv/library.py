"""Model, tokenizer and store in one object: documents and a question in, inputs of `generate` out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import nn
from transformers import BatchEncoding

from blendkv import _compat
from blendkv.attaching import attach, attachment_of
from blendkv.cache import BlendedCache, Chunk
from blendkv.chunk import ChunkCache, MissingChunk, chunk_key, tokenizer_fingerprint
from blendkv.codecs import Codec
from blendkv.container.format import MAX_NAME_BYTES
from blendkv.container.seals import check_secret
from blendkv.conversation import Turn, assemble_turns
from blendkv.errors import ChunkMissError
from blendkv.facts import ModelFacts
from blendkv.guard import Guard
from blendkv.layout import Layout, Piece, Prompt, begins_with_bos, conditioning_ids, texts_of
from blendkv.loading.controller import Controller
from blendkv.loading.guided import Guided
from blendkv.loading.pipeline import TEXT, Pipeline
from blendkv.loading.progress import Progress
from blendkv.loading.sparing import Sparing
from blendkv.pace import seconds_to_compute
from blendkv.prefilling import BATCH_TOKENS, prefill
from blendkv.pretrained import PretrainedMixin
from blendkv.report import BlendReport
from blendkv.scoring import add_scores
from blendkv.selectors import Selector, get_selector
from blendkv.stores import Budget, Pool, Store, TieredStore, faults_of, open_chunks
from blendkv.stores.pool import Fetched

DEADLINE_S = 0.25
Road = Callable[[Sequence[str], Sequence[torch.device], Budget], list[Fetched]]
Wanted = tuple[Piece, tuple[int, ...]]
"""A piece of the prompt, and the ids that stand before it while it is computed."""


class BlendedInputs(BatchEncoding):
    """What `model.generate(**inputs)` takes: `input_ids`, `attention_mask`, and the cache under its keyword."""

    @property
    def cache(self) -> BlendedCache:
        """The cache, whatever the installed transformers calls it."""
        return self.data[_compat.CACHE_ARG]

    @property
    def report(self) -> BlendReport:
        """What the blend did; filled in by `generate`."""
        return self.cache.report

    def to(self, device: Any, **kwargs: Any) -> BlendedInputs:
        """Moves ids and mask; keys and values follow each layer's device by themselves."""
        cache = self.data.pop(_compat.CACHE_ARG)
        try:
            super().to(device, **kwargs)
        finally:
            self.data[_compat.CACHE_ARG] = cache
        return self


class ChunkLibrary(PretrainedMixin):
    """Keeps the chunks of one model and lays prompts out of them.

    Args:
        model: a decoder-only transformers model (attached, and proven, here).
        tokenizer: its tokenizer.
        store: where chunks are kept: `memory://`; a folder, `s3://...`, `redis://...` or another URL of `open_store`,
            or a `Store`, which get memory above them; or a `Pool` or `TieredStore` of your own.
        codec: how chunks are kept there: None or "raw" loses nothing; `get_codec("klt", profile=...)`.
        recompute_ratio: share of chunk tokens recomputed, of prompts that do not say; as in `BlendedCache`.
        selector: which tokens, likewise.
        check_layers: schedule of gradual filtering, likewise.
        strict: whether a chunk that cannot be used is an error, likewise.
        reserve: tokens of room beyond the prompt, likewise.
        condition: what stands before a chunk while it is computed: "none", "bos", "system" (the prompt's head), or
            "dummy" (a few neutral words). "auto": a BOS where the tokenizer begins every text with one, else nothing
            (docs/guides/defaults.md). Part of the key; which is best depends on model and task.
        chunk_tokens: longer documents are cut at sentence ends.
        separator: text after every document in the prompt; never part of a chunk, always computed.
        namespace: part of every key: who may use each other's chunks. Who runs the service sets it, never a request; a
            store that others reach too wants one.
        secret: of a tenant, 16 to 64 bytes: keys cannot be guessed without it, and files are sealed with it.
        controller: chooses, for each prompt, the ratio that loading hides, and what is computed from text instead.
        pipeline: whether a blend begins before its chunks are loaded from stores: layer by layer, while others compute.
        deadline_s: most seconds that a prompt waits for stores that are not local, in all; what is not there by then is
            computed. None: 0.25, or a tenth of what computing the chunks takes at least, if that is more.
        on_miss: "prefill" computes and keeps a chunk that is not in the store before the prompt is laid out,
            "recompute" leaves its tokens to the prompt's own forward (exact, but nothing is kept).
        capacity_bytes: of the pool, if `store` is a URL.
        batch_tokens: most tokens of one prefill forward.
        progress: show a bar while chunks are computed.
        guard: checks a sample of requests and falls back to full recompute (`blendkv.Guard`).
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        store: str | os.PathLike[str] | Store | Pool | TieredStore = "memory://",
        *,
        codec: str | Codec | None = None,
        recompute_ratio: float = 0.15,
        selector: str | Selector = "hkvd",
        check_layers: Mapping[int, float] | None = None,
        strict: bool = False,
        reserve: int = 256,
        condition: Literal["auto", "none", "bos", "system", "dummy"] = "auto",
        chunk_tokens: int = 512,
        separator: str = "\n\n",
        namespace: str | None = None,
        secret: bytes | None = None,
        deadline_s: float | None = None,
        on_miss: Literal["prefill", "recompute"] = "prefill",
        pipeline: bool = True,
        controller: Controller | None = None,
        capacity_bytes: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        progress: bool = False,
        guard: Guard | None = None,
    ) -> None:
        if condition == "auto":
            condition = "bos" if begins_with_bos(tokenizer) else "none"
        conditioning_ids(condition, tokenizer, ())  # refuses what cannot be
        if on_miss not in ("prefill", "recompute"):
            raise ValueError(f"on_miss={on_miss!r}: choose 'prefill' or 'recompute'")
        if deadline_s is not None and not deadline_s >= 0:
            raise ValueError(f"deadline_s={deadline_s}: give seconds, 0 or more, or None")
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens}: give at least one")
        self.options: dict[str, Any] = {
            "recompute_ratio": recompute_ratio,
            "selector": selector,
            "check_layers": check_layers,
            "strict": strict,
            "reserve": reserve,
        }
        BlendedCache((), **self.options)  # refuses bad options now, not at the first prompt
        check_secret(secret)
        self.tokenizer = tokenizer
        self.pool = open_chunks(store, capacity_bytes, codec, secret)
        self.secret = secret if secret is not None else getattr(self.pool, "secret", None)
        _check_namespace(namespace or "")
        if not namespace and self.secret is None and getattr(self.pool, "shared", False):
            raise ValueError(
                "others reach this store too: name those who may use each other's chunks with namespace='...' (set by "
                "who runs the service, never taken from a request), or give a secret"
            )
        self.condition, self.on_miss, self.deadline_s = condition, on_miss, deadline_s
        self.pipeline = Pipeline(self.pool) if pipeline and isinstance(self.pool, TieredStore) else None
        self.controller = controller
        if controller is not None and self.pipeline is None:
            raise ValueError("a controller chooses how chunks are loaded from stores: give a store, and pipeline=True")
        self.layout, self.namespace = Layout(tokenizer, chunk_tokens, separator), namespace or ""
        self.batch_tokens, self.progress, self.guard = batch_tokens, progress, guard
        self.model = attach(model)
        self.tokenizer_digest = tokenizer_fingerprint(tokenizer)
        self._lock = threading.Lock()

    def __call__(
        self, documents: Iterable[Any], question: str, system: str | None = None, **options: Any
    ) -> BlendedInputs:
        """Lays out a prompt and finds, or computes, its chunks.

        Args:
            documents: texts, or objects with `page_content` or `text` (LangChain's and LlamaIndex's), in prompt order.
            question: what follows them.
            system: the system prompt.
            **options: override the library's defaults for this prompt's `BlendedCache`.

        Returns:
            Inputs for `generate`, with `.cache` and `.report`.

        Raises:
            ChunkMissError: with `strict=True`, if a chunk is missing or could not be stored.
        """
        return self.inputs(self.assemble(documents, question, system), **options)

    def inputs(self, prompt: Prompt, **options: Any) -> BlendedInputs:
        """Finds, or computes, the chunks of a prompt that is laid out already, by `assemble` or `conversation`.

        Args:
            prompt: its pieces.
            **options: override the library's defaults for this prompt's `BlendedCache`.

        Returns:
            Inputs for `generate`, with `.cache` and `.report`.

        Raises:
            ChunkMissError: with `strict=True`, if a chunk is missing or could not be stored.
        """
        options = self.options | options
        report = BlendReport()
        with report.clock.stage("load"):
            chunks = self._chunks(prompt, report, options)  # a controller may choose another ratio
        report.notes += getattr(self.pool, "notes", ())
        cache = BlendedCache(chunks, **options) if self.guard is None else self.guard.cache(chunks, options)
        cache.report.take_over(report)
        ids = torch.tensor([prompt.ids], device=next(self.model.parameters()).device)
        return BlendedInputs({"input_ids": ids, "attention_mask": torch.ones_like(ids), _compat.CACHE_ARG: cache})

    def prefill(
        self, documents: Iterable[Any], system: str | None = None, report: BlendReport | None = None
    ) -> list[ChunkCache]:
        """Chunks of documents: from the store, or computed and stored.

        Args:
            documents: as in a call.
            system: the system prompt they will be used under (matters with `condition="system"`).
            report: told what was loaded, and what had to be computed.

        Returns:
            One chunk a document, or several for one that is longer than `chunk_tokens`, in order.
        """
        wanted = self._wanted(documents, system)
        report = BlendReport() if report is None else report
        chunks = self._from_store(wanted, report, self.options["strict"], compute=True)
        return [chunk for chunk in chunks if isinstance(chunk, ChunkCache)]

    def prefetch(
        self, documents: Iterable[Any], system: str | None = None, deadline_s: float | None = 10.0
    ) -> BlendReport:
        """Brings the chunks of documents that a store has into memory; computes nothing.

        Args:
            documents: as in a call.
            system: as for `prefill`.
            deadline_s: most seconds to wait for stores that are not local; None for as long as they take.

        Returns:
            What was loaded, and which stores failed.
        """
        report, wanted = BlendReport(), self._wanted(documents, system)
        pieces = {self._key(*piece): piece for piece in wanted}
        self._usable(pieces, attachment_of(self.model).facts, report, Budget(deadline_s))
        return report

    def keys(self, documents: Iterable[Any], system: str | None = None) -> list[str]:
        """Keys of the chunks that `prefill` would give, in order; nothing is looked up or computed."""
        return [self._key(*wanted) for wanted in self._wanted(documents, system)]

    def assemble(self, documents: Iterable[Any], question: str, system: str | None = None) -> Prompt:
        """The prompt as pieces: the template's head, each document's chunks, separators, and the rest.

        The model sees the concatenation of the pieces' ids, so template tokens are never inside a chunk, and a BOS
        stands once, in front, if the template (or, without one, the tokenizer) puts it there.
        """
        return self.layout.assemble(documents, question, system)

    def conversation(self, turns: Iterable[Turn], **template: Any) -> Prompt:
        """A conversation as pieces, with the documents of every turn as chunks; for `inputs`.

        Args:
            turns: system, user, assistant and tool turns (`blendkv.conversation.Turn`), the newest last.
            **template: what the chat template takes besides (`enable_thinking=False`).

        Raises:
            ValueError: for a conversation that the tokenizer's chat template cannot lay out.
        """
        return assemble_turns(self.layout, turns, **template)

    def clear(self) -> None:
        """Forgets every chunk in memory; stores keep theirs."""
        self.pool.clear()

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until stores have been given every chunk; False if that took longer than `timeout` seconds."""
        return getattr(self.pool, "flush", lambda timeout: True)(timeout)

    def close(self) -> None:
        """Waits until every chunk is written, and closes the store."""
        getattr(self.pool, "close", lambda: None)()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- chunks -----------------------------------------------------------------------------------------------------

    def _wanted(self, documents: Iterable[Any], system: str | None) -> list[Wanted]:
        pieces = [piece for text in texts_of(documents) for piece in self.layout.document(text)]
        conditioning = self._conditioning(self.layout.head(system))
        return [(piece, conditioning) for piece in pieces]

    def _key(self, piece: Piece, conditioning: tuple[int, ...]) -> str:
        fingerprint = attachment_of(self.model).facts.fingerprint
        return chunk_key(piece.ids, fingerprint, conditioning, self.tokenizer_digest, self.namespace, self.secret)

    def _conditioning(self, head: Piece | None) -> tuple[int, ...]:
        return conditioning_ids(self.condition, self.tokenizer, () if head is None else head.ids)

    def _chunks(self, prompt: Prompt, report: BlendReport, options: dict[str, Any]) -> list[Chunk]:
        head = next((piece for piece in prompt.pieces if piece.kind == "head"), None)
        conditioning = self._conditioning(head)
        wanted = [
            (piece, conditioning if piece.kind == "chunk" else ()) for piece in prompt.pieces if piece.kind != "text"
        ]
        road = self._road(prompt.ids, wanted, report, options)
        return self._from_store(wanted, report, options["strict"], self.on_miss == "prefill", road)

    def _road(
        self, ids: Sequence[int], wanted: Sequence[Wanted], report: BlendReport, options: dict[str, Any]
    ) -> Road | None:
        """How chunks of a prompt are fetched while it computes, if that can be; options get the ratio chosen."""
        attachment = attachment_of(self.model)
        if self.pipeline is None or options["strict"] or attachment.masks != "lazy":
            return None
        selector, report.loading = get_selector(options["selector"]), Progress()
        # asked once the controller has chosen a ratio: at ratio 0 the first layer is read, else often not
        given: dict[str, Any] = {"first": lambda: BlendedCache((), **options).reads_from, "progress": report.loading}
        pieces = {self._key(piece, before): (piece.ids, before) for piece, before in wanted}
        layers, computes = len(attachment.facts.rotations), self.on_miss == "prefill"
        given["spare"] = Sparing(ids, pieces, options, layers, computes, report.notes)
        if self.controller is not None:
            guided = Guided(self.controller, attachment, len(ids), selector, options, report)
            given |= {"choose": guided.choose}
            report.loading.on_loaded = guided.learn
        return partial(self.pipeline.fetch, **given)

    def _from_store(
        self,
        wanted: Sequence[Wanted],
        report: BlendReport,
        strict: bool,
        compute: bool,
        road: Road | None = None,
    ) -> list[Chunk]:
        """Looks every piece up; computes and stores the missing ones, or says that they are missing.

        Args:
            wanted: pieces.
            report: of the prompt.
            strict: whether a chunk that cannot be stored raises.
            compute: whether missing ones are computed.
            road: fetches chunks that are still on their way; None: as the store gives them, whole.
        """
        facts = attachment_of(self.model).facts
        keys = [self._key(piece, conditioning) for piece, conditioning in wanted]
        pieces: dict[str, Wanted] = {}
        for key, piece in zip(keys, wanted, strict=True):
            pieces.setdefault(key, piece)
        mine = [_same(pieces[key], piece) for key, piece in zip(keys, wanted, strict=True)]
        budget = self._budget(facts, sum(len(piece.ids) for piece, _ in pieces.values()))
        have: dict[str, Chunk] = self._usable(pieces, facts, report, budget, road)
        lacking = {key: piece for key, piece in pieces.items() if key not in have}
        if not compute:
            have |= {key: MissingChunk(torch.tensor(piece.ids)) for key, (piece, _) in lacking.items()}
        elif lacking:
            with self._lock:  # one prefill at a time: what another thread has just computed is not computed again
                self._fill(lacking, have, facts, report, budget)
        if strict and report.put_failures:
            words = sorted({word for faults in report.store_faults.values() for word in faults})
            why = "; ".join([*words, *getattr(self.pool, "notes", ())])
            raise ChunkMissError(
                f"{report.put_failures} chunks could not be stored{f' ({why})' if why else ''}: give the store more "
                "room than the chunks of a prompt take (capacity_bytes), see its stats, or use strict=False"
            )
        # two contents under one key, as only a broken hash makes them: the second is asked for by itself
        others = [piece for piece, is_mine in zip(wanted, mine, strict=True) if not is_mine]
        rest = iter(self._from_store(others, report, strict, compute, road) if others else ())
        return [have[key] if is_mine else next(rest) for key, is_mine in zip(keys, mine, strict=True)]

    def _budget(self, facts: ModelFacts, tokens: int) -> Budget:
        """How long this prompt may wait for stores."""
        if self.deadline_s is not None or not getattr(self.pool, "shared", False):
            return Budget(self.deadline_s)
        weight = next(self.model.parameters())
        dtype = weight.dtype if weight.dtype.is_floating_point else facts.dtype
        return Budget(max(DEADLINE_S, 0.1 * seconds_to_compute(facts.shape, tokens, weight.device, dtype)))

    def _fill(
        self,
        lacking: dict[str, Wanted],
        have: dict[str, Chunk],
        facts: ModelFacts,
        report: BlendReport,
        budget: Budget,
    ) -> None:
        """Computes and stores what is lacking, by conditioning; what the store makes of it is used at once."""
        there = {key: lacking[key] for key in lacking if key in self.pool}
        have |= self._usable(there, facts, report, budget)
        lacking = {key: piece for key, piece in lacking.items() if key not in have}
        for conditioning in dict.fromkeys(c for _, c in lacking.values()):
            group = {key: piece for key, (piece, c) in lacking.items() if c == conditioning}
            with report.clock.stage("prefill"):
                made = self._compute(group, conditioning)
            report.prefilled_tokens += sum(map(len, made))
            for key, (chunk, kept) in zip(group, self._put(made, report, budget), strict=True):
                have[key] = chunk
                report.put_failures += not kept

    def _usable(
        self,
        wanted: Mapping[str, Wanted],
        facts: ModelFacts,
        report: BlendReport,
        budget: Budget,
        road: Road | None = None,
    ) -> dict[str, Chunk]:
        """Those chunks that the store has, and that are what their keys say; a store that fails has none."""
        if not wanted:
            return {}
        before = faults_of(self.pool)
        try:
            fetch = self.pool.fetch if road is None else road
            found = fetch(list(wanted), attachment_of(self.model).homes, budget)
        except Exception as error:
            report.notes.append(f"the store failed to get {len(wanted)} chunks, which were computed instead: {error!r}")
            return {}
        report.note_faults(before, faults_of(self.pool))
        have: dict[str, Chunk] = {}
        for (key, (piece, conditioning)), got in zip(wanted.items(), found, strict=True):
            if got.tier == TEXT:
                have[key] = MissingChunk(torch.tensor(piece.ids), TEXT)
            elif (chunk := self._checked(got.chunk, piece, facts, conditioning)) is not None:
                have[key] = chunk
                report.loaded[got.tier] = report.loaded.get(got.tier, 0) + len(chunk)
        return have

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

    def _checked(
        self, chunk: ChunkCache | None, piece: Piece, facts: ModelFacts, conditioning: tuple[int, ...]
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

    def _compute(self, pieces: Mapping[str, Piece], conditioning: tuple[int, ...]) -> list[ChunkCache]:
        """Chunks of pieces, by key, that were not in the store."""
        made = prefill(
            self.model,
            [list(piece.ids) for piece in pieces.values()],
            conditioning=conditioning,
            namespace=self.namespace,
            batch_tokens=self.batch_tokens,
            progress=self.progress,
        )
        if wanted := get_selector(self.options["selector"]).stored:
            made = add_scores(self.model, made, wanted, self.tokenizer)
        return [
            replace(
                chunk,
                tokenizer=self.tokenizer_digest,
                text=piece.text,
                keyed="" if self.secret is None else key,
            )
            for chunk, (key, piece) in zip(made, pieces.items(), strict=True)
        ]


def _check_namespace(namespace: str) -> None:
    """Refuses what could not be written into a chunk file."""
    try:
        size = len(namespace.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"namespace={namespace!r} is no text that UTF-8 can hold: choose another") from error
    if size > MAX_NAME_BYTES:
        raise ValueError(f"a namespace of {size:,} bytes: at most {MAX_NAME_BYTES:,} in UTF-8; give a digest of it")


def _same(a: Wanted, b: Wanted) -> bool:
    """Whether two pieces of a prompt have the same content."""
    return a[0].ids == b[0].ids and a[1] == b[1]
