"""Caches for kernels: buffers that are NaN where nobody wrote, and the table that says where they are."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

pytest.importorskip("triton")

from blendkv.kernels.table import describe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Buffers:
    """Layers of (keys, values) `[B, H, capacity, D]`, all NaN, and twins for the naive kernels to write to."""

    layers: list
    twins: list = field(init=False)
    filled: int = 0

    def __post_init__(self):
        self.twins = [tuple(t.clone() for t in layer) for layer in self.layers]

    @property
    def table(self):
        return torch.from_numpy(describe(self.layers, self.filled)).to(DEVICE)

    def fill(self, tokens):
        """Random numbers in the first tokens of every layer."""
        self.filled = tokens
        for layer, twins in zip(self.layers, self.twins, strict=True):
            for t, twin in zip(layer, twins, strict=True):
                t[:, :, :tokens] = torch.randn(*t.shape[:2], tokens, t.shape[3], device=DEVICE)
                twin.copy_(t)
        return self


@pytest.fixture
def buffers():
    """`buffers(batch, heads, dim, value_dim, capacities, dtype)`."""

    def make(batch, heads, dim, value_dim, capacities, dtype):
        return Buffers(
            [
                tuple(torch.full((batch, heads, c, d), torch.nan, dtype=dtype, device=DEVICE) for d in (dim, value_dim))
                for c in capacities
            ]
        )

    return make


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def close():
    """`close(got, want, bound)`: NaN at the same places, and RMS of the difference within `bound` of the RMS."""

    def check(got, want, bound):
        assert got.shape == want.shape
        hole = want.isnan()
        assert torch.equal(got.isnan(), hole)
        got, want = got.double()[~hole], want.double()[~hole]
        assert (got - want).square().sum().sqrt() <= bound * want.square().sum().sqrt()

    return check
