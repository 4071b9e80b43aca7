"""Scattered rows: blocks of SDPA, eager and a dense mask must agree."""

from itertools import combinations, pairwise

import pytest
import torch
from torch.nn import functional as F

from blendkv.attention import BLOCK_QUERIES, MASK_BYTES, LazyMask, RowMask, scattered_eager, scattered_sdpa


def causal(batch, head, q, k):
    return k <= q


def sliding(window):
    return lambda batch, head, q, k: (k <= q) & (k > q - window)


def setting(
    total, rows, function=causal, padding=None, batch=1, heads=4, groups=2, width=8, dtype=torch.float32, seed=0
):
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, rows.shape[1], width, generator=g, dtype=dtype)
    key, value = (torch.randn(batch, heads // groups, total, width, generator=g, dtype=dtype) for _ in range(2))
    lazy = LazyMask(lambda: None, function, padding)
    visible = function(None, None, rows[:, None, :, None], torch.arange(total)[None, None, None])
    if padding is not None:
        visible = visible & padding[:, None, None]
    return query, key, value, RowMask(lazy, rows), visible


def dense(query, key, value, visible, scaling):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query.double() @ key.double().transpose(-1, -2)) * scaling
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
    return (weights @ value.double()).transpose(1, 2)


def some_rows(total, count, batch=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(total, generator=g)[:count].sort().values for _ in range(batch)])


@pytest.mark.parametrize(
    ("total", "count"), [(1, 1), (7, 3), (97, 96), (97, 97), (300, 200), (193, 5), (500, 193), (700, 650)]
)
@pytest.mark.parametrize("function", [causal, sliding(3), sliding(64)], ids=["causal", "sliding 3", "sliding 64"])
def test_blocks_equal_a_dense_mask(total, count, function):
    query, key, value, mask, visible = setting(total, some_rows(total, count), function)
    got = scattered_sdpa(query, key, value, mask, 0.3)
    torch.testing.assert_close(got.double(), dense(query, key, value, visible, 0.3), atol=1e-5, rtol=1e-5)
    assert got.shape == (1, count, 4, 8)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_groups_and_scaling(groups, scaling):
    query, key, value, mask, visible = setting(60, some_rows(60, 31), groups=groups, width=12)
    got = scattered_sdpa(query, key, value, mask, scaling)
    want = dense(query, key, value, visible, scaling or 12**-0.5)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_values_of_another_width_and_queries_not_contiguous():
    query, key, value, mask, visible = setting(60, some_rows(60, 31))
    value = torch.randn(1, 2, 60, 5)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert not query.is_contiguous()
    got = scattered_sdpa(query, key, value, mask, 0.3)
    torch.testing.assert_close(got.double(), dense(query, key, value, visible, 0.3), atol=1e-5, rtol=1e-5)


def test_batches_of_ragged_rows_with_padding():
    rows = some_rows(120, 110, batch=3)
    rows[1, :30] = rows[1, 30]  # ragged rows repeat their first
    padding = torch.ones(3, 120, dtype=torch.bool)
    padding[2, :17] = False
    query, key, value, mask, visible = setting(120, rows, padding=padding, batch=3)
    got = scattered_sdpa(query, key, value, mask, 0.3)
    want = dense(query, key, value, visible, 0.3)
    real = visible.any(-1)[:, 0]
    torch.testing.assert_close(got.double()[real], want[real], atol=1e-5, rtol=1e-5)
    assert got.isfinite().all()  # a padding row sees nothing; NaN there would spread


