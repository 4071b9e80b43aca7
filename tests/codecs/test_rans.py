"""Sections of symbols, coded and decoded."""

import numpy as np
import pytest

from blendkv.codecs import naive, rans
from blendkv.codecs.tables import ABSENT, tables
from blendkv.errors import ChunkFileError


def drawn(rng, rows, tokens):
    """Symbols as likely as their rows say, zeros where there is none."""
    symbols = tables().lut[rows, rng.integers(0, 4096, (tokens, len(rows)))] >> 24
    return np.where(rows == ABSENT, 0, symbols.astype(np.int16) - 128)


@pytest.mark.parametrize("lanes", rans.LANES)
@pytest.mark.parametrize(("tokens", "channels"), [(1, 1), (7, 3), (13, 64), (5, 100), (0, 5), (4, 0)])
def test_round_trip(tokens, channels, lanes):
    rng = np.random.default_rng(0)
    rows = rng.integers(ABSENT, 35, channels)
    symbols = drawn(rng, rows, tokens)
    payload = rans.encode(symbols, rows, lanes)
    assert len(payload) % 16 == 0
    got = rans.decode(payload, rows, tokens, lanes)
    assert got.dtype == np.int16
    assert np.array_equal(got, symbols)


def test_damage():
    with pytest.raises(ChunkFileError):
        rans.decode(bytes(64), np.array([3]), 9, 4)


@pytest.mark.parametrize("lanes", [4, 32])
def test_same_as_the_twin(lanes):
    rng = np.random.default_rng(1)
    rows = rng.integers(ABSENT, 35, 50)
    symbols = drawn(rng, rows, 9)
    symbols[rng.random(symbols.shape) < 0.1] = -0x8000
    symbols[3] = 0x7FFF
    symbols[:, rows == ABSENT] = 0
    payload = rans.encode(symbols, rows, lanes)
    assert payload == naive.encode(symbols.tolist(), rows.tolist(), lanes)
    assert (
        rans.decode(payload, rows, 9, lanes).tolist()
        == symbols.tolist()
        == naive.decode(payload, rows.tolist(), 9, lanes)
    )
