"""What every codec with a profile must do: the file that docs/format.md describes, any shape, nothing lost unsaid."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv import codecs
from blendkv.chunkfile import ChunkFile, decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import LayerShape, get_codec, rans
from blendkv.codecs.statistics import Statistics
from blendkv.container import ContainerReader, pack
from blendkv.errors import ChunkFileError
from blendkv.levelkeys import BASE, id_of
from tests.chunks import assert_same
from tests.codecs import twin
from tests.container.test_sources import Counting
from tests.drawn import SMALL, chunk_of, fit, profile_of
from tests.patience import seconds_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 2, 7, 9, 10, 11, 249, 250, 251, 255, 256, 257, 1023, 4097)
VARIANTS = {
    "cachegen": ("cachegen", {}),
    "klt": ("klt", {}),
    "klt, two streams": ("klt", {"streams": 2}),
    "klt-xl": ("klt-xl", {}),
    "klt-xl, two streams": ("klt-xl", {"streams": 2}),
}
WORST = {-12: 0.07, -8: 0.15, 0: 0.5, 8: 1.2}
"""Largest relative error of a layer's keys or values of `draw`, at a level."""


@pytest.fixture(params=VARIANTS)
def variant(request):
    """(name, what else it takes)"""
    return VARIANTS[request.param]


def codec_of(variant, shapes=SMALL, level=0):
    name, others = variant
    return get_codec(name, level=level, profile=profile_of(name, shapes), **others)


def through(chunk, codec, **kwargs):
    return decode_chunk(encode_chunk(chunk, codec), profiles={codec.profile_hash: codec.profile}, **kwargs)


def pairs(a, b):
    return zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)


def errors(read, chunk) -> list[float]:
    """Relative error of keys, then values, of each layer."""
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs(read, chunk)]


def segments_of(data: bytes) -> list[bytes]:
    with ContainerReader(data) as reader:
        return [bytes(segment) for segment in reader.segments(range(reader.header.segments))]


@pytest.fixture
def profile_file(variant, tmp_path):
    path = tmp_path / "profile.safetensors"
    profile_of(variant[0]).save(path)
    return twin.ProfileFile(path)


