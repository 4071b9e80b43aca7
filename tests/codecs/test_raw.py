"""The raw codec: bit by bit, whatever the shape."""

from dataclasses import replace
from importlib.metadata import EntryPoint
from itertools import pairwise

import pytest
import torch

from blendkv import codecs
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import Codec, codec_names, get_codec
from blendkv.codecs.raw import Raw
from blendkv.container import LayerShape
from blendkv.errors import ChunkFileError
from tests.chunks import assert_same, make_chunk
from tests.container.twin import parse

LENGTHS = (1, 2, 7, 31, 32, 33, 255, 256, 257, 1023)
LEVELS = (0, 1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_lengths(tokens, level, dtype):
    chunk = make_chunk(tokens=tokens, layers=2, key_dim=24, value_dim=16, dtype=dtype)
    assert_same(decode_chunk(encode_chunk(chunk, Raw(level))), chunk)


@pytest.mark.parametrize(("tokens", "group"), [(1, 32), (512, 32), (513, 64), (1024, 64), (1025, 128), (131_072, 8192)])
def test_groups_are_as_few_as_a_small_index_wants(tokens, group):
    assert Raw().arrangement([LayerShape(1, 1, 1)] * 1024, tokens).group_tokens == group
    assert Raw(0).arrangement([LayerShape(1, 1, 1)], tokens).group_tokens == tokens


@pytest.mark.parametrize("level", LEVELS)
def test_a_file_is_what_the_format_says(level):
    """docs/format.md, in loops."""
    chunk = make_chunk(tokens=71, layers=2, heads=3, key_dim=5, value_dim=3, dtype=torch.float16)
    told = parse(encode_chunk(chunk, Raw(level)))
    assert (told["level"], told["group"], told["parts"]) == ((1, 32, 1) if level else (0, 71, 2))
    for layer in range(2):
        both = (chunk.keys[layer], chunk.values[layer])
        for group in range(-(-71 // told["group"])):
            tokens = range(group * told["group"], min(71, (group + 1) * told["group"]))
            for part in range(told["parts"]):
                want = b""
                for states in both if told["parts"] == 1 else (both[part],):
                    for head in range(3):
                        for token in tokens:
                            want += states[head, token].numpy().astype("<f2").tobytes()
                    want += bytes(-len(want) % 16)
                assert told["coded"][0, layer, part, group] == want


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (64, 128), (80, 80), (128, 128), (192, 128), (256, 256), (1, 3)])
def test_head_dims(dims, dtype):
    chunk = make_chunk(tokens=5, layers=2, key_dim=dims[0], value_dim=dims[1], dtype=dtype)
    assert_same(decode_chunk(encode_chunk(chunk)), chunk)


def test_layers_may_differ():
    a, b = make_chunk(heads=2, key_dim=16, layers=2), make_chunk(heads=4, key_dim=64, value_dim=32, layers=1)
    chunk = replace(a, keys=a.keys + b.keys, values=a.values + b.values)
    assert_same(decode_chunk(encode_chunk(chunk)), chunk)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_extremes(dtype):
    chunk = make_chunk(tokens=4, dtype=dtype)
    info = torch.finfo(dtype)
    for states in (*chunk.keys, *chunk.values):
        states.zero_()
    chunk.keys[0].view(-1)[:5] = torch.tensor([info.max, info.min, info.tiny, -0.0, info.smallest_normal], dtype=dtype)
    assert_same(decode_chunk(encode_chunk(chunk)), chunk)


def test_states_that_are_not_contiguous():
    wide = make_chunk(tokens=9, key_dim=16)
    values = tuple(v.transpose(0, 1)[1:5].transpose(0, 1) for v in wide.values)
    chunk = replace(wide, ids=wide.ids[:4], keys=tuple(k[:, 1:5] for k in wide.keys), values=values)
    again = decode_chunk(encode_chunk(chunk))
    assert_same(again, chunk)
    assert all(t.is_contiguous() for t in (*again.keys, *again.values))


def test_a_file_is_decoded_without_copies(tmp_path):
    """One buffer, aligned as kernels want it; of bytes, which must not change, each layer is a copy."""
    chunk, path = make_chunk(tokens=33, dtype=torch.bfloat16), tmp_path / "chunk"
    data = encode_chunk(chunk, Raw(0))
    path.write_bytes(data)
    read = decode_chunk(path)
    assert len({t.untyped_storage().data_ptr() // 4096 for t in (*read.keys, *read.values)}) <= 1 + read.nbytes // 4096
    starts = [t.data_ptr() for pair in zip(read.keys, read.values, strict=True) for t in pair]
    assert [b - a for a, b in pairwise(starts)] == [chunk.keys[0].nbytes] * 5
    assert read.addresses.shape == (3, 2, 2)
    copied = decode_chunk(data)
    copied.keys[0].zero_()
    assert_same(decode_chunk(data), chunk)
    assert copied.addresses.shape == (3, 2, 2)


def test_a_short_chunk_of_level_1_is_decoded_without_copies(tmp_path):
    chunk, path = make_chunk(tokens=32, dtype=torch.bfloat16), tmp_path / "chunk"
    path.write_bytes(encode_chunk(chunk))
    read = decode_chunk(path)
    starts = [t.data_ptr() for pair in zip(read.keys, read.values, strict=True) for t in pair]
    assert [b - a for a, b in pairwise(starts)] == [chunk.keys[0].nbytes] * 5
    assert read.addresses.shape == (3, 2, 2)


WRONG = {"short": (8, b""), "bare": (12, b""), "long": (12, bytes(20)), "not zero": (12, b"\0\0\0\1")}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("size", "padding"), WRONG.values(), ids=WRONG)
def test_bytes_that_raw_never_writes_are_refused(size, padding, level):
    """Three fp32 numbers are followed by four zeros."""
    shape, ones, codec = LayerShape(1, 3, 3), torch.ones(1, 1, 3), Raw(level)
    number = ones.numpy().tobytes()
    good = [number + bytes(4), number + bytes(4)]
    bad = [[number[:size] + padding, good[1]], [good[0], number[:size] + padding]]
    together = (lambda pair: [b"".join(pair)]) if level else list

    def decode(pair):
        return codec.decode_unit(0, [shape], 1, torch.float32, [memoryview(s) for s in together(pair)], 1)

    assert [torch.equal(states, ones) for (states,) in decode(good)] == [True, True]
    for pair in bad:
        with pytest.raises(ChunkFileError) as error:
            decode(pair)
        assert error.value.reason == "symbols"


def test_the_registry():
    assert "raw" in codec_names()
    assert isinstance(get_codec("raw"), Raw)
    assert isinstance(get_codec("raw"), Codec)
    mine = Raw()
    assert get_codec(mine) is mine
    with pytest.raises(ValueError, match="choose one of"):
        get_codec("nosuch")
    with pytest.raises(ValueError, match="level 0 or 1"):
        get_codec("raw", level=3)


def test_a_codec_from_elsewhere(monkeypatch):
    """By the entry point group, as for selectors."""
    entry = EntryPoint("mine", "tests.codecs.toy:Toy", codecs.GROUP)
    monkeypatch.setattr(codecs, "_entries", lambda: {"mine": entry})
    chunk = make_chunk()
    data = encode_chunk(chunk, get_codec("mine", level=3, profile="p"))
    assert_same(decode_chunk(data, profiles={"ab" * 16: "p"}), chunk)
    assert_same(decode_chunk(data, profiles=lambda digest: "p"), chunk)
    wrong = [(None, "profile"), ({}, "profile"), (lambda digest: None, "profile"), ({"ab" * 16: "other"}, "codec")]
    for profiles, reason in wrong:
        with pytest.raises(ChunkFileError) as error:
            decode_chunk(data, profiles=profiles)
        assert error.value.reason == reason
        if reason == "profile":
            assert "ab" * 16 in str(error.value)
