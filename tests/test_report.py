"""What a blend did, for people, notebooks and machines."""

import json

import pytest
import torch

from blendkv import BlendedCache, BlendReport, MissingChunk
from blendkv.report import STAGES, ChunkUse, Clock, LayerRows
from tests.helpers import make_case, run


@pytest.fixture
def filled(attached):
    model = attached()
    case = make_case(model)
    cache = BlendedCache(
        [MissingChunk(case.caches[0].ids, "late <b>"), *case.caches[1:]], check_layers={1: 0.5, 3: 0.1}
    )
    run(model, case.ids, cache)
    return cache.report


def test_empty():
    report = BlendReport()
    assert "nothing was blended" in str(report)
    assert report.reused_tokens == 0
    assert report.recomputed_share == 0.0
    assert report._repr_html_().startswith("<table>")
    json.dumps(report.to_dict())


def test_text(filled):
    text = str(filled)
    assert "50 (39 in chunks)" in text
    assert "2 hit, 1 not" in text
    assert "13 tokens late <b>" in text
    assert "hkvd {1: 0.5, 3: 0.1}" in text
    chunks, table = (part.splitlines() for part in text.split("\n\n")[1:])
    assert [line.split()[0] for line in chunks] == ["chunk", "0:0", "0:1", "0:2"]
    assert "13  miss (late <b>)" in chunks[1]
    assert all(line.endswith("hit") for line in chunks[2:])
    assert [line.split()[0] for line in table] == ["layers", "0", "1", "2", "3"]
    names = table[0].split()
    for line, layer in zip(table[1:], filled.layers, strict=True):
        shown = dict(zip(names, line.split(), strict=True))
        for name in ("reused", "recomputed", "fresh", "missed", "probed"):
            assert int(shown[name]) == getattr(layer, name)
    assert [r.probed for r in filled.layers] == [0, 26, 0, 13]


def test_equal_layers_are_folded():
    report = BlendReport(tokens=3, layers=[LayerRows(1, 1, 1, 0)] * 5 + [LayerRows(2, 0, 1, 0)])
    assert "\n0-4 " in str(report)
    assert "\n5 " in str(report)


def test_html_is_escaped(filled):
    html = filled._repr_html_()
    assert html.count("<table>") == html.count("</table>") == 3
    assert "<b>" not in html
    assert "late &lt;b&gt;" in html


def test_dict_is_json(filled):
    data = json.loads(json.dumps(filled.to_dict()))
    assert data["tokens"] == 50
    assert data["misses"] == {"late <b>": 13}
    assert len(data["layers"]) == 4
    assert [c["hit"] for c in data["chunks"]] == [False, True, True]
    assert set(data["seconds"]) == set(STAGES)
    assert 0 < data["charged_budget"] < 1


def test_sums(filled):
    assert filled.chunk_tokens == 39
    last = filled.layers[-1]
    assert filled.reused_tokens == last.reused == 26 - round(2.6)
    assert filled.recomputed_share == pytest.approx(3 / 26)
    per_token = 4 * 2 * 2 * 16 * 4
    assert filled.chunk_bytes == 26 * per_token
    assert filled.cache_bytes == (50 + 256) * per_token


def test_a_chunk_given_twice_is_counted_once():
    uses = [
        ChunkUse(0, 0, "k", 5, 10, True),
        ChunkUse(1, 0, "k", 5, 0, True),
        ChunkUse(2, 0, "", 4, 4, False, "absent"),
    ]
    report = BlendReport(tokens=20, chunks=uses)
    assert report.chunk_tokens == 14
    assert report.misses == {"absent": 4}


def test_clock(monkeypatch):
    now = [5.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Clock()
    with clock.stage("recompute"):
        now[0] += 1.0
        with clock.stage("place", torch.device("cpu")):
            now[0] += 20.0
        now[0] += 2.0

    def fails():
        now[0] += 0.5
        raise RuntimeError("x")

    with pytest.raises(RuntimeError, match="x"), clock.stage("select"):
        fails()
    seconds = clock.seconds()
    assert set(seconds) == set(STAGES)
    assert seconds["place"] == 20.0
    assert seconds["recompute"] == 3.0  # a stage inside another counts for itself alone
    assert seconds["select"] == 0.5  # an error is time too
    assert seconds["load"] == 0.0


def test_budget_bounds(attached):
    model = attached()
    case = make_case(model)
    spent = []
    for ratio in (0.0, 0.15, 0.5, 1.0):
        cache = BlendedCache(case.caches, ratio)
        run(model, case.ids, cache)
        spent.append(cache.report.charged_budget)
    assert spent[0] == 0.0
    assert spent[-1] == pytest.approx(1.0)
    assert spent == sorted(spent)
    assert 0.25 < spent[1] < 0.6  # layer 0 is full: a quarter, and the probe


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("selector", ["hkvd", "boundary"])
def test_which_tokens_were_recomputed(attached, ratio, selector):
    """As many as the report counts, chunk tokens all of them, and those whose keys are not the stored ones."""
    model = attached()
    case = make_case(model)
    reuse, cache = BlendedCache(case.caches, 0.0), BlendedCache(case.caches, ratio, selector)
    assert cache.recomputed == []
    run(model, case.ids, reuse)
    run(model, case.ids, cache)
    (rows,) = cache.recomputed
    in_chunks = {s + i for s, chunk in zip(case.starts, case.chunks, strict=True) for i in range(len(chunk))}
    assert len(rows) == cache.report.layers[-1].recomputed
    assert set(rows.tolist()) <= in_chunks
    differ = (cache.layers[-1].keys != reuse.layers[-1].keys)[0].any(0).any(-1).nonzero()[:, 0].tolist()
    assert [row for row in differ if row in in_chunks] == rows.tolist()
    assert cache.fork().recomputed == []
