"""Placing chunks, against the naive twin and against `Rotation.rotate`."""

import numpy as np
import pytest
import torch

from blendkv.chunk import ChunkCache
from blendkv.kernels import naive
from blendkv.kernels.table import describe
from blendkv.rope import Rotation

placing = pytest.importorskip("blendkv.kernels.placing")

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-4 if torch.cuda.is_available() else 6e-3, torch.float16: 1e-4}
"""Of the same fp32 arithmetic in another order: few numbers fall on the other side of a rounding. (Triton's interpreter
does not round to bf16, it cuts off.)"""
TOKENS = 150


def angles_of(batch, tokens, n, device):
    at = torch.arange(tokens, dtype=torch.float64)[None] + torch.tensor([[3.0], [70.0]])[:batch]
    turn = (at[..., None] * 10_000.0 ** (-torch.arange(n, dtype=torch.float64) / n))[:, None]
    return (turn.cos() * 1.25).float().to(device), (turn.sin() * 1.25).float().to(device)


def chunk_of(tokens, layers, heads, dim, value_dim, dtype, device):
    keys, values = (
        tuple(torch.randn(heads, tokens, d, device=device).to(dtype) for _ in range(layers)) for d in (dim, value_dim)
    )
    return ChunkCache(torch.arange(tokens), keys, values, "fingerprint")


def place(cache, placed, layers, sizes, dtype, pairing, angles, device):
    """`placed`: (chunk, offset, row, start, length)."""
    pieces, tiles = placing.cut([(row, start, length, len(chunk)) for chunk, _, row, start, length in placed])
    sources = placing.locate([(chunk.addresses, offset) for chunk, offset, *_ in placed], layers)
    on_device = (torch.from_numpy(a).to(device) for a in (sources, pieces, tiles))
    placing.rotate_and_place(*on_device, cache.table, layers, sizes, dtype, pairing, angles)
    for layer in layers:
        parts = [(c.keys[layer][:, o : o + n], c.values[layer][:, o : o + n]) for c, o, _, _, n in placed]
        where = [(row, start) for _, _, row, start, _ in placed]
        naive.rotate_and_place(parts, where, *cache.twins[layer], pairing, angles)


def scene(buffers, device, dtype, dim, value_dim, heads, layers=3):
    """Pieces that begin anywhere, one shorter than a block, one cut out of the middle of its chunk, two rows."""
    cache = buffers(2, heads, dim, value_dim, (TOKENS, TOKENS + 7, TOKENS + 20)[:layers], dtype)
    big, small = (chunk_of(t, layers, heads, dim, value_dim, dtype, device) for t in (77, 5))
    return cache, [(big, 0, 0, 6, 77), (small, 0, 0, 83, 5), (big, 13, 1, 101, 40), (small, 1, 1, 9, 1)]


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("dim", "n", "value_dim", "heads"),
    [(16, 8, 16, 2), (80, 20, 64, 1), (20, 7, 12, 5), (96, 48, 96, 1), (18, 9, 7, 3)],
)
def test_as_the_twin(buffers, close, device, dtype, pairing, dim, n, value_dim, heads):
    cache, placed = scene(buffers, device, dtype, dim, value_dim, heads)
    angles = angles_of(2, TOKENS, n, device)
    place(cache, placed, range(0, 3, 2), (heads, dim, value_dim), dtype, pairing, angles, device)
    for layer, twins in zip(cache.layers, cache.twins, strict=True):
        close(layer[0], twins[0], ROUNDING[dtype])  # and NaN wherever nothing was placed, the layer between included
        assert torch.equal(layer[1].nan_to_num(7), twins[1].nan_to_num(7))


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("dim", "n"), [(64, 32), (24, 5)])
def test_as_the_rotation(buffers, close, device, dtype, pairing, dim, n):
    cache, placed = scene(buffers, device, dtype, dim, dim, 2, layers=1)
    angles = angles_of(2, TOKENS, n, device)
    place(cache, placed, range(1), (2, dim, dim), dtype, pairing, angles, device)
    for chunk, offset, row, start, length in placed:
        here = slice(start, start + length)
        turn = tuple(angle[row : row + 1, :, here] for angle in angles)
        want = Rotation(pairing).rotate(chunk.keys[0][None, :, offset : offset + length], turn)
        close(cache.layers[0][0][row : row + 1, :, here], want, ROUNDING[dtype])


