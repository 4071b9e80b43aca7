"""Heads: one encoding each, bounded before anything is made."""

import struct
import time
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.container import Arrangement, ContainerReader, Header, LayerShape, TokenStream, pack, write
from blendkv.container.format import DTYPES, MAX_HEAD
from blendkv.container.header import Head
from blendkv.container.packing import pack_head, parse_head, parse_prelude
from blendkv.container.seals import Tag
from blendkv.errors import ChunkFileError
from tests.chunks import make_chunk, payload_start
from tests.container.test_damage import refused, reseal
from tests.container.twin import parse
from tests.patience import SLACK_S

NAMES = st.from_regex(r"[a-z0-9-]{1,16}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDS = st.binary(max_size=24).map(lambda b: b[: len(b) // 4 * 4])


@st.composite
def headers(draw):
    """Any header that the format has room for, small."""
    tokens = draw(st.integers(1, 9))
    layers = draw(st.integers(1, 4))
    dims = st.integers(1, 40) | st.integers(1, 65535)
    streams = sorted(draw(st.dictionaries(NAMES, st.sampled_from(sorted(DTYPES)), max_size=3)).items())
    return Header(
        codec=draw(NAMES),
        level=draw(st.integers(-(2**15), 2**15 - 1)),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        arrangement=Arrangement(
            draw(st.integers(1, 12)), draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
        ),
        layers=tuple(LayerShape(draw(st.integers(1, 4)), draw(dims), draw(dims)) for _ in range(layers)),
        fingerprint=draw(TEXTS),
        ids=draw(st.binary(min_size=4 * tokens, max_size=4 * tokens)),
        profile_hash=draw(st.just("") | st.binary(min_size=16, max_size=16).filter(any).map(bytes.hex)),
        conditioning=draw(IDS),
        tokenizer=draw(TEXTS),
        namespace=draw(TEXTS),
        text=draw(st.none() | TEXTS),
        layer0=layers == 1 or draw(st.booleans()),
        token_streams=tuple(TokenStream(name, dtype) for name, dtype in streams),
        key_id=draw(st.none() | st.binary(max_size=16)),
    )


@settings(max_examples=300, deadline=None)
@given(headers(), st.data())
def test_heads_have_one_encoding(header, data):
    seal = 8 if header.key_id is None else 16
    streams = [stream.nbytes(header.tokens) for stream in header.token_streams]
    lengths = [-(-n // 16) * 16 for n in streams]
    lengths += [16 * data.draw(st.integers(0, 2**28 - 1)) for _ in range(header.segments - len(lengths))]
    checks = tuple(data.draw(st.binary(min_size=seal, max_size=seal)) for _ in lengths)
    head = Head(header, tuple(lengths), checks)
    tag = None if header.key_id is None else Tag(b"s" * 16, header.namespace)
    packed = pack_head(head, tag)
    assert len(packed) % 16 == 0
    again = parse_head(memoryview(packed), parse_prelude(memoryview(packed), len(packed) + sum(lengths)))
    assert again == head
    assert pack_head(again, tag) == packed


@settings(max_examples=200, deadline=None)
@given(headers(), st.randoms(use_true_random=False))
def test_the_reader_agrees_with_the_documentation(header, random):
    """`twin.parse` was written from docs/format.md."""
    names = [random.randbytes(stream.nbytes(header.tokens)) for stream in header.token_streams]
    header = replace(header, layers=tuple(replace(s, key_dim=1 + s.key_dim % 40, value_dim=2) for s in header.layers))
    coded = [random.randbytes(random.choice((0, 1, 15, 16, 17, 40))) for _ in range(header.segments - len(names))]
    secret = None if header.key_id is None else b"s" * 32
    data = pack(header, names + coded, secret=secret)
    slow = parse(data, secret)
    with ContainerReader(data, secret=secret) as reader:
        quick = reader.header
        assert quick == header
        assert slow["codec"] == header.codec
        assert slow["level"] == header.level
        assert slow["dtype"] == header.dtype
        assert slow["profile"] == (header.profile_hash or "0" * 32)
        assert slow["layers"] == [(s.heads, s.key_dim, s.value_dim) for s in header.layers]
        for name in ("fingerprint", "tokenizer", "namespace", "text"):
            assert slow[name] == getattr(header, name)
        assert slow["key_id"] == (header.key_id or b"")
        assert slow["ids"] == list(struct.unpack(f"<{header.tokens}I", header.ids))
        assert slow["token_streams"] == [(s.name, s.dtype) for s in header.token_streams]
        for name, given_bytes in zip(slow["named"], names, strict=True):
            assert bytes(reader.token_stream(name)) == given_bytes
            assert slow["named"][name].rstrip(b"\0") == given_bytes.rstrip(b"\0")
        a = header.arrangement
        for unit in range(header.units):
            for stream in range(a.streams):
                found = [bytes(s) for s in reader.unit(unit, stream)]
                groups = len(found) // a.parts
                assert found == [slow["coded"][stream, unit, p, g] for p in range(a.parts) for g in range(groups)]
        whole = [bytes(s) for s in reader.streams(a.streams)]
        assert whole == list(slow["coded"].values())
        assert reader.streams(1) == whole[: header.units * header.unit_segments]
    for given_bytes, kept in zip(names + coded, slow["segments"], strict=True):
        assert kept.rstrip(b"\0") == given_bytes.rstrip(b"\0")


def test_write_gives_what_pack_gives(tmp_path):
    header = Header("raw", 0, "fp32", Arrangement(2), (LayerShape(1, 2, 2),), "f", bytes(8))
    with (tmp_path / "chunk").open("wb") as file:
        assert write(file, header, [b"a" * 16, b"b" * 16]) == len(pack(header, [b"a" * 16, b"b" * 16]))
    assert (tmp_path / "chunk").read_bytes() == pack(header, [b"a" * 16, b"b" * 16])


FIELDS = {  # name: (offset, struct code)
    "parts": (51, "B"),
    "streams": (52, "B"),
    "token streams": (53, "B"),
    "key id": (54, "B"),
    "zero": (55, "B"),
    "tokens": (72, "I"),
    "group": (76, "I"),
    "unit": (80, "H"),
    "layers": (82, "H"),
    "fingerprint": (84, "H"),
    "tokenizer": (86, "H"),
    "namespace": (88, "H"),
    "zero 2": (90, "H"),
    "conditioning": (92, "I"),
    "text": (96, "I"),
    "heads": (100, "H"),
    "key dim": (102, "H"),
    "value dim": (104, "H"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_bombs_are_refused_before_room_is_made(field):
    """Every count at its worst, the head's checksum right: refused in milliseconds, in little memory."""
    data = encode_chunk(make_chunk())
    at, code = FIELDS[field]
    size = struct.calcsize(code)
    refused(reseal(data[:at] + b"\xff" * size + data[at + size :]))  # what is loaded once does not count
    tracemalloc.start()
    begin = time.perf_counter()
    for value in (0, 1 << (8 * size - 1), (1 << 8 * size) - 1):
        bomb = data[:at] + struct.pack("<" + code, value) + data[at + size :]
        if bomb != data:
            assert refused(reseal(bomb)) in {"header", "limit", "geometry", "symbols"}
    took, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 0.3 + SLACK_S
    assert peak < 1 << 20


def test_a_head_of_gigabytes_is_refused():
    data = bytearray(encode_chunk(make_chunk()))
    for length in (MAX_HEAD, 2**31, 2**32 - 1):
        data[12:16] = struct.pack("<I", length)
        assert refused(bytes(data)) == "limit"
    data[12:16] = struct.pack("<I", MAX_HEAD - 32)
    assert refused(bytes(data)) == "truncated"


def test_a_wide_layer_in_a_tiny_file_is_a_bomb():
    """Everything adds up, and 48 bytes would become gigabytes."""
    header = Header("x", 0, "fp32", Arrangement(1 << 17), (LayerShape(1, 1, 1),), "f", bytes(4 << 10))
    data = pack(header, [b"", bytes(16)])
    at = 100
    bomb = reseal(data[:at] + struct.pack("<HHH", 64, 512, 512) + data[at + 6 :])
    assert refused(bomb) == "limit"
    bomb = reseal(data[:at] + struct.pack("<HHH", 65535, 65535, 65535) + data[at + 6 :])
    assert refused(bomb, max_bytes=2**60) == "limit"


def test_the_writer_pads_what_a_reader_would_take_for_a_bomb():
    header = Header("x", 0, "fp32", Arrangement(1 << 17), (LayerShape(64, 512, 512),), "f", bytes(4 << 10))
    data = pack(header, [b"", b"y"])
    with ContainerReader(data) as reader:
        first, second = reader.unit(0)
    assert len(first) == 0
    assert bytes(second[:1]) == b"y"
    assert len(second) == header.decoded_bytes // 4096


def test_max_bytes_bounds_what_is_decoded():
    chunk = make_chunk()
    data = encode_chunk(chunk)
    assert decode_chunk(data, max_bytes=chunk.nbytes).nbytes == chunk.nbytes
    assert refused(data, max_bytes=chunk.nbytes - 1) == "limit"


def test_a_text_that_does_not_fit_is_left_out():
    header = Header("x", 0, "fp32", Arrangement(1 << 17), (LayerShape(1, 1, 1),), "f", bytes(4 << 17))
    for length, kept in ((400_000, True), (600_000, False)):
        data = pack(replace(header, text="x" * length), [bytes(16), bytes(16)])
        assert payload_start(data) <= MAX_HEAD
        with ContainerReader(data) as reader:
            assert (reader.header.text is not None) == kept


def test_an_index_that_does_not_fit_is_an_error():
    header = Header("x", 0, "fp32", Arrangement(1), (LayerShape(1, 1, 1),), "f", bytes(4 << 16))
    with pytest.raises(ChunkFileError, match="smaller chunks") as error:
        pack(header, [b""] * header.segments)
    assert error.value.reason == "limit"


@pytest.mark.parametrize(
    "wrong",
    [
        {"codec": "Raw"},
        {"codec": "x" * 17},
        {"level": 1 << 15},
        {"dtype": "fp64"},
        {"profile_hash": "abc"},
        {"profile_hash": "0" * 32},
        {"ids": b""},
        {"ids": bytes(6)},
        {"ids": bytes(4 * (2**17 + 1))},
        {"conditioning": bytes(3)},
        {"layers": ()},
        {"layers": (LayerShape(0, 1, 1),)},
        {"layers": (LayerShape(1, 65536, 1),)},
        {"layer0": False},
        {"arrangement": Arrangement(0)},
        {"arrangement": Arrangement(1, parts=17)},
        {"arrangement": Arrangement(1, streams=9)},
        {"arrangement": Arrangement(1, unit_layers=1025)},
        {"token_streams": (TokenStream("b", "fp32"), TokenStream("a", "fp32"))},
        {"token_streams": (TokenStream("a", "fp32"),) * 2},
        {"token_streams": (TokenStream("a", "int8"),)},
        {"key_id": bytes(17)},
        {"namespace": "x" * 1025},
        {"fingerprint": "\ud800"},
    ],
    ids=str,
)
def test_what_cannot_be_written_down_is_no_header(wrong):
    header = Header("raw", 0, "fp32", Arrangement(2), (LayerShape(1, 2, 2),), "f", bytes(8))
    with pytest.raises(ChunkFileError):
        replace(header, **wrong)


def test_a_wrong_number_of_segments_is_an_error():
    header = Header("raw", 0, "fp32", Arrangement(2), (LayerShape(1, 2, 2),), "f", bytes(8))
    with pytest.raises(ValueError, match="3 segments"):
        pack(header, [b""] * 3)
    with pytest.raises(ValueError, match="belong together"):
        pack(header, [b""] * 2, secret=b"s" * 16)
