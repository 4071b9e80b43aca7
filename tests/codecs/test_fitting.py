"""Statistics to transforms: what they must be, in fp64 and by themselves."""

from dataclasses import replace
from math import log2

import pytest
import torch

from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import LayerShape, cachegen, fitting, get_codec
from blendkv.codecs.fitting import FINEST, SMOOTHING, fit_transform
from blendkv.codecs.statistics import Moments, Statistics, flat, units_of
from blendkv.codecs.transform import parts_of
from tests.chunks import assert_same
from tests.drawn import CODECS, SMALL, chunk_of, draw, profile_of, statistics_of

STATISTICS = statistics_of(SMALL, unit_layers=2)


def test_moments():
    """Of all rows of both matrices, as numpy would have them."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 4, generator=generator, dtype=torch.float64) * torch.tensor([1, 10, 0.1, 0]) + 3
    for joint in (True, False):
        moments = Moments.of(4, joint)
        moments.add(rows[:20])
        moments.add(rows[20:])
        torch.testing.assert_close(moments.mean, rows.mean(0))
        wanted = torch.cov(rows.T, correction=0)
        torch.testing.assert_close(moments.spread, wanted if joint else wanted.diagonal(), atol=1e-9, rtol=1e-9)


def test_units_of():
    assert units_of(SMALL, 2) == [range(2), range(2, 3)]
    assert units_of(SMALL, 5) == [range(3)]


def test_statistics():
    """Of what they were given: spread without the first token, anchors and deltas by tens."""
    statistics = Statistics(SMALL[:1], 10, 10)
    keys, values = draw(SMALL[0], 34, seed=1)
    statistics.add_states([keys], [values])
    statistics.add_gradients([keys], [values])
    rows = flat(keys).double()
    torch.testing.assert_close(statistics.spread(0)[0], rows[1:].var(0, correction=0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(statistics.metric(0)[0], rows[1:].T @ rows[1:] / 33, atol=1e-4, rtol=1e-4)
    tens = rows[:30].unflatten(0, (3, 10))
    deltas = (tens[:, 1:] - tens[:, :1]).flatten(0, 1)
    torch.testing.assert_close(statistics.deltas[0][0].mean, deltas.mean(0), atol=1e-4, rtol=1e-4)
    scaled = tens[:, 0] / tens[:, 0].abs().amax(1, keepdim=True) * 127
    torch.testing.assert_close(statistics.anchors[0][0].mean, scaled.mean(0), atol=1e-3, rtol=1e-4)
    assert statistics.spread(0)[1].shape == (8,)
    with pytest.raises(ValueError, match="shorter"):
        statistics.add_states([keys, keys], [values])


@pytest.mark.parametrize("joint", [False, True])
def test_transforms(joint):
    """Components do not correlate; in the metric each is orthogonal to the others, and all have one step."""
    profile = fit_transform(STATISTICS, joint, {})
    part = parts_of(profile)[0][0]
    spread = STATISTICS.states[0].spread
    metric = torch.block_diag(*(m for layer in (0, 1) for m in STATISTICS.metric(layer)))
    size = part.matrix.shape[1]
    spread, metric = spread[:size, :size], metric[:size, :size]
    inverse = torch.linalg.inv(part.matrix[0].double())
    found = inverse.T @ spread @ inverse
    deviations = found.diagonal().sqrt()
    assert ((found / deviations / deviations[:, None] - torch.eye(size)).abs() < 0.01).all()
    assert (deviations.diff() < 0.01).all()  # the largest first
    scale = 16 * torch.log2(deviations)
    assert (scale - torch.from_numpy(part.scale[:size])).abs().max() < 1
    smooth = metric + SMOOTHING * metric.diagonal().mean() * torch.eye(size)
    steps = part.matrix[0].double() @ smooth @ part.matrix[0].double().T
    assert ((steps / steps.diagonal().mean() - torch.eye(size)).abs() < 0.01).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("quarters", [-6, 4])
def test_coarser_is_a_level(codec, quarters):
    """A profile made coarser by a quarter of an octave codes at level 0 as it did at level 1."""
    profile, chunk = profile_of(codec), chunk_of(SMALL, 40)
    coarser = (cachegen if codec == "cachegen" else fitting).coarser
    shifted = coarser(profile, 4 * quarters)
    assert shifted.hash != profile.hash
    assert {n: (t.shape, t.dtype) for n, t in shifted.tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in profile.tensors.items()
    }
    one = get_codec(codec, profile=profile, level=quarters)
    other = get_codec(codec, profile=shifted)
    a, b = encode_chunk(chunk, one), encode_chunk(chunk, other)
    assert abs(len(a) - len(b)) <= 0.02 * len(a)
    again = decode_chunk(b, profiles={shifted.hash: shifted})
    for x, y in zip(decode_chunk(a, profiles={profile.hash: profile}).keys, again.keys, strict=True):
        assert float((x - y).norm() / x.norm()) < 0.02
    assert_same(again, replace(again))


@pytest.mark.parametrize("gradient", [0.0, 1e-12, 1e12])
def test_gradients_of_any_size(gradient):
    """None at all, next to none, and far too many: a profile that codes, in fp16."""
    statistics = Statistics((LayerShape(2, 8, 8),), 100, 10)
    chunk = chunk_of(statistics.shapes, 200)
    statistics.add_states(chunk.keys, chunk.values)
    draws = torch.Generator().manual_seed(0)
    noise = [torch.randn(2, 200, 8, generator=draws) * gradient for _ in range(2)]
    statistics.add_gradients(noise[:1], noise[1:])
    for joint in (False, True):
        profile = fit_transform(statistics, joint, {})
        codec = get_codec(profile.codec, profile=profile, level=-8)
        assert max(int(part.scale.max()) for part in parts_of(profile)[0]) <= 16 * log2(FINEST)
        decode_chunk(encode_chunk(chunk, codec), profiles={profile.hash: profile})
