"""Some groups of tokens of a file without the others: the same numbers, nothing else is read, NaN in between."""

from itertools import pairwise

import pytest
import torch

from blendkv.chunkfile import ChunkFile
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec
from tests.codecs.test_lossy import VARIANTS, codec_of
from tests.codecs.toy import Toy
from tests.container.test_sources import Counting
from tests.drawn import SMALL, chunk_of

NAMES = ["raw", "raw, level 0", *VARIANTS]


def coded(name, tokens):
    """(file, its codec)"""
    codec = get_codec("raw", level=int(name == "raw")) if name.startswith("raw") else codec_of(VARIANTS[name])
    return encode_chunk(chunk_of(SMALL, tokens), codec), codec


@pytest.mark.parametrize("tokens", [9, 64, 300, 600])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_there_is_what_it_always_was(name, tokens):
    """Bit by bit: products of fewer tokens could differ in their last bits."""
    data, codec = coded(name, tokens)
    source = Counting(data)
    file = ChunkFile(source, codec=codec)
    size, count = file.header.arrangement.group_tokens, -(-tokens // file.header.arrangement.group_tokens)
    draw = torch.Generator().manual_seed(tokens)
    for wanted in ({0}, {count - 1}, set(range(1, count)), set(), *(_some(count, draw) for _ in range(5))):
        for units in (range(file.header.units), range(1, file.header.units)):
            if not units:
                continue
            whole = file.units(units)
            before = len(source.reads)
            runs = file.runs(units, wanted)
            part = file.units(units, groups=wanted)
            assert [
                (int(file.starts[r.start]), int(file.starts[r.stop] - file.starts[r.start])) for r in runs
            ] == source.reads[before:]
            there = torch.tensor([token // size in wanted for token in range(tokens)])
            for pair, both in zip(part, whole, strict=True):
                for states, full in zip(pair, both, strict=True):
                    assert states.shape == full.shape
                    assert torch.equal(states[:, there], full[:, there])
                    assert states[:, ~there].isnan().all()


def _some(count, draw):
    return {group for group in range(count) if torch.rand((), generator=draw) < 0.5}


@pytest.mark.parametrize("name", NAMES)
def test_runs_are_the_segments_of_the_groups_and_no_others(name):
    """Against the order that docs/format.md gives: stream, unit, part, group."""
    data, codec = coded(name, 300)
    with ChunkFile(data, codec=codec) as file:
        header = file.header
        groups = -(-300 // header.arrangement.group_tokens)
        for units in (range(header.units), range(1)):
            for wanted in ({0}, set(range(1, groups)), {1, 3} & set(range(groups)), set(range(groups))):
                number, numbers = 0, []
                for _ in range(header.arrangement.streams):
                    for unit in range(header.units):
                        for _ in range(header.arrangement.parts):
                            for group in range(groups):
                                if unit in units and group in wanted:
                                    numbers.append(number)
                                number += 1
                runs = file.runs(units, wanted)
                assert [n for run in runs for n in run] == numbers
                assert all(a.stop < b.start for a, b in pairwise(runs))


def test_a_codec_that_does_not_say_so_is_given_all():
    toy = Toy(profile="p")
    data = encode_chunk(chunk_of(SMALL[:1] * 3, 7), toy)
    file = ChunkFile(data, codec=toy)
    file.units(range(1))
    with pytest.raises(ValueError, match="only together"):
        file.units(range(1), groups={0})
