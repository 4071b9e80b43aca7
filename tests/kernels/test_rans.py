"""Range ANS by the kernel, against numba's (which is tested against the plain twin)."""

import numpy as np
import pytest
import torch

from blendkv.codecs import rans
from blendkv.codecs.tables import ABSENT, tables
from blendkv.errors import ChunkFileError

kernels = pytest.importorskip("blendkv.kernels.rans")

CLASSES = 35


def drawn(rng, rows, tokens):
    symbols = tables().lut[rows, rng.integers(0, 4096, (tokens, len(rows)))] >> 24
    return np.where(rows == ABSENT, 0, symbols.astype(np.int16) - 128)


class Sections:
    """Sections of any sizes, one after the other, decoded in one launch into rows of one output."""

    def __init__(self, sizes, wide, rng):
        self.rows = [rng.integers(ABSENT, CLASSES, channels) for _, channels, _ in sizes]
        self.symbols = [drawn(rng, rows, tokens) for (tokens, _, _), rows in zip(sizes, self.rows, strict=True)]
        self.lanes = [lanes for _, _, lanes in sizes]
        self.wide = wide
        self.contexts = None

    def encode(self):
        contexts = self.contexts or [None] * len(self.rows)
        parts = zip(self.symbols, self.rows, self.lanes, contexts, strict=True)
        self.payloads = [rans.encode(*part) for part in parts]
        return self

    def decode(self, device):
        """`[tokens, wide]` of all sections, what must be there, and the status of each."""
        described = [kernels.describe_rows(rows) for rows in self.rows]
        table, offset, first, token = [], 0, 0, 0
        for payload, channels, symbols, lanes in zip(self.payloads, described, self.symbols, self.lanes, strict=True):
            place = token * self.wide, self.wide
            table.append(kernels.Section(offset, len(payload), first, len(channels), len(symbols), lanes, *place))
            offset, first, token = offset + len(payload), first + len(channels), token + len(symbols)
        data = np.frombuffer(b"".join(self.payloads), np.uint8).copy()
        want, context = np.zeros((2, token, self.wide), np.int16)
        for section, symbols, rows in zip(table, self.symbols, self.rows, strict=True):
            begin = section.to // self.wide
            want[begin : begin + len(symbols), : symbols.shape[1]] = np.where(rows == ABSENT, 0, symbols)
        for section, added in zip(table, self.contexts or [], strict=bool(self.contexts)):
            begin = section.to // self.wide
            context[begin : begin + len(added), : added.shape[1]] = added
        channels, lut = np.concatenate(described), tables().lut.view(np.int32).copy()
        sections = kernels.describe(table, channels, len(data), want.size)
        out = torch.zeros(want.shape, dtype=torch.int16, device=device)
        given = [torch.from_numpy(array).to(device) for array in (data, sections, channels, lut)]
        context = torch.from_numpy(context.astype(np.uint8)).to(device) if self.contexts else None
        status = kernels.decode(*given, out, max(self.lanes), context)
        return out.cpu().numpy(), want, status.tolist()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


SIZES = [(3, 40, 16), (1, 1, 4), (2, 64, 64), (5, 3, 8), (4, 100, 32), (2, 33, 16)]


def test_sections_of_all_sizes(rng, device):
    got, want, status = Sections(SIZES, 128, rng).encode().decode(device)
    assert status == [0] * len(SIZES)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("wild", [0.1, 1.0])
def test_escapes(rng, device, wild):
    sections = Sections(SIZES, 100, rng)
    for symbols in sections.symbols:
        places = rng.random(symbols.shape) < wild
        symbols[places] = rng.choice([-0x8000, 0x7FFF, -128, 128, 999], places.sum())
    got, want, status = sections.encode().decode(device)
    assert status == [0] * len(SIZES)
    assert np.array_equal(got, want)


