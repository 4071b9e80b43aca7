"""A conversation in a chat template, as one sequence of ids: the documents of every turn are chunks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from blendkv.layout import Layout, Piece, Prompt

Role = Literal["system", "user", "assistant", "tool"]
_STAND_IN = re.compile("\ue000([0-9]+)\ue001")


@dataclass(frozen=True)
class Part:
    """Some text of a turn.

    Attributes:
        text: as it is; never read as part of the template.
        document: whether it is a document, whose chunks are reused.
        system: whether it belongs to the system prompt, wherever the template has room for that.
    """

    text: str
    document: bool = False
    system: bool = False


@dataclass(frozen=True)
class Turn:
    """What one side says.

    Attributes:
        role: whose turn it is.
        parts: text and documents, in order; may be empty.
    """

    role: Role
    parts: tuple[Part, ...]


def assemble_turns(layout: Layout, turns: Iterable[Turn], **template: Any) -> Prompt:
    """Lays a conversation out in the tokenizer's chat template, ready for the assistant's turn.

    Turns of one role that follow each other are one turn, with a blank line between their texts. A template without a
    system role gets the system prompt in front of the first user's turn, one without a tool role gets tool results as
    the user's. With a system prompt, documents and a question, the ids are those of `Layout.assemble`.

    Args:
        layout: the tokenizer, and how documents are cut.
        turns: the conversation, the newest turn last.
        **template: what `apply_chat_template` takes besides.

    Returns:
        The prompt: a head (all that stands before the first document, or the first words that are not the system's),
        chunks, and text.

    Raises:
        ValueError: for a tokenizer without a template, no turn, a last turn that is the assistant's, a system turn that
            is not the first, or a template that cannot print the conversation.
    """
    if getattr(layout.tokenizer, "chat_template", None) is None:
        raise ValueError(
            "this tokenizer has no chat template, so messages cannot be laid out: set tokenizer.chat_template, or call "
            "ChunkLibrary(documents, question), which needs none"
        )
    merged = _merge(turns)
    if not merged or merged[-1].role in ("system", "assistant"):
        last = f"the last message is the {merged[-1].role}'s" if merged else "there are no messages"
        raise ValueError(f"{last}, so there is nothing to answer: end with a message of the user or a tool")
    if any(turn.role == "system" for turn in merged[1:]):
        raise ValueError("a system message stands after other messages: put all of them first, where they become one")
    turns, frame = _framed(layout.tokenizer, merged, template)
    pieces: list[Piece] = []
    head: int | None = None  # number of pieces before anything that is not the system's
    for before, turn in zip(frame, turns, strict=False):
        pieces.append(layout.special(before, "text"))
        for i, part in enumerate(turn.parts):
            if head is None and (part.document or not part.system):
                head = len(pieces)
            pieces += layout.document(part.text) if part.document else [layout.plain(part.text)]
            if part.document and i + 1 < len(turn.parts):
                pieces.append(layout.plain(layout.separator))
        if head is None and turn.role != "system":
            head = len(pieces)
    pieces.append(layout.special(frame[-1], "text"))
    front, rest = pieces[:head], pieces[head:]
    joined = Piece("".join(p.text for p in front), tuple(i for p in front for i in p.ids), "head")
    return Prompt(tuple(piece for piece in (joined, *rest) if piece.ids))


def _merge(turns: Iterable[Turn]) -> list[Turn]:
    """Joins turns of one role that follow each other, and texts that do; marks the system's."""
    merged: list[Turn] = []
    for turn in turns:
        is_system = turn.role == "system"
        parts = tuple(replace(part, system=is_system or part.system) for part in turn.parts if part.text)
        if merged and merged[-1].role == turn.role:
            merged[-1] = Turn(turn.role, _joined(merged[-1].parts, parts))
        else:
            merged.append(Turn(turn.role, _joined((), parts)))
    return merged


def _joined(parts: tuple[Part, ...], more: tuple[Part, ...]) -> tuple[Part, ...]:
    """Parts of one turn, with texts that follow each other as one; a blank line stands between two messages."""
    between = "\n\n"
    for part in more:
        last = parts[-1] if parts else None
        if last is not None and not last.document and not part.document and last.system == part.system:
            parts = (*parts[:-1], replace(last, text=last.text + between + part.text))
        elif last is not None and not last.document and between:
            parts = (*parts[:-1], replace(last, text=last.text + between), part)
        else:
            parts = (*parts, part)
        between = ""
    return parts


def _framed(tokenizer: Any, turns: list[Turn], template: dict[str, Any]) -> tuple[list[Turn], list[str]]:
    """Turns as the template takes them, and its text before each and after the last.

    Raises:
        ValueError: with the template's own words, if it takes them in no way.
    """
    ways = (lambda t: t, _tools_as_user, _system_in_user, lambda t: _system_in_user(_tools_as_user(t)))
    why = ""
    tried: list[list[Turn]] = []
    for way in ways:
        if (candidate := way(turns)) in tried:
            continue
        tried.append(candidate)
        messages = [{"role": turn.role, "content": f"\ue000{i}\ue001"} for i, turn in enumerate(candidate)]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template)
        except Exception as error:  # templates refuse roles, and orders of them, in their own ways
            why = why or f": {error}"
            continue
        frame = _STAND_IN.split(text)
        if [int(i) for i in frame[1::2]] == list(range(len(candidate))):
            return candidate, frame[::2]
    raise ValueError(
        f"this tokenizer's chat template cannot print these messages, each once, in order and unchanged{why or '.'} "
        f"(roles: {', '.join(turn.role for turn in turns)})"
    )


def _tools_as_user(turns: Sequence[Turn]) -> list[Turn]:
    return _merge(replace(turn, role="user") if turn.role == "tool" else turn for turn in turns)


def _system_in_user(turns: Sequence[Turn]) -> list[Turn]:
    """The system prompt opens the first turn after it, if that is the user's, as in `Layout`."""
    if len(turns) < 2 or turns[0].role != "system" or turns[1].role != "user" or not turns[0].parts:
        return list(turns)
    *front, last = turns[0].parts
    last = last if last.document else replace(last, text=last.text + "\n\n")
    return [Turn("user", (*front, last, *turns[1].parts)), *turns[2:]]
