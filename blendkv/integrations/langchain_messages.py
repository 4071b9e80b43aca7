"""LangChain's messages as turns: which of their content blocks are documents, and what cannot be taken."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from blendkv.conversation import Part, Role, Turn
from blendkv.integrations.extras import missing
from blendkv.integrations.prefetching import text_in

try:
    from langchain_core.documents import Document
    from langchain_core.messages import (
        AIMessage,
        BaseMessage,
        ChatMessage,
        HumanMessage,
        SystemMessage,
        ToolMessage,
    )
except ImportError as error:
    raise missing("langchain", error) from error

_LOG = logging.getLogger("blendkv")
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "tool": "tool",
}
_SILENT = ("reasoning", "thinking", "redacted_thinking")
"""Blocks of earlier answers that are not said again."""
_CALLS = ("tool_call", "tool_use", "function_call", "tool_call_chunk", "invalid_tool_call")
"""Blocks that repeat `AIMessage.tool_calls`."""


def as_content_blocks(documents: Iterable[Any]) -> list[dict[str, Any]]:
    """Documents as content blocks of a message, each marked as one to be cached.

    The mark is that of Anthropic's models; other providers ignore it. `ChatBlended` takes each block for a document.

    Args:
        documents: LangChain's documents, other objects with `page_content` or `text`, or strings. Empty ones are left
            out, and logged.

    Returns:
        `{"type": "text", "text": ..., "cache_control": {"type": "ephemeral"}}` each; none for no documents.

    Raises:
        TypeError: for a document without text, or a single string.
    """
    if isinstance(documents, str):
        raise TypeError("documents is one string: pass a list of documents")
    texts = [text_in(document) for document in documents]
    if empty := texts.count(""):
        _LOG.warning("blendkv: %d of %d documents are empty, and left out", empty, len(texts))
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts if text]


def turns_of(messages: Sequence[BaseMessage]) -> list[Turn]:
    """The messages as turns, for `ChunkLibrary.conversation`.

    Documents are text blocks with `cache_control`, and those on a `ToolMessage.artifact`, which then stand instead of
    the message's own text. Calls of tools are written out as JSON.

    Raises:
        ValueError: for content that is not text, or a role that is unknown.
        TypeError: for text that is none.
    """
    return [Turn(_role(message), tuple(_parts(message, i))) for i, message in enumerate(messages)]


def _role(message: BaseMessage) -> Role:
    kinds: tuple[tuple[type[BaseMessage], Role], ...] = (
        (SystemMessage, "system"),
        (HumanMessage, "user"),
        (AIMessage, "assistant"),
        (ToolMessage, "tool"),
    )
    for kind, role in kinds:
        if isinstance(message, kind):
            return role
    name = message.role if isinstance(message, ChatMessage) else message.type
    if name not in _ROLES:
        raise ValueError(
            f"a message of the role {name!r}: this chat model takes system, human, ai and tool messages (ChatMessage: "
            f"{', '.join(_ROLES)})"
        )
    return _ROLES[name]


def _parts(message: BaseMessage, index: int) -> list[Part]:
    documents = _artifact(message)
    if documents:
        return [Part(text, document=True) for text in documents]
    content = message.content
    blocks: list[Any] = [content] if isinstance(content, str) else list(content)
    parts = [part for i, block in enumerate(blocks) if (part := _part(block, f"block {i} of message {index}"))]
    if isinstance(message, AIMessage):
        calls = [{"name": call["name"], "arguments": call["args"]} for call in message.tool_calls]
        lines = "".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>\n" for call in calls)
        parts += [Part(lines.rstrip("\n"))] if lines else []
    return parts


def _part(block: Any, where: str) -> Part | None:
    """Text or a document; None for what is not said."""
    if isinstance(block, str):
        return Part(block)
    kind = block.get("type") if isinstance(block, dict) else type(block).__name__
    if kind in _SILENT or kind in _CALLS:
        return None
    if kind != "text":
        raise ValueError(
            f"{where} is of the type {kind!r}, and this model reads text alone: leave it out, or put what it says into "
            "a text block"
        )
    text = block.get("text")
    if not isinstance(text, str):
        raise TypeError(f"{where} has a {type(text).__name__} for its text: give a string")
    marked = block.get("cache_control") or (block.get("extras") or {}).get("cache_control")
    if marked and not text:
        raise ValueError(f"{where} is an empty document: leave it out, as as_content_blocks(documents) does")
    return Part(text, document=bool(marked))


def _artifact(message: BaseMessage) -> list[str]:
    """Texts of the documents that a retriever tool left on its message."""
    artifact = message.artifact if isinstance(message, ToolMessage) else None
    if not isinstance(artifact, list | tuple) or not all(isinstance(item, Document) for item in artifact):
        return []
    return [item.page_content for item in artifact if item.page_content]
