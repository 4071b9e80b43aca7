"""`bench loading` on a tiny model: every method's answer is right, and its rows say what happened."""

import json
import math

import pytest
from typer.testing import CliRunner

from blendkv.bench import loading
from blendkv.bench.results import read_rows, write_rows
from blendkv.cli import main
from blendkv.testing import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def rows():
    model = tiny_model("llama", max_position_embeddings=2048)
    return list(
        loading.loading_rows(
            model,
            byte_tokenizer(),
            chunks=4,
            chunk_tokens=128,
            factors=(0.5, 20.0),
            ratios=(0.15, 1.0),
            repeats=1,
            name="t",
        )
    )


def of(rows, method, factor=None):
    return [row for row in rows if row["method"] == method and factor in (None, row["factor"])]


def test_a_row_for_every_link_and_method(rows):
    told = [(row["factor"], row["method"], row["ratio"]) for row in rows if row["method"] != "controller"]
    each = [("sequential", 0.15), ("pipeline", 0.15), ("fixed", 0.15), ("fixed", 1.0), ("text", 1.0)]
    assert sorted(told) == sorted((factor, *one) for factor in (0.5, 20.0) for one in each)
    for row in rows:
        assert row["ttft_s"] > 0
        assert math.isfinite(row["kl"])
        assert row["link_mb_s"] > 0


def test_quality_is_of_the_setting_that_ran(rows):
    for row in of(rows, "text") + [row for row in of(rows, "fixed") if row["ratio"] == 1.0]:
        assert row["kl"] == pytest.approx(0, abs=1e-6)
    for row in of(rows, "sequential") + of(rows, "pipeline"):
        assert row["kl"] > 1e-4
    assert of(rows, "pipeline")[0]["kl"] == of(rows, "sequential")[0]["kl"]


def test_loading_takes_what_the_link_takes(rows):
    for row in of(rows, "sequential"):
        least = row["bytes"] / row["link_mb_s"] / 1e6
        assert row["load_s"] >= 0.9 * least
        assert row["ttft_s"] >= row["load_s"]
    assert of(rows, "text")[0]["load_s"] == 0


def test_the_controller_computes_what_is_slow_to_load(rows):
    (slow,) = of(rows, "controller", 20.0)
    assert slow["text"] > 0
    assert slow["predicted_s"] > 0
    assert slow["best_fixed_s"] > 0


def test_a_selector_that_knows_its_tokens_ahead_leaves_them_out():
    model = tiny_model("llama", max_position_embeddings=2048, head_dim=64)
    options = {"chunks": 4, "chunk_tokens": 512, "factors": (1.0,), "ratios": (0.15, 1.0), "repeats": 1}
    told = list(loading.loading_rows(model, byte_tokenizer(), selector="boundary", **options))
    (piped,), (whole,) = of(told, "pipeline"), of(told, "whole")
    assert 0.05 < piped["left_out_bytes"] / piped["bytes"] < 0.15
    assert whole["left_out_bytes"] == 0
    assert piped["kl"] == whole["kl"] > 0
    assert [row["left_out_bytes"] / row["bytes"] > 0.9 for row in of(told, "fixed")] == [False, True]


def test_rows_are_kept_and_read(rows, tmp_path):
    write_rows(tmp_path / "rows.json", rows)
    assert len(read_rows(tmp_path / "rows.json")) == len({(r["factor"], r["method"], r["ratio"]) for r in rows})


def test_the_command(monkeypatch, attached):
    given = {}

    def fake(model, tokenizer, **options):
        given.update(options)
        row = dict.fromkeys(("model", "dtype", "level", "device"), "x") | {"bound_s": 1.0, "best_fixed_s": None}
        numbers = (
            "link_mb_s",
            "factor",
            "ratio",
            "ttft_s",
            "load_s",
            "compute_s",
            "kl",
            "tokens",
            "text",
            "left_out_bytes",
        )
        yield row | dict.fromkeys(numbers, 1) | {"method": "pipeline", "predicted_s": None}

    monkeypatch.setattr(loading, "loading_rows", fake)
    monkeypatch.setattr("blendkv.cli_bench_loading.load", lambda *a: (attached("llama"), None))
    found = CliRunner().invoke(main, ["bench", "loading", "t", "--factors", "0.5,2", "--ratio", "0.15,1"])
    assert found.exit_code == 0, found.output
    assert "1.00 of its bound" in found.output
    assert (given["factors"], given["ratios"]) == ([0.5, 2.0], [0.15, 1.0])
    said = json.loads(CliRunner().invoke(main, ["bench", "loading", "t", "--json"]).stdout)
    assert said["rows"][0]["method"] == "pipeline"
    for wrong in ("0", "a", "-1"):
        assert CliRunner().invoke(main, ["bench", "loading", "t", "--factors", wrong]).exit_code == 2