def test_blocks_read_no_key_after_their_last_row():
    rows = some_rows(200, 150)
    query, key, value, mask, _ = setting(300, rows)
    want = scattered_sdpa(query, key, value, mask, 0.3)
    last = -(-(int(rows.max()) + 1) // 16) * 16  # in steps of 16
    key[:, :, last:], value[:, :, last:] = torch.nan, torch.nan
    assert torch.equal(scattered_sdpa(query, key, value, mask, 0.3), want)


@pytest.mark.parametrize("family", ["llama", "mistral", "granite"])
def test_eager_twin(attached, family):
    from blendkv import _compat
    from blendkv.attaching import attachment_of

    module = attachment_of(attached(family)).layers[0].self_attn
    query, key, value, mask, visible = setting(70, some_rows(70, 33), width=16)
    got, weights = scattered_eager(
        _compat.eager_attention(module), module, query, key, value, mask, scaling=0.3, dropout=0.0
    )
    torch.testing.assert_close(got.double(), dense(query, key, value, visible, 0.3), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, scattered_sdpa(query, key, value, mask, 0.3), atol=1e-5, rtol=1e-5)
    assert weights.shape == (1, 4, 33, 70)
    assert (weights.masked_select(~visible.expand_as(weights)) == 0).all()


def test_masks_are_made_once_and_only_when_wanted():
    made = []
    lazy = LazyMask(lambda: made.append(1) or "mask", causal, None)
    assert made == []
    assert lazy.dense() == lazy.dense() == "mask"
    assert made == [1]
    rows = some_rows(200, 100)
    mask = RowMask(lazy, rows)
    first, again = (list(mask.blocks(torch.zeros(1), 2, 200)) for _ in range(2))
    assert [part for part, _, _ in first] == [part for part, _, _ in again]
    assert all(a[2] is b[2] for a, b in zip(first, again, strict=True))
    other = next(iter(mask.blocks(torch.zeros(1, dtype=torch.bfloat16), 2, 200)))
    assert other[2].dtype == torch.bfloat16
    assert mask._bytes <= MASK_BYTES


def cost(rows, parts, groups):
    """Keys passed by every query, at the speed of its block's size."""
    total = 0.0
    for part in parts:
        units = -(-(part.stop - part.start) * groups // 64)
        speed = max(v for size, v in BLOCK_QUERIES["cpu"].items() if size <= units * 64)
        total += (part.stop - part.start) * (int(rows[part.stop - 1]) + 1) / speed
    return total


def test_blocks_are_large_where_rows_stand_close_together():
    sizes = [queries // 4 for queries in BLOCK_QUERIES["cpu"]]
    sparse, dense = torch.arange(0, 4000, 40), 4000 + torch.arange(2 * max(sizes))
    rows = torch.cat([sparse, dense])
    mask = RowMask(LazyMask(lambda: None, causal, None), rows[None])
    blocks = list(mask.blocks(torch.zeros(1), 4, 5000))
    parts = [part for part, _, _ in blocks]
    assert (parts[0].start, parts[-1].stop) == (0, len(rows))
    assert all(a.stop == b.start for a, b in pairwise(parts))
    assert all(keys > rows[part.stop - 1] for part, keys, _ in blocks)
    widths = [part.stop - part.start for part in parts]
    assert widths[0] == min(sizes)
    assert max(sizes) in widths
    for size in sizes:
        same = [slice(at, min(at + size, len(rows))) for at in range(0, len(rows), size)]
        assert cost(rows, parts, 4) < cost(rows, same, 4)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_take_the_least_time_of_all_cuts(seed):
    """Against every way to cut, where there are few."""
    rows = some_rows(400, 16 * 7 - 3, seed=seed)
    mask = RowMask(LazyMask(lambda: None, causal, None), rows)
    ends = [*range(0, rows.shape[1], 16), rows.shape[1]]
    every = []
    for count in range(len(ends) - 1):
        for inner in combinations(ends[1:-1], count):
            parts = [slice(a, b) for a, b in pairwise((0, *inner, ends[-1]))]
            if all((part.stop - part.start) * 4 <= max(BLOCK_QUERIES["cpu"]) for part in parts):
                every.append(cost(rows[0], parts, 4))
    parts = [part for part, _, _ in mask.blocks(torch.zeros(1), 4, 400)]
    assert cost(rows[0], parts, 4) <= min(every) + 1e-6


def test_masks_beyond_the_limit_are_right_and_not_kept(monkeypatch):
    monkeypatch.setattr("blendkv.attention.MASK_BYTES", 1)
    query, key, value, mask, visible = setting(150, some_rows(150, 100))
    for _ in range(2):
        got = scattered_sdpa(query, key, value, mask, 0.3)
        torch.testing.assert_close(got.double(), dense(query, key, value, visible, 0.3), atol=1e-5, rtol=1e-5)
    assert not mask._blocks


def test_the_trap_that_this_file_is_about():
    """SDPA's own causal flag with fewer queries than keys is a triangle at the top left."""
    query, key, value, _, _ = setting(9, torch.tensor([[2, 8]]), groups=1)
    wrong = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3).transpose(1, 2)
    _, _, _, mask, visible = setting(9, torch.tensor([[2, 8]]), groups=1)
    right = scattered_sdpa(query, key, value, mask, 0.3)
    assert (wrong - right).abs().max() > 0.1
    torch.testing.assert_close(right.double(), dense(query, key, value, visible, 0.3), atol=1e-5, rtol=1e-5)
