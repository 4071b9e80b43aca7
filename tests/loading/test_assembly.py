"""Pieces of a chunk file are joined in any order, checked, and used as far as they have come."""

import itertools
import random

import numpy as np
import pytest
import torch

from blendkv.chunkfile import ChunkFile
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec
from blendkv.errors import ChunkFileError
from blendkv.levelkeys import id_of
from blendkv.loading.assembly import Assembly, place_of
from blendkv.loading.orders import ORDERS, pieces
from tests.chunks import assert_same
from tests.drawn import SMALL, chunk_of, profile_of

TOKENS = 600


def made(name, **settings):
    codec = get_codec(name, level=0, profile=profile_of(name), **settings)
    return codec, encode_chunk(chunk_of(SMALL, TOKENS, text="a text"), codec)


@pytest.fixture(params=["klt", "klt-xl", "cachegen"])
def progressive(request):
    """Codec and file of two streams and several groups."""
    return made(request.param, **({} if request.param == "cachegen" else {"streams": 2}))


def opened(data, codec, **settings):
    assembly = Assembly(len(data), codec=codec, **settings)
    while assembly.header is None:
        for start, stop in assembly.missing():
            assert assembly.add(start, data[start:stop]) == []
    return assembly


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True))


def test_addresses_are_those_of_the_format(progressive):
    codec, data = progressive
    header = ChunkFile(data, codec=codec).header
    groups = -(-TOKENS // header.arrangement.group_tokens)
    assert groups > 1
    seen = [place_of(header, number) for number in range(header.segments)]
    assert len(set(seen)) == header.segments
    for stream in range(2):
        for unit in range(header.units):
            numbers = header.segments_of(unit, stream)
            places = [seen[n] for n in numbers]
            assert {p[:2] for p in places} == {(stream, unit)}
            assert [(p.part, p.group) for p in places] == [
                (part, group) for part in range(header.arrangement.parts) for group in range(groups)
            ]


@pytest.mark.parametrize("seed", range(3))
def test_any_order_any_cut(progressive, seed):
    codec, data = progressive
    rng = random.Random(seed)
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(40))})
    ranges = [(a, b) for a, b in itertools.pairwise(cuts)]
    ranges += rng.sample(ranges, 5)  # some twice
    rng.shuffle(ranges)
    assembly = Assembly(len(data), codec=codec)
    for start, stop in ranges:
        assert assembly.add(start, data[start:stop]) == []
    assert assembly.complete
    assert assembly.missing() == []
    assert_same(assembly.usable(), ChunkFile(data, codec=codec).read())
    assert equal(assembly.usable(), ChunkFile(data, codec=codec).read())


@pytest.mark.parametrize("order", ORDERS)
def test_orders_bring_everything_once(progressive, order):
    codec, data = progressive
    files = [opened(data, codec) for _ in range(2)]
    sent = pieces(files, order, most=4096)
    assert sorted((p.file, n) for p in sent for n in p.segments) == [
        (file, n) for file in range(2) for n in range(files[0].file.header.segments)
    ]
    streams = [place_of(files[0].header, p.segments[-1]).stream for p in sent]
    numbers = [p.file for p in sent]
    assert (
        numbers == sorted(numbers) if order == "sequential" else streams == sorted(streams, reverse=order == ORDERS[2])
    )
    if order == "refinements-first":
        assert all(len(p.segments) == 1 for p, stream in zip(sent, streams, strict=True) if stream == 1)
    for piece in sent:
        assert files[piece.file].add(piece.start, data[piece.start : piece.stop]) == []
    assert all(file.complete for file in files)


def test_an_unknown_order():
    with pytest.raises(ValueError, match="choose among sequential"):
        pieces([], "any")


def test_after_the_bases_all_is_usable_and_refinements_add_to_it_layer_by_layer(progressive):
    codec, data = progressive
    assembly, whole = opened(data, codec), ChunkFile(data, codec=codec)
    assert assembly.usable() is None
    order = pieces([assembly], "base-first", most=1)
    header = whole.header
    bases = header.segments_of(header.units - 1, 0).stop
    for piece in order:
        if piece.segments.start == bases:
            assert equal(assembly.usable(), whole.read(streams=1))
        assembly.add(piece.start, data[piece.start : piece.stop])
        if piece.segments.stop == header.segments_of(0, 1).stop:  # the first unit is refined, others are not
            got, layers = assembly.usable(), header.layers_of(0)
            assert got.coded == whole.read(streams=1).coded != whole.read().coded
            for layer in range(len(header.layers)):
                keys, values = whole.layer(layer, 2 if layer in layers else 1)
                assert torch.equal(got.keys[layer], keys)
                assert torch.equal(got.values[layer], values)
    assert equal(assembly.usable(), whole.read())
    assert assembly.usable().coded == whole.read().coded == id_of(codec)