@pytest.mark.parametrize(("tokens", "level"), [(1, 0), (2, 5), (7, -3), (10, 0), (11, 0), (250, 2), (257, -1)])
def test_twin(variant, profile_file, tokens, level):
    """The document's decoder reads the same numbers, and its encoder makes the same bytes of the symbols."""
    codec, chunk = codec_of(variant, level=level), chunk_of(SMALL, tokens)
    data = encode_chunk(chunk, codec)
    told, written = twin.read(data, profile_file), segments_of(data)
    assert told.segments[:-1] == written[:-1]
    assert not written[-1].removeprefix(told.segments[-1]).strip(b"\0")
    read = decode_chunk(data, profiles={codec.profile_hash: codec.profile})
    for kind, layers in enumerate((read.keys, read.values)):
        for layer, states in enumerate(layers):
            rows = states.transpose(0, 1).flatten(1).numpy()
            np.testing.assert_allclose(rows, told.states[layer, kind], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_at_the_end(variant, profile_file, dtype):
    codec, chunk = codec_of(variant), chunk_of(SMALL, 21, dtype)
    data = encode_chunk(chunk, codec)
    told, read = twin.read(data, profile_file), decode_chunk(data, profiles={codec.profile_hash: codec.profile})
    for layer, states in enumerate(read.keys):
        assert states.dtype == dtype
        rows, wanted = states.transpose(0, 1).flatten(1), torch.from_numpy(told.states[layer, 0])
        torch.testing.assert_close(rows.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_lengths(variant, tokens, dtype):
    """Layers that differ, the last unit smaller; whole and layer by layer the same."""
    codec, chunk = codec_of(variant, level=-8), chunk_of(SMALL, tokens, dtype)
    data = encode_chunk(chunk, codec)
    with ChunkFile(data, profiles={codec.profile_hash: codec.profile}) as file:
        read = file.read()
        assert {t.dtype for t in (*read.keys, *read.values)} == {dtype}
        assert max(errors(read, chunk)) < WORST[-8]
        for layer in (2, 0, 1):
            keys, values = file.layer(layer)
            assert torch.equal(keys, read.keys[layer])
            assert torch.equal(values, read.values[layer])
    assert read.key == chunk.key


@pytest.mark.parametrize("dims", [(16, 16), (64, 32), (80, 80), (128, 128), (256, 64)], ids=str)
def test_head_dims(variant, dims):
    shapes = (LayerShape(2, *dims), LayerShape(1, *dims))
    chunk = chunk_of(shapes, 33, torch.float16)
    assert max(errors(through(chunk, codec_of(variant, shapes, -8)), chunk)) < WORST[-8]


def test_many_tokens(variant):
    shapes = (LayerShape(1, 4, 2),)
    chunk = chunk_of(shapes, 32_768, torch.bfloat16)
    assert max(errors(through(chunk, codec_of(variant, shapes, -8)), chunk)) < WORST[-8]


def test_levels_are_monotone(variant):
    chunk = chunk_of(SMALL, 512)
    sizes, found = [], []
    for level in (-12, -8, 0, 8):
        codec = codec_of(variant, level=level)
        data = encode_chunk(chunk, codec)
        sizes.append(len(data))
        found.append(errors(decode_chunk(data, profiles={codec.profile_hash: codec.profile}), chunk))
        assert max(found[-1]) < WORST[level]
    assert sizes == sorted(sizes, reverse=True)
    for coarse, fine in zip(found[1:], found, strict=False):
        assert all(a > b for a, b in zip(coarse, fine, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_survive(variant, dtype):
    """A token, and a whole chunk, in which everything is 0."""
    codec, chunk = codec_of(variant, level=-8), chunk_of(SMALL, 30, dtype)
    for states in (*chunk.keys, *chunk.values):
        states[:, [0, 10, 13]] = 0
    assert max(errors(through(chunk, codec), chunk)) < WORST[-8]
    nothing = replace(chunk, keys=tuple(map(torch.zeros_like, chunk.keys)))
    nothing = replace(nothing, values=tuple(map(torch.zeros_like, chunk.values)))
    for again, usual in pairs(through(nothing, codec), chunk):
        assert float(again.double().norm() / usual.double().norm()) < WORST[-8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extremes_of_the_first_token(variant, dtype):
    """It is kept in eight bits, whatever it is, and stays finite."""
    chunk, info = chunk_of(SMALL, 1, dtype), torch.finfo(dtype)
    odd = torch.tensor([info.max, info.min, info.smallest_normal, -0.0], dtype=dtype)
    for states in (*chunk.keys, *chunk.values):
        states.view(-1)[:4] = odd
    for again, states in pairs(through(chunk, codec_of(variant)), chunk):
        assert torch.isfinite(again).all()
        assert float((again / info.max - states / info.max).abs().max()) <= 0.501 / 127 + info.eps


@pytest.mark.parametrize("value", [1e-45, 1e-40, -0.0, 6e-8])
def test_numbers_that_are_next_to_nothing(variant, value):
    chunk = chunk_of(SMALL, 12)
    for states in (*chunk.keys, *chunk.values):
        states[:, [0, 10]] = value
    read = through(chunk, codec_of(variant, level=-8))
    for again, _ in pairs(read, chunk):
        assert torch.isfinite(again).all()
        assert float(again[:, 0].abs().max()) <= 2e-7
    assert max(errors(read, chunk)) < WORST[-8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_far_outside_is_refused(variant, dtype):
    """It is said, and `raw` stores it."""
    chunk = chunk_of(SMALL, 12, dtype)
    chunk.keys[1][0, 7, 3] = torch.finfo(dtype).max
    with pytest.raises(ValueError, match=r"far outside what the profile was made of.*raw"):
        encode_chunk(chunk, codec_of(variant, level=-8))
    assert_same(decode_chunk(encode_chunk(chunk)), chunk)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(VARIANTS.values())),
    st.integers(-12, 12),
    st.integers(1, 30),
    st.sampled_from(DTYPES),
    st.lists(st.tuples(st.integers(0, 10_000), st.floats(-38, 38), st.booleans()), max_size=4),
)
def test_anything_finite(variant, level, tokens, dtype, odd):
    """Numbers of any size anywhere: refused by name, or finite when they come back, bit by bit the same each time."""
    chunk, codec = chunk_of(SMALL, tokens, dtype), codec_of(variant, level=level)
    sides, most = (*chunk.keys, *chunk.values), torch.finfo(dtype).max
    for at, power, negative in odd:
        numbers = sides[at % len(sides)].view(-1)
        numbers[at % len(numbers)] = min(10.0**power, most) * (-1 if negative else 1)
    try:
        data = encode_chunk(chunk, codec)
    except ValueError as error:
        assert "far outside" in str(error)  # noqa: PT017 - it may also not be raised
        return
    profiles = {codec.profile_hash: codec.profile}
    read = decode_chunk(data, profiles=profiles)
    for again in (*read.keys, *read.values):
        assert torch.isfinite(again).all()
    assert_same(decode_chunk(data, profiles=profiles), read)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused(variant, bad):
    chunk = chunk_of(SMALL, 12)
    chunk.keys[2][1, 5, 1] = bad
    with pytest.raises(ValueError, match="keys of layer 2 hold NaN or Inf"):
        encode_chunk(chunk, codec_of(variant))


def test_constant_channels(variant):
    """Channels that never change, and some that are always 0, cost nothing and come back."""
    name, kwargs = variant
    shapes = (LayerShape(1, 8, 8),)
    statistics, chunks = constant(shapes)
    codec = get_codec(name, profile=fit(name, statistics), level=-8, **kwargs)
    read = through(chunks, codec)
    assert max(errors(read, chunks)) < WORST[-8]
    assert float((read.keys[0][:, 1:, :4] - 3).abs().max()) < 0.1
    assert float(read.values[0][:, 1:, 5].abs().max()) < 0.1


def constant(shapes):
    statistics = Statistics(shapes, 1000, 100)
    for seed in (1, 2, 3, 0):
        chunk = chunk_of(shapes, 300, seed=seed)
        chunk.keys[0][:, :, :4] = 3
        chunk.values[0][:, :, 5] = 0
        statistics.add_states(chunk.keys, chunk.values)
        statistics.add_gradients([k * 0.01 for k in chunk.keys], [v * 0.01 for v in chunk.values])
    return statistics, chunk


def test_progressive(variant, profile_file):
    """The first stream alone is a prefix of the file, and a coarser chunk."""
    codec, chunk = codec_of(variant), chunk_of(SMALL, 300)
    data = encode_chunk(chunk, codec)
    source = Counting(data)
    with ChunkFile(source, profiles={codec.profile_hash: codec.profile}) as file:
        streams = file.header.arrangement.streams
        source.reads.clear()
        whole = file.read()
        assert len(source.reads) == 1
        source.reads.clear()
        file.unit(1)
        assert len(source.reads) == streams  # one ranged read a unit and stream
        source.reads.clear()
        base = file.read(streams=1)
        ((start, length),) = source.reads
        assert (start + length < source.size) == (streams > 1)
    assert whole.coded == id_of(codec)
    if streams == 1:
        assert_same(base, whole)
        assert base.coded == whole.coded
        return
    assert base.coded != whole.coded  # what is known of the whole level's loss is not the base's
    assert base.coded.name == whole.coded.name + BASE
    told = twin.read(data, profile_file, streams=1)
    for layer, states in enumerate(base.keys):
        rows = states.transpose(0, 1).flatten(1).numpy()
        np.testing.assert_allclose(rows, told.states[layer, 0], rtol=1e-5, atol=1e-5)
    assert all(a > b for a, b in zip(errors(base, chunk), errors(whole, chunk), strict=True))


def test_a_bomb(variant, monkeypatch):
    """Many tokens of which nothing is there: noticed before anything is decoded."""
    codec, decode = codec_of(variant), Mock(wraps=rans.decode)
    for module in ("cachegen", "klt"):
        monkeypatch.setattr(f"blendkv.codecs.{module}.decode", decode)
    sound = encode_chunk(chunk_of(SMALL, 33), codec)
    decode_chunk(sound, profiles={codec.profile_hash: codec.profile})
    assert decode.called
    decode.reset_mock()
    with ContainerReader(sound) as reader:
        header = replace(reader.header, ids=bytes(4 << 17))
    for content in (b"", bytes(16)):
        data = pack(header, [content] * header.segments)

        def read(data=data):
            with pytest.raises(ChunkFileError) as error:
                decode_chunk(data, profiles={codec.profile_hash: codec.profile})
            assert error.value.reason == "symbols"

        assert min(seconds_of(read) for _ in range(3)) < 0.5  # one of them may meet a garbage collection
        assert not decode.called


def test_without_layer_0(variant):
    """Layers coded alone can do without it; layers coded together are refused, when written and when read."""
    codec, chunk = codec_of(variant), chunk_of(SMALL, 12)
    if "xl" in variant[0]:
        with pytest.raises(ValueError, match="layer0=True") as error:
            encode_chunk(chunk, codec, layer0=False)
        assert error.value.reason == "geometry"
        return
    data = encode_chunk(chunk, codec, layer0=False)
    whole = through(chunk, codec)
    with ChunkFile(data, profiles={codec.profile_hash: codec.profile}) as file:
        for layer in (1, 2):
            keys, values = file.layer(layer)
            assert torch.equal(keys, whole.keys[layer])
            assert torch.equal(values, whole.values[layer])
        with pytest.raises(ChunkFileError) as error:
            file.layer(0)
        assert error.value.reason == "layer0"


def test_the_same_bytes_each_time_on_any_number_of_threads(variant):
    shapes = (LayerShape(3, 64, 64),)
    codec, chunk = codec_of(variant, shapes), chunk_of(shapes, 600, torch.bfloat16)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            data = encode_chunk(chunk, get_codec(variant[0], profile=codec.profile, **variant[1]))
            read = decode_chunk(data, profiles={codec.profile_hash: codec.profile})
            found.append((data, read))
    finally:
        torch.set_num_threads(threads)
    for data, read in found[1:]:
        assert data == found[0][0]
        assert_same(read, found[0][1])


def test_other_layers_are_refused(variant):
    """A profile is of one model: by shapes, when written and when read."""
    codec = codec_of(variant)
    others = (SMALL[:2], (*SMALL[:2], LayerShape(3, 4, 5)), (*SMALL, SMALL[0]))
    for shapes in others:
        with pytest.raises(ValueError, match="make a profile of this model"):
            encode_chunk(chunk_of(shapes), codec)
    name, profile = variant[0], codec.profile
    other = replace(profile, shapes=SMALL[::-1])
    data = encode_chunk(chunk_of(SMALL), codec)
    for wrong in ({}, {profile.hash: other}, {profile.hash: profile_of("klt" if name == "klt-xl" else "klt-xl")}):
        with pytest.raises(ChunkFileError, match=profile.hash) as error:
            decode_chunk(data, profiles=wrong)
        assert error.value.reason == "profile"
    with ContainerReader(data) as reader:
        header = replace(reader.header, layers=SMALL[:2])
    with pytest.raises(ChunkFileError) as error:
        codecs.codec_of(header, {profile.hash: profile})
    assert error.value.reason == "geometry"


def test_settings_that_are_not_there(variant):
    name, kwargs = variant
    profile = profile_of(name)
    for level in (-17, 17, 400):
        with pytest.raises(ValueError, match="has levels"):
            get_codec(name, profile=profile, level=level, **kwargs)
    with pytest.raises(ValueError, match="blendkv profile MODEL"):
        get_codec(name)
    with pytest.raises(ValueError, match="its file or its hash; got a dict"):
        get_codec(name, profile={profile.hash: profile})
    with pytest.raises(ValueError, match="takes no level"):
        get_codec(get_codec(name, profile=profile), level=8)
    assert repr(get_codec(name, profile=profile, level=1.0, **kwargs).level) == "1"
    with pytest.raises(ValueError, match="is for codec"):
        get_codec(name, profile=profile_of("cachegen" if name != "cachegen" else "klt"))


def test_every_tensor_of_a_profile_is_looked_at(variant):
    """Missing, of another shape or dtype, or not finite: said when the codec is made."""
    name, kwargs = variant
    profile = profile_of(name)
    for key, tensor in profile.tensors.items():
        wrong = [tensor[..., :-1], tensor.double(), None]
        if tensor.is_floating_point():
            wrong += [torch.full_like(tensor, float("nan")), torch.full_like(tensor, float("inf"))]
        for bad in wrong:
            tensors = {k: v for k, v in profile.tensors.items() if k != key}
            tensors |= {} if bad is None else {key: bad}
            with pytest.raises(ValueError, match=key):
                get_codec(name, profile=replace(profile, tensors=tensors), **kwargs)
