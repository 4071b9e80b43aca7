"""Chunks as files: everything comes back, layer by layer or whole, layer 0 from the model."""

import dataclasses
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch

from blendkv import codecs, prefill
from blendkv.attaching import attachment_of
from blendkv.chunkfile import ChunkFile, decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec
from blendkv.errors import ChunkFileError
from blendkv.prefilling import first_layer_of
from blendkv.testing import FAMILIES, tiny_model
from tests.chunks import assert_same, make_chunk
from tests.codecs.toy import Toy
from tests.container.test_damage import refused
from tests.container.test_sources import Counting
from tests.helpers import tokens


@pytest.fixture
def toy(monkeypatch):
    """The toy codec, known by its name."""
    entries = {"mine": EntryPoint("mine", "tests.codecs.toy:Toy", codecs.GROUP)}
    monkeypatch.setattr(codecs, "_entries", lambda: entries)
    return get_codec("mine", profile="p")


PROFILES = {"ab" * 16: "p"}


def test_all_fields_come_back():
    chunk = make_chunk(conditioning=(7, 2**32 - 1), tokenizer="t", namespace="ns", text="text \N{SNOWMAN}")
    assert_same(decode_chunk(encode_chunk(chunk)), chunk)
    assert_same(decode_chunk(encode_chunk(make_chunk(text=""))), make_chunk(text=""))
    assert_same(decode_chunk(encode_chunk(make_chunk(text=None))), make_chunk(text=None))


def test_mixed_and_other_dtypes_are_not_written():
    """D17."""
    chunk = make_chunk()
    mixed = dataclasses.replace(chunk, values=tuple(v.half() for v in chunk.values))
    with pytest.raises(ValueError, match=r"torch\.float16, torch\.float32"):
        encode_chunk(mixed)
    double = dataclasses.replace(
        chunk, keys=tuple(k.double() for k in chunk.keys), values=tuple(v.double() for v in chunk.values)
    )
    with pytest.raises(ValueError, match="choose one of"):
        encode_chunk(double)


def test_nan_and_inf_are_not_written():
    chunk = make_chunk()
    for states, name in ((chunk.keys, "keys of layer 1"), (chunk.values, "values of layer 1")):
        for bad in (float("nan"), float("inf"), -float("inf")):
            good = states[1][0, 3, 5].item()
            states[1][0, 3, 5] = bad
            with pytest.raises(ValueError, match=name):
                encode_chunk(chunk)
            states[1][0, 3, 5] = good
    assert_same(decode_chunk(encode_chunk(chunk)), chunk)


def test_tensors_that_want_gradients():
    chunk = make_chunk()
    wanting = dataclasses.replace(chunk, keys=tuple(k.clone().requires_grad_() for k in chunk.keys))
    assert_same(decode_chunk(encode_chunk(wanting)), chunk)


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_cuda(device):
    chunk = make_chunk(dtype=torch.bfloat16)
    assert_same(decode_chunk(encode_chunk(chunk.to(device)), device=device), chunk)


def test_device_places_tensors():
    chunk = decode_chunk(encode_chunk(make_chunk()), device="meta")
    assert {t.device.type for t in (*chunk.keys, *chunk.values)} == {"meta"}


def test_layers_one_by_one():
    chunk = make_chunk(tokens=50, layers=5)
    with ChunkFile(encode_chunk(chunk)) as file:
        assert file.key == chunk.key
        assert torch.equal(file.ids, chunk.ids)
        for layer in (4, 0, 2):
            keys, values = file.layer(layer)
            assert torch.equal(keys, chunk.keys[layer])
            assert torch.equal(values, chunk.values[layer])
        for layer in (-1, 5):
            with pytest.raises(IndexError, match="0 to 4"):
                file.layer(layer)


def test_units_groups_parts_and_streams(toy):
    """Three layers in two units, eight tokens in three groups, two streams."""
    chunk = make_chunk(tokens=8, layers=3, key_dim=60, value_dim=40)
    source = Counting(encode_chunk(chunk, toy))
    with ChunkFile(source, profiles=PROFILES) as file:
        assert (file.header.units, file.header.unit_segments, file.header.segments) == (2, 9, 36)
        assert_same(file.read(), chunk)
        source.reads.clear()
        keys, values = file.layer(1)
        assert len(source.reads) == 2  # one a stream
        assert torch.equal(keys, chunk.keys[1])
        assert torch.equal(values, chunk.values[1])
        source.reads.clear()
        base = file.read(streams=1)
        ((start, length),) = source.reads
        assert start + length < source.size * 0.6  # a prefix
        for a, b in zip((*base.keys, *base.values), (*chunk.keys, *chunk.values), strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7, atol=0)
        assert torch.equal(file.layer(2, streams=1)[0], base.keys[2])
        ((third, _),) = file.unit(1)
        assert torch.equal(third, chunk.keys[2])
        with pytest.raises(IndexError, match="0 to 1"):
            file.unit(2)
        with pytest.raises(ValueError, match="has 2"):
            file.read(streams=3)


