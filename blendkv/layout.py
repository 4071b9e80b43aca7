"""Documents, a question and a chat template, laid out as one sequence of token ids."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

TOKENIZER_LOCK = threading.RLock()
"""Held around every call of a tokenizer."""
_SENTENCE_END = re.compile("(?<=[.!?\u3002\uff01\uff1f])[\"'\u201d\u2019)\\]]*\\s+|\n+|(?<=[\u3002\uff01\uff1f])")
"""After . ! ? (closing quotes and spaces included), at line ends, and after their full-width kin."""
SYSTEM, DOCUMENTS, QUESTION = "\ue000system\ue001", "\ue000documents\ue001", "\ue000question\ue001"
"""Stand-ins while a chat template is rendered (private-use characters: no template or text has them)."""
PLAIN = f"{SYSTEM}\n\n{DOCUMENTS}Question: {QUESTION}\nAnswer:"
"""The layout for models without a chat template."""

DUMMY = "This is a passage of text.\n\n"
"""Neutral words in front of a chunk: they, and not the chunk's first words, become the sink of its attention."""
CONDITIONS = ("none", "bos", "system", "dummy")
"""What may stand before a chunk while it is computed."""


@dataclass(frozen=True)
class Piece:
    """A part of a prompt, tokenised alone.

    Attributes:
        text: as it stands in the prompt.
        ids: its token ids.
        kind: "head" (template and system prompt, kept as a chunk of its own), "chunk", or "text" (always computed).
    """

    text: str
    ids: tuple[int, ...]
    kind: Literal["head", "chunk", "text"]


