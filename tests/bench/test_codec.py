"""What codecs cost, from whole files; what the kept rows hold."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from blendkv.bench import codec as bench
from blendkv.bench.codec_table import caption, cells, markdown
from blendkv.bench.coders import sections_of, zstd1
from blendkv.bench.results import merged, read_rows
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec
from blendkv.texts import count_known, passages
from blendkv.trials import Trial
from tests.bench.conftest import CONTEXT, random_passage

KEPT = Path(__file__).parent.parent.parent / "docs" / "results" / "codec-bundled.json"
UNSEEN = [random_passage(seed) for seed in (11, 12)]


@pytest.fixture(scope="module")
def rows(tiny_profiles):
    from blendkv.testing import tiny_model

    profiles = {"raw": None, **tiny_profiles}
    return bench.codec_rows(
        tiny_model("llama"), UNSEEN, profiles, levels=(-8, 0), context=CONTEXT, short=(16, 256), repeats=1
    )


def test_a_row_a_level_and_one_a_codec(rows):
    assert [(row["codec"], row["level"]) for row in rows] == [
        ("raw", 1),
        *((name, level) for name in ("cachegen", "klt", "klt-xl") for level in (-8, 0)),
        ("raw", None),
        ("cachegen", None),
        ("klt", None),
        ("klt-xl", None),
    ]
    for row in rows[:7]:
        assert row["ratio_16bit"] == pytest.approx(16 / row["bits_per_element"])
        assert row["bits_16"] > row["bits_per_element"] > row["payload_bits_per_element"]
        assert "bits_256" not in row
        assert len(row["all_kl"]) == 2
        assert row["encode_mb_s"] > 0
        assert row["decode_mb_s"] > 0


def test_raw_is_the_16_bit_cache_and_finer_levels_are_nearer_to_it(rows):
    raw, *coded = rows[:7]
    assert raw["kl"] == pytest.approx(0, abs=1e-6)
    assert raw["top1"] == 1
    assert raw["payload_bits_per_element"] == pytest.approx(16, rel=0.02)
    for fine, coarse in zip(coded[::2], coded[1::2], strict=True):
        assert fine["kl"] < coarse["kl"]
        assert fine["bits_per_element"] > coarse["bits_per_element"]


def test_bits_are_those_of_the_files(attached, tiny_profiles, rows):
    codec = get_codec("klt", level=-8, profile=tiny_profiles["klt"])
    sizes = []
    for passage in UNSEEN:
        trial = Trial.of(attached("llama"), torch.tensor(passage.ids), CONTEXT)
        chunk = bench.in_16_bits(trial.chunk)
        numbers = sum(t.numel() for t in (*chunk.keys, *chunk.values))
        sizes.append(8 * len(encode_chunk(chunk, codec)) / numbers)
    row = next(row for row in rows if (row["codec"], row["level"]) == ("klt", -8))
    assert row["bits_per_element"] == pytest.approx(sum(sizes) / 2)
    assert row["all_bits"] == pytest.approx(sizes)


def test_texts_of_a_profile_are_refused(attached, tiny_profiles):
    with pytest.raises(ValueError, match="made of 1 of the texts"):
        bench.codec_rows(attached("llama"), [random_passage(3)], tiny_profiles, context=CONTEXT)
    with pytest.raises(ValueError, match="no passages"):
        bench.codec_rows(attached("llama"), [], tiny_profiles, context=CONTEXT)


def test_interpolation_is_linear_in_the_logarithm():
    points = [{"bits_per_element": bits, "kl": kl} for bits, kl in ((4.0, 0.001), (2.0, 0.1), (3.0, 0.01))]
    assert bench.bits_at(points) == pytest.approx(3 + math.log(2) / math.log(10))
    assert bench.bits_at(points[:1]) is None
    assert bench.bits_at(points, 0.5) is None
    assert bench.bits_at(points, 0.01) == pytest.approx(3)


def test_profiles_come_from_a_folder(tmp_path, tiny_profiles):
    tiny_profiles["klt"].save(tmp_path / "klt.safetensors")
    found = bench.load_profiles(["raw", "klt"], tmp_path)
    assert found["raw"] is None
    assert found["klt"].hash == tiny_profiles["klt"].hash
    assert bench.load_profiles(["raw"], None) == {"raw": None}
    with pytest.raises(ValueError, match="blendkv profile MODEL"):
        bench.load_profiles(["raw", "klt"], None)
    with pytest.raises(FileNotFoundError, match=r"cachegen\.safetensors: make one with"):
        bench.load_profiles(["cachegen"], tmp_path)


def test_torch_gets_its_threads_back():
    before = torch.get_num_threads()
    with bench.one_core():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_zstd_is_given_the_very_symbols(attached, tiny_profiles):
    pytest.importorskip("zstandard")
    chunk = bench.in_16_bits(Trial.of(attached("llama"), torch.tensor(UNSEEN[0].ids), CONTEXT).chunk)
    for name, profile in tiny_profiles.items():
        codec = get_codec(name, level=-4, profile=profile)
        sections = sections_of(chunk, codec)
        assert sections is not None
        numbers = sum(t.numel() for t in (*chunk.keys, *chunk.values))
        assert sum(map(len, sections)) <= numbers
        assert zstd1(sections).size < numbers
    raw = sections_of(chunk, get_codec("raw"))
    assert b"".join(raw) == b"".join(t.numpy().tobytes() for t in (*chunk.keys, *chunk.values))


def test_symbols_are_laid_out_channel_by_channel(attached, tiny_profiles):
    chunk = bench.in_16_bits(Trial.of(attached("llama"), torch.tensor(UNSEEN[0].ids), CONTEXT).chunk)
    codec = get_codec("klt", level=-4, profile=tiny_profiles["klt"])
    symbols = codec.symbols(0, chunk.keys[:1], chunk.values[:1])
    section = np.frombuffer(sections_of(chunk, codec)[0], np.int8).reshape(symbols[0].T.shape)
    assert np.array_equal(section, symbols[0].T.clip(-127, 127))


def test_without_zstandard_the_row_says_so(monkeypatch, attached, tiny_profiles):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    [row, _] = bench.codec_rows(
        attached("llama"), UNSEEN[:1], {"klt": tiny_profiles["klt"]}, levels=[0], context=CONTEXT, repeats=1
    )
    assert row["zstd1_decode_mb_s"] is None
    assert "zstandard" in row["note"]
    assert "| klt | 0 |" in markdown([row | {"model": "m", "dtype": "float32"}])


def test_tables(rows):
    columns, lines = cells(rows)
    assert {len(line) for line in lines} == {len(columns)}
    assert "at 16" in columns
    fixed = [row | {"model": "m", "dtype": "float32"} for row in rows]
    assert "2 contexts of 72 tokens, KL over 8 tokens after them" in caption(fixed)
    at = {**fixed[-1], "bits_at_kl_0.005": 2.0}
    assert cells([*fixed, at])[1][-1][:4] == ["klt-xl", "", "2.00", "8.00x"]
    assert merged(fixed, fixed) == merged(fixed[::-1], []) != fixed[:-1]


# -- texts ------------------------------------------------------------------------------------------------------------


def words(seed, count=30):
    return " ".join(f"w{seed}x{i}" for i in range(count))


def test_measured_texts_are_none_of_those_calibrated_on(tmp_path):
    from blendkv.testing import byte_tokenizer

    tokenizer, a, b = byte_tokenizer(), tmp_path / "a.txt", tmp_path / "b.jsonl"
    a.write_text(words(0))
    b.write_text("\n".join(f'{{"t": "{words(i)}"}}' for i in range(1, 9)))
    used = passages([a, b], tokenizer, 64, 4)
    known = {digest for passage in used for digest in passage.digests}
    rest = passages([a, b], tokenizer, 64, 100, without=known)
    assert known.isdisjoint(digest for passage in rest for digest in passage.digests)
    assert len(used) + len(rest) == 9
    assert count_known([a, b, b], known) == 4


def test_a_file_named_twice_gives_two_passages_a_turn_and_none_twice(tmp_path):
    from blendkv.testing import byte_tokenizer

    tokenizer, a, b = byte_tokenizer(), tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, first in ((a, 0), (b, 10)):
        path.write_text("\n".join(f'{{"t": "{words(first + i)}"}}' for i in range(5)))
    found = passages([a, a, b], tokenizer, 64, 6)
    said = [tokenizer.decode(passage.ids).split("x")[0] for passage in found]
    assert said == ["w0", "w1", "w10", "w2", "w3", "w11"]


# -- what was measured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "bits"), [("klt", 3.0), ("klt-xl", 2.0)])
def test_the_kept_rows_hold_the_bits_aimed_at(codec, bits):
    [at] = [row for row in read_rows(KEPT) if row["codec"] == codec and row["level"] is None]
    assert at["bits_at_kl_0.005"] <= bits


def test_short_chunks_are_small_too():
    rows = [row for row in read_rows(KEPT) if row["codec"] == "klt" and row["level"] is not None]
    near = min(rows, key=lambda row: abs(math.log(row["kl"] / 0.015)))
    assert near["ratio_64"] >= 6
    assert near["ratio_256"] >= 6.7
