"""What selectors put together choose, and how they are named."""

import re
from pathlib import Path

import pytest
import torch

from blendkv.correctors import get_corrector
from blendkv.selectors import (
    HKVD,
    Attention,
    Boundary,
    Candidates,
    Every,
    First,
    PerChunk,
    Product,
    Random,
    Stored,
    Union,
    Window,
    get_selector,
)
from blendkv.selectors.base import best_first, ranks


def candidates(lengths=(3, 5), **given):
    return Candidates(
        rows=torch.arange(sum(lengths)) + 10,
        chunk=torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)]),
        offset=torch.tensor([j for n in lengths for j in range(n)]),
        length=torch.tensor([n for n in lengths for _ in range(n)]),
        **given,
    )


def order(selector, view):
    return best_first(selector.score(view)).tolist()


ATTENTION = {0: torch.tensor([8.0, 0, 0, 5, 0, 1, 0, 2]), 2: torch.tensor([0.0, 0, 1, 0, 0, 8, 0, 0])}


def test_attention_is_summed_over_layers():
    view = candidates(attention=ATTENTION)
    assert order(Attention(), view)[:3] == [5, 0, 3]
    assert order(Attention((0,)), view)[:3] == [0, 3, 7]
    with pytest.raises(ValueError, match="not given"):
        Attention((1,)).score(view)
    with pytest.raises(ValueError, match="not given"):
        Attention().score(candidates())
    for wrong in ({"layers": ()}, {"layers": (-1,)}, {"last": 0}):
        with pytest.raises(ValueError, match="at least one"):
            Attention(**wrong)


def test_every():
    assert order(Every(2), candidates()) == [0, 2, 3, 5, 7, 1, 4, 6]
    with pytest.raises(ValueError, match="at least 1"):
        Every(0)


def test_products_multiply_powers():
    v = torch.tensor([1.0, 1, 1, 16, 1, 1, 1, 1])
    view = candidates(attention=ATTENTION, v_deviation=v, k_deviation=v * 0)
    assert order(get_selector("attention*hkvd-v"), view)[0] == 3
    assert order(get_selector("attention*hkvd-v^0.05"), view)[0] == 5
    want = (sum(ATTENTION.values()) ** 2) * v**0.5
    got = get_selector("attention^2*hkvd-v^0.5").score(view)
    torch.testing.assert_close(got / got.sum(), want / want.sum())
    tiny = Product([Attention(), HKVD("v")]).score(candidates(attention=ATTENTION, v_deviation=v * 1e-38))
    assert tiny.max() > 0
    with pytest.raises(ValueError, match=r"join it with '\+'"):
        Product([Attention(), Boundary()])
    with pytest.raises(ValueError, match="powers"):
        Product([Attention()], [1, 2])


@pytest.mark.parametrize("share", [0.2, 0.5, 0.75])
def test_unions_share_any_budget(share):
    draw = torch.Generator().manual_seed(1)
    k, v = (torch.rand(200, generator=draw) for _ in range(2))
    view = candidates((120, 80), k_deviation=k, v_deviation=v)
    union = Union(HKVD("k"), HKVD("v"), shares=(share, 1 - share))
    first, second = (set(best_first(x).tolist()[:40]) for x in (k, v))
    for budget in (10, 40):
        chosen = set(order(union, view)[:budget])
        best_k = sum(i in best_first(k).tolist()[:budget] for i in chosen)
        mine = [i for i in best_first(k).tolist() if i in chosen]
        assert set(best_first(k).tolist()[: int(share * budget)]) <= chosen  # each has its share, its best ones
        assert set(best_first(v).tolist()[: int((1 - share) * budget)]) <= chosen
        assert best_k <= budget
        assert mine
    assert first != second


def test_per_chunk_takes_the_same_share_of_every_chunk():
    k = torch.cat([torch.arange(10.0) + 100, torch.arange(20.0)])
    view = candidates((10, 20), k_deviation=k)
    assert order(HKVD(), view)[:9] == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    spread = order(PerChunk(HKVD()), view)
    assert sorted(spread[:9]) == [7, 8, 9, 24, 25, 26, 27, 28, 29]
    assert sorted(spread) == list(range(30))


@pytest.mark.parametrize("width", [1, 3, 5, 99])
def test_windows_take_the_best_nearby_but_stay_in_the_chunk(width):
    draw = torch.Generator().manual_seed(2)
    k = torch.rand(30, generator=draw)
    view = candidates((13, 17), k_deviation=k)
    keep = torch.tensor([0, 1, 2, 5, 6, 11, 12, 13, 14, 20, 29])  # what an earlier layer of a schedule left
    some = Candidates(view.rows[keep], view.chunk[keep], view.offset[keep], view.length[keep], k[keep])
    for each in (view, some):
        n, want = len(each.rows), []
        for i in range(n):
            near = [
                float(each.k_deviation[j])
                for j in range(n)
                if each.chunk[i] == each.chunk[j] and abs(int(each.offset[i] - each.offset[j])) <= width // 2
            ]
            want.append(max(near))
        torch.testing.assert_close(Window(HKVD(), width).score(each), torch.tensor(want))
    with pytest.raises(ValueError, match="odd"):
        Window(HKVD(), 4)


def test_the_first_tokens_of_each_chunk_come_before_any_other():
    k = torch.tensor([1.0, 9, 8, 2, 3, torch.nan, 7, 9])
    view = candidates(k_deviation=k)
    assert order(First(HKVD(), 2), view) == [1, 4, 3, 0, 7, 2, 6, 5]
    assert order(First(HKVD(), 99), view) == order(HKVD(), view)
    later = Candidates(view.rows[2:3], view.chunk[2:3], view.offset[2:3], view.length[2:3], k[2:3])
    assert order(First(HKVD(), 2), later) == [0]  # a later layer of a schedule has none of the first
    with pytest.raises(ValueError, match="at least one"):
        First(HKVD(), 0)


