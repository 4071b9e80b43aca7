"""The leaderboard page equals what its command renders, and figures are drawn of any rows."""

import re
from pathlib import Path

import pytest

from blendkv.bench.leaderboard import BEGIN, EMPTY, END, board, page_with_board
from blendkv.bench.quality_plot import lines_over, panels
from blendkv.bench.results import read_rows, write_rows

ROOT = Path(__file__).parents[2]


def row(method="blend", selector="hkvd", ratio=0.15, kl=0.08, budget=0.18, **others):
    setting = {"bench": "quality", "device": "card", "model": "m", "dtype": "float32", "task": "hotpot"}
    setting |= {"data": "h.json", "records": "even", "prompts": 50, "chunks": None, "chunk_tokens": None, "batch": 1}
    ci = {"kl": None if kl is None else [kl / 2, kl * 2], "ttft_s": [0.1, 0.3]}
    figures = {"charged_budget": budget, "kl": kl, "relative": kl and kl / 0.08, "same": 0.5, "f1": 0.2, "rouge_l": 0.3}
    own = {"method": method, "selector": selector, "ratio": ratio, "ttft_s": 0.2, "ci": ci, "can_do": True}
    told = {
        "relative_to": ["hkvd", 0.15],
        "full_gets_nothing": 0.25,
        "commit": "abc",
        "command": "blendkv bench quality",
    }
    return setting | figures | own | told | others


ROWS = [
    row(),
    row("full", None, None, 0.0, 1.0),
    row("reuse", None, 0.0, 0.28, 0.0),
    row(selector="random", kl=0.2, budget=0.12),
    row(selector="boundary", kl=0.25, budget=0.12),
    row("mapreduce", None, None, None, 1.0),
]