def test_refinement(rng, device):
    sections = Sections(SIZES, 100, rng)
    sections.rows = [np.where(rows == ABSENT, ABSENT, CLASSES + 7 * rows) for rows in sections.rows]
    sections.contexts = [rng.integers(0, 7, symbols.shape).astype(np.uint8) for symbols in sections.symbols]
    sections.symbols = [rng.integers(-1, 2, symbols.shape).astype(np.int16) for symbols in sections.symbols]
    got, want, status = sections.encode().decode(device)
    assert status == [0] * len(SIZES)
    assert np.array_equal(got, want)


def test_nothing(device):
    rng = np.random.default_rng(0)
    got, want, status = Sections([(0, 5, 4), (2, 0, 4), (2, 3, 4)], 8, rng).encode().decode(device)
    assert status == [0, 0, 0]
    assert np.array_equal(got, want)


def refused(payload, rows, tokens, lanes):
    try:
        rans.decode(payload, rows, tokens, lanes)
    except ChunkFileError:
        return 1
    return 0


def test_damaged_sections_are_told_from_whole_ones(rng, device):
    """The kernel refuses what numba refuses, and its neighbours are right."""
    sections = Sections([(3, 9, 4)] * 24, 9, rng)
    sections.symbols[5][0] = 1000  # some words are symbols, and no damage is seen in them
    sections.encode()
    for i, payload in enumerate(sections.payloads):
        if i % 3:
            damaged = bytearray(payload)
            damaged[rng.integers(len(payload))] ^= 1 << rng.integers(8)
            sections.payloads[i] = bytes(damaged)
        if i % 7 == 1:
            sections.payloads[i] = payload[:16] + b"\xff" * 16
        if i % 7 == 2:
            sections.payloads[i] = payload + bytes(16)
    got, want, status = sections.decode(device)
    parts = zip(sections.payloads, sections.rows, [3] * 24, sections.lanes, strict=True)
    assert status == [refused(*part) for part in parts]
    assert 5 < sum(status) < 24
    for i in range(0, 24, 21):
        assert np.array_equal(got[3 * i : 3 * i + 3], want[3 * i : 3 * i + 3])


@pytest.mark.gpu
def test_long_sections(rng):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    sizes = [(256, 1024, 64), (64, 1024, 32), (256, 192, 32), (64, 192, 8), (17, 1024, 16)] * 8
    got, want, status = Sections(sizes, 1024, rng).encode().decode("cuda")
    assert status == [0] * len(sizes)
    assert np.array_equal(got, want)


FINE = kernels.Section(0, 32, 0, 5, 2, 4, 0, 6)
CHANNELS = kernels.describe_rows(np.array([3, 3, ABSENT, 3, 3, 3]))


def test_description():
    assert kernels.describe([FINE], CHANNELS, 32, 12).tolist() == [list(FINE)]
    assert kernels.describe([], CHANNELS, 0, 0).shape == (0, 8)
    assert kernels.describe([FINE._replace(tokens=0, to=12)], CHANNELS, 32, 12).shape == (1, 8)


@pytest.mark.parametrize(
    "wrong", [{"offset": -4}, {"offset": 16}, {"length": 24}, {"length": 0}, {"offset": 2, "length": 16}], ids=str
)
def test_a_section_outside_the_data_is_damage(wrong):
    with pytest.raises(ChunkFileError, match="section 1"):
        kernels.describe([FINE, FINE._replace(**wrong)], CHANNELS, 32, 12)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lanes": 3},
        {"first": 1},
        {"first": -1},
        {"coded": -1},
        {"tokens": -1},
        {"tokens": 3},
        {"to": 1},
        {"to": -1},
        {"stride": -5},
    ],
    ids=str,
)
def test_a_section_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="section 0"):
        kernels.describe([FINE._replace(**wrong)], CHANNELS, 32, 12)


@pytest.mark.parametrize("rows", [np.zeros(40_000, int), np.array([280]), np.array([-2])], ids=["many", "280", "-2"])
def test_rows_that_cannot_be_are_refused(rows):
    with pytest.raises(ValueError, match="channels of rows"):
        kernels.describe_rows(rows)
