"""Haystack: a component that has the chunks of documents ready, and a chat generator that reuses them.

Needs haystack-ai: `pip install 'blendkv[haystack]'`. Components are described by names and URLs, as Haystack's are, so
that pipelines can be written to files; those with the same model, store and options share one library.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from blendkv.conversation import Part, Role, Turn
from blendkv.integrations.answering import Answer, Asking, Settings, model_name
from blendkv.integrations.extras import missing
from blendkv.integrations.prefetching import Mode, Prefetcher, check_mode
from blendkv.library import ChunkLibrary
from blendkv.models import load_model

try:
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.dataclasses import (
        ChatMessage,
        StreamingCallbackT,
        StreamingChunk,
        TextContent,
        select_streaming_callback,
    )
    from haystack.dataclasses.chat_message import ReasoningContent, ToolCall, ToolCallResult
    from haystack.utils.callable_serialization import deserialize_callable, serialize_callable
except ImportError as error:
    raise missing("haystack", error) from error

_LIBRARIES: WeakValueDictionary[str, ChunkLibrary] = WeakValueDictionary()
_LOADING = threading.Lock()
_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
__all__ = ["BlendedChatGenerator", "ChunkPrefetcher", "shared_library"]


def shared_library(
    model: str = "bundled",
    store: str = "memory://",
    model_kwargs: dict[str, Any] | None = None,
    library_kwargs: dict[str, Any] | None = None,
) -> ChunkLibrary:
    """The library of a model and a store, which lives as long as somebody uses it; loads the model the first time.

    Args:
        model: a name as `load_model` takes it: a hub id, a folder, a GGUF file, or "bundled".
        store: where chunks are kept, as `ChunkLibrary` takes it.
        model_kwargs: more for `load_model` (`dtype`, `device`, `attn_implementation`).
        library_kwargs: more for `ChunkLibrary` (`recompute_ratio`, `selector`, `namespace`, ...).
    """
    name = json.dumps([model, store, model_kwargs or {}, library_kwargs or {}], sort_keys=True, default=repr)
    with _LOADING:
        library = _LIBRARIES.get(name)
        if library is None:
            library = ChunkLibrary(*load_model(model, **(model_kwargs or {})), store, **(library_kwargs or {}))
            _LIBRARIES[name] = library
    return library


@component
class ChunkPrefetcher:
    """Has the chunks of documents ready before the generator asks for them; documents pass through.

    They come out as copies with one more entry in `meta`: `chunk_key`, with commas between the keys of a long document.

    Args:
        model, store, model_kwargs, library_kwargs: as for `shared_library`; give the generator the same.
        mode: "load" starts to bring what a store has into memory, in a thread, and goes on; "prefill" computes and
            stores what is missing first.
        system: the system prompt that the documents will be used under; matters with `condition="system"`.
    """

    def __init__(
        self,
        model: str = "bundled",
        store: str = "memory://",
        mode: Mode = "load",
        system: str | None = None,
        model_kwargs: dict[str, Any] | None = None,
        library_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_mode(mode)
        self.model, self.store, self.mode, self.system = model, store, mode, system
        self.model_kwargs, self.library_kwargs = model_kwargs, library_kwargs
        self._prefetcher: Prefetcher | None = None

    def warm_up(self) -> None:
        """Loads the model, unless another component has."""
        if self._prefetcher is None:
            library = shared_library(self.model, self.store, self.model_kwargs, self.library_kwargs)
            self._prefetcher = Prefetcher(library, "load", self.system)

    def to_dict(self) -> dict[str, Any]:
        """For a pipeline's file."""
        names = ("model", "store", "mode", "system", "model_kwargs", "library_kwargs")
        return default_to_dict(self, **{name: getattr(self, name) for name in names})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ChunkPrefetcher:
        """From a pipeline's file."""
        return default_from_dict(cls, data)

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, list[Document]]:
        """Starts, or computes.

        Args:
            documents: what a retriever found; those without text pass as they are.
        """
        self.warm_up()
        prefetcher = self._prefetcher
        assert prefetcher is not None
        library = prefetcher.library
        texts = [document.content for document in documents if document.content]
        if self.mode == "prefill":
            library.prefill(texts, self.system)
        else:
            prefetcher.start(texts)
        return {"documents": [self._keyed(library, document) for document in documents]}

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for what mode "load" has started; False if that takes longer than `timeout` seconds."""
        return self._prefetcher is None or self._prefetcher.wait(timeout)

    def _keyed(self, library: ChunkLibrary, document: Document) -> Document:
        if not document.content:
            return document
        key = ",".join(library.keys([document.content], self.system))
        return replace(document, meta={**document.meta, "chunk_key": key})


@component
class BlendedChatGenerator:
    """Answers messages with a local model that starts from cached chunks of documents.

    Documents stand in front of the last message's text, each a chunk of its own. A reply's `meta` has `model`,
    `finish_reason`, `usage` and `blend`, the `BlendReport` as numbers.

    Args:
        model, store, model_kwargs, library_kwargs: as for `shared_library`.
        generation_kwargs: `max_tokens`, `temperature`, `top_p`, `top_k`, `stop` (strings), `timeout` (seconds).
        streaming_callback: called with each new piece of text, unless a run has its own.

    Raises:
        TypeError, ValueError: for settings that there are not, or that cannot be.
    """

    def __init__(
        self,
        model: str = "bundled",
        store: str = "memory://",
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
        model_kwargs: dict[str, Any] | None = None,
        library_kwargs: dict[str, Any] | None = None,
    ) -> None:
        Settings.of(generation_kwargs or {})  # refused now, not at the first message
        self.model, self.store, self.generation_kwargs = model, store, generation_kwargs
        self.streaming_callback = streaming_callback
        self.model_kwargs, self.library_kwargs = model_kwargs, library_kwargs
        self._library: ChunkLibrary | None = None

    def warm_up(self) -> None:
        """Loads the model, unless another component has."""
        if self._library is None:
            self._library = shared_library(self.model, self.store, self.model_kwargs, self.library_kwargs)

    def to_dict(self) -> dict[str, Any]:
        """For a pipeline's file."""
        names = ("model", "store", "generation_kwargs", "model_kwargs", "library_kwargs")
        callback = None if self.streaming_callback is None else serialize_callable(self.streaming_callback)
        return default_to_dict(self, **{name: getattr(self, name) for name in names}, streaming_callback=callback)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BlendedChatGenerator:
        """From a pipeline's file."""
        parameters = dict(data.get("init_parameters", {}))
        if parameters.get("streaming_callback"):
            parameters["streaming_callback"] = deserialize_callable(parameters["streaming_callback"])
        return default_from_dict(cls, data | {"init_parameters": parameters})

    @component.output_types(replies=list[ChatMessage])
    def run(
        self,
        messages: list[ChatMessage] | str,
        documents: list[Document] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Answers.

        Args:
            messages: the conversation, the newest last, or one question.
            documents: what the answer is to be found in; those without text are left out.
            streaming_callback: for this run.
            generation_kwargs: for this run, over those of the component.
        """
        self.warm_up()
        callback = select_streaming_callback(self.streaming_callback, streaming_callback, requires_async=False)
        asking = self._asking(messages, documents, generation_kwargs)
        answer = asking.run(lambda text: None if callback is None else callback(StreamingChunk(text)))
        return {"replies": [self._reply(answer)]}

    @component.output_types(replies=list[ChatMessage])
    async def run_async(
        self,
        messages: list[ChatMessage] | str,
        documents: list[Document] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Answers from an event loop, which goes on meanwhile; see `run`."""
        await asyncio.to_thread(self.warm_up)
        callback = select_streaming_callback(self.streaming_callback, streaming_callback, requires_async=True)
        stream = (await asyncio.to_thread(self._asking, messages, documents, generation_kwargs)).astream()
        try:
            async for item in stream:
                if isinstance(item, Answer):
                    return {"replies": [self._reply(item)]}
                said = None if callback is None else callback(StreamingChunk(item))
                if inspect.isawaitable(said):
                    await said
        finally:
            await stream.aclose()
        raise AssertionError("a stream ends with its answer")

    def _asking(
        self,
        messages: list[ChatMessage] | str,
        documents: list[Document] | None,
        generation_kwargs: dict[str, Any] | None,
    ) -> Asking:
        library = self._library
        assert library is not None
        settings = Settings.of({**(self.generation_kwargs or {}), **(generation_kwargs or {})})
        messages = [ChatMessage.from_user(messages)] if isinstance(messages, str) else messages
        turns = [_turn(message, i) for i, message in enumerate(messages)]
        found = tuple(Part(document.content, document=True) for document in documents or () if document.content)
        if turns and found:
            turns[-1] = replace(turns[-1], parts=(*found, *turns[-1].parts))
        return Asking(library, library.conversation(turns), settings)

    def _reply(self, answer: Answer) -> ChatMessage:
        assert self._library is not None
        usage = {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.tokens,
            "total_tokens": answer.prompt_tokens + answer.tokens,
            "prompt_tokens_details": {"cached_tokens": answer.cache_read},
        }
        meta = {
            "model": model_name(self._library.model),
            "index": 0,
            "finish_reason": answer.finish,
            "usage": usage,
            "blend": answer.report.to_dict(),
        }
        return ChatMessage.from_assistant(answer.text, meta=meta)


def _turn(message: ChatMessage, index: int) -> Turn:
    """A message as a turn.

    Raises:
        ValueError: for content that is not text.
    """
    parts: list[Part] = []
    for i, content in enumerate(message._content):
        if isinstance(content, TextContent):
            parts.append(Part(content.text))
        elif isinstance(content, ToolCall):
            call = json.dumps({"name": content.tool_name, "arguments": content.arguments}, ensure_ascii=False)
            parts.append(Part(f"<tool_call>\n{call}\n</tool_call>"))
        elif isinstance(content, ToolCallResult) and isinstance(content.result, str):
            parts.append(Part(content.result))
        elif not isinstance(content, ReasoningContent):
            raise ValueError(
                f"content {i} of message {index} is a {type(content).__name__}, and this model reads text alone: leave "
                "it out, or put what it says into text"
            )
    return Turn(_ROLES[message.role.value], tuple(parts))