def test_arrangements_of_others_are_refused(toy, monkeypatch):
    data = encode_chunk(make_chunk(), toy)
    monkeypatch.setattr("tests.codecs.toy.GROUP", 4)
    assert refused(data, profiles=PROFILES) == "geometry"

    def impossible(self, shapes, tokens):
        raise ValueError("not these")

    monkeypatch.setattr(Toy, "arrangement", impossible)
    assert refused(data, profiles=PROFILES) == "geometry"


def test_what_a_codec_decodes_is_checked(toy, monkeypatch):
    data = encode_chunk(make_chunk(), toy)
    monkeypatch.setattr(Toy, "decode_unit", lambda *args: ([torch.zeros(2, 7, 16)] * len(args[2]),) * 2)
    decode_chunk(data, profiles=PROFILES)
    for wrong in (torch.zeros(2, 8, 16), torch.zeros(2, 7, 16).half()):
        monkeypatch.setattr(Toy, "decode_unit", lambda *args, w=wrong: ([w] * len(args[2]),) * 2)
        assert refused(data, profiles=PROFILES) == "geometry"


def test_a_codec_that_breaks_its_own_arrangement_writes_nothing(toy, monkeypatch):
    monkeypatch.setattr(Toy, "encode_unit", lambda *args: [b""])
    with pytest.raises(ValueError, match="1 segments of a unit"):
        encode_chunk(make_chunk(), toy)


def test_token_streams():
    chunk = make_chunk(tokens=9)
    scores = {"hkvd": torch.rand(9), "a-first": torch.rand(9).half()}
    data = encode_chunk(chunk, token_streams=scores)
    source = Counting(data)
    with ChunkFile(source) as file:
        for name, given in scores.items():
            read = file.token_stream(name)
            assert read.dtype == given.dtype
            assert torch.equal(read, given)
        again = file.read()
        assert_same(again, chunk)
        assert {name: s.tolist() for name, s in again.scores.items()} == {n: s.tolist() for n, s in scores.items()}
        with pytest.raises(KeyError, match="nosuch"):
            file.token_stream("nosuch")
    second, first, whole = source.reads[1:]
    assert first[0] + first[1] == second[0]  # sorted by name
    assert whole[0] == first[0]  # before all layers, and read with them
    assert sum(whole) > sum(second)
    for bad in (torch.rand(8), torch.rand(9, 1)):
        with pytest.raises(ValueError, match="one number"):
            encode_chunk(chunk, token_streams={"x": bad})
    with pytest.raises(ValueError, match="choose one of"):
        encode_chunk(chunk, token_streams={"x": torch.arange(9)})