@dataclass(frozen=True)
class Prompt:
    """A prompt as the concatenation of its pieces' ids."""

    pieces: tuple[Piece, ...]

    @property
    def ids(self) -> list[int]:
        """All ids in order."""
        return [i for piece in self.pieces for i in piece.ids]

    @property
    def text(self) -> str:
        """All text in order."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True)
class Layout:
    """How prompts of one tokenizer are laid out.

    Attributes:
        tokenizer: with or without a chat template.
        chunk_tokens: longer documents are cut at sentence ends.
        separator: text after every document, never part of a chunk.
    """

    tokenizer: Any
    chunk_tokens: int
    separator: str

    def assemble(self, documents: Iterable[Any], question: str, system: str | None = None) -> Prompt:
        """The prompt as pieces: the template's head, each document's chunks, separators, and the rest."""
        before, between, after = self._frame(system)
        pieces = [self.special(before, "head")]
        for text in texts_of(documents):
            pieces += self.document(text)
            pieces.append(self.plain(self.separator))
        pieces += [self.special(between, "text"), self.plain(question), self.special(after, "text")]
        return Prompt(tuple(piece for piece in pieces if piece.ids))

    def head(self, system: str | None) -> Piece:
        """What stands before the documents."""
        return self.special(self._frame(system)[0], "head")

    def document(self, text: str) -> list[Piece]:
        """The chunks of one document."""
        return [self.plain(part, "chunk") for part in split_text(self.tokenizer, text, self.chunk_tokens)]

    def _frame(self, system: str | None) -> tuple[str, str, str]:
        """The prompt's text before the documents, between documents and question, and after."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            bos = self.tokenizer.bos_token if begins_with_bos(self.tokenizer) else ""
            text = bos + (PLAIN if system else PLAIN.removeprefix(f"{SYSTEM}\n\n"))
        else:
            text = self._render(system is not None)
        before, _, rest = text.replace(SYSTEM, system or "").partition(DOCUMENTS)
        between, _, after = rest.partition(QUESTION)
        return before, between, after

    def _render(self, system: bool) -> str:
        """The chat template with stand-ins for what goes into it.

        Raises:
            ValueError: if the template does not print each of them once, as it is.
        """
        user = {"role": "user", "content": DOCUMENTS + QUESTION}
        text = ""
        if system:
            try:
                text = self._template([{"role": "system", "content": SYSTEM}, user])
            except Exception:  # templates refuse a system role in their own ways
                text = ""
        if SYSTEM not in text:  # then the system prompt opens the user's turn
            front = f"{SYSTEM}\n\n" if system else ""
            text = self._template([user | {"content": front + user["content"]}])
        if any(text.count(part) != 1 for part in (DOCUMENTS, QUESTION, *([SYSTEM] if system else []))):
            raise ValueError(
                "this tokenizer's chat template does not print a message's content once and unchanged, so documents "
                "cannot be laid out in it: lay out the prompt yourself and pass BlendedCache(chunks) to generate"
            )
        return text

    def _template(self, messages: list[dict[str, str]]) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def plain(self, text: str, kind: Literal["chunk", "text"] = "text") -> Piece:
        """Text of a user or a document: what looks like a special token in it stays text."""
        return Piece(text, tuple(encode(self.tokenizer, text)) if text else (), kind)

    def special(self, text: str, kind: Literal["head", "text"]) -> Piece:
        """A part of the template, whose special tokens are meant."""
        with TOKENIZER_LOCK:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else ()
        return Piece(text, tuple(ids), kind)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text as it stands: nothing added, and text that looks like a special token stays text.

    One thread at a time: whether special tokens are split is a state of the tokenizer.
    """
    with TOKENIZER_LOCK:
        return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def begins_with_bos(tokenizer: Any) -> bool:
    """Whether a tokenizer puts a BOS before every text, so that its model has hardly seen one without."""
    bos = tokenizer.bos_token_id
    with TOKENIZER_LOCK:
        return bos is not None and list(tokenizer("a")["input_ids"][:1]) == [bos]


def conditioning_ids(condition: str, tokenizer: Any, head: Iterable[int]) -> tuple[int, ...]:
    """The ids that stand before a chunk while it is computed.

    Args:
        condition: of `CONDITIONS`: nothing; a BOS; the prompt's head; or a few neutral words (after a BOS, if any)
            (EPIC's LegoLink-0 puts four BOS there, Hu et al. 2410.15332).
        tokenizer: has the BOS, and cuts the text.
        head: ids of what stands before the chunks in the prompt.

    Raises:
        ValueError: for another condition, or "bos" where the tokenizer has none.
    """
    if condition not in CONDITIONS:
        raise ValueError(f"condition={condition!r}: choose of {', '.join(map(repr, CONDITIONS))}")
    bos = () if tokenizer.bos_token_id is None else (int(tokenizer.bos_token_id),)
    if condition == "bos" and not bos:
        raise ValueError("condition='bos', but this tokenizer has no BOS token: choose another")
    if condition == "dummy":
        return (*bos, *encode(tokenizer, DUMMY))
    return {"none": (), "bos": bos, "system": tuple(head)}[condition]


def split_text(tokenizer: Any, text: str, chunk_tokens: int) -> list[str]:
    """Cuts a text into pieces of at most `chunk_tokens` tokens, at sentence ends where there are any.

    The pieces joined are the text, byte for byte; a text that is short enough is one piece, so that what a retriever
    returns is found again.

    Args:
        tokenizer: counts the tokens.
        text: what to cut.
        chunk_tokens: most tokens of a piece.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: give at least one")
    if len(encode(tokenizer, text)) <= chunk_tokens:
        return [text]
    sentences, at = [], 0
    for match in _SENTENCE_END.finditer(text):
        sentences.append(text[at : match.end()])
        at = match.end()
    sentences = [s for s in [*sentences, text[at:]] if s]
    pieces: list[str] = []
    for sentence in sentences:
        joined = pieces[-1] + sentence if pieces else sentence
        if pieces and len(encode(tokenizer, joined)) <= chunk_tokens:
            pieces[-1] = joined
        else:
            pieces += _halves(tokenizer, sentence, chunk_tokens)
    return pieces


def _halves(tokenizer: Any, text: str, chunk_tokens: int) -> list[str]:
    """Cuts one long sentence in halves, at a space if there is one near the middle, until they fit."""
    if len(text) < 2 or len(encode(tokenizer, text)) <= chunk_tokens:
        return [text]
    middle = len(text) // 2
    space = text.rfind(" ", middle // 2, middle + middle // 2)
    cut = space if space > 0 else middle
    return [*_halves(tokenizer, text[:cut], chunk_tokens), *_halves(tokenizer, text[cut:], chunk_tokens)]


def texts_of(documents: Iterable[Any]) -> list[str]:
    """The text of each document: a string, or an object with `page_content` or `text`.

    Raises:
        TypeError: for anything else, or a single string.
        ValueError: for an empty document.
    """
    if isinstance(documents, str):
        raise TypeError("documents is one string: pass a list of documents")
    texts = []
    for i, document in enumerate(documents):
        text = document
        for name in ("page_content", "text"):
            text = getattr(document, name, text) if not isinstance(document, str) else text
        if not isinstance(text, str):
            raise TypeError(f"document {i} is a {type(document).__name__}: pass text, or an object with page_content")
        if not text:
            raise ValueError(f"document {i} is empty: leave it out")
        texts.append(text)
    return texts
