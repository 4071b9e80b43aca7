"""Codecs where chunks are blended: paired with full recompute, with 16 bits, and with as many bits spent otherwise."""

import json
import math

import pytest
import torch

from blendkv.bench.codec_table import cells, curves
from blendkv.bench.joint import _at_bits, changed, joint_rows, through, unseen_examples
from blendkv.bench.plot import plot
from blendkv.bench.quality import lay_out, quality_rows
from blendkv.bench.results import merged, read_rows, write_rows
from blendkv.bench.table import markdown
from blendkv.bench.tasks import Example
from blendkv.codecs import Profile, get_codec
from blendkv.testing import byte_tokenizer
from blendkv.texts import digest, read_texts

EXAMPLES = [
    Example("Who?", ["Ada: Ada wrote notes.\n\n", "Bob: Bob slept.\n\n", "Cid: Cid won.\n\n"], ["Ada"]),
    Example("What?", ["Bob: Bob slept.\n\n", "Ada: Ada wrote notes.\n\n"], ["notes"]),
]
ABOUT = {"model": "m", "dtype": "float32", "task": "hotpot"}


@pytest.fixture(scope="module")
def rows(tiny_profiles):
    from blendkv.testing import tiny_model

    profiles = {"raw": None, "klt": tiny_profiles["klt"]}
    return joint_rows(
        tiny_model("llama"),
        byte_tokenizer(),
        EXAMPLES,
        profiles,
        levels=(-8, 0, 8),
        ratios=(0.0, 0.3),
        controls=0,
        about=ABOUT,
    )


def test_a_row_a_codec_level_change_and_ratio(rows):
    assert len(rows) == 2 * (1 + 3 + 5) == len(merged(rows, rows))
    for row in rows:
        assert row["kl"] == pytest.approx(sum(row["all_kl"]) / 2)
        assert (row["kl_minus_plain"] is None) or row["change"]
    finer = next(row for row in rows if row["change"] == "layer 1 four octaves finer")
    plain = next(row for row in rows if (row["codec"], row["level"], row["change"]) == ("klt", 0, ""))
    assert finer["bits_per_element"] > plain["bits_per_element"] + 0.5


def test_differences_are_paired_with_16_bits(rows):
    for ratio in (0.0, 0.3):
        raw, *others = [row for row in rows if row["ratio"] == ratio]
        assert raw["codec"] == "raw"
        assert raw["kl_minus_raw"] == 0
        for row in others:
            assert row["kl_minus_raw"] == pytest.approx(row["kl"] - raw["kl"])
            assert row["kl_minus_raw_low"] <= row["kl_minus_raw"] <= row["kl_minus_raw_high"]


def test_raw_is_bench_quality_but_for_the_rounding(attached, rows):
    told = quality_rows(attached("llama"), byte_tokenizer(), EXAMPLES, (0.0, 0.3))
    for row, quality in zip(rows[:2], told[1:], strict=True):
        assert row["kl"] == pytest.approx(quality["kl"], rel=0.05)


def test_chunks_really_go_through_files(attached, tiny_profiles):
    case = lay_out(attached("llama"), byte_tokenizer(), EXAMPLES[0])
    codec = get_codec("klt", level=0, profile=tiny_profiles["klt"])
    chunks, size = through(codec, case.chunks)
    assert size > 0
    for chunk, back in zip(case.chunks, chunks, strict=True):
        assert back.key == chunk.key
        assert back.dtype == chunk.dtype
        assert not torch.equal(back.keys[0], chunk.keys[0])


def test_changes_of_a_profile(tiny_profiles):
    klt = tiny_profiles["klt"]
    codecs = {setting.change: setting.codec for setting in changed(klt, 0)}
    assert codecs["0 protected tokens"].protected == 0
    assert codecs["4 protected tokens"].protected == 4
    tensors = codecs["keys an octave coarser, values finer"].profile.tensors
    assert torch.equal(tensors["scale.2.0"], klt.tensors["scale.2.0"] - 16)
    assert torch.equal(tensors["scale.2.1"], klt.tensors["scale.2.1"] + 16)
    assert torch.equal(tensors["mean.2.1"], klt.tensors["mean.2.1"])
    tensors = codecs["layer 1 four octaves finer"].profile.tensors
    assert torch.equal(tensors["scale.1.0"], klt.tensors["scale.1.0"] + 64)
    assert torch.equal(tensors["scale.0.0"], klt.tensors["scale.0.0"])


def test_as_many_bits_lie_between_two_levels():
    points = [{"bits_per_element": 3.0, "all_kl": [0.01, 0.1]}, {"bits_per_element": 1.0, "all_kl": [0.04, 0.1]}]
    assert _at_bits(points, 2.0) == pytest.approx([math.sqrt(0.01 * 0.04), 0.1])
    assert _at_bits(points, 1.0) == pytest.approx([0.04, 0.1])
    assert _at_bits(points, 3.5) is None


def test_records_that_a_profile_was_made_of_are_passed_over(tmp_path):
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps([{"question": f"Q{i}", "answer": "A", "context": [["T", ["S."]]]} for i in range(4)]))
    texts = read_texts(path)
    profile = Profile("klt", (), {}, about={"texts": [digest(texts[0]), digest(texts[2])]})
    told = unseen_examples("hotpot", path, None, {"klt": profile, "raw": None}, 9)
    assert [example.question for example in told] == ["Q1", "Q3"]
    assert len(unseen_examples("hotpot", path, None, {"raw": None}, 2)) == 2
    everything = Profile("klt", (), {}, about={"texts": [digest(text) for text in texts]})
    with pytest.raises(ValueError, match="made of all of its records"):
        unseen_examples("hotpot", path, None, {"klt": everything}, 1)


def test_the_table_and_the_figure(rows, tmp_path):
    write_rows(tmp_path / "j.json", rows)
    assert len(read_rows(tmp_path / "j.json")) == len(rows)
    columns, lines = cells(merged(rows, []))
    assert len(lines) == 9
    assert columns[4:6] == ["KL at 0%", "KL at 30%"]
    assert {len(line) for line in lines} == {len(columns)}
    assert "2 prompts of hotpot" in markdown(rows)
    drawn = curves(rows)
    assert list(drawn) == [0.0, 0.3]
    assert len(drawn[0.3]["klt"]) == 3
    pytest.importorskip("matplotlib")
    plot(rows, tmp_path / "j.svg")
    assert "klt, 30%" in (tmp_path / "j.svg").read_text()
