"""Scattering and comparing rows, against the naive twins."""

import pytest
import torch

from blendkv.kernels import naive

kernels = pytest.importorskip("blendkv.kernels.rows")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [(16, 16, 2, 1), (80, 64, 3, 17), (20, 12, 1, 35), (64, 18, 2, 16)]
"""Key dim, value dim, heads, rows."""


def states(heads, count, dim, dtype, device):
    """`[2, H, S, D]` seen as models hand them over: `[B, S, H, D]` with two dimensions swapped."""
    return torch.randn(2, count, heads, dim, device=device).to(dtype).transpose(1, 2)


def rows_of(count, below, device, left=0):
    """`[2, S]` ascending, the second row padded on the left with its first; a slice, as the last rows are."""
    rows = torch.stack([torch.randperm(below)[: count + 3].sort().values for _ in range(2)])
    rows[1, : 3 + left] = rows[1, 3 + left]
    return rows.to(device)[:, 3:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "value_dim", "heads", "count"), SIZES)
def test_scatter(buffers, device, dtype, dim, value_dim, heads, count):
    cache = buffers(2, heads, dim, value_dim, (50, 61), dtype)
    for layer in (1, 0):
        keys, values = (states(heads, count, d, dtype, device) for d in (dim, value_dim))
        left = min(4, count - 1)
        rows = rows_of(count, 50, device, left)
        for t in (keys, values):
            t[1, :, :left] = t[1, :, left : left + 1]
        kernels.scatter(keys, values, rows, cache.table, layer)
        naive.scatter(keys, values, rows, *cache.twins[layer])
        for got, want in zip(cache.layers[layer], cache.twins[layer], strict=True):
            assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize(("dim", "value_dim", "heads", "count"), SIZES)
def test_deviation(buffers, close, device, dtype, which, dim, value_dim, heads, count):
    cache = buffers(2, heads, dim, value_dim, (50, 61), dtype).fill(48)
    column = ("keys", "values").index(which)
    fresh = states(heads, count, (dim, value_dim)[column], dtype, device)
    for layer, rows in ((0, rows_of(count, 48, device)), (1, None)):
        got = kernels.deviation(fresh, rows, cache.table, layer, which)
        assert got.dtype == torch.float32
        close(got, naive.deviation(fresh, rows, cache.layers[layer][column]), 1e-6)
