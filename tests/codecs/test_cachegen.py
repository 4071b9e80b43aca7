"""What is cachegen's own: anchors and deltas as the document's arithmetic makes them, and hostile ones."""

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from blendkv.chunkfile import ChunkFile
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec, rans
from blendkv.codecs.cachegen import GROUP, sides_of
from blendkv.errors import ChunkFileError
from tests.codecs import twin
from tests.codecs.test_klt import rows_of
from tests.drawn import SMALL, chunk_of, profile_of

PROFILE = profile_of("cachegen")


@pytest.mark.parametrize("level", [-12, -3, 0, 5])
def test_symbols(tmp_path, level):
    """Each tenth token by its largest channel, the others by their distance to it as it is decoded."""
    PROFILE.save(tmp_path / "profile.safetensors")
    chunk = chunk_of(SMALL, 300)
    data = encode_chunk(chunk, get_codec("cachegen", profile=PROFILE, level=level))
    told = twin.cachegen(data, twin.ProfileFile(tmp_path / "profile.safetensors"))
    for layer in range(3):
        for kind, states in enumerate((chunk.keys[layer], chunk.values[layer])):
            bin_ = float(PROFILE.tensors["bins"][layer, kind]) * 2 ** (level / 4)
            for start in (0, GROUP):
                rows = rows_of(states)[start : start + GROUP]
                anchors = told.symbols[f"anchor.{layer}.{kind}.{start}"]
                scales = np.abs(rows[::10]).max(1, keepdims=True) / 127
                assert np.array_equal(np.abs(anchors).max(1), np.full(len(anchors), 127))
                assert np.abs(anchors - rows[::10] / scales).max() < 0.5001
                others = np.arange(len(rows)) % 10 > 0
                exact = ((rows - np.repeat(anchors * scales, 10, 0)[: len(rows)]) / bin_)[others]
                clear = np.abs(exact % 1 - 0.5) > 2e-3
                deltas = told.symbols[f"delta.{layer}.{kind}.{start}"]
                assert np.array_equal(deltas[clear], np.rint(exact)[clear])
                assert np.abs(deltas - exact).max() < 0.51


def test_bins():
    """Half a standard deviation in the first third of the layers, one in the second, one and a half in the last."""
    shapes = (SMALL[0],) * 3
    bins = profile_of("cachegen", shapes).tensors["bins"]
    for layer, factor in enumerate((0.5, 1.0, 1.5)):
        states = torch.cat([chunk_of(shapes, 600, seed=seed).keys[layer][:, 1:] for seed in range(1, 5)], 1)
        wanted = factor * states.double().var(1, correction=0).mean().sqrt()
        assert float(bins[layer, 0]) * 2**0.5 == pytest.approx(float(wanted), rel=1e-3)  # keys are half an octave finer


def test_anchors_alone():
    """Every token is its anchor."""
    chunk = chunk_of(SMALL, 25)
    data = encode_chunk(chunk, get_codec("cachegen", profile=PROFILE))
    with ChunkFile(data, profiles={PROFILE.hash: PROFILE}) as file:
        anchors, whole = file.read(streams=1), file.read()
    for a, b in zip(anchors.keys, whole.keys, strict=True):
        assert torch.equal(a[:, ::10], b[:, ::10])
        assert torch.equal(a, a[:, ::10].repeat_interleave(10, 1)[:, :25])


def test_values_of_profiles():
    for key, bad in (("bins", 0.0), ("bins", -1.0), ("mean.1.0", 128), ("mean.1.0", -0x8000)):
        tensor = PROFILE.tensors[key].clone()
        tensor.view(-1)[-1] = bad
        with pytest.raises(ValueError, match=key):
            get_codec("cachegen", profile=replace(PROFILE, tensors=dict(PROFILE.tensors) | {key: tensor}))


def scaled(value: float):
    def change(segment: bytes) -> bytes:
        return struct.pack("<f", value) + segment[4:]

    return change


def symbol_of(value: int):
    """One anchor of one token that no encoder writes."""

    def change(segment: bytes) -> bytes:
        side = sides_of(PROFILE)[1][0]
        symbols = np.zeros((1, len(side.means)), np.int16)
        symbols[0, 2] = value - side.means[2]
        return segment[:16] + rans.encode(symbols, side.rows, 4)

    return change


HOSTILE = {
    "negative": scaled(-1.0),
    "infinite": scaled(float("inf")),
    "nan": scaled(float("nan")),
    "too large": scaled(3e38),
    "padding": lambda segment: segment[:15] + b"\1" + segment[16:],
    "cut in the scales": lambda segment: b"",
    "cut behind them": lambda segment: segment[:16],
    "above": symbol_of(128),
    "below": symbol_of(-128),
    "far below": symbol_of(-0x7F00),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_anchors_that_no_encoder_writes(change):
    codec, chunk = get_codec("cachegen", profile=PROFILE), chunk_of(SMALL, 1)
    segments = codec.encode_unit(1, chunk.keys[1:2], chunk.values[1:2])
    for wanted in (symbol_of(127), symbol_of(-127), scaled(2e36)):
        fine = [memoryview(wanted(segments[0])), *map(memoryview, segments[1:])]
        keys, _ = codec.decode_unit(1, SMALL[1:2], 1, torch.float16, fine, 2)
        assert torch.isfinite(keys[0]).all()
    bad = [memoryview(change(segments[0])), *map(memoryview, segments[1:])]
    with pytest.raises(ChunkFileError) as error:
        codec.decode_unit(1, SMALL[1:2], 1, torch.float16, bad, 2)
    assert error.value.reason == "symbols"
