"""Sections of symbols: coded and decoded, as the plain twin does it, and damaged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import caching

from blendkv.codecs import loops, naive, rans
from blendkv.codecs.tables import ABSENT, LANES, tables
from blendkv.errors import ChunkFileError

CLASSES = 35
LONG = settings(max_examples=60, deadline=None)


def drawn(rng, rows, tokens):
    """Symbols as likely as their rows say, zeros where there is none."""
    symbols = tables().lut[rows, rng.integers(0, 4096, (tokens, len(rows)))] >> 24
    return np.where(rows == ABSENT, 0, symbols.astype(np.int16) - 128)


def both(symbols, rows, lanes, context=None):
    """A section, the same by both coders, that both decode."""
    as_lists = symbols.tolist(), rows.tolist(), lanes, context if context is None else context.tolist()
    payload = rans.encode(symbols, rows, lanes, context)
    assert len(payload) % 16 == 0
    assert payload == naive.encode(*as_lists)
    got = rans.decode(payload, rows, len(symbols), lanes, context)
    assert got.dtype == np.int16
    assert got.shape == symbols.shape
    assert got.tolist() == naive.decode(payload, as_lists[1], len(symbols), lanes, as_lists[3])
    assert np.array_equal(got, np.where(rows == ABSENT, 0, symbols))
    return payload


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("tokens", "channels"), [(1, 1), (7, 3), (13, 64), (5, 100), (0, 5), (4, 0), (3, 129)])
def test_sizes(rng, tokens, channels, lanes):
    rows = rng.integers(ABSENT, CLASSES, channels)
    both(drawn(rng, rows, tokens), rows, lanes)


@LONG
@given(st.integers(1, 9), st.integers(1, 70), st.sampled_from(LANES), st.floats(0, 1), st.integers(0, 2**32))
def test_any_symbols(tokens, channels, lanes, wild, seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(ABSENT, CLASSES, channels)
    symbols = drawn(rng, rows, tokens)
    places = rng.random(symbols.shape) < wild
    symbols[places] = rng.integers(-0x8000, 0x8000, places.sum())
    both(symbols, rows, lanes)


@pytest.mark.parametrize("value", [0, 1, -1, 127, -127, 128, -128, 129, 0x7FFF, -0x8000])
@pytest.mark.parametrize("row", [0, CLASSES - 1])
def test_one_symbol_only(value, row):
    both(np.full((6, 11), value, np.int16), np.full(11, row), 8)


def test_absent_channels(rng):
    rows = np.full(10, ABSENT)
    nothing = both(np.ones((5, 10), np.int16), rows, 4)
    assert len(nothing) == 16
    rows[[2, 9]] = 7
    payload = both(drawn(rng, rows, 5), rows, 4)
    assert payload == rans.encode(rans.decode(payload, rows, 5, 4)[:, [2, 9]], rows[[2, 9]], 4)


def test_refinement(rng):
    rows = rng.choice([ABSENT, CLASSES, CLASSES + 7 * 20], 30)
    context = rng.integers(0, 7, (8, 30)).astype(np.uint8)
    symbols = rng.integers(-1, 2, (8, 30)).astype(np.int16)
    both(symbols, rows, 8, context)
    symbols[3, int(np.flatnonzero(rows >= 0)[0])] = 2
    with pytest.raises(ValueError, match="must be -1, 0 or 1"):
        rans.encode(symbols, rows, 8, context)


def test_size_is_near_the_entropy(rng):
    rows = np.repeat(rng.integers(5, 20, 24), 8)
    symbols = drawn(rng, rows, 256)
    ideal = (12 - np.log2(tables().freq[rows, symbols + 128])).sum() + 16 * (symbols == -128).sum()
    lanes = rans.lanes_for(256, 192)
    payload = rans.encode(symbols, rows, lanes)
    assert 8 * len(payload) < 1.01 * ideal
    assert np.array_equal(rans.decode(payload, rows, 256, lanes), symbols)


@pytest.mark.parametrize(
    ("tokens", "channels", "lanes"),
    [(64, 192, 8), (256, 192, 32), (256, 1024, 64), (64, 1024, 32), (1, 1, 4), (0, 0, 4), (9999, 5, 4), (9999, 9, 8)],
)
def test_lanes_for(tokens, channels, lanes):
    assert rans.lanes_for(tokens, channels) == lanes


def test_other_integers_and_layouts(rng):
    rows = rng.integers(0, CLASSES, 40)
    symbols = drawn(rng, rows, 6)
    want = rans.encode(symbols, rows, 8)
    assert rans.encode(symbols.astype(np.int64), rows.astype(np.int16), 8) == want
    assert rans.encode(np.asfortranarray(symbols), rows.astype(np.uint8), 8) == want
    shifted = memoryview(b"x" + want)[1:]
    assert np.array_equal(rans.decode(shifted, rows, 6, 8), symbols)


def test_bad_arguments():
    symbols, rows = np.zeros((2, 3), np.int64), np.zeros(3, int)
    for wrong in (0x8000, -0x8001):
        with pytest.raises(ValueError, match="within int16"):
            rans.encode(symbols + wrong, rows, 4)
    with pytest.raises(ValueError, match="integers"):
        rans.encode(symbols / 2, rows, 4)
    with pytest.raises(ValueError, match="3 lanes"):
        rans.encode(symbols, rows, 3)
    with pytest.raises(ValueError, match="rows"):
        rans.encode(symbols, rows + 280, 4)
    with pytest.raises(ValueError, match="rows"):
        rans.decode(bytes(16), rows - 2, 2, 4)
    with pytest.raises(ValueError, match="channels"):
        rans.encode(symbols, rows[:2], 4)
    with pytest.raises(ValueError, match="context"):
        rans.encode(symbols, rows, 4, np.zeros((2, 2), np.uint8))


def outcome(decode, *args):
    try:
        return np.asarray(decode(*args)).tolist()
    except ChunkFileError as error:
        return f"refused: {error.reason}"


@pytest.fixture(scope="module")
def section():
    rng = np.random.default_rng(0)
    rows = rng.integers(ABSENT, 16, 37)
    symbols = drawn(rng, rows, 20)
    symbols[3, :5] = 1000
    return rans.encode(symbols, rows, 8), rows, 20, 8


def test_every_damaged_byte_is_noticed_or_harmless_in_both_coders(section):
    payload, rows, tokens, lanes = section
    refused = 0
    for at in range(len(payload)):
        damaged = bytearray(payload)
        damaged[at] ^= 1 + at % 255
        got = outcome(rans.decode, bytes(damaged), rows, tokens, lanes)
        assert got == outcome(naive.decode, bytes(damaged), rows.tolist(), tokens, lanes)
        refused += got == "refused: symbols"
    assert refused == len(payload) - 2 * 5  # all but those of the escaped symbols


@pytest.mark.parametrize("length", [0, 4, 16, 31, 32, 48])
def test_cut_short(section, length):
    payload, *rest = section
    assert outcome(rans.decode, payload[:length], *rest) == "refused: symbols"
    assert outcome(rans.decode, payload[:-16], *rest) == "refused: symbols"


def test_too_long(section):
    payload, *rest = section
    for coder in (rans, naive):
        assert outcome(coder.decode, payload + bytes(16), *rest) == outcome(coder.decode, payload, *rest)  # as padding
        assert outcome(coder.decode, payload + bytes(15) + b"\1", *rest) == "refused: symbols"


def test_padding_is_zeros(rng):
    rows = np.full(9, 20)
    for tokens in range(1, 9):
        payload = rans.encode(drawn(rng, rows, tokens), rows, 4)
        if payload[-2:] == b"\0\0":
            assert outcome(rans.decode, payload[:-1] + b"\1", rows, tokens, 4) == "refused: symbols"


@LONG
@given(st.binary(max_size=400), st.integers(0, 40), st.integers(0, 40), st.sampled_from(LANES))
def test_hostile_bytes(payload, tokens, channels, lanes):
    payload += bytes(-len(payload) % 16)
    rows = np.arange(channels) % CLASSES
    assert outcome(rans.decode, payload, rows, tokens, lanes) == outcome(
        naive.decode, payload, rows.tolist(), tokens, lanes
    )


def test_compiled_without_a_folder_to_cache_in(monkeypatch):
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    again = loops._compiled(loops.pop.py_func)
    assert isinstance(again._cache, caching.NullCache)
