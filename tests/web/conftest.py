"""A comparison on a tiny model, shared; documents and a question for it."""

import pytest

from blendkv.testing import byte_tokenizer, tiny_model
from blendkv.web import running
from blendkv.web.running import Comparison

DOCUMENTS = ("The crossing opened on 1 July 2000.", "An octopus has blue blood: copper, not iron.", "Emus won a war.")
QUESTION = "When did it open?"


@pytest.fixture(scope="session")
def tiny():
    """`tiny(**options)`: a comparison of its own on a tiny Llama with random weights."""
    model = tiny_model("llama", max_position_embeddings=8192)
    return lambda **options: Comparison(model, byte_tokenizer(chat=True), **options)


@pytest.fixture(scope="session")
def comparison(tiny):
    return tiny()


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(running, "ANSWER_TOKENS", 10)
