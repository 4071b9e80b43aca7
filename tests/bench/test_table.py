"""Tables and figures of kept rows; the committed page shows the committed rows."""

import re
import sys
from pathlib import Path

import pytest

from blendkv.bench.plot import lines_of, plot
from blendkv.bench.results import kind, read_rows, write_rows
from blendkv.bench.table import MARKED, markdown, method_name, page_with

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"


def row(method="blend", selector="hkvd", ratio=0.15, tokens=2048, run=0, **fields):
    common = {
        "device": "A Card", "shape": "llama-8b", "dtype": "bfloat16", "chunk_tokens": 512, "question_tokens": 64,
        "batch": 1, "pool": "cuda", "ttft_s": 0.02, "full_ttft_s": 0.08, "speedup": 4.0, "flop_limit": 5.0,
        "achieved_of_limit": 0.8, "achieved_of_floor": 0.9, "decode_ratio": None, "peak_bytes": 3 * 2**20,
        "versions": {"blendkv": "1", "torch": "2"},
    }  # fmt: skip
    return common | {"method": method, "selector": selector, "ratio": ratio, "tokens": tokens, "run": run} | fields


ROWS = [
    row(tokens=16384, speedup=4.5, ttft_s=1.5),
    row(run=1, speedup=3.9, ttft_s=0.0205),
    row("full", None, None, speedup=1.0, flop_limit=1.0),
    row(ratio=0.05, selector="boundary", decode_ratio=1.05),
    row(),
]


def test_a_table_has_a_line_a_method_with_its_runs_beside_each_other():
    lines = markdown(ROWS).splitlines()
    assert lines[0] == (
        "**A Card**; llama-8b in bfloat16; chunks of 512 tokens in cuda memory; 64 question tokens; blendkv 1, torch 2."
    )
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:]]
    assert [cells[:2] for cells in table] == [
        ["2,048", "full recompute"],
        ["2,048", "blend, boundary, 5%"],
        ["2,048", "blend, hkvd, 15%"],
        ["16,384", "blend, hkvd, 15%"],
    ]
    assert table[2][2:] == [
        "20 ms / 20.5 ms", "80 ms / 80 ms", "4.00x / 3.90x", "5.00x", "80% / 80%", "90% / 90%", "", "3 MiB",
    ]  # fmt: skip
    assert table[1][8] == "1.05x"
    assert table[3][2] == "1.50 s"
    assert len({len(cells) for cells in table}) == 1


def test_each_setting_has_its_own_table():
    text = markdown([*ROWS, row(batch=4), row(device="Another")])
    assert text.count("| context |") == 3
    assert "batch of 4" in text


def test_names_of_methods():
    assert method_name(row(ratio=0.075)) == "blend, hkvd, 7.5%"
    assert method_name(row("reuse", None, 0.0)) == "full reuse"


def test_a_page_is_brought_up_to_date_between_its_markers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows("r.json", ROWS)
    place = "<!-- table: {} -->\nold\n<!-- end of table -->"
    page = f"# Head\n\n{place.format('r.json')}\n\nText.\n\n{place.format('other.json')}\n"
    new = page_with(page, Path("r.json"))
    assert markdown(ROWS) in new
    assert new.count("old") == 1
    assert page_with(new, tmp_path / "r.json") == new
    with pytest.raises(ValueError, match="no marker"):
        page_with("# Head", "r.json")


def test_the_committed_page_shows_the_committed_rows():
    marked = MARKED.findall(PAGE.read_text())
    assert marked
    page = PAGE.read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for _, path, _ in marked:
            assert page_with(page, path) == page, f"blendkv bench table {path} --into docs/benchmarks.md"


def test_every_kept_file_of_results_is_one_of_ours():
    for path in sorted((ROOT / "docs" / "results").glob("*.json")):
        rows = read_rows(path)
        assert rows
        for kept in rows:
            if kind(kept) != "ttft":
                continue
            assert kept["speedup"] == pytest.approx(kept["full_ttft_s"] / kept["ttft_s"]), path


def test_pictures_of_the_page_are_there():
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", PAGE.read_text()):
        assert (PAGE.parent / picture).exists(), picture


def test_lines_of_a_figure_are_by_method_with_the_median_of_runs():
    assert lines_of(ROWS) == {
        "blend, hkvd, 15%": [(2048, pytest.approx(3.95), 5.0), (16384, 4.5, 5.0)],
        "blend, boundary, 5%": [(2048, 4.0, 5.0)],
    }


def test_without_matplotlib_a_figure_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'blendkv\[bench\]'"):
        plot(ROWS, tmp_path / "x.svg")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot([row("full", None, None)], tmp_path / "x.svg")


def test_a_figure(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        plot([*ROWS, row(batch=4, flop_limit=None)], tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    for part in ("blend, hkvd, 15%", "blend, boundary, 5%", "A Card", "batch 4", "stroke-dasharray"):
        assert part in text
