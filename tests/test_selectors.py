"""Which tokens a selector ranks first."""

import pytest
import torch

from blendkv.cache import make_schedule
from blendkv.selectors import HKVD, All, Boundary, Candidates, Nothing, Random, Selector, get_selector, selector_names


def candidates(n=6, k=None, v=None):
    half = n // 2
    return Candidates(
        rows=torch.arange(n) + 10,
        chunk=torch.tensor([0] * half + [1] * (n - half)),
        offset=torch.tensor([*range(half), *range(n - half)]),
        length=torch.tensor([half] * half + [n - half] * (n - half)),
        k_deviation=k,
        v_deviation=v,
    )


def order(selector, view):
    return torch.sort(selector.score(view), descending=True, stable=True).indices.tolist()


def test_hkvd_sources():
    k, v = torch.tensor([5.0, 1, 2, 3, 0, 4]), torch.tensor([0.0, 0, 90, 0, 0, 0])
    assert order(HKVD(), candidates(k=k)) == [0, 5, 3, 2, 1, 4]
    assert order(HKVD("v"), candidates(v=v))[0] == 2
    assert order(HKVD("kv"), candidates(k=k, v=v))[:2] == [2, 0]  # neither scale outweighs the other
    same = order(HKVD("kv"), candidates(k=k * 1e6, v=v))
    assert same == order(HKVD("kv"), candidates(k=k, v=v))
    assert HKVD("kv").score(candidates(k=k * 0, v=v * 0)).isfinite().all()
    with pytest.raises(ValueError, match="deviations"):
        HKVD().score(candidates())
    with pytest.raises(ValueError, match="source"):
        HKVD("q")


def test_boundary_spreads_over_chunks():
    assert order(Boundary(), candidates()) == [0, 3, 1, 4, 2, 5]


def test_random_is_seeded():
    a, b = Random(1), Random(1)
    assert torch.equal(a.score(candidates()), b.score(candidates()))
    assert not torch.equal(a.score(candidates()), Random(2).score(candidates()))
    torch.manual_seed(0)
    want = torch.rand(1)
    torch.manual_seed(0)
    a.score(candidates())
    assert torch.equal(torch.rand(1), want)  # the caller's own generator is left alone


def test_names():
    assert set(selector_names()) >= {"hkvd", "boundary", "random", "all", "none"}
    for name in ("hkvd", "boundary", "random", "all", "none"):
        assert get_selector(name).name == name
    mine = Random(3)
    assert get_selector(mine) is mine
    assert HKVD("kv").name == "hkvd-kv"
    with pytest.raises(ValueError, match="choose one of"):
        get_selector("best")


def test_one_verb_makes_a_selector(attached):
    from blendkv import BlendedCache
    from tests.helpers import make_case, run

    class Last(Selector):
        def score(self, candidates):
            return candidates.offset / candidates.length

    model = attached()
    case = make_case(model)
    cache = BlendedCache(case.caches, 0.2, Last())
    out = run(model, case.ids, cache)
    computed = (~out.logits[0, :, 0].isnan()).nonzero().flatten().tolist()
    ends = [s + len(c) - 1 for s, c in zip(case.starts, case.chunks, strict=True)]
    assert set(ends) <= set(computed)
    assert cache.report.selector == "last"


def test_candidates_describe_the_prompt(attached):
    from blendkv import BlendedCache
    from tests.helpers import make_case, run

    seen = []

    class Spy(HKVD):
        def score(self, candidates):
            seen.append(candidates)
            return super().score(candidates)

    model = attached()
    case = make_case(model)
    run(model, case.ids, BlendedCache(case.caches, 0.3, Spy("kv")))
    (view,) = seen
    assert len(view.rows) == 39
    assert view.rows.tolist() == sorted(view.rows.tolist())
    lengths = {int(c): int(n) for c, n in zip(view.chunk, view.length, strict=True)}
    assert lengths == {0: 9, 1: 17, 2: 13}
    for row, chunk, offset in zip(view.rows, view.chunk, view.offset, strict=True):
        start = sorted(case.starts)[int(chunk)]
        assert int(row) == start + int(offset)
    assert view.k_deviation.dtype == view.v_deviation.dtype == torch.float32
    assert view.k_deviation.isfinite().all()
    assert (view.k_deviation >= 0).all()


@pytest.mark.parametrize(
    ("selector", "ratio", "given", "want"),
    [
        (HKVD(), 0.15, None, {1: 0.15}),
        (Boundary(), 0.15, None, {0: 0.15}),
        (HKVD(), 1.0, None, {}),
        (HKVD(), 0.0, None, {0: 0.0}),
        (HKVD(), 0.5, {3: 0.1, 1: 0.4}, {1: 0.4, 3: 0.1}),
        (HKVD(), 0.5, {1: 1.0, 2: 0.2}, {2: 0.2}),
        (HKVD(), 0.5, {}, {}),
        (All(), 0.5, {1: 0.5}, {}),
        (Nothing(), 0.5, {1: 0.5}, {0: 0.0}),
    ],
)
def test_schedules(selector, ratio, given, want):
    assert make_schedule(selector, ratio, given) == want
