"""Model, tokenizer and store in one object: documents and a question in, inputs of `generate` out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self

import torch
from torch import nn

from blendkv import _compat
from blendkv.attaching import attach
from blendkv.cache import BlendedCache, Chunk
from blendkv.chunk import ChunkCache, tokenizer_fingerprint
from blendkv.codecs import Codec
from blendkv.container.format import MAX_NAME_BYTES
from blendkv.container.seals import check_secret
from blendkv.conversation import Turn, assemble_turns
from blendkv.correctors import Corrector
from blendkv.guard import Guard
from blendkv.inputs import BlendedInputs
from blendkv.layout import Layout, Piece, Prompt, begins_with_bos, conditioning_ids, texts_of
from blendkv.listening import Listeners
from blendkv.loading.controller import Controller
from blendkv.loading.pipeline import Pipeline
from blendkv.prefilling import BATCH_TOKENS
from blendkv.pretrained import PretrainedMixin
from blendkv.report import BlendReport
from blendkv.selectors import Selector, get_selector
from blendkv.stores import Budget, Pool, Store, TieredStore, open_chunks
from blendkv.supply import Supply, Wanted

__all__ = ["BlendedInputs", "ChunkLibrary"]


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
        corrector: what is done to stored states that are kept, likewise.
        condition: what stands before a chunk while it is computed: "none", "bos", "system" (the prompt's head), or
            "dummy" (a few neutral words). "auto": a BOS where the tokenizer begins every text with one, else nothing
            (docs/guides/defaults.md). Part of the key; which is best depends on model and task.
        chunk_tokens: longer documents are cut at sentence ends.
        separator: text after every document in the prompt; never part of a chunk, always computed.
        namespace: part of every key: who may use each other's chunks. Who runs the service sets it, never a request; a
            store that others reach too wants one.
        secret: of a tenant, 16 to 64 bytes: keys cannot be guessed without it, and files are sealed with it.
        controller: chooses, for each prompt, the ratio that loading hides, at which level chunks are loaded from which
            store, and what is computed from text instead; by a target, if it has one (docs/guides/loading.md).
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
        corrector: str | Corrector | None = None,
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
            "corrector": corrector,
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
        self._listeners = Listeners()
        self.supply = Supply(
            self.model,
            tokenizer,
            self.tokenizer_digest,
            self.pool,
            self.pipeline,
            controller,
            self.namespace,
            self.secret,
            deadline_s,
            get_selector(selector).stored,
            batch_tokens,
            progress,
        )

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
        report = BlendReport(listeners=self._listeners)
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
        chunks = self.supply.get(wanted, report, self.options["strict"], compute=True)
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
        self.supply.usable(dict(zip(self.supply.keys(wanted), wanted, strict=True)), report, Budget(deadline_s))
        return report

    def keys(self, documents: Iterable[Any], system: str | None = None) -> list[str]:
        """Keys of the chunks that `prefill` would give, in order; nothing is looked up or computed."""
        return self.supply.keys(self._wanted(documents, system))

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

    def on_report(self, listener: Callable[[BlendReport], object]) -> Callable[[], None]:
        """Tells a function of every blend, when its first forward is done, in the thread that runs it.

        One that raises costs no prompt anything: the log `blendkv` says so once. On a GPU `report.seconds` waits for
        the device, so read it later (`blendkv.telemetry` does).

        Args:
            listener: takes the report.

        Returns:
            A function to call when it is to be told no more.
        """
        return self._listeners.add(listener)

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

    def _conditioning(self, head: Piece | None) -> tuple[int, ...]:
        return conditioning_ids(self.condition, self.tokenizer, () if head is None else head.ids)

    def _chunks(self, prompt: Prompt, report: BlendReport, options: dict[str, Any]) -> list[Chunk]:
        head = next((piece for piece in prompt.pieces if piece.kind == "head"), None)
        conditioning = self._conditioning(head)
        wanted = [
            (piece, conditioning if piece.kind == "chunk" else ()) for piece in prompt.pieces if piece.kind != "text"
        ]
        computes = self.on_miss == "prefill"
        road = self.supply.road(prompt.ids, report, options, computes)
        return self.supply.get(wanted, report, options["strict"], computes, road)


def _check_namespace(namespace: str) -> None:
    """Refuses what could not be written into a chunk file."""
    try:
        size = len(namespace.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"namespace={namespace!r} is no text that UTF-8 can hold: choose another") from error
    if size > MAX_NAME_BYTES:
        raise ValueError(f"a namespace of {size:,} bytes: at most {MAX_NAME_BYTES:,} in UTF-8; give a digest of it")
