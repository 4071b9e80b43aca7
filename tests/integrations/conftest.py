"""A library that answers with readable text. Coroutines are tests here, where pytest-asyncio is (langchain-tests)."""

import os

import pytest

from blendkv import ChunkLibrary
from blendkv.testing import byte_tokenizer
from tests.helpers import unprintable

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")


def pytest_configure(config):
    if config.pluginmanager.hasplugin("asyncio"):
        config.option.asyncio_mode = "auto"


@pytest.fixture
def library(attached, plain, monkeypatch):
    """`library(**options)`: a tiny model that answers with printable ASCII; other bytes are seldom whole characters."""
    tokenizer = byte_tokenizer(chat=True)
    for model in (attached(), plain()):
        monkeypatch.setattr(model.generation_config, "suppress_tokens", unprintable(tokenizer))
    return lambda **options: ChunkLibrary(attached(), tokenizer, **options)
