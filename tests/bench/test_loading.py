"""`bench loading` on a tiny model: every method's answer is right, and its rows say what happened."""

import json
import math

import pytest
from typer.testing import CliRunner

from blendkv.attaching import attach
from blendkv.bench import loading
from blendkv.bench.loading_runs import Run
from blendkv.bench.results import read_rows, write_rows
from blendkv.calibrating import calibrate
from blendkv.cli import main
from blendkv.codecs import get_codec
from blendkv.testing import byte_tokenizer, tiny_model
from blendkv.texts import Passage
from tests.helpers import tokens


@pytest.fixture(scope="module")
def rows():
    model = attach(tiny_model("llama", max_position_embeddings=2048))
    passages = [Passage(tokens(48, seed).tolist(), ()) for seed in range(4)]
    profile = calibrate(model, passages, ["klt"], continuation=16, progress=False)["klt"]
    return list(
        loading.loading_rows(
            model,
            byte_tokenizer(),
            chunks=4,
            chunk_tokens=128,
            factors=(0.5, 8.0),
            ratios=(0.15, 1.0),
            levels=[get_codec("klt", level=level, profile=profile) for level in (0, 8)],
            repeats=1,
            name="t",
        )
    )


def of(rows, method, factor=None):
    return [row for row in rows if row["method"] == method and factor in (None, row["factor"])]


def test_a_row_for_every_link_and_method(rows):
    told = [(row["factor"], row["method"], row["ratio"], row["level"]) for row in rows if row["method"] != "controller"]
    each = [(method, 0.15, "raw") for method in ("sequential", "pipeline", "fixed")]
    each += [("fixed", 1.0, "raw"), ("fixed", 0.15, "klt@0"), ("fixed", 0.15, "klt@8"), ("text", 1.0, "text")]
    assert sorted(told) == sorted((factor, *one) for factor in (0.5, 8.0) for one in each)
    for row in rows:
        assert row["ttft_s"] > 0
        assert math.isfinite(row["kl"])
        assert row["link_mb_s"] > 0


def test_quality_is_of_the_setting_that_ran(rows):
    for row in of(rows, "text") + [row for row in of(rows, "fixed") if row["ratio"] == 1.0]:
        assert row["kl"] == pytest.approx(0, abs=1e-6)
    for row in of(rows, "sequential") + of(rows, "pipeline"):
        assert row["kl"] > 1e-4
    by_level = [row["kl"] for row in of(rows, "fixed", 0.5) if row["ratio"] == 0.15]
    assert len(set(by_level)) == 3
    assert of(rows, "pipeline")[0]["kl"] == of(rows, "sequential")[0]["kl"]


def test_loading_takes_what_the_link_takes(rows):
    for row in of(rows, "sequential"):
        least = row["bytes"] / row["link_mb_s"] / 1e6
        assert row["load_s"] >= 0.9 * least
        assert row["ttft_s"] >= row["load_s"]
    assert of(rows, "text")[0]["load_s"] == 0


def test_the_controller_chooses_a_level(rows):
    (slow,) = of(rows, "controller", 8.0)
    assert "klt" in slow["level"] or slow["text"] > 0
    assert slow["load_s"] < 0.5 * of(rows, "sequential", 8.0)[0]["load_s"]
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
    assert len(read_rows(tmp_path / "rows.json")) == len(
        {(r["factor"], r["method"], r["ratio"], r["level"]) for r in rows}
    )


def test_levels_are_told_in_a_word():
    def level(*levels):
        return Run(1.0, 1.0, 1.0, 0.15, levels).level

    assert level("raw", "raw", "text") == "raw"
    assert level("text", "text") == "text"
    assert level("raw", "klt@0", "raw", "text") == "1xklt@0+2xraw"


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
    options = ["--factors", "0.5,2", "--ratio", "0.15,1", "--levels", "raw", "--max-kl", "0.1"]
    found = CliRunner().invoke(main, ["bench", "loading", "t", *options])
    assert found.exit_code == 0, found.output
    assert "1.00 of its bound" in found.output
    assert (given["factors"], given["ratios"]) == ([0.5, 2.0], [0.15, 1.0])
    assert ([codec.name for codec in given["levels"]], given["max_kl"]) == (["raw"], 0.1)
    said = json.loads(CliRunner().invoke(main, ["bench", "loading", "t", "--json"]).stdout)
    assert said["rows"][0]["method"] == "pipeline"
    for wrong in ("klt@x", "klt@4"):  # without a profile
        assert CliRunner().invoke(main, ["bench", "loading", "t", "--levels", wrong]).exit_code
    for wrong in ("0", "a", "-1"):
        assert CliRunner().invoke(main, ["bench", "loading", "t", "--factors", wrong]).exit_code == 2
