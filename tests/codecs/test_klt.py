"""What is klt's own: symbols as the document's arithmetic makes them, bases, bf16 products, hostile symbols."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import LayerShape, get_codec, rans, transform
from blendkv.codecs.klt import KLT, LARGEST_BASE, base_rows
from blendkv.codecs.protect import protected_bytes
from blendkv.codecs.statistics import Statistics
from blendkv.errors import ChunkFileError
from tests.codecs import twin
from tests.drawn import SMALL, chunk_of, fit, profile_of, statistics_of


def rows_of(states: torch.Tensor) -> np.ndarray:
    """`[H, T, D]` as `[T, H * D]` fp64."""
    return states.double().transpose(0, 1).flatten(1).numpy()


def read_by_twin(codec, chunk, tmp_path, streams=None):
    codec.profile.save(tmp_path / "profile.safetensors")
    return twin.klt(encode_chunk(chunk, codec), twin.ProfileFile(tmp_path / "profile.safetensors"), streams)


@pytest.mark.parametrize("level", [-8, 0, 6])
@pytest.mark.parametrize("name", ["klt", "klt-xl"])
def test_symbols(tmp_path, name, level):
    """The inverse of the matrix and rounding, in fp64: the same but for ties. Both streams hold what one does."""
    profile, chunk = profile_of(name), chunk_of(SMALL, 300)
    one = read_by_twin(get_codec(name, profile=profile, level=level), chunk, tmp_path)
    two = read_by_twin(get_codec(name, profile=profile, level=level, streams=2), chunk, tmp_path)
    base = read_by_twin(get_codec(name, profile=profile, level=level, streams=2), chunk, tmp_path, 1)
    units = [(0, 1), (2,)] if name == "klt-xl" else [(0,), (1,), (2,)]
    checked = 0
    for unit, layers in enumerate(units):
        sides = [rows_of(states[layer]) for layer in layers for states in (chunk.keys, chunk.values)]
        for part, states in enumerate([np.concatenate(sides, 1)] if name == "klt-xl" else sides):
            tensors = {kind: profile.tensors[f"{kind}.{unit}.{part}"] for kind in ("mean", "matrix", "scale")}
            inverse = np.linalg.inv(tensors["matrix"].double().numpy())
            blocks = (states - tensors["mean"].numpy()).reshape(len(states), len(inverse), -1)
            exact = np.einsum("tbi,bij->tbj", blocks, inverse).reshape(len(states), -1) / 2 ** (level / 4)
            exact = exact[:, tensors["scale"].numpy() - 4 * level >= -37]
            for start, first, stop in ((0, 1, 256), (256, 256, 300)):
                symbols, wanted = one.symbols[f"{unit}.{part}.{start}"], exact[first:stop]
                clear = np.abs(wanted % 1 - 0.5) > 1e-3
                assert np.array_equal(symbols[clear], np.rint(wanted)[clear])
                assert np.abs(symbols - wanted).max() < 0.502
                assert np.array_equal(two.symbols[f"{unit}.{part}.{start}"], symbols)
                assert np.array_equal(base.symbols[f"{unit}.{part}.{start}"], 3 * np.rint(symbols / 3))
                checked += clear.sum()
    assert checked > 5000


def test_the_error_is_half_a_step_at_most(tmp_path):
    """In every component that is coded."""
    profile, chunk = profile_of("klt"), chunk_of(SMALL, 60)
    told = read_by_twin(get_codec("klt", profile=profile, level=-12), chunk, tmp_path)
    matrix = profile.tensors["matrix.0.0"].double().numpy()
    assert (profile.tensors["scale.0.0"].numpy() + 48 >= -37).all()
    missed = (rows_of(chunk.keys[0]) - told.states[0, 0])[1:].reshape(59, 2, 8)
    steps = np.einsum("tbi,bij->tbj", missed, np.linalg.inv(matrix)) / 2**-3
    assert np.abs(steps).max() < 0.502


@pytest.mark.parametrize("protected", [0, 1, 5, 64])
def test_protected_tokens(protected):
    profile, chunk = profile_of("klt", protected=protected), chunk_of(SMALL, 300, torch.float16)
    codec = get_codec("klt", profile=profile, level=12)
    read = decode_chunk(encode_chunk(chunk, codec), profiles={profile.hash: profile})
    for again, states in zip((*read.keys, *read.values), (*chunk.keys, *chunk.values), strict=True):
        wrong, largest = (again - states).abs()[:, :protected], states.abs().amax(2, keepdim=True)[:, :protected]
        assert (wrong <= largest * (0.5 / 127 + 1e-3)).all()


def test_settings_of_profiles():
    """Missing or impossible ones are said when the codec is made."""
    for name, bad in (("protected", (None, -1, 257, "1")), ("unit_layers", (None, 0, 2, 1.0)), ("joint", (None, 3))):
        for value in bad:
            profile = profile_of("klt")
            settings = dict(profile.settings) | {name: value}
            with pytest.raises(ValueError, match=name):
                get_codec("klt", profile=replace(profile, settings=settings))
    with pytest.raises(ValueError, match="1 or 2 streams"):
        KLT(profile=profile_of("klt"), streams=3)


def test_a_matrix_without_inverse_decodes_and_does_not_encode():
    good, chunk = profile_of("klt"), chunk_of(SMALL)
    for value in (0.0, 6e-8):
        matrix = torch.full_like(good.tensors["matrix.1.1"], value)
        bad = replace(good, tensors=dict(good.tensors) | {"matrix.1.1": matrix})
        codec = get_codec("klt", profile=bad)
        segments = get_codec("klt", profile=good).encode_unit(1, chunk.keys[1:2], chunk.values[1:2])
        codec.decode_unit(1, SMALL[1:2], 7, torch.float32, [*map(memoryview, segments)], 1)
        with pytest.raises(ValueError, match="no inverse"):
            encode_chunk(chunk, codec)


def test_products_in_bf16(monkeypatch):
    """Where the hardware multiplies bf16, small components are rounded: nothing beside their steps."""
    shapes = (LayerShape(2, 64, 64),)
    profile, chunk = profile_of("klt-xl", shapes), chunk_of(shapes, 70)
    data = encode_chunk(chunk, get_codec("klt-xl", profile=profile))
    found = []
    for fast in (False, True):
        monkeypatch.setattr(transform, "bf16_is_fast", lambda fast=fast: fast)
        found.append(decode_chunk(data, profiles={profile.hash: profile}))
    exact, rounded = found
    for a, b, c in zip(exact.keys, rounded.keys, chunk.keys, strict=True):
        assert 0 < float((a - b).norm()) < 0.1 * float((a - c).norm())


def test_bases_that_no_encoder_writes():
    """Three times as much would not be within int16."""
    profile, shape = profile_of("klt"), SMALL[1]
    codec = get_codec("klt", profile=profile, streams=2)
    keys, values = chunk_of(SMALL).keys[1:2], chunk_of(SMALL).values[1:2]
    good = codec.encode_unit(1, keys, values)
    part = codec._units[1][0]
    coded = codec.rows(part) >= 0
    rows, kept = base_rows(codec._scale(part)[coded]), protected_bytes(1, part.heads)
    for value, fine in ((LARGEST_BASE, True), (LARGEST_BASE + 1, False), (-LARGEST_BASE - 1, False), (-0x8000, False)):
        symbols = np.zeros((6, len(rows)), np.int16)
        symbols[3, 2] = value
        section = rans.encode(symbols, rows, rans.lanes_for(*symbols.shape))
        segments = [memoryview(good[0][:kept] + section), *map(memoryview, good[1:])]
        if fine:
            read, _ = codec.decode_unit(1, [shape], 7, torch.float16, segments[:2], 1)
            assert torch.isfinite(read[0]).all()
            continue
        with pytest.raises(ChunkFileError, match="base") as error:
            codec.decode_unit(1, [shape], 7, torch.float16, segments[:2], 1)
        assert error.value.reason == "symbols"


def test_units_of_klt_xl():
    """By default as many layers as have 2,048 channels, three at most."""
    for shapes, layers in (((SMALL[0],) * 7, 3), ((LayerShape(8, 64, 64),) * 3, 2), ((LayerShape(16, 64, 64),), 1)):
        assert Statistics(shapes, 10, 10).unit_layers == layers
    profile = fit("klt-xl", statistics_of((SMALL[0],) * 2))
    assert get_codec("klt-xl", profile=profile).arrangement((SMALL[0],) * 2, 9).unit_layers == 3
