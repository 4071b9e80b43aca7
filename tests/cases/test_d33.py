import os

import pytest

from blendkv.chunkfile import ChunkFile, decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec
from blendkv.errors import ChunkFileError
from tests.chunks import assert_same
from tests.drawn import CODECS, SMALL, chunk_of, profile_of


@pytest.fixture(params=["raw", *CODECS])
def entry(request):
    """(a chunk file of about 4 KiB or less, another of the same codec, what reads both)"""
    profile = None if request.param == "raw" else profile_of(request.param)
    codec = get_codec(request.param, **({} if profile is None else {"profile": profile}))
    tokens = 13 if profile is None else 60
    files = [encode_chunk(chunk_of(SMALL, tokens, seed=seed, text=f"{seed}"), codec) for seed in (0, 1)]
    return (*files, {"profiles": lambda _: profile})


def reason_of(source, reader) -> str:
    with pytest.raises(ChunkFileError) as error:
        decode_chunk(source, **reader)
    return error.value.reason


def test_d33_damaged_entries_are_told_from_whole_ones(entry, tmp_path):
    """A damaged file took the engine down, or was loaded as if it were fine (LMCache#1313, #2420, vllm#54363)."""
    data, _, reader = entry
    path = tmp_path / "entry"
    for damaged, reasons in [
        (b"", {"truncated"}),
        *((data[: len(data) * part // 64], {"truncated"}) for part in range(64)),
        (data + b"\0", {"length"}),
    ]:
        path.write_bytes(damaged)
        assert reason_of(path, reader) in reasons
        assert reason_of(damaged, reader) in reasons


def test_d33_every_bit_counts(entry):
    """22 of 60 flips in bf16 values had changed the answer; here each is found, in an entry of about 4 KiB."""
    data, _, reader = entry
    damaged, found = bytearray(data), 0
    for at in range(len(data)):
        bit = 1 << at % 8
        damaged[at] ^= bit
        found += reason_of(damaged, reader) != ""
        damaged[at] ^= bit
    assert found == len(data) < 12_000
    decode_chunk(damaged, **reader)


def test_d33_bytes_of_another_entry(entry):
    """A whole other file has another key; a part of it does not pass."""
    data, other, reader = entry
    with ChunkFile(data, **reader) as file, ChunkFile(other, **reader) as wrong:
        head, end = file._reader.starts[0], wrong._reader.starts[0]
        assert file.header.text != wrong.header.text
    assert reason_of(data[:head] + other[end:], reader) in {"checksum", "truncated", "length"}
    assert_same(decode_chunk(data, **reader), decode_chunk(bytearray(data), **reader))


def test_d33_missing_and_unreadable_entries(entry, tmp_path):
    """An error of the file system, which a store counts as a miss."""
    data, _, reader = entry
    path = tmp_path / "entry"
    with pytest.raises(FileNotFoundError):
        decode_chunk(path, **reader)
    with pytest.raises(OSError, match="directory"):
        decode_chunk(tmp_path, **reader)
    path.write_bytes(data)
    path.chmod(0)
    if os.geteuid():
        with pytest.raises(PermissionError):
            decode_chunk(path, **reader)
    path.chmod(0o600)
    decode_chunk(path, **reader)
