"""What a visitor asks for, looked at before anything is computed: one sentence for each thing that cannot be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blendkv.errors import BlendError
from blendkv.selectors import get_selector

DOCUMENTS = 8
"""Most documents of a prompt."""
CHARACTERS = 40_000
"""Most characters of all documents together."""
QUESTION_CHARACTERS = 2_000
SELECTOR_CHARACTERS = 200


class BadInputError(BlendError, ValueError):
    """Something that was typed in cannot be used; the message is for the visitor."""


@dataclass(frozen=True)
class Asked:
    """A prompt to compare methods on.

    Attributes:
        documents: texts, none of them blank, in prompt order.
        question: what follows them.
        ratio: share of chunk tokens that the blend recomputes, in [0, 1].
        selector: which; a name that `get_selector` knows.
    """

    documents: tuple[str, ...]
    question: str
    ratio: float = 0.15
    selector: str = "hkvd"

    @classmethod
    def of(cls, documents: Any, question: Any, ratio: Any = 0.15, selector: Any = "hkvd") -> Asked:
        """Takes what came in; documents that are blank are left out.

        Raises:
            BadInputError: with one sentence on what is wrong, and what to do.
        """
        return cls(_documents(documents), _question(question), _ratio(ratio), _selector(selector))


def _documents(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise BadInputError(f"The documents are a {type(given).__name__}: give a list of texts.")
    texts = [_text(text, f"Document {number}") for number, text in enumerate(given, 1)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise BadInputError("All documents are empty: write something into at least one of them.")
    if len(texts) > DOCUMENTS:
        raise BadInputError(f"{len(texts)} documents are too many for this page: give at most {DOCUMENTS}.")
    if (size := sum(map(len, texts))) > CHARACTERS:
        raise BadInputError(
            f"The documents have {size:,} characters, and this page takes {CHARACTERS:,}: shorten them or leave some "
            "out."
        )
    return tuple(texts)


def _question(given: Any) -> str:
    text = _text(given, "The question").strip()
    if not text:
        raise BadInputError("The question is empty: ask something.")
    if len(text) > QUESTION_CHARACTERS:
        raise BadInputError(
            f"The question has {len(text):,} characters, and this page takes {QUESTION_CHARACTERS:,}: shorten it, or "
            "put a part of it into a document."
        )
    return text


def _text(given: Any, what: str) -> str:
    if not isinstance(given, str):
        raise BadInputError(f"{what} is a {type(given).__name__}, not a text: write it out.")
    try:
        given.encode()
    except UnicodeEncodeError:
        raise BadInputError(f"{what} has half a character in it (a lone surrogate): type that part again.") from None
    return given


def _ratio(given: Any) -> float:
    number = given if isinstance(given, int | float) and not isinstance(given, bool) else math.nan
    if not 0 <= number <= 1:
        raise BadInputError(f"The share to recompute is {str(given)[:40]}: give a number from 0 to 1.")
    return float(number)


def _selector(given: Any) -> str:
    if not isinstance(given, str) or not given.strip() or len(given) > SELECTOR_CHARACTERS:
        raise BadInputError("There is no such selector: choose one of the list.")
    try:
        get_selector(given.strip())
    except ValueError as error:
        said = str(error)
        raise BadInputError(f"{said[:1].upper()}{said[1:]}.") from None
    return given.strip()
