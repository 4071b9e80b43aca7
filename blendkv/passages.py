"""The dozen passages and three questions that come with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Passage:
    """A text of 100 to 250 tokens."""

    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question, and words of its right answer."""

    question: str
    answer: str


def read_passages() -> tuple[list[Passage], list[Question]]:
    """Passages and questions in the order of the file."""
    data = json.loads(files("blendkv").joinpath("data/passages.json").read_text(encoding="utf-8"))
    return [Passage(**entry) for entry in data["passages"]], [Question(**entry) for entry in data["questions"]]


def pick_passages(passages: list[Passage], questions: list[Question], count: int) -> list[Passage]:
    """`count` passages in the file's order, those that hold the answers before any other.

    Raises:
        ValueError: if there are fewer passages, or fewer asked for than questions.
    """
    if not len(questions) <= count <= len(passages):
        raise ValueError(f"{count} passages: choose {len(questions)} to {len(passages)}")
    needed = [any(q.answer.lower() in p.text.lower() for q in questions) for p in passages]
    order = sorted(range(len(passages)), key=lambda i: not needed[i])[:count]
    return [passages[i] for i in sorted(order)]