def test_the_page_is_what_the_command_renders():
    page = (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8")
    files = sorted((ROOT / "docs" / "results").glob("quality*.json"))
    assert page == page_with_board(page, [r for file in files for r in read_rows(file)])


def test_a_board_has_controls_and_losers(tmp_path):
    write_rows(tmp_path / "q.json", ROWS)
    told = board(read_rows(tmp_path / "q.json"))
    lines = [line.split(" | ")[0].removeprefix("| ") for line in told.splitlines() if line.startswith("| ")][1:]
    assert lines == [
        "full recompute", "blend, hkvd, 15%", "blend, random, 15% (control)",
        "blend, boundary, 15% (no better than random)", "full reuse", "MapReduce",
    ]  # fmt: skip
    assert "| 0.0800 (0.0400 to 0.1600) |" in told
    assert "### m, hotpot (h.json)" in told
    assert "50 prompts (records: even), float32, card" in told
    assert "full recompute gets nothing on 25%" in told
    assert "`blendkv bench quality` at commit abc." in told
    assert "cannot do this task" not in told


def test_a_task_that_cannot_be_done_is_said_on_the_board():
    assert "this model cannot do this task" in board([row(can_do=False)])


def test_no_rows_are_a_page_too():
    page = f"# Head\n\n{BEGIN}\nold\n{END}\ntail\n"
    assert page_with_board(page, []) == f"# Head\n\n{BEGIN}\n\n{EMPTY}\n{END}\ntail\n"
    with pytest.raises(ValueError, match="no place for the board"):
        page_with_board("# Head\n", [])


def test_points_of_figures():
    lines = lines_over([*ROWS, row(ratio=0.3, kl=0.05, budget=0.3)], "charged_budget")
    assert lines["hkvd"] == [(0.18, 0.08, 0.04, 0.16), (0.3, 0.05, 0.025, 0.1)]
    assert set(lines) == {"hkvd", "full reuse", "random", "boundary"}
    assert [what for what, _ in panels(ROWS)] == ["charged_budget", "ttft_s"]


def test_times_are_drawn_relative_to_full_recompute_where_rows_have_that():
    timed = [row(speedup=4.0), row("full", None, None, 0.0, 1.0, speedup=1.0)]
    assert [what for what, _ in panels(timed)] == ["charged_budget", "speedup"]
    assert lines_over(timed, "speedup") == {"hkvd": [(0.25, 0.08, 0.04, 0.16)]}
    assert "| 4.00x |" in board(timed)
    swept = [row(chunks=n, prompts=40 + n, speedup=float(n)) for n in (3, 6)]
    assert [what for what, _ in panels(swept)] == ["chunks", "chunks, time"]


def test_conditions_and_schedules_have_lines_of_their_own(tmp_path):
    varied = [row(), row(condition="bos"), row(check_layers="1:0.3,4:0.15"), row(condition="bos", ratio=0.3)]
    lines = lines_over(varied, "charged_budget")
    assert {name: len(points) for name, points in lines.items()} == {
        "hkvd": 1, "hkvd, chunks after bos": 2, "hkvd, 1:0.3,4:0.15": 1,
    }  # fmt: skip
    write_rows(tmp_path / "q.json", varied)
    told = board(read_rows(tmp_path / "q.json"))
    for name in ("hkvd, 15%", "hkvd, 15%, chunks after bos", "hkvd, layers 1:0.3, 4:0.15"):
        assert f"| blend, {name} |" in told


def test_a_sweep_has_a_panel_of_its_own():
    swept = [row(chunks=n, kl=0.01 * n, prompts=40 + n) for n in (3, 6)]
    found = panels(swept)
    assert [what for what, _ in found] == ["chunks"]
    assert {r["chunks"] for r in found[0][1]} == {3, 6}
    assert [what for what, _ in panels([swept[0]])] == ["charged_budget", "ttft_s"]


def test_without_times_there_is_no_panel_of_them(tmp_path):
    """As `--no-answers` leaves rows, full recompute's included: that failed once."""
    pytest.importorskip("matplotlib")
    from blendkv.bench.plot import plot

    untimed = [each | {"ttft_s": None, "speedup": None} for each in ROWS]
    assert {what for what, _ in panels(untimed)} == {"charged_budget"}
    plot(untimed, tmp_path / "f.svg")
    assert "charged budget" in (tmp_path / "f.svg").read_text()


@pytest.mark.parametrize("every", [False, True])
def test_the_figure_of_the_readme(tmp_path, every):
    """Speed beside quality, from the rows that are kept; without `every` speed alone."""
    pytest.importorskip("matplotlib")
    from blendkv.bench.plot import plot

    results = ROOT / "docs/results"
    rows = [row for name in ("h100", "quality-bundled-hotpot") for row in read_rows(results / f"{name}.json")]
    plot(rows, tmp_path / "f.svg", every=every)
    text = (tmp_path / "f.svg").read_text()
    assert ("KL to full recompute" in text) == every
    committed = (results.parent / "assets/speed-quality.svg").read_text()
    words = {word for word in re.findall(r"<text[^>]*>([^<]+)</text>", text) if re.search("[a-z]", word)}
    assert len(words) > 8
    assert words <= set(re.findall(r"<text[^>]*>([^<]+)</text>", committed))


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_figures_are_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    from blendkv.bench.plot import plot

    common = {"bench": "insights", "device": "card", "model": "m", "dtype": "float32", "task": "t", "prompts": 3}
    common |= {"data": None, "selector": "hkvd"}
    insights = [
        common | {"figure": "attention deviation", "layer": None, "ratio": r, "value": 1 - r} for r in (0.0, 1.0)
    ]
    insights += [common | {"figure": "rank correlation", "layer": i, "ratio": None, "value": 0.9} for i in (1, 2)]
    swept = [row(batch=b, ttft_s=0.1 * b) for b in (1, 4)]
    swept += [row(chunk_tokens=n, speedup=n / 64, task="other") for n in (128, 256)]
    plot([*ROWS, *swept, *insights], tmp_path / f"f{suffix}")
    assert (tmp_path / f"f{suffix}").stat().st_size > 2000
    if suffix == ".svg":
        text = (tmp_path / "f.svg").read_text()
        for words in (
            "charged budget",
            "prompts at once",
            "tokens of a chunk",
            "times faster",
            "rank correlation",
            "attention deviation",
        ):
            assert words in text


def test_every_interval_on_the_page_of_defaults_is_in_the_rows():
    """`0.86 (0.65 to 1.09)` is the relative KL of some row, as it is rounded there."""
    page = (ROOT / "docs" / "guides" / "defaults.md").read_text(encoding="utf-8")
    rows = [r for name in ("quality-defaults", "sweeps") for r in read_rows(ROOT / "docs" / "results" / f"{name}.json")]
    known = {(f"{r['relative']:.2f}", *(f"{v:.2f}" for v in r["ci"]["relative"])) for r in rows if r["ci"]["relative"]}
    told = re.findall(r"(\d+\.\d\d) \((\d+\.\d\d) to (\d+\.\d\d)\)", page)
    assert len(told) > 20
    assert [interval for interval in told if interval not in known] == []
