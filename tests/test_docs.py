"""Python blocks of README and the documents run, on a tiny model; those to other frameworks: tests/integrations.

A block behind a line `<!-- not run: REASON -->` does not; the reason is for readers of the source.
"""

import re
import warnings
from pathlib import Path

import pytest
import typer

import blendkv
from blendkv import errors
from blendkv.cli import main
from blendkv.testing import byte_tokenizer, tiny_model

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(?:^<!-- not run: (?P<why>.+?) -->\n+)?^```python\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
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


RUN = {"index": 1, "quickstart": 6, "concepts": 4, "guides/loading": 2, "guides/quality": 1, "guides/selectors": 2}
RUN |= {"guides/stores": 3}
NOT_RUN = {"guides/codecs": 1, "guides/demo-page": 1, "guides/serving": 1, "guides/streaming": 2, "guides/valkey": 2}
ELSEWHERE = {"guides/haystack", "guides/langchain", "guides/llamaindex", "guides/pipeline"}
"""They run in tests/integrations/test_guides.py."""


def blocks_of(page: str) -> tuple[list[str], list[str]]:
    """Blocks of a page that run, and those that say why they do not."""
    text = (ROOT / f"docs/{page}.md").read_text()
    found = list(BLOCK.finditer(text))
    assert len(found) == text.count("```python")
    return [m["code"] for m in found if not m["why"]], [m["code"] for m in found if m["why"]]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("page", RUN)
def test_blocks_run(page, chat, tmp_path, monkeypatch, capsys):
    """In order, in one namespace; folders of the reader's home are in a temporary one."""
    run, _ = blocks_of(page)
    assert len(run) == RUN[page]
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    model, tokenizer = tiny_model("llama", max_position_embeddings=4096), byte_tokenizer(chat=chat)
    monkeypatch.setitem(blendkv.__dict__, "load_model", lambda name: (model, tokenizer))
    documents = [" ".join(f"word{n + 50 * i}" for n in range(80)) for i in range(3)]
    scope = {"blendkv": blendkv, "model": model, "tokenizer": tokenizer, "documents": documents, "question": "why?"}
    scope |= {name: getattr(blendkv, name) for name in ("BlendedCache", "ChunkLibrary", "open_store", "prefill")}
    scope["chunks"] = blendkv.prefill(model, documents, tokenizer, progress=False)
    scope["chunk"] = scope["chunks"][0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
        for number, block in enumerate(run, 1):
            code = block.replace("~/", f"{tmp_path}/")
            exec(compile(code, f"{page}.md, block {number}", "exec"), scope)
    printed = capsys.readouterr().out
    if page == "guides/loading":
        assert scope["inputs"].report.loading.decision.ratio >= 0.15
    if page == "quickstart":
        assert [scope[name].report.recomputed_share for name in ("exact", "quick")] == [1.0, 0.0]
        assert scope["cache"].report.reused_tokens > 0
        assert any((tmp_path / "chunks").iterdir())
    if page != "guides/selectors":
        assert printed


def test_every_block_is_accounted_for():
    """A page with blocks is in one of the lists above, and a block that is not run says why."""
    pages = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}
    with_blocks = {page for page in pages if "```python" in (ROOT / f"docs/{page}.md").read_text()}
    assert with_blocks == set(RUN) | set(NOT_RUN) | ELSEWHERE
    for page in NOT_RUN:
        run, held = blocks_of(page)
        assert (len(run), len(held)) == (0, NOT_RUN[page]), page


def test_every_page_is_in_the_site():
    """The nav of mkdocs.yml names each document once."""
    named = re.findall(r"^ +- (\S+)\.md$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    there = [str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(there)


def test_the_reference_has_every_public_name():
    """`blendkv.__all__`, but for the version; errors are all in their module."""
    text = (ROOT / "docs/reference.md").read_text()
    lacking = [name for name in blendkv.__all__ if f"::: blendkv.{name}\n" not in text and name != "__version__"]
    assert [name for name in lacking if not hasattr(errors, name)] == []


def test_the_command_line_page_has_every_command():
    text = (ROOT / "docs/cli.md").read_text()
    table = text.partition("## Benchmarks")[2]
    for name, command in typer.main.get_command(main).commands.items():
        assert name == "bench" or f"`blendkv {name}" in text, name
        assert [sub for sub in getattr(command, "commands", {}) if f"`{sub}`" not in table] == []


def test_the_citations_are_of_this_version():
    cff = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    bibtex = re.findall(r"^  version = \{(.+)\},$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert cff == bibtex == [blendkv.__version__]
