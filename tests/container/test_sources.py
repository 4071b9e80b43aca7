"""The same file through everything that can give a range of bytes, in as few ranges as promised."""

import io
import mmap

import fsspec
import pytest

from blendkv.chunkfile import ChunkFile, decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.container import ContainerReader, MemorySource, RangeSource, Source
from blendkv.container.reader import FIRST_READ
from blendkv.errors import ChunkFileError
from tests.chunks import assert_same, make_chunk

CHUNK = make_chunk(tokens=300, layers=4)
DATA = encode_chunk(CHUNK)


class Counting:
    """A source that notes what is read."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size, self.reads = data, len(data), []

    def read(self, start: int, length: int) -> bytes:
        self.reads.append((start, length))
        assert start >= 0
        assert length > 0
        assert start + length <= self.size
        return self.data[start : start + length]


class OnlyRead:
    """The least that a file object can be."""

    def __init__(self, data: bytes) -> None:
        self.file = io.BytesIO(data)
        self.seek = self.file.seek

    def read(self, length: int) -> bytes:
        return self.file.read(min(length, 1000))  # as a raw file may


@pytest.mark.parametrize(
    "wrap",
    [bytes, bytearray, memoryview, io.BytesIO, MemorySource, OnlyRead, Counting],
    ids=lambda wrap: wrap.__name__,
)
def test_memory(wrap):
    source = wrap(DATA)
    assert_same(decode_chunk(source), CHUNK)
    assert_same(decode_chunk(source), CHUNK)  # it is not closed, and may be read again


def test_paths_files_and_maps(tmp_path):
    path = tmp_path / "chunk"
    path.write_bytes(DATA)
    for source in (path, str(path)):
        assert_same(decode_chunk(source), CHUNK)
    with path.open("rb") as file:
        file.seek(17)
        assert_same(decode_chunk(file), CHUNK)
        assert not file.closed
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert_same(decode_chunk(mapped), CHUNK)
    with path.open("rb", buffering=0) as raw:
        assert_same(decode_chunk(raw), CHUNK)


def test_fsspec():
    with fsspec.open("memory://chunks/one", "wb") as file:
        file.write(DATA)
    with fsspec.open("memory://chunks/one", "rb") as file:
        assert_same(decode_chunk(file), CHUNK)
    fs = fsspec.filesystem("memory")
    source = RangeSource(lambda start, length: fs.cat_file("chunks/one", start, start + length), fs.size("chunks/one"))
    assert isinstance(source, Source)
    assert_same(decode_chunk(source), CHUNK)


def test_open_files_are_closed_after_errors(tmp_path):
    """A ResourceWarning would be an error here."""
    path = tmp_path / "chunk"
    for content, reason in ((DATA[:-1], "truncated"), (b"", "truncated"), (b"no", "magic"), (DATA + b"x", "length")):
        path.write_bytes(content)
        with pytest.raises(ChunkFileError) as error:
            decode_chunk(path)
        assert error.value.reason == reason
    path.write_bytes(DATA.replace(b"raw", b"war", 1))
    with pytest.raises(ChunkFileError):
        decode_chunk(path)


def test_errors_of_the_source_pass():
    def gone(start, length):
        raise TimeoutError("the network")

    with pytest.raises(FileNotFoundError):
        decode_chunk("/no/such/file")
    with pytest.raises(TimeoutError):
        decode_chunk(RangeSource(gone, len(DATA)))


@pytest.mark.parametrize(("answer", "reason"), [(None, "truncated"), (b"", "truncated"), (bytes(10**6), "length")])
def test_wrong_ranges_are_refused(answer, reason):
    with pytest.raises(ChunkFileError) as error:
        decode_chunk(RangeSource(lambda start, length: answer, len(DATA)))
    assert error.value.reason == reason


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "chunk"
    path.write_bytes(DATA)
    with ChunkFile(path) as file:
        path.write_bytes(DATA[:-5])
        file.layer(0)
        with pytest.raises(ChunkFileError) as error:
            file.layer(3)
        assert error.value.reason == "truncated"


def test_what_is_no_source_is_a_type_error():
    with pytest.raises(TypeError, match="RangeSource"):
        decode_chunk(17)


def test_one_read_to_open_and_one_a_layer():
    source = Counting(DATA)
    with ChunkFile(source) as file:
        assert source.reads == [(0, FIRST_READ)]
        for layer in (2, 0, 3, 1):
            file.layer(layer)
        ends = [start + length for start, length in sorted(source.reads[1:])]
        assert [start for start, _ in sorted(source.reads[1:])][1:] == ends[:-1]
        assert ends[-1] == len(DATA)
        source.reads.clear()
        file.read()
        assert len(source.reads) == 1


def test_a_large_head_takes_a_second_read():
    source = Counting(encode_chunk(make_chunk(text="x" * 100_000)))
    with ContainerReader(source) as reader:
        assert reader.header.text == "x" * 100_000
    assert len(source.reads) == 2
    assert source.reads[1][0] == FIRST_READ
