"""examples/notebooks as they are kept; `make notebooks` (tests/notebooks.py) runs them, which takes two minutes."""

import os
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests import notebooks
from tests.notebooks import ROOT, digest, faults, tidied

PNG = new_output("display_data", data={"image/png": "aGVsbG8=", "text/plain": "<Figure>"})


@pytest.fixture
def kept(tmp_path):
    """`kept(*outputs, source=...)`: a file with one cell, as it is kept after it was run."""

    def make(*outputs, source="1 + 1", **metadata):
        cell = new_code_cell(source, outputs=[PNG, *outputs], execution_count=1)
        notebook = new_notebook(cells=[new_markdown_cell("# One"), cell])
        notebook.metadata["blendkv"] = {"code": digest(notebook)} | metadata
        nbformat.write(notebook, tmp_path / "01_one.ipynb")
        return tmp_path / "01_one.ipynb"

    return make


@pytest.mark.parametrize("path", notebooks.notebooks(), ids=lambda path: path.stem)
def test_what_is_kept(path):
    """Outputs of the code that is there, a picture among them, and nothing of the machine that made them."""
    assert faults(path) == []


def test_all_are_in_the_guide():
    names = [path.name for path in notebooks.notebooks()]
    assert [name[:2] for name in names] == ["01", "02", "03", "04", "05"]
    guide = (ROOT / "docs/guides/notebooks.md").read_text()
    assert [name for name in names if name not in guide] == []


def test_all_have_their_turn(tmp_path):
    paths, seen = notebooks.notebooks(), set()
    for number in range(200):
        (tmp_path / "code.py").write_text(f"version = {number}")
        some = notebooks.turn(paths, 2, tmp_path)
        assert some == notebooks.turn(paths, 2, tmp_path)
        assert len(set(some)) == 2
        seen.update(some)
    assert seen == set(paths)
    assert sorted(notebooks.turn(paths, 9)) == paths


def test_a_good_one_has_no_faults(kept):
    assert faults(kept(new_output("stream", name="stdout", text="2\n"))) == []


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (new_output("stream", name="stdout", text="in /home/somebody/chunks"), "/home/somebody/chunks"),
        (new_output("stream", name="stdout", text=r"C:\chunks\ab"), r"C:\chunks"),
        (new_output("execute_result", data={"text/html": "<a href='/tmp/x'>"}, execution_count=1), "/tmp/x"),
        (new_output("stream", name="stderr", text="a warning"), "stderr"),
        (new_output("error", ename="ValueError", evalue="no", traceback=[]), "error"),
        (new_output("stream", name="stdout", text="12%|#  | 3/9 [00:01<00:02, 3.1it/s]"), "it/s]"),
    ],
)
def test_what_may_not_be_kept(kept, output, said):
    assert [fault for fault in faults(kept(output)) if said in fault]


def test_changed_code_is_noticed(kept):
    path = kept()
    notebook = notebooks.read(path)
    notebook.cells[1].source = "1 + 2"
    nbformat.write(notebook, path)
    assert ["not those of its code" in fault for fault in faults(path)] == [True]


def test_one_that_was_not_run_or_has_no_picture_is_noticed(kept):
    path = kept()
    notebook = notebooks.read(path)
    notebook.cells[1].outputs, notebook.cells[1].execution_count = [], None
    nbformat.write(notebook, path)
    assert len(faults(path)) == 2


def test_large_ones_are_noticed(kept):
    assert "bytes are more than" in faults(kept(new_output("stream", name="stdout", text="x" * (1 << 20))))[0]


def test_tidying_leaves_what_was_printed_and_drawn():
    said = [new_output("stream", name=name, text=name) for name in ("stdout", "stderr", "stdout")]
    notebook = new_notebook(cells=[new_code_cell("1", outputs=[*said, PNG], metadata={"execution": {"when": "now"}})])
    cell = tidied(notebook).cells[0]
    assert [out.get("text") for out in cell.outputs] == ["stdoutstdout", None]
    assert cell.metadata == {}


@pytest.mark.parametrize(
    ("source", "code"), [("print(__import__('blendkv').__name__)", 0), ("raise ValueError('as it should')", 1)]
)
def test_a_cell_that_raises_is_an_exit_code(kept, source, code, tmp_path):
    """In a process of its own, as `make notebooks` runs it; nothing is written."""
    before = kept(source=source).read_bytes()
    command = [sys.executable, "-m", "tests.notebooks", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("ValueError: as it should" in done.stdout) == bool(code)
    assert (tmp_path / "01_one.ipynb").read_bytes() == before