def test_backwards(buffers, close, device):
    """The sine of a rotation that turns backwards comes negative: x1 cos + x2 sin, x2 cos - x1 sin."""
    cache, placed = scene(buffers, device, torch.float32, 16, 16, 2, layers=1)
    cos, sin = angles_of(2, TOKENS, 8, device)

    def rotary(x, position_ids):
        return torch.cat([cos, cos], -1)[:, 0], torch.cat([sin, sin], -1)[:, 0]

    rotary.buffers = lambda: iter([cos])
    angles = Rotation("half", backwards=True).angles(rotary, torch.arange(TOKENS, device=device)[None])
    place(cache, placed, range(1), (2, 16, 16), torch.float32, "half", angles, device)
    for chunk, offset, row, start, length in placed:
        here = slice(start, start + length)
        a, b = chunk.keys[0][:, offset : offset + length].chunk(2, dim=-1)
        c, s = cos[row, :, here], sin[row, :, here]
        close(cache.layers[0][0][row, :, here], torch.cat([a * c + b * s, b * c - a * s], -1), 1e-6)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_without_rotation_is_a_copy(buffers, device, dtype):
    cache, placed = scene(buffers, device, dtype, 20, 12, 2, layers=1)
    place(cache, placed, range(1), (2, 20, 12), dtype, "none", None, device)
    for got, want in zip(cache.layers[0], cache.twins[0], strict=True):
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))


def test_no_pieces(buffers, device):
    cache = buffers(1, 1, 16, 16, (10,), torch.float32)
    pieces, tiles = (torch.from_numpy(a).to(device) for a in placing.cut([]))
    sources = torch.empty(1, 0, 2, dtype=torch.long, device=device)
    sizes = (1, 16, 16)
    placing.rotate_and_place(sources, pieces, tiles, cache.table, range(1), sizes, torch.float32, "none", None)
    assert cache.layers[0][0].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_from_pinned_memory(buffers, close, device):
    cache, placed = scene(buffers, device, torch.bfloat16, 128, 128, 8)
    chunks = {id(chunk): chunk.to("cpu") for chunk, *_ in placed}
    pinned = {
        name: ChunkCache(c.ids, *(tuple(t.pin_memory() for t in states) for states in (c.keys, c.values)), "")
        for name, c in chunks.items()
    }
    angles = angles_of(2, TOKENS, 64, device)
    spans = [(row, start, length, len(chunk)) for chunk, _, row, start, length in placed]
    sources = placing.locate([(pinned[id(c)].addresses, o) for c, o, *_ in placed], range(3))
    tensors = [torch.from_numpy(a).to(device) for a in (sources, *placing.cut(spans))]
    placing.rotate_and_place(*tensors, cache.table, range(3), (8, 128, 128), torch.bfloat16, "half", angles)
    got = [tuple(t.clone() for t in layer) for layer in cache.layers]
    place(cache, placed, range(3), (8, 128, 128), torch.bfloat16, "half", angles, device)
    for ours, layer in zip(got, cache.layers, strict=True):
        for a, b in zip(ours, layer, strict=True):
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def test_cut_and_locate():
    block = placing.BLOCK_T
    pieces, tiles = placing.cut([(0, 5, 2 * block + 1, 999), (1, 0, block, block)])
    assert pieces.tolist() == [[0, 5, 2 * block + 1, 999], [1, 0, block, block]]
    assert tiles.tolist() == [[0, 0], [0, block], [0, 2 * block], [1, 0]]
    chunk = chunk_of(9, 3, 2, 16, 8, torch.bfloat16, "cpu")
    found = placing.locate([(chunk.addresses, 0), (chunk.addresses, 4)], range(1, 3))
    assert found.dtype == np.int64
    assert found.shape == (2, 2, 2)
    for i, layer in enumerate((1, 2)):
        for j, offset in enumerate((0, 4)):
            want = [t[layer][:, offset:].data_ptr() for t in (chunk.keys, chunk.values)]
            assert found[i, j].tolist() == want


def test_what_kernels_cannot_address():
    good = torch.zeros(1, 2, 8, 16)
    with pytest.raises(ValueError, match="contiguous"):
        describe([(good, good.mT)], 0)
    with pytest.raises(ValueError, match="16 bytes"):
        describe([(good, torch.zeros(257)[1:].view(1, 2, 8, 16))], 0)
    assert describe([(good, good)], 3).tolist() == [[good.data_ptr(), good.data_ptr(), 8, 3]]
