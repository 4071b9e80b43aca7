"""The prompt as sections of coloured tokens."""

import math

import torch

from blendkv.layout import Piece, Prompt
from blendkv.testing import byte_tokenizer
from blendkv.web.tokens import picture_of

TOKENIZER = byte_tokenizer()


def piece(text: str, kind: str) -> Piece:
    return Piece(text, tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"]), kind)


PROMPT = Prompt(
    (
        piece("hd", "head"),
        piece("ab", "chunk"), piece("cd", "chunk"), piece("\n\n", "text"),
        piece("é", "chunk"), piece("\n\n", "text"),
        piece("\n", "text"), piece("why", "text"), piece("?", "text"),
    )
)  # fmt: skip


def test_sections_and_what_is_known_of_their_tokens():
    deviation = torch.arange(len(PROMPT.ids)).float()
    picture = picture_of(TOKENIZER, PROMPT, deviation, [3, 9])
    assert [(s.title, s.kind, "".join(t.text for t in s.tokens)) for s in picture.sections] == [
        ("System prompt", "head", "hd"),
        ("Document 1", "document", "abcd\n\n"),
        ("Document 2", "document", "é\n\n\n"),
        ("Question", "text", "why?"),
    ]
    one, two = picture.sections[1].tokens, picture.sections[2].tokens
    assert [(t.text, t.deviation, t.recomputed) for t in one] == [
        ("a", 2.0, False), ("b", 3.0, True), ("c", 4.0, False), ("d", 5.0, False), ("\n", None, False),
        ("\n", None, False),
    ]  # fmt: skip
    assert (two[0].text, two[0].deviation, two[0].recomputed) == ("é", 9.0, True)  # two tokens: the larger, and either
    assert all(token.deviation is None for token in picture.sections[3].tokens)


def test_figures_count_stored_tokens_alone():
    deviation = torch.full((len(PROMPT.ids),), 100.0)
    stored = [0, 1, 2, 3, 4, 5, 8, 9]
    deviation[stored] = torch.tensor([0.0, 0.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    picture = picture_of(TOKENIZER, PROMPT, deviation, [3])
    assert (picture.recomputed, picture.stored) == (1, 8)
    assert math.isclose(picture.held, 4 / 9)
    assert 1 < picture.top <= 2


def test_nothing_off():
    picture = picture_of(TOKENIZER, PROMPT, torch.zeros(len(PROMPT.ids)), [])
    assert math.isnan(picture.held)
    assert picture.top == 0.0
