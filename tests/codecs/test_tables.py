"""The integers in `data/rans.json`, and the forms made of them."""

import json

import numpy as np
import pytest

from blendkv.codecs import classes, tables

T = tables.tables()


def test_the_file_is_what_its_generator_makes():
    assert json.loads(classes.FILE.read_text()) == classes.generate()


def test_rows_share_4096_slots():
    assert T.freq.shape == (classes.COUNT * (1 + tables.CONTEXTS), 256)
    assert (T.freq.sum(1) == 4096).all()
    assert T.freq.max() < 4096  # twelve bits hold it
    symbols, refinements = T.freq[: classes.COUNT], T.freq[classes.COUNT :]
    assert (symbols[:, tables.ESCAPE] >= 1).all()
    assert (symbols[:, 1:] == symbols[:, :0:-1]).all()
    assert (np.diff(symbols[:, 128:].astype(int)) <= 0).mean() > 0.99  # rounding may leave zero a little too few
    assert (refinements[:, 127:130] >= 1).all()
    assert (refinements[:, 127:130].sum(1) == 4096).all()
    by_base = refinements.reshape(classes.COUNT, tables.CONTEXTS, 256)[..., 127:130]
    assert (by_base == by_base[:, ::-1, ::-1]).all()


@pytest.mark.parametrize("row", [0, 20, 34, 35, 150, 279])
def test_lut(row):
    slot = 0
    for index in range(256):
        assert T.cum[row, index] == slot
        for within in range(T.freq[row, index]):
            assert T.lut[row, slot] == index << 24 | int(T.freq[row, index]) << 12 | within
            slot += 1


def test_tables_are_not_written_to():
    with pytest.raises(ValueError, match="read-only"):
        T.lut[0, 0] = 1


@pytest.mark.parametrize("index", range(0, classes.COUNT, 4))
def test_rows_cost_what_numbers_of_their_scale_must(index):
    """Bits of a symbol, 16 more for an escape, within 1.2% and 0.001 of the entropy."""
    scale = 2 ** ((classes.FIRST + classes.SPACING * index) / classes.UNITS)
    chance = np.array([classes.probability(k, scale) for k in range(-2000, 2001)])
    freq = np.zeros(len(chance))
    freq[2000 - 127 : 2000 + 128] = T.freq[index, 1:]
    bits = 12 - np.log2(np.where(freq > 0, freq, T.freq[index, 0] / 2**16))
    entropy = -(chance[chance > 0] * np.log2(chance[chance > 0])).sum()
    assert entropy <= chance @ bits <= 1.012 * entropy + 0.001


def test_row_of_log2():
    every = np.arange(-300, 300)
    rows = tables.row_of_log2(every)
    assert rows.dtype == np.int16
    assert (rows[every < -54] == tables.ABSENT).all()
    assert list(tables.row_of_log2(np.array([-54, -51, -50, 0, 83, 84, 299]))) == [0, 0, 1, 13, 34, 34, 34]
    assert (np.abs(every - (4 * rows - 52))[(every >= -54) & (every < 86)] <= 2).all()


def test_refinement_rows():
    fine = tables.refinement_row_of_log2(np.array([-60, -52, 84]))
    assert list(fine) == [tables.ABSENT, 35, 35 + 7 * 34]
    assert list(tables.refinement_context(np.array([-99, -3, -1, 0, 2, 3, 40]))) == [0, 0, 2, 3, 5, 6, 6]


@pytest.mark.parametrize("log2", [-20, 0, 24])
def test_base_and_refinement_cost_as_much_as_the_symbol(log2):
    rng = np.random.default_rng(0)
    gauss, laplace = rng.normal(size=200_000), rng.laplace(size=200_000) / 2**0.5
    fine = np.round(np.where(rng.random(200_000) < 0.7, gauss, laplace) * 2 ** (log2 / 16)).astype(int)
    base = np.round(fine / 3).astype(int)

    def bits(row, symbol):
        kept = (np.abs(symbol) < 128) & (T.freq[row, np.clip(symbol, -127, 127) + 128] > 0)
        freq = np.where(kept, T.freq[row, np.clip(symbol, -127, 127) + 128], T.freq[row, 0] / 2**16)
        return (12 - np.log2(freq)).mean()

    row = tables.refinement_row_of_log2(np.array(log2)) + tables.refinement_context(base).astype(int)
    two = bits(tables.row_of_log2(np.array(log2 - tables.THIRD)), base) + bits(row, fine - 3 * base)
    assert two <= 1.01 * bits(tables.row_of_log2(np.array(log2)), fine)
