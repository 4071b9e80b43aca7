"""The attention that keys get, against the naive twin."""

import pytest
import torch

from blendkv.kernels import naive

kernels = pytest.importorskip("blendkv.kernels.mass")

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter cannot multiply bf16 matrices")
DTYPES = (torch.float32, pytest.param(torch.bfloat16, marks=ON_GPU), torch.float16)
BOUND = 1e-5
"""For every dtype: products of bf16 or fp16 are exact in fp32."""


def scene(buffers, device, dtype, heads=2, groups=3, dim=16, count=11, tokens=75, capacities=(100,)):
    """Layers filled up to `tokens`, NaN beyond; queries `[2, Q, S, D]` as models hand them over; rows `[2, S]`."""
    cache = buffers(2, heads, dim, dim, capacities, dtype).fill(tokens)
    query = torch.randn(2, count, heads * groups, dim, device=device).to(dtype).transpose(1, 2)
    rows = torch.stack([torch.randperm(tokens)[:count].sort().values for _ in range(2)]).to(device)
    return cache, query, rows


def compare(cache, query, rows, close, layer=0, tokens=None, **options):
    keys = cache.layers[layer][0][:, :, : cache.filled]
    tokens = tokens or cache.filled
    options = {"scaling": query.shape[-1] ** -0.5, **options}
    got = kernels.attention_mass(query, rows, cache.table, layer, keys.shape[1], tokens, **options)
    assert got.dtype == torch.float32
    close(got[:, : cache.filled], naive.attention_mass(query, rows, keys, **options), BOUND)
    assert not got[:, cache.filled :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "groups", "dim", "count"), [(2, 3, 80, 17), (1, 7, 20, 1), (1, 1, 64, 70)])
def test_as_the_twin(buffers, close, device, dtype, heads, groups, dim, count):
    cache, query, rows = scene(buffers, device, dtype, heads, groups, dim, count)
    compare(cache, query, rows, close)


@pytest.mark.parametrize(
    "options",
    [{"window": 1}, {"window": 20}, {"window": 500}, {"softcap": 2.0}, {"softcap": 0.1}, {"scaling": 2.0}],
    ids=str,
)
def test_options(buffers, close, device, options):
    compare(*scene(buffers, device, torch.float32), close, **options)


def test_sinks_take_their_share(buffers, close, device):
    cache, query, rows = scene(buffers, device, torch.float16)
    sinks = torch.linspace(-3, 6, 6, device=device).half()
    compare(cache, query, rows, close, sinks=sinks, window=9)
    got = kernels.attention_mass(query, rows, cache.table, 0, 2, 75, 0.25, sinks=sinks)
    assert (got.sum(1) < 0.9 * rows.shape[1] * 6).all()


def test_padding_gets_nothing(buffers, close, device):
    cache, query, rows = scene(buffers, device, torch.float32)
    padding = torch.ones(2, 75, dtype=torch.bool, device=device)
    padding[1, :40] = False
    rows[1, :5], rows[1, 5:] = 10, torch.arange(40, 46)  # rows of padding see nothing, and count nothing
    compare(cache, query, rows, close, padding=padding, softcap=3.0)
    compare(cache, query, rows, close, padding=padding, window=20)
    got = kernels.attention_mass(query, rows, cache.table, 0, 2, 75, 0.25, padding=padding)
    assert not got[1, :40].any()
    close(got.sum(1), torch.tensor([11.0, 6.0], device=device) * 6, BOUND)


def test_other_layers_and_more_tokens_than_filled(buffers, close, device):
    cache, query, rows = scene(buffers, device, torch.float32, capacities=(75, 81, 130))
    for layer in range(3):
        compare(cache, query, rows, close, layer=layer)
    compare(cache, query, rows, close, layer=2, tokens=120)


def test_more_keys_than_parts(buffers, close, device, monkeypatch):
    monkeypatch.setattr(kernels, "SPLITS", 2)
    cache, query, rows = scene(buffers, device, torch.float32, tokens=150, capacities=(160,))
    compare(cache, query, rows, close)
    compare(cache, query, rows, close, window=70)
