"""Model, tokenizer and store in one object: documents and a question in, inputs of `generate` out."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import BatchEncoding

from blendkv import _compat
from blendkv.attaching import attach, attachment_of
from blendkv.cache import BlendedCache, Chunk
from blendkv.chunk import ChunkCache, MissingChunk, chunk_key, tokenizer_fingerprint
from blendkv.errors import ChunkMissError
from blendkv.facts import ModelFacts
from blendkv.layout import Layout, Piece, Prompt, texts_of
from blendkv.prefilling import BATCH_TOKENS, prefill
from blendkv.report import BlendReport
from blendkv.scoring import add_scores
from blendkv.selectors import Selector, get_selector
from blendkv.stores import Pool, open_pool


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


class ChunkLibrary:
    """Keeps the chunks of one model and lays prompts out of them.

    Args:
        model: a decoder-only transformers model (attached, and proven, here).
        tokenizer: its tokenizer.
        store: `memory://`, or a `Pool` to share.
        recompute_ratio, selector, check_layers, strict, reserve: defaults for every prompt's `BlendedCache`.
        condition: what stands before a chunk while it is computed: "none", "bos", or "system" (the prompt's head). Part
            of the key; which is best depends on model and task.
        chunk_tokens: longer documents are cut at sentence ends.
        separator: text after every document in the prompt; never part of a chunk, always computed.
        namespace: part of every key; set it where tenants share a store.
        on_miss: "prefill" computes and keeps a chunk that is not in the store before the prompt is laid out,
            "recompute" leaves its tokens to the prompt's own forward (exact, but nothing is kept).
        capacity_bytes: of the pool, if `store` is a URL.
        batch_tokens: most tokens of one prefill forward.
        progress: show a bar while chunks are computed.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        store: str | Pool = "memory://",
        *,
        recompute_ratio: float = 0.15,
        selector: str | Selector = "hkvd",
        check_layers: Mapping[int, float] | None = None,
        strict: bool = False,
        reserve: int = 256,
        condition: Literal["none", "bos", "system"] = "none",
        chunk_tokens: int = 512,
        separator: str = "\n\n",
        namespace: str = "",
        on_miss: Literal["prefill", "recompute"] = "prefill",
        capacity_bytes: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        progress: bool = False,
    ) -> None:
        if condition not in ("none", "bos", "system"):
            raise ValueError(f"condition={condition!r}: choose 'none', 'bos' or 'system'")
        if on_miss not in ("prefill", "recompute"):
            raise ValueError(f"on_miss={on_miss!r}: choose 'prefill' or 'recompute'")
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens}: give at least one")
        if condition == "bos" and tokenizer.bos_token_id is None:
            raise ValueError("condition='bos', but this tokenizer has no BOS token: choose 'none' or 'system'")
        self.options: dict[str, Any] = {
            "recompute_ratio": recompute_ratio,
            "selector": selector,
            "check_layers": check_layers,
            "strict": strict,
            "reserve": reserve,
        }
        BlendedCache((), **self.options)  # refuses bad options now, not at the first prompt
        self.tokenizer = tokenizer
        self.pool = open_pool(store, capacity_bytes)
        self.condition, self.on_miss = condition, on_miss
        self.layout, self.namespace = Layout(tokenizer, chunk_tokens, separator), namespace
        self.batch_tokens, self.progress = batch_tokens, progress
        self.model = attach(model)
        self._tokenizer_digest = tokenizer_fingerprint(tokenizer)
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
        prompt = self.assemble(documents, question, system)
        options = self.options | options
        report = BlendReport()
        with report.clock.stage("load"):
            chunks = self._chunks(prompt, report, options["strict"])
        report.notes += getattr(self.pool, "notes", ())
        cache = BlendedCache(chunks, **options)
        cache.report.clock, cache.report.put_failures = report.clock, report.put_failures
        cache.report.prefilled_tokens, cache.report.notes = report.prefilled_tokens, report.notes
        ids = torch.tensor([prompt.ids], device=next(self.model.parameters()).device)
        return BlendedInputs({"input_ids": ids, "attention_mask": torch.ones_like(ids), _compat.CACHE_ARG: cache})

    def prefill(self, documents: Iterable[Any], system: str | None = None) -> list[ChunkCache]:
        """Chunks of documents: from the store, or computed and stored.

        Args:
            documents: as in a call.
            system: the system prompt they will be used under (matters with `condition="system"`).

        Returns:
            One chunk a document, or several for one that is longer than `chunk_tokens`, in order.
        """
        pieces = [piece for text in texts_of(documents) for piece in self.layout.document(text)]
        conditioning = self._conditioning(self.layout.head(system))
        wanted = [(piece, conditioning) for piece in pieces]
        chunks = self._from_store(wanted, BlendReport(), self.options["strict"], compute=True)
        return [chunk for chunk in chunks if isinstance(chunk, ChunkCache)]

    def assemble(self, documents: Iterable[Any], question: str, system: str | None = None) -> Prompt:
        """The prompt as pieces: the template's head, each document's chunks, separators, and the rest.

        The model sees the concatenation of the pieces' ids, so template tokens are never inside a chunk, and a BOS
        stands once, in front, if the template (or, without one, the tokenizer) puts it there.
        """
        return self.layout.assemble(documents, question, system)

    def clear(self) -> None:
        """Forgets every chunk in memory."""
        self.pool.clear()

    # -- chunks -----------------------------------------------------------------------------------------------------

    def _conditioning(self, head: Piece | None) -> tuple[int, ...]:
        if self.condition == "bos":
            return (self.tokenizer.bos_token_id,)
        return head.ids if self.condition == "system" and head is not None else ()

    def _chunks(self, prompt: Prompt, report: BlendReport, strict: bool) -> list[Chunk]:
        head = next((piece for piece in prompt.pieces if piece.kind == "head"), None)
        conditioning = self._conditioning(head)
        wanted = [
            (piece, conditioning if piece.kind == "chunk" else ()) for piece in prompt.pieces if piece.kind != "text"
        ]
        return self._from_store(wanted, report, strict, compute=self.on_miss == "prefill")

    def _from_store(
        self, wanted: Sequence[tuple[Piece, tuple[int, ...]]], report: BlendReport, strict: bool, compute: bool
    ) -> list[Chunk]:
        """Looks every piece up; computes and stores the missing ones, or says that they are missing."""
        facts = attachment_of(self.model).facts
        keys = [
            chunk_key(piece.ids, facts.fingerprint, conditioning, self._tokenizer_digest, self.namespace)
            for piece, conditioning in wanted
        ]
        pieces = dict(zip(keys, wanted, strict=True))
        have: dict[str, Chunk] = {}
        lacking: dict[str, tuple[Piece, tuple[int, ...]]] = {}
        for (key, (piece, conditioning)), chunk in zip(pieces.items(), self._get(list(pieces), report), strict=True):
            chunk = self._checked(chunk, piece, facts, conditioning)
            if chunk is None:
                lacking[key] = piece, conditioning
            else:
                have[key] = chunk
        if not compute:
            have |= {key: MissingChunk(torch.tensor(piece.ids)) for key, (piece, _) in lacking.items()}
        elif lacking:
            with self._lock:  # one prefill at a time: what another thread has just computed is not computed again
                self._fill(lacking, have, facts, report)
        if strict and report.put_failures:
            raise ChunkMissError(
                f"{report.put_failures} chunks could not be stored: give the pool more than "
                f"{self.pool.capacity_bytes:,} bytes, or use strict=False"
            )
        return [have[key] for key in keys]

    def _fill(
        self,
        lacking: dict[str, tuple[Piece, tuple[int, ...]]],
        have: dict[str, Chunk],
        facts: ModelFacts,
        report: BlendReport,
    ) -> None:
        """Computes and stores what is lacking, by conditioning; what the store makes of it is used at once."""
        there = [key for key in lacking if key in self.pool]
        for key, chunk in zip(there, self._get(there, report), strict=True):
            if (chunk := self._checked(chunk, lacking[key][0], facts, lacking[key][1])) is not None:
                have[key] = chunk
                del lacking[key]
        for conditioning in dict.fromkeys(c for _, c in lacking.values()):
            group = {key: piece for key, (piece, c) in lacking.items() if c == conditioning}
            with report.clock.stage("prefill"):
                made = self._compute(list(group.values()), conditioning)
            report.prefilled_tokens += sum(map(len, made))
            for key, (chunk, kept) in zip(group, self._put(made, report), strict=True):
                have[key] = chunk
                report.put_failures += not kept

    def _get(self, keys: Sequence[str], report: BlendReport) -> Sequence[ChunkCache | None]:
        """What the store has; a store that fails has nothing."""
        try:
            return self.pool.get_many(keys)
        except Exception as error:
            report.notes.append(f"the store failed to get {len(keys)} chunks, which were computed instead: {error!r}")
            return [None] * len(keys)

    def _put(self, chunks: Sequence[ChunkCache], report: BlendReport) -> Sequence[tuple[ChunkCache, bool]]:
        """Chunks as the store gives them from now on, and whether it kept them; one that fails did not."""
        try:
            return self.pool.put_many(chunks)
        except Exception as error:
            report.notes.append(f"the store failed to keep {len(chunks)} chunks: {error!r}")
            return [(chunk, False) for chunk in chunks]

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
            and chunk.tokenizer == self._tokenizer_digest
            and chunk.namespace == self.namespace
        )
        return chunk if same else None

    def _compute(self, pieces: list[Piece], conditioning: tuple[int, ...]) -> list[ChunkCache]:
        """Chunks of pieces that were not in the store."""
        made = prefill(
            self.model,
            [list(piece.ids) for piece in pieces],
            conditioning=conditioning,
            namespace=self.namespace,
            batch_tokens=self.batch_tokens,
            progress=self.progress,
        )
        if wanted := get_selector(self.options["selector"]).stored:
            made = add_scores(self.model, made, wanted, self.tokenizer)
        return [
            replace(chunk, tokenizer=self._tokenizer_digest, text=piece.text)
            for chunk, piece in zip(made, pieces, strict=True)
        ]
