"""What a prompt will not read, and what is left out for that: against loops over tokens."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from blendkv import BlendedCache, MissingChunk
from blendkv.chunkfile import ChunkFile
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import LayerShape, get_codec
from blendkv.loading.sparing import Sparing, gaps, share_read, tokens_of
from blendkv.plan import plan_row
from blendkv.selectors import get_selector
from tests.chunks import make_chunk
from tests.drawn import SMALL, chunk_of, profile_of
from tests.loading.test_sparing import ByChunk
from tests.made_up import fit_profile


def slow_never_read(ids, chunks, selector, schedule, layers, stop):
    """By key, {(layer, token)} that nobody reads: in Python, token by token."""
    plan = plan_row(0, ids, chunks, lambda chunk: None, stop)
    place = {}
    for number, (span, chunk) in enumerate(plan.placed):
        for i in range(span.length):
            place[span.start + i] = (number, i, span.length, chunk, span.offset + i, bool(plan.exact[span.start + i]))
    kept, reads = sorted(place), {chunk.key: set() for _, chunk in plan.placed}
    total, narrowed = len(kept), False
    for layer in range(layers):
        if layer in schedule:
            narrowed, budget = True, round(schedule[layer] * total)
            if budget < len(kept):
                scores = _scores(selector, kept, place)
                order = sorted(range(len(kept)), key=lambda i: (place[kept[i]][5], -scores[i], i))
                kept = sorted(kept[i] for i in order[:budget])
        if narrowed:
            for at in set(place) - set(kept):
                reads[place[at][3].key].add((layer, place[at][4]))
    return {
        chunk.key: {(la, t) for la in range(layers) for t in range(len(chunk))} - reads[chunk.key]
        for _, chunk in plan.placed
    }


def _scores(selector, kept, place):
    if selector.name == "boundary":
        return [-place[at][1] for at in kept]
    if selector.name == "by-chunk":
        return [-place[at][0] for at in kept]
    if selector.name == "every-5":
        return [-(place[at][1] % 5) for at in kept]
    if selector.name == "stored-asked":
        return [float(place[at][3].scores["asked"][place[at][4]]) for at in kept]
    return torch.rand(len(kept), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("seed", range(40))
def test_the_forecast_is_that_of_loops(seed):
    """Chunks twice, cut off, without a place, exact ones, missing ones, schedules of several layers."""
    draw = random.Random(seed)
    chunks = []
    for number in range(draw.randint(1, 4)):
        chunk = chunk_of(SMALL, draw.randint(9, 150), seed=number)
        ids = torch.randint(0, 500, (len(chunk),), generator=torch.Generator().manual_seed(10 * seed + number))
        scores = {"asked": torch.rand(len(chunk), generator=torch.Generator().manual_seed(number))}
        fields = {**chunk.__dict__, "ids": ids, "scores": scores}
        chunks.append(type(chunk)(**{k: fields[k] for k in ("ids", "keys", "values", "fingerprint", "scores")}))
    parts = []
    for chunk in draw.choices(chunks, k=draw.randint(1, 5)):
        begin = draw.choice((0, 0, 20)) if len(chunk) > 60 else 0
        parts += [*([] if draw.random() < 0.3 else range(600, 603)), *chunk.ids.tolist()[begin:]]
    ids = parts + list(range(700, 700 + draw.randint(0, 3)))
    selector = draw.choice(
        [ByChunk(), *map(get_selector, ("boundary", "every-5", "random", "stored-asked", "all", "none"))]
    )
    layers = len(SMALL)
    schedule = draw.choice([{0: 0.3}, {0: 0.9, 1: 0.5, 2: 0.2}, {1: 0.6}, {2: 0.0}, {0: 0.15}])
    options = {"selector": selector, "check_layers": schedule}
    schedule = BlendedCache((), **options).schedule
    absent = {chunk.key for chunk in chunks if draw.random() < 0.2} if selector.name != "stored-asked" else set()
    text = {key for key in absent if draw.random() < 0.5}
    pieces = {chunk.key: (chunk.ids.tolist(), ()) for chunk in chunks}
    found = {c.key: None if c.key in text else c for c in chunks if c.key not in absent or c.key in text}
    got = Sparing(ids, pieces, options, layers)(found)
    want = slow_never_read(
        np.array(ids),
        [MissingChunk(c.ids) if c.key in text else c for c in chunks],
        selector,
        schedule,
        layers,
        len(ids) - 1,
    )
    assert {key: set(map(tuple, np.argwhere(spare).tolist())) for key, spare in got.items()} == {
        key: spare for key, spare in want.items() if found.get(key) is not None
    }


@pytest.mark.parametrize("seed", range(30))
def test_gaps_are_those_of_loops(seed):
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    name = draw.choice(["raw", "raw", "klt", "klt-xl", "cachegen"])
    codec = get_codec(name) if name == "raw" else get_codec(name, profile=profile_of(name))
    count = draw.choice([31, 64, 300, 900])
    with ChunkFile(encode_chunk(chunk_of(SMALL, count), codec), codec=codec) as file:
        size = file.header.arrangement.group_tokens
        groups = -(-count // size)
        spare = np.repeat(numbers.random((3, groups)) < 0.6, size, axis=1)[:, :count]
        spare ^= numbers.random((3, count)) < draw.choice([0.0, 0.005])
        least, want = draw.choice([1, 400, 3000]), {}
        for unit in range(file.header.units):
            unread = [
                g
                for g in range(groups)
                if all(spare[la, t] for la in file.header.layers_of(unit) for t in range(count) if t // size == g)
            ]
            runs = [[g for g in unread if g - unread.index(g) == at] for at in {g - unread.index(g) for g in unread}]
            for run in runs:
                sizes = {}
                for stream in range(file.header.arrangement.streams):
                    for at, number in enumerate(file.header.segments_of(unit, stream)):
                        if at % groups in run:
                            begin, end = int(file.starts[number]), int(file.starts[number + 1])
                            sizes = {a: b for a, b in sizes.items() if b != begin} | {
                                next((a for a, b in sizes.items() if b == begin), begin): end
                            }
                if sum(b - a for a, b in sizes.items()) >= least * len(sizes):
                    want.setdefault(unit, set()).update(run)
        assert gaps(file, spare, least) == want
        for those in want.values():
            assert tokens_of(file, frozenset(those)).sum() == sum(min(size, count - g * size) for g in those)


@pytest.mark.parametrize("seed", range(20))
def test_what_will_be_left_out_is_foreseen_without_a_file(seed):
    """Exactly for raw, whose tokens and layers have as many bytes each; nearly for others."""
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    name = draw.choice(["raw", "klt", "cachegen"])
    codec = get_codec(name) if name == "raw" else get_codec(name, profile=profile_of(name))
    count = draw.choice([31, 64, 300, 900])
    chunk = chunk_of(SMALL, count)
    with ChunkFile(encode_chunk(chunk, codec), codec=codec) as file:
        size = file.header.arrangement.group_tokens
        spare = np.repeat(numbers.random((3, -(-count // size))) < 0.6, size, axis=1)[:, :count]
        nbytes, left = int(file.sizes.sum()), 0
        for unit, groups in gaps(file, spare, 1).items():
            left += int(file.sizes[:, unit][..., list(groups)].sum())
        found = share_read(codec, file.header.layers, file.header.dtype, nbytes, spare, 1)
        assert found == pytest.approx(1 - left / nbytes, abs=1e-9 if name == "raw" and count % 4 == 0 else 0.1)
        assert share_read(codec, file.header.layers, file.header.dtype, nbytes, spare, nbytes + 1) == 1.0


@pytest.mark.parametrize("selector", ["boundary", "every-5", "hkvd", "stored-asked"])
def test_at_another_ratio_and_before_anything_is_found(selector):
    chunks = [make_chunk(tokens=40 + n, seed=n) for n in range(3)]
    ids = [7, *(token for chunk in chunks for token in chunk.ids.tolist()), *range(9)]
    pieces = {chunk.key: (chunk.ids.tolist(), ()) for chunk in chunks}
    options, found = {"selector": selector, "recompute_ratio": 0.1}, {chunk.key: chunk for chunk in chunks}
    ahead = Sparing(ids, pieces, options, 3)
    for ratio in (0.0, 0.3, 1.0):
        got, want = ahead.at(ratio), Sparing(ids, pieces, options | {"recompute_ratio": ratio}, 3)(found)
        if selector == "stored-asked":
            want = {}  # scores are in files
        assert got.keys() == want.keys()
        assert all((got[key] == want[key]).all() for key in want)


def test_the_table_of_the_guide():
    """docs/guides/loading.md: keys and values of 8 heads of 128, six chunks behind a head."""
    text = (Path(__file__).parents[2] / "docs/guides/loading.md").read_text()
    told = re.findall(r"^\| ratio ([\d.]+) \| (\d+) \| ([\d.]+)% \|$", text, re.MULTILINE)
    assert len(told) == 4
    chunks = [make_chunk(tokens=512, layers=2, heads=8, key_dim=128, dtype=torch.bfloat16, seed=n) for n in range(6)]
    files = [ChunkFile(encode_chunk(chunk)) for chunk in chunks]
    ids = [7, *(token for chunk in chunks for token in chunk.ids.tolist()), *range(40)]
    pieces = {chunk.key: (chunk.ids.tolist(), ()) for chunk in chunks}
    for ratio, tokens, share in told:
        options = {"selector": "boundary", "recompute_ratio": float(ratio)}
        spare = Sparing(ids, pieces, options, 2)({chunk.key: chunk for chunk in chunks})
        found = [gaps(file, spare[chunk.key]) for file, chunk in zip(files, chunks, strict=True)]
        left = sum(
            int(file.sizes[:, unit, :, list(groups)].sum())
            for file, each in zip(files, found, strict=True)
            for unit, groups in each.items()
        )
        assert f"{100 * left / sum(file.sizes.sum() for file in files):.1f}" == share
        assert round(float(ratio) * 512) == int(tokens)


def test_of_a_codec_that_has_not_written_it_all_is_read():
    """A library's own codec may be one of another model's layers: its store has what others wrote."""
    spare = np.ones((3, 200), bool)
    codec = get_codec("klt", profile=fit_profile([make_chunk(200, 3, 2, 16)]))
    assert share_read(codec, [LayerShape(2, 16, 16)] * 3, "fp32", 1 << 20, spare, 1) == 0.0
    assert share_read(codec, [LayerShape(4, 32, 32)] * 2, "fp32", 1 << 20, spare[:2], 1) == 1.0