def test_stored_scores_and_chunks_without():
    view = candidates(scores={"asked": torch.tensor([3.0, 1, 2, *[torch.nan] * 5])})
    assert order(Stored(), view) == [0, 2, 1, 3, 4, 5, 6, 7]
    assert order(get_selector("stored-asked*stored-asked"), view)[:3] == [0, 2, 1]
    with pytest.raises(ValueError, match="'other'"):
        Stored("other").score(view)


def test_ranks():
    assert ranks(torch.tensor([1.0, 3, torch.nan, 3])).tolist() == [2, 0, 3, 1]


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("hkvd", HKVD()),
        ("hkvd-v", HKVD("v")),
        ("attention", Attention()),
        ("attention-10:20", Attention(range(10, 20))),
        ("attention-3.7.11-last8", Attention((3, 7, 11), 8)),
        ("every-16", Every(16)),
        ("random-3", Random(3)),
        ("stored-asked", Stored()),
        ("attention*hkvd-v^0.5", Product([Attention(), HKVD("v")], [1, 0.5])),
        ("hkvd^2", Product([HKVD()], [2])),
        ("boundary+attention", Union(Boundary(), Attention())),
        ("20%boundary+80%attention", Union(Boundary(), Attention(), shares=(1, 4))),
        ("attention@per-chunk", PerChunk(Attention())),
        ("attention@window5", Window(Attention(), 5)),
        ("hkvd@first4", First(HKVD(), 4)),
        ("(attention*hkvd)@first2@per-chunk", PerChunk(First(Product([Attention(), HKVD()]), 2))),
        ("(boundary+attention)@per-chunk", PerChunk(Union(Boundary(), Attention()))),
        ("(attention*hkvd)@window3", Window(Product([Attention(), HKVD()]), 3)),
        ("attention*hkvd@window3", Product([Attention(), Window(HKVD(), 3)])),
    ],
)
def test_names_say_what_they_are(name, same):
    made = get_selector(name)
    assert made == same or (made.name == same.name and made.__dict__.keys() == same.__dict__.keys())
    assert made.name == same.name == name
    assert get_selector(same.name).name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("best", "choose one of"),
        ("", "the name of a selector expected, not the end"),
        ("hkvd*", "the name of a selector expected"),
        ("hkvd hkvd", "expected, not 'hkvd'"),
        ("hkvd~", "'~' is not part"),
        ("(hkvd", r"'\)' expected"),
        ("hkvd)", r"expected, not '\)'"),
        ("hkvd^", "a number expected"),
        ("hkvd@here", "per-chunk, a window"),
        ("hkvd@", "per-chunk, a window"),
        ("hkvd@window4", "odd"),
        ("hkvd@first0", "at least one"),
        ("hkvd@first4^2*hkvd", "cannot be multiplied"),
        ("hkvd-q", "source='q'"),
        ("boundary-3", "takes nothing"),
        ("every-x", "a whole number"),
        ("attention-x", "10:20"),
        ("attention-5:5", "at least one"),
        ("boundary*hkvd", "cannot be multiplied"),
        ("50%hkvd+60%boundary", "100%"),
        ("50%hkvd+30%boundary", "100%"),
        ("100%hkvd+boundary", "100%"),
        ("20 hkvd+boundary", "'%' expected"),
        ("all+hkvd", "ratio of its own"),
        ("attention-last2+attention", "different rows"),
    ],
)
def test_names_that_cannot_be_read(name, message):
    with pytest.raises(ValueError, match=message):
        get_selector(name)


def test_what_combinations_need():
    both = get_selector("attention-1:3*hkvd-v+hkvd-k+boundary")
    assert set(both.needs) == {"question", "deviation"}
    assert both.sources == "kv"
    assert both.layers == [1, 2]
    assert get_selector("attention-1:3+attention").layers is None
    assert get_selector("boundary+every-4").needs == ()
    assert get_selector("stored-a+stored-b").stored == ("a", "b")


def test_families_of_other_packages(monkeypatch):
    class Entry:
        name = "my-own"

        @staticmethod
        def load():
            return Every

    monkeypatch.setattr("blendkv.selectors.plugins", {"blendkv.selectors": {"my-own": Entry}}.get)
    assert get_selector("my-own-3") == Every(3)
    assert get_selector("my-own+boundary").parts[0] == Every()


GUIDE = (Path(__file__).parent.parent / "docs/guides/selectors.md").read_text()


def test_the_guide_says_names_that_are_read():
    rows = [line.split("|")[1] for line in GUIDE.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    stands_for = {"N": "8", "SEED": "3", "NAME": "mine"}
    assert len(names) > 15
    for name in names:
        if name.startswith(("mean-shift", "temperature")):
            get_corrector(name)
        elif name not in ("asked", "moved"):  # scores
            get_selector(re.sub(r"\b(N|SEED|NAME)\b", lambda found: stands_for[found[0]], name))


def test_the_guide_writes_a_selector():
    (block,) = re.findall(r"```python\n(from dataclasses.*?)```", GUIDE, flags=re.DOTALL)
    scope: dict = {"__name__": "guide"}
    exec(compile(block, "guide", "exec"), scope)
    flat = {0: torch.ones(8)}
    assert order(scope["QuestionAndStart"](), candidates(attention=flat))[:2] == [0, 3]
