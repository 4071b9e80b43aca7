"""Python blocks of README and the documents run, on a tiny model; those to other frameworks: tests/integrations.

A block behind a line `<!-- needs: ... -->` runs beside servers on loopback, or with a profile (tests/pages.py).
"""

import re
import warnings
from pathlib import Path

import pytest
import typer

import blendkv
from blendkv import errors
from blendkv.cli import main
from blendkv.stores.catalog import Region
from blendkv.testing import byte_tokenizer, tiny_model
from tests.pages import NEEDS, World, blocks_of

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


ELSEWHERE = {"guides/haystack", "guides/langchain", "guides/llamaindex", "guides/pipeline"}
"""They run in tests/integrations/test_guides.py."""
PAGES = sorted(str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md"))
RUN = {page: blocks for page in PAGES if page not in ELSEWHERE and (blocks := blocks_of(page))}
NEEDY = {page: {need for block in blocks for need in block.needs} for page, blocks in RUN.items()}


@pytest.fixture
def world(tmp_path, monkeypatch, chat):
    """In one namespace, as a reader would type them; folders of the reader's home are in a temporary one."""
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    model, tokenizer = tiny_model("llama", max_position_embeddings=4096), byte_tokenizer(chat=chat)
    monkeypatch.setitem(blendkv.__dict__, "load_model", lambda name: (model, tokenizer))
    documents = [" ".join(f"word{n + 50 * i}" for n in range(80)) for i in range(3)]
    scope = {"blendkv": blendkv, "model": model, "tokenizer": tokenizer, "documents": documents, "question": "why?"}
    scope |= {name: getattr(blendkv, name) for name in ("BlendedCache", "ChunkLibrary", "open_store", "prefill")}
    scope["chunks"] = blendkv.prefill(model, documents, tokenizer, progress=False)
    scope["chunk"], scope["keys"] = scope["chunks"][0], [chunk.key for chunk in scope["chunks"]]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
        yield World(scope, tmp_path, monkeypatch)
    close_all(scope)


def close_all(scope):
    """As a reader's process does when it ends."""
    for made in scope.values():
        if isinstance(made, blendkv.ChunkLibrary | blendkv.TieredStore | blendkv.Store | Region):
            getattr(made, "close", lambda: None)()


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("page", RUN)
def test_blocks_run(page, world, capsys):
    """In order, those that need nothing but a model."""
    plain = [block for block in RUN[page] if not block.needs]
    for number, block in enumerate(plain, 1):
        world.block(block.code, f"{page}.md, block {number}")
    printed, scope = capsys.readouterr().out, world.scope
    if page == "guides/loading":
        assert scope["inputs"].report.loading.decision.ratio >= 0.15
    if page == "quickstart":
        assert [scope[name].report.recomputed_share for name in ("exact", "quick")] == [1.0, 0.0]
        assert scope["cache"].report.reused_tokens > 0
        assert any((world.folder / "chunks").iterdir())
    if any(block.code.startswith("print(") or "\nprint(" in block.code for block in plain):
        assert printed


@pytest.mark.parametrize("chat", [True])
@pytest.mark.parametrize("page", [page for page, needs in NEEDY.items() if needs])
def test_blocks_run_with_servers(page, world, capsys):
    """All of them, in order, beside servers on loopback."""
    if lacking := [need for need in sorted(NEEDY[page]) if not NEEDS[need][1]()]:
        pytest.skip(f"not on this machine: {', '.join(lacking)}")
    with world.having(NEEDY[page] - {"hub"}):
        for number, block in enumerate(RUN[page], 1):
            with world.having({"hub"} & set(block.needs)):
                world.block(block.code, f"{page}.md, block {number}")
        AFTER[page](world, capsys.readouterr().out)
        close_all(world.scope)


def _served(world, printed):
    """Chunks of the library are with the gateway."""
    chunks = world.scope["kv"].prefill(world.scope["documents"])
    assert world.scope["kv"].flush(30)
    assert {chunk.key for chunk in chunks} <= set(blendkv.DiskStore(world.folder / "served").keys())


def _streamed(world, printed):
    """All of them, from the store, none of them recomputed without need."""
    streamed = world.scope["streamed"]
    assert [chunk.key for chunk in streamed.chunks] == world.scope["keys"]
    assert not streamed.faults
    assert set(streamed.chosen) <= {"text", *world.scope["loss"]}


def _named(world, printed):
    assert list(world.scope["region"].get("handbook").keys) == world.scope["keys"]
    assert world.scope["store"].url.startswith("redis://")


def _coded(world, printed):
    assert any("klt" in note for note in world.scope["inputs"].report.notes)


def _kept(world, printed):
    """Every tier has what was computed; the bucket is there."""
    chunks = world.scope["kv"].prefill(world.scope["documents"])
    assert world.scope["kv"].flush(30)
    assert world.scope["store"].size("0" * 64) is None
    for store in world.scope["tiers"].stores:
        assert all(store.size(chunk.key) for chunk in chunks), store.url


def _counted(world, printed):
    assert 'blendkv_prompts_total{library="support"} 1.0' in printed


def _compared(world, printed):
    assert world.scope["result"]["methods"]


def _loaded(world, printed):
    """With a target every chunk is there, or computed; the store of the levels writes three beside each chunk."""
    levels = world.scope["inputs"].report.loading.levels
    assert set(levels.values()) <= {"raw", "text"}
    assert len(levels) >= len(world.scope["documents"])
    assert len(world.scope["tiers"].levels) == 3


AFTER = {
    "guides/codecs": _coded,
    "guides/demo-page": _compared,
    "guides/loading": _loaded,
    "guides/serving": _served,
    "guides/stores": _kept,
    "guides/streaming": _streamed,
    "guides/telemetry": _counted,
    "guides/valkey": _named,
}
"""What must hold when a page's blocks have run."""


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