@pytest.mark.parametrize("dims", [(8, 8), (8, 16), (5, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 100, 513])
def test_units_at_once_are_those_one_by_one(tokens, level, dtype, dims):
    """Plain files, all units of which are put in order at once, and others."""
    chunk = make_chunk(tokens, 5, 4, *dims, dtype=dtype)
    scores = {"moved": torch.arange(tokens).float()}
    source = Counting(encode_chunk(chunk, get_codec("raw", level=level), token_streams=scores))
    file = ChunkFile(source)
    assert dims == (5, 5) or file.is_plain == (dims == (8, 8))  # of five, with some lengths
    for units in (range(5), range(1, 4), range(4, 5)):
        reads = len(source.reads)
        both = file.units(units)
        assert len(source.reads) == reads + 1
        for number, pair in zip(units, both, strict=True):
            for states, alone, want in zip(pair, *file.unit(number), (chunk.keys, chunk.values), strict=True):
                assert states.is_contiguous()
                for other in (alone, want[number]):
                    assert states.shape == other.shape
                    assert torch.equal(states.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("secret", [None, bytes(range(32))], ids=["open", "sealed"])
def test_units_at_once_are_verified(secret):
    chunk = make_chunk(64, 5, 4, 8)
    data = bytearray(encode_chunk(chunk, get_codec("raw"), secret=secret))
    file = ChunkFile(bytes(data), secret=secret)
    assert file.is_plain
    for at in range(int(file.starts[0]), len(data), 97):
        data[at] ^= 1
        bad = ChunkFile(bytes(data), secret=secret)
        with pytest.raises(ChunkFileError) as error:
            bad.units(range(5))
        assert error.value.reason == ("checksum" if secret is None else "authentication")
        data[at] ^= 1


def test_bytes_that_change_afterwards_change_no_chunk():
    chunk = make_chunk()
    data = bytearray(encode_chunk(chunk))
    read = decode_chunk(data)
    data[:] = bytes(len(data))
    assert_same(read, chunk)


# -- layer 0 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conditioning", [(), (3, 4, 5)], ids=["alone", "conditioned"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_0_is_rebuilt(attached, family, conditioning):
    model = attached(family)
    (chunk,) = prefill(model, [tokens(21)], conditioning=conditioning, progress=False)
    data = encode_chunk(chunk, layer0=False)
    assert len(data) < len(encode_chunk(chunk)) - chunk.keys[0].nbytes
    with ChunkFile(data, rebuild=first_layer_of(model)) as file:
        assert file.rebuilt == 0
        again = file.read()
        assert file.rebuilt == 1
        assert torch.equal(file.layer(1)[0], chunk.keys[1])
        assert file.rebuilt == 1
        keys, values = file.layer(0)
        assert file.rebuilt == 2
    torch.testing.assert_close(keys, chunk.keys[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(values, chunk.values[0], atol=1e-6, rtol=1e-6)
    assert again.key == chunk.key
    assert torch.equal(again.keys[0], keys)
    for a, b in zip(again.keys[1:], chunk.keys[1:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_layer_0_is_rebuilt_in_bf16(device):
    """At the positions that it was computed at, so that keys are rounded alike."""
    model = tiny_model("llama").to(device, torch.bfloat16)
    (chunk,) = prefill(model, [tokens(21)], conditioning=(3, 4), progress=False)
    with ChunkFile(encode_chunk(chunk, layer0=False), rebuild=first_layer_of(model), device=device) as file:
        keys, values = file.layer(0)
    for got, wanted in ((keys, chunk.keys[0]), (values, chunk.values[0])):
        assert got.device.type == device
        torch.testing.assert_close(got, wanted, atol=0.02, rtol=2**-7)


def test_only_layer_0_runs(attached):
    model = attached("llama")
    (chunk,) = prefill(model, [tokens(21)], progress=False)
    layers = attachment_of(model).layers
    ran: list[int] = []
    handles = [layer.register_forward_pre_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(layers)]
    handles += [layer.mlp.register_forward_pre_hook(lambda *_: ran.append(-1)) for layer in layers]
    try:
        decode_chunk(encode_chunk(chunk, layer0=False), rebuild=first_layer_of(model))
    finally:
        for handle in handles:
            handle.remove()
    assert ran == [0]
    (after,) = prefill(model, [tokens(21)], progress=False)  # nothing was left behind
    assert_same(after, chunk)


def test_layer_0_needs_its_own_model(attached):
    model = attached("llama")
    (chunk,) = prefill(model, [tokens(5)], progress=False)
    data = encode_chunk(chunk, layer0=False)
    assert refused(data) == "layer0"
    with ChunkFile(data) as file:
        assert torch.equal(file.layer(3)[0], chunk.keys[3])
    assert refused(data, rebuild=first_layer_of(attached("qwen3"))) == "layer0"
    assert refused(data, rebuild=first_layer_of(tiny_model("llama", num_hidden_layers=2))) == "layer0"
    ids = chunk.ids.clone()
    ids[2] = 512  # beyond the vocabulary: an embedding would raise, or break a GPU's context
    forged = dataclasses.replace(chunk, ids=ids)
    assert refused(encode_chunk(forged, layer0=False), rebuild=first_layer_of(model)) == "layer0"
    other = dataclasses.replace(chunk, keys=tuple(k[:1] for k in chunk.keys), values=tuple(v[:1] for v in chunk.values))
    assert refused(encode_chunk(other, layer0=False), rebuild=first_layer_of(model)) == "geometry"


def test_a_chunk_of_a_model_blends_the_same(attached):
    model = attached("llama")
    (chunk,) = prefill(model, [tokens(21)], progress=False)
    read = decode_chunk(encode_chunk(chunk, secret=b"s" * 32), secret=b"s" * 32)
    assert_same(read, chunk)
    assert np.array_equal(read.addresses[..., 1], chunk.addresses[..., 1])
