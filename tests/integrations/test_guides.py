"""Every Python block of the guides to other frameworks runs, in order, as a reader would type it, on a tiny model."""

import importlib
import re
from pathlib import Path

import pytest

import blendkv
from blendkv.testing import byte_tokenizer, tiny_model
from tests.helpers import unprintable

GUIDES = Path(__file__).parent.parent.parent / "docs/guides"
NEEDS = {"langchain": "langchain_core", "llamaindex": "llama_index.core", "pipeline": "torch", "haystack": "haystack"}


@pytest.mark.parametrize("guide", NEEDS)
def test_guide_runs(guide, monkeypatch, capsys):
    pytest.importorskip(NEEDS[guide])
    text = (GUIDES / f"{guide}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == text.count("```python") >= 1
    model, tokenizer = tiny_model("llama", max_position_embeddings=4096), byte_tokenizer(chat=True)
    model.generation_config.suppress_tokens = unprintable(tokenizer)
    monkeypatch.setitem(blendkv.__dict__, "load_model", lambda name: (model, tokenizer))
    if guide == "haystack":
        module = importlib.import_module("blendkv.integrations.haystack")
        monkeypatch.setattr(module, "load_model", lambda name: (model, tokenizer))
    scope: dict = {}
    for block in blocks:
        exec(compile(block, f"{guide}.md", "exec"), scope)
    assert len(capsys.readouterr().out) > 20


@pytest.mark.parametrize("guide", NEEDS)
def test_guides_name_files_that_are_there(guide):
    for link in re.findall(r"\]\(([\w./-]+)\)", (GUIDES / f"{guide}.md").read_text()):
        assert (GUIDES / link).exists(), link
