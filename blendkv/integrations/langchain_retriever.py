"""LangChain: a retriever, and a callback, that have the chunks of documents ready when the model is asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Literal

from blendkv.integrations.extras import missing
from blendkv.integrations.prefetching import Mode, Prefetcher, text_in, usable
from blendkv.library import ChunkLibrary
from blendkv.report import BlendReport

try:
    from langchain_core.callbacks import (
        AsyncCallbackManagerForRetrieverRun,
        BaseCallbackHandler,
        CallbackManagerForRetrieverRun,
    )
    from langchain_core.callbacks.manager import adispatch_custom_event, dispatch_custom_event
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever, RetrieverLike
except ImportError as error:
    raise missing("langchain", error) from error

from pydantic import ConfigDict, Field, PrivateAttr

EVENT = "blendkv.chunks"
"""Name of the custom event that tells traces what was there and what was computed."""
_LOG = logging.getLogger("blendkv")


class ChunkCacheRetriever(BaseRetriever):
    """Any retriever, with chunks for what it finds.

    The documents come back as copies with one more entry in their metadata: `chunk_key`, the keys of their chunks in
    the library's store, with commas between if a long document has several. Keys and values never leave the library.
    A custom event `blendkv.chunks` says how many documents and chunks there were, and how many tokens were loaded and
    computed. Empty documents have no key.

    Args:
        retriever: what finds documents; keyword arguments of a call are passed on to it.
        library: whose chunks.
        mode: "prefill" computes and stores what is missing before it returns; "load" starts to bring what a store has
            into memory, in a thread, and returns at once.
        k: most documents to keep, the first ones; None keeps all. A call may have its own (`invoke(query, k=3)`), which
            the wrapped retriever is given too.
        system: the system prompt that the documents will be used under; matters with `condition="system"`.
    """

    retriever: RetrieverLike
    library: ChunkLibrary
    mode: Literal["prefill", "load"] = "prefill"
    k: int | None = Field(default=None, ge=1)
    system: str | None = None

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
    _prefetcher: Prefetcher = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Makes the thread that loads."""
        super().model_post_init(context)
        self._prefetcher = Prefetcher(self.library, "load", self.system)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for what mode "load" has started; False if that takes longer than `timeout` seconds."""
        return self._prefetcher.wait(timeout)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        children = run_manager.get_child()
        found = _checked(self.retriever.invoke(query, config={"callbacks": children}, **kwargs))
        documents, event = self._with_keys(found[: kwargs.get("k", self.k)])
        if event["documents"]:
            dispatch_custom_event(EVENT, event, config={"callbacks": children})
        return documents

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        children = run_manager.get_child()
        found = _checked(await self.retriever.ainvoke(query, config={"callbacks": children}, **kwargs))
        documents, event = await asyncio.to_thread(self._with_keys, found[: kwargs.get("k", self.k)])
        if event["documents"]:
            await adispatch_custom_event(EVENT, event, config={"callbacks": children})
        return documents

    def _with_keys(self, documents: list[Document]) -> tuple[list[Document], dict[str, Any]]:
        """Copies with keys, and what to tell traces; chunks are there, or on their way."""
        report, keyed, keys = BlendReport(), [], []
        texts = [document.page_content for document in usable(documents)]
        if self.mode == "prefill":
            self.library.prefill(texts, self.system, report)
        else:
            self._prefetcher.start(texts)
        for document in documents:
            own = self.library.keys([document], self.system) if document.page_content else []
            keys += own
            more = {"chunk_key": ",".join(own)} if own else {}
            keyed.append(document.model_copy(update={"metadata": {**document.metadata, **more}}))
        event = {
            "documents": len(texts),
            "chunks": len(keys),
            "mode": self.mode,
            "loaded_tokens": dict(report.loaded),
            "computed_tokens": report.prefilled_tokens,
            "put_failures": report.put_failures,
        }
        return keyed, event


class ChunkPrefetchHandler(BaseCallbackHandler):
    """A callback that starts to bring chunks into memory as soon as a retriever has found their documents.

    For retrievers that are not to be wrapped: `retriever.with_config(callbacks=[ChunkPrefetchHandler(library)])`, or
    `callbacks` of one call. It returns at once, and never raises: what fails is logged.

    Args:
        library: whose chunks.
        mode: "load" brings what a store has, "prefill" also computes and stores the rest.
        system: as for `ChunkCacheRetriever`.

    Raises:
        ValueError: for another mode.
    """

    def __init__(self, library: ChunkLibrary, mode: Mode = "load", system: str | None = None) -> None:
        self._prefetcher = Prefetcher(library, mode, system)

    def on_retriever_end(self, documents: Sequence[Any], **kwargs: Any) -> None:
        """Starts loading; called by LangChain."""
        try:
            self._prefetcher.start(text for document in documents if (text := text_in(document)))
        except TypeError as error:
            _LOG.warning("blendkv: nothing is prefetched: %s", error)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for what was started; False if that takes longer than `timeout` seconds."""
        return self._prefetcher.wait(timeout)


def _checked(found: Any) -> list[Document]:
    """What a retriever returned, if it is documents.

    Raises:
        TypeError: if it is something else.
    """
    if not isinstance(found, list | tuple):
        raise TypeError(f"the wrapped retriever returned a {type(found).__name__}: it must return a list of documents")
    for item in found:
        if not isinstance(item, Document):
            raise TypeError(
                f"the wrapped retriever returned a {type(item).__name__} among its documents: each must be a "
                "langchain_core.documents.Document"
            )
    return list(found)
