"""Tokens in eight bits a number."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendkv.codecs.protect import protect, protected_bytes, unprotect
from blendkv.errors import ChunkFileError


def plainly(states: torch.Tensor, heads: list[int]) -> bytes:
    """The same, number by number."""
    scales, numbers = [], []
    for token in states.tolist():
        at = 0
        for head in heads:
            part, at = token[at : at + head], at + head
            scales.append(struct.unpack("<f", struct.pack("<f", max(map(abs, part)) / 127))[0])
            numbers += [round(x / scales[-1]) if scales[-1] else 0 for x in part]
    data = struct.pack(f"<{len(scales)}f{len(numbers)}b", *scales, *numbers)
    return data + bytes(-len(data) % 16)


@pytest.mark.parametrize("heads", [[4], [16, 16], [8, 8, 8, 2, 2, 2], [1, 3]], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_twin(heads, tokens):
    states = torch.randn(tokens, sum(heads), generator=torch.Generator().manual_seed(0)) * 3
    states[:, : heads[0]] *= 100
    data = protect(states, heads)
    assert len(data) == protected_bytes(tokens, heads)
    assert data == plainly(states, heads)
    again, at = unprotect(data + b"more", tokens, heads), 0
    assert again.dtype == torch.float32
    for head in heads:
        part = slice(at, at := at + head)
        limit = states[:, part].abs().amax(1, keepdim=True) * 0.501 / 127
        assert ((again - states)[:, part].abs() <= limit).all()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=6, max_size=6))
def test_any_numbers(numbers):
    states = torch.tensor([numbers])
    again = unprotect(protect(states, [2, 4]), 1, [2, 4])
    assert torch.isfinite(again).all()
    for part in (slice(0, 2), slice(2, 6)):
        limit = float(states[:, part].abs().max()) * 0.501 / 127
        tiny = 127 * float(torch.finfo(torch.float32).tiny)  # below it scales are too small to be divided by
        assert float((again[:, part] / 2 - states[:, part] / 2).abs().max()) <= limit / 2 + tiny


@given(st.binary(min_size=32, max_size=32))
def test_hostile_bytes(data):
    """Finite numbers, which are coded as these bytes, or an error."""
    try:
        states = unprotect(data, 1, [3, 2])
    except ChunkFileError:
        return
    assert torch.isfinite(states).all()
    assert states.shape == (1, 5)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), -float("inf"), 2.7e36, 3.4e38])
def test_scales_that_no_encoder_writes(scale):
    good = protect(torch.ones(1, 5), [3, 2])
    for data in (np.float32(scale).tobytes() + good[4:], good[:8] + b"\x80" + good[9:], good[:-1] + b"\1", good[:-1]):
        with pytest.raises(ChunkFileError) as error:
            unprotect(data, 1, [3, 2])
        assert error.value.reason == "symbols"
