"""Attention of scattered rows, against the naive twin."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendkv.kernels import naive

kernels = pytest.importorskip("blendkv.kernels.attention")
Tiling = kernels.Tiling

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter cannot multiply bf16 matrices")
HALVES = (torch.float16, pytest.param(torch.bfloat16, marks=ON_GPU))
DTYPES = (torch.float32, *HALVES)
BOUND = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
SMALL = Tiling(16, 16, 4, 1)
"""Blocks so small that a few rows and keys take several."""
SPLIT = SMALL._replace(splits=4)
"""Parts of 32 keys of 75, the last of them empty. In the interpreter each line is another program: few lines, then."""


def scene(
    buffers, device, dtype=torch.float32, heads=1, groups=2, dim=16, value_dim=None, count=9, tokens=75, capacities=()
):
    """Layers filled up to `tokens`, NaN beyond; queries `[2, Q, S, D]` as models hand them over; rows `[2, S]`."""
    cache = buffers(2, heads, dim, value_dim or dim, capacities or (tokens + 13,), dtype).fill(tokens)
    query = torch.randn(2, count, heads * groups, dim, device=device).to(dtype).transpose(1, 2)
    rows = torch.stack([torch.randperm(tokens)[:count].sort().values for _ in range(2)]).to(device)
    return cache, query, rows


def compare(cache, query, rows, close, layer=0, tiling=SMALL, **options):
    keys, values = cache.layers[layer]
    options = {"scaling": query.shape[-1] ** -0.5, **options}
    shape = (keys.shape[1], values.shape[-1])
    got = kernels.scattered_attention(query, rows, cache.table, layer, *shape, tiling=tiling, **options)
    assert got.dtype == query.dtype
    if options.get("padding") is not None:
        options["padding"] = options["padding"][:, : cache.filled]
    keys, values = (t[:, :, : cache.filled].double() for t in (keys, values))
    close(got, naive.scattered_attention(query.double(), rows, keys, values, **options), BOUND[query.dtype])
    return got


def test_the_twin_is_attention(close, device):
    query, keys = (torch.randn(2, h, 40, 16, device=device) for h in (6, 2))
    values = torch.randn(2, 2, 40, 24, device=device)
    want = torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
    rows = torch.tensor([[3, 3, 17, 39], [0, 1, 2, 20]], device=device)
    query, want = (torch.stack([t[b, :, rows[b]] for b in range(2)]) for t in (query, want))
    for dtype in (torch.float32, torch.float64):
        got = naive.scattered_attention(query.to(dtype), rows, keys, values, 0.25)
        assert got.dtype == dtype
        close(got, want.transpose(1, 2), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "value_dim", "count", "splits"),
    [
        (2, 3, 64, 64, 17, 1),
        (2, 4, 80, 80, 1, 2),
        (1, 7, 96, 64, 1, 4),
        (1, 1, 128, 128, 33, 1),
        (1, 1, 256, 256, 17, 1),
        (2, 1, 192, 128, 17, 1),
        (1, 4, 64, 80, 17, 1),
    ],
)
def test_as_the_twin(buffers, close, device, dtype, heads, groups, dim, value_dim, count, splits):
    cache, query, rows = scene(buffers, device, dtype, heads, groups, dim, value_dim, count)
    compare(cache, query, rows, close, tiling=SMALL._replace(splits=splits))


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 9},
        {"window": 40},
        {"window": 500},
        {"softcap": 2.0},
        {"softcap": 50.0, "window": 20},
        {"scaling": 2.0},
    ],
    ids=str,
)
def test_options(buffers, close, device, options):
    compare(*scene(buffers, device), close, **options)


@pytest.mark.parametrize("window", [1, 40])
@pytest.mark.parametrize("splits", [2, 4])
def test_windows_and_parts(buffers, close, device, splits, window):
    compare(*scene(buffers, device), close, tiling=SMALL._replace(splits=splits), window=window)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("tiling", [SMALL, SPLIT], ids=["whole", "split"])
def test_options_together(buffers, close, device, dtype, tiling):
    cache, query, rows = scene(buffers, device, dtype)
    options = {"sinks": torch.linspace(-1, 2, 2, device=device).to(dtype), "softcap": 3.0, "window": 30}
    padding = torch.rand(2, 75, device=device) < 0.5
    compare(cache, query, rows, close, tiling=tiling, padding=padding, **options)


@pytest.mark.parametrize("tiling", [SMALL, SPLIT], ids=["whole", "split"])
def test_sinks_take_their_share(buffers, close, device, tiling):
    cache, query, rows = scene(buffers, device)
    sinks = torch.tensor([-3.0, 60.0], device=device)
    got = compare(cache, query, rows, close, tiling=tiling, sinks=sinks)
    assert got[:, :, 1].abs().max() < 1e-15
    compare(cache, query, rows, close, tiling=tiling, sinks=sinks - 57, window=9)


@pytest.mark.parametrize("tiling", [SMALL, SPLIT], ids=["whole", "split"])
def test_left_padding_repeats_the_first_row(buffers, close, device, tiling):
    cache, query, rows = scene(buffers, device, groups=1)
    padding = torch.ones(2, 75, dtype=torch.bool, device=device)
    padding[1, :30] = False
    rows[1] = torch.tensor([30] * 5 + [31, 48, 60, 74])
    for options in ({"padding": padding}, {"padding": padding, "window": 12}):
        got = compare(cache, query, rows, close, tiling=tiling, **options)
        close(got[1, :5], cache.layers[0][1][1, :, 30].expand(5, 1, 16), 1e-6)  # nothing else is to be seen


@pytest.mark.parametrize("tiling", [SMALL, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_a_row_that_sees_nothing_gets_nothing(buffers, close, device, tiling, sinks):
    cache, query, rows = scene(buffers, device, groups=1)
    padding = torch.ones(2, 75, dtype=torch.bool, device=device)
    padding[1, :40] = False
    padding[0, 50:] = False
    rows[:] = torch.tensor([[10, 45, 60, 61, 62, 70, 71, 72, 74], [0, 15, 16, 31, 39, 40, 41, 50, 74]])
    options = {"padding": padding, "sinks": torch.ones(1, device=device) if sinks else None}
    got = compare(cache, query, rows, close, tiling=tiling, **options)
    assert torch.equal(got.any(-1).any(-1), rows >= torch.tensor([[0], [40]], device=device))
    got = compare(cache, query, rows, close, tiling=tiling, window=12, **options)
    assert not got[0, 4:].any()  # all in their window is padding
    assert not got[1, :5].any()
    assert got[0, :3].any(-1).all()
    assert got[1, 5:8].any(-1).all()


def test_padding_longer_than_what_is_filled(buffers, close, device):
    cache, query, rows = scene(buffers, device)
    padding = torch.rand(2, 140, device=device) < 0.5
    compare(cache, query, rows, close, padding=padding[:, 20:])  # a slice, so its rows are apart


def test_rows_at_the_ends(buffers, close, device):
    cache, query, rows = scene(buffers, device, groups=1, tokens=48)
    for some, window in ((range(9), None), (range(9), 16), (range(39, 48), None), (range(39, 48), 16), ([47] * 9, 16)):
        rows[:] = torch.tensor(some)  # the last sees the second part only, from its very first key
        compare(cache, query, rows, close, window=window)
        compare(cache, query, rows, close, window=window, tiling=SMALL._replace(splits=2))


def test_layers_and_their_capacities(buffers, close, device):
    cache, query, rows = scene(buffers, device, heads=2, groups=1, capacities=(75, 81, 130))
    for layer in range(3):
        compare(cache, query, rows, close, layer=layer)
    compare(cache, query, rows, close, layer=2, tiling=SPLIT, window=30)


@pytest.mark.parametrize("splits", [1, 4, 16])
def test_fewer_keys_than_a_block(buffers, close, device, splits):
    cache, query, rows = scene(buffers, device, count=5, tokens=7)
    compare(cache, query, rows, close, tiling=SMALL._replace(splits=splits))


def test_contiguous_queries(buffers, close, device):
    cache, query, rows = scene(buffers, device)
    compare(cache, query.contiguous(), rows, close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("groups", "dim", "count"), [(4, 64, 1), (3, 128, 6), (1, 80, 2), (1, 256, 2)])
def test_default_tiling(buffers, close, device, dtype, groups, dim, count):
    compare(*scene(buffers, device, dtype, 1, groups, dim, count=count, tokens=150), close, tiling=None)


@pytest.mark.parametrize(
    ("processors", "memory"),
    [(132, 227 * 1024), (108, 163 * 1024), (128, 99 * 1024)],
    ids=["H100", "A100", "RTX 4090"],
)
def test_tilings_fit_the_card(monkeypatch, device, processors, memory):
    monkeypatch.setattr(kernels, "_card", lambda device: (processors, memory))
    bad = []
    shapes = itertools.product((1, 16, 17, 500, 30000), (1, 8, 64), (16, 64, 80, 96, 128, 192, 256), BOUND)
    for lines, heads, dim, dtype in shapes:
        chosen = kernels.choose_tiling(lines, heads, dim, dtype, torch.device(device))
        powers = all(n > 0 and n & (n - 1) == 0 for n in (*chosen[:3], chosen.splits))
        block_d = 1 << (dim - 1).bit_length()
        need = (chosen.block_m + 2 * chosen.stages * chosen.block_n) * block_d * dtype.itemsize
        if not powers or min(chosen[:2]) < 16 or chosen.stages < 1 or need > memory:
            bad.append((lines, heads, dim, dtype, chosen, need))
    assert not bad


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_anything_together(buffers, close, device, data):
    draw = data.draw
    tokens = draw(st.integers(1, 70), "tokens")
    count = draw(st.integers(1, 4), "count")
    heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (1, 3)]), "heads, groups")
    cache = buffers(2, heads, 16, 32, (tokens + 5,), torch.float32).fill(tokens)
    query = torch.randn(2, count, heads * groups, 16, device=device).transpose(1, 2)
    ascending = st.lists(st.integers(0, tokens - 1), min_size=count, max_size=count).map(sorted)
    rows = torch.tensor([draw(ascending, "rows"), draw(ascending, "rows")], device=device)
    options = {
        "window": draw(st.none() | st.integers(1, 80), "window"),
        "softcap": draw(st.none() | st.floats(0.5, 50), "softcap"),
        "sinks": torch.randn(heads * groups, device=device) if draw(st.booleans(), "sinks") else None,
        "tiling": Tiling(16, draw(st.sampled_from([16, 32]), "keys"), 4, 1, draw(st.sampled_from([1, 2, 4]), "splits")),
    }
    if draw(st.booleans(), "padding"):
        seen = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
        options["padding"] = torch.tensor([draw(seen), draw(seen)], device=device)
    compare(cache, query, rows, close, **options)