def test_refinements_without_their_base_are_worth_nothing(progressive):
    codec, data = progressive
    assembly = opened(data, codec)
    for piece in pieces([assembly], "refinements-first"):
        if place_of(assembly.header, piece.segments[0]).stream == 1:
            assembly.add(piece.start, data[piece.start : piece.stop])
    assert assembly.usable() is None
    assert assembly.groups == 0


def test_the_first_groups_are_a_chunk_of_their_own(progressive):
    codec, data = progressive
    assembly, whole = opened(data, codec), ChunkFile(data, codec=codec).read(streams=1)
    group = assembly.header.arrangement.group_tokens
    for number in range(assembly.header.segments):
        place = place_of(assembly.header, number)
        if place.stream == 0 and place.group < 2:
            start, stop = assembly.starts[number : number + 2]
            assembly.add(int(start), data[start:stop])
    got = assembly.usable()
    assert len(got) == 2 * group < TOKENS
    assert torch.equal(got.ids, whole.ids[: 2 * group])
    assert got.text is None
    for a, b in zip((*got.keys, *got.values), (*whole.keys, *whole.values), strict=True):
        assert torch.allclose(a, b[:, : 2 * group], atol=1e-5)  # products of other sizes round otherwise


def test_every_flipped_byte_is_noticed_where_it_is(progressive):
    codec, data = progressive
    good = opened(data, codec)
    for seed in range(20):
        at = int(np.random.default_rng(seed).integers(good.starts[0], len(data)))
        bad = bytearray(data)
        bad[at] ^= 1 << seed % 8
        assembly = opened(data, codec)
        wrong = assembly.add(0, bytes(bad))
        assert len(wrong) == 1
        assert wrong[0][0] <= at < wrong[0][1]
        assert assembly.missing() == wrong
        assert assembly.add(wrong[0][0], data[wrong[0][0] : wrong[0][1]]) == []
        assert assembly.complete
        assert bytes(assembly.read(0, len(data))) == data


def test_what_was_checked_stays_whatever_comes_later(progressive):
    codec, data = progressive
    assembly = Assembly(len(data), codec=codec)
    assembly.add(0, data)
    assembly.add(0, bytes(len(data)))
    assert bytes(assembly.read(0, len(data))) == data
    assert assembly.complete


def test_a_wrong_head_is_thrown_away_with_all_that_came(progressive):
    codec, data = progressive
    assembly = Assembly(len(data), codec=codec)
    head = int(opened(data, codec).starts[0])
    bad = bytearray(data[:head])
    bad[200] ^= 1
    assembly.add(head + 100, data[head + 100 : head + 1000])
    assert assembly.add(0, bytes(bad)) == [(0, head), (head + 100, head + 1000)]
    assert assembly.header is None
    assert assembly.add(0, b"something else" * 3) == [(0, 42)]
    assert assembly.wrong == head + 900 + 42
    assert assembly.add(0, data) == []
    assert assembly.complete


@pytest.mark.parametrize("size", [0, 31, 1 << 50])
def test_sizes_that_no_file_has(size):
    with pytest.raises(ChunkFileError):
        Assembly(size)


def test_bytes_outside():
    with pytest.raises(ValueError, match="of a file of 100"):
        Assembly(100).add(90, bytes(11))


def test_what_has_not_come_cannot_be_read(progressive):
    codec, data = progressive
    assembly = opened(data, codec)
    with pytest.raises(OSError, match="have not all come"):
        assembly.file.read()


def test_a_sealed_file_is_not_joined_with_anybody_elses():
    secret, codec = b"s" * 32, get_codec("raw")
    data, forged = (
        encode_chunk(chunk_of(SMALL, 300, seed=seed), codec, secret=each)
        for seed, each in ((1, secret), (2, b"t" * 32))
    )
    assembly = Assembly(len(data), codec=codec, secret=secret)
    assembly.add(0, data[:2048])
    assert assembly.add(2048, forged[2048:]) != []
    assert not assembly.complete
    assembly.add(0, data)
    assert assembly.complete
