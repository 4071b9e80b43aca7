"""Every Python block of README runs, on a tiny model; the bundled one runs them in `make demo`'s environment too."""

import re
import warnings
from pathlib import Path

import pytest

import blendkv
from blendkv.testing import byte_tokenizer, tiny_model

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("chat", [True, False])
def test_readme_runs(monkeypatch, capsys, chat):
    """In order, in one namespace, as a reader would type them; `load_model` gives a tiny model."""
    model, tokenizer = tiny_model("llama", max_position_embeddings=2048), byte_tokenizer(chat=chat)
    monkeypatch.setitem(blendkv.__dict__, "load_model", lambda name: (model, tokenizer))
    assert len(BLOCKS) >= 2
    scope: dict = {}
    with warnings.catch_warnings():
        # README shows the name that every supported transformers knows; from 5.24 on it is deprecated
        warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
        for block in BLOCKS:
            exec(compile(block, "README.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert "reused" in printed
    assert scope["inputs"].report.reused_tokens > 0
    assert len(scope["chunks"]) == 2
    assert scope["out"].shape[1] > scope["ids"].shape[1]


def test_readme_names_files_that_are_there():
    """Links to files of this repository."""
    for link in re.findall(r"\]\(([\w./-]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / link).exists(), link


def test_refusals_in_the_guide_are_those_of_the_code():
    """The middle column quotes messages as they are in the source, whatever lines they are broken into."""
    source = " ".join(path.read_text() for path in sorted((ROOT / "blendkv").glob("*.py")))
    source = re.sub(r'"\s+f?"', "", source)
    table = (ROOT / "docs/guides/generate.md").read_text().partition("## What is refused")[2]
    quoted = [line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(quoted) > 15
    assert not [text for text in quoted if text not in source]


def test_the_guide_to_loading_runs(tmp_path, monkeypatch, capsys):
    """Its blocks in order, over a folder in place of ~/chunks."""
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path / "home"))
    text = (ROOT / "docs/guides/loading.md").read_text().replace("~/chunks", str(tmp_path / "chunks"))
    model, tokenizer = tiny_model("llama", max_position_embeddings=4096), byte_tokenizer()
    documents = [" ".join(f"word{n + 50 * i}" for n in range(80)) for i in range(3)]
    scope = {"ChunkLibrary": blendkv.ChunkLibrary, "model": model, "tokenizer": tokenizer}
    scope |= {"documents": documents, "question": "why?"}
    for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        exec(compile(block, "loading.md", "exec"), scope)
    assert scope["inputs"].report.loading.decision.ratio >= 0.15
    assert "bytes" in capsys.readouterr().out
