"""Whatever is wrong with a file is found: damage by accident, and with a secret, forgery."""

import struct
import subprocess
import sys
from collections import Counter

import pytest
import xxhash

from blendkv.chunkfile import ChunkFile, decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.container import ContainerReader
from blendkv.errors import BlendError, ChunkFileError
from tests.chunks import assert_same, index_at, make_chunk, payload_start

SECRET, OTHER = b"s" * 32, b"o" * 32
FIELDS = {"conditioning": (1, 2), "tokenizer": "t" * 32, "namespace": "tenant", "text": "Grüße"}
CHUNK = make_chunk(tokens=5, layers=3, **FIELDS)
BUILD = {"plain": {}, "sealed": {"secret": SECRET, "key_id": b"2025"}}


def reseal(data: bytes | bytearray) -> bytes:
    """The head's checksum made right, as anybody can."""
    data, end = bytearray(data), payload_start(data)
    data[24:32] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:24] + data[32:end])))
    return bytes(data)


@pytest.fixture(params=BUILD)
def mode(request):
    """(a valid file, the secret to read it with)."""
    return encode_chunk(CHUNK, **BUILD[request.param]), BUILD[request.param].get("secret")


def refused(data: bytes, secret=None, **kwargs) -> str:
    with pytest.raises(ChunkFileError) as error:
        decode_chunk(data, secret=secret, **kwargs)
    return error.value.reason


def test_the_file_is_fine_to_begin_with(mode):
    data, secret = mode
    assert 4000 < len(data) < 4500
    assert_same(decode_chunk(data, secret=secret), CHUNK)


def test_every_single_bit_flip_is_found(mode):
    """All of them, some 34,000."""
    data, secret = mode
    damaged, reasons = bytearray(data), Counter()
    for at in range(len(data)):
        for bit in range(8):
            damaged[at] ^= 1 << bit
            try:
                decode_chunk(damaged, secret=secret)
            except ChunkFileError as error:
                reasons[error.reason] += 1
            damaged[at] ^= 1 << bit
    assert reasons.total() == 8 * len(data)
    assert reasons["magic"] == 64
    assert reasons["version"] == 16
    in_payload = 8 * (len(data) - payload_start(data))
    assert reasons["checksum" if secret is None else "authentication"] >= in_payload


def test_truncation_at_every_length_is_found(mode):
    data, secret = mode
    assert {refused(data[:length], secret) for length in range(len(data))} == {"truncated"}


def test_extension_is_found(mode):
    data, secret = mode
    assert refused(data + b"\0", secret) == "length"
    assert refused(data + data, secret) == "length"


def test_swapped_segments_are_found(mode):
    """Two of the same length, even where their checksums are swapped with them and the head's is made right."""
    data, secret = mode
    with ContainerReader(data, secret=secret) as reader:
        header = reader.header
    entry, index, start = (12 if secret is None else 20), index_at(data, header), payload_start(data)
    (length,) = struct.unpack_from("<I", data, index)
    swapped = bytearray(data)
    swapped[start : start + length], swapped[start + length : start + 2 * length] = (
        data[start + length : start + 2 * length],
        data[start : start + length],
    )
    assert refused(bytes(swapped), secret) == ("checksum" if secret is None else "authentication")
    swapped[index : index + 2 * entry] = data[index + entry : index + 2 * entry] + data[index : index + entry]
    assert refused(reseal(swapped), secret) == ("checksum" if secret is None else "authentication")


def test_segments_of_another_entry_are_found(mode):
    data, secret = mode
    kwargs = {} if secret is None else BUILD["sealed"]
    other = encode_chunk(make_chunk(tokens=5, seed=1, **FIELDS), **kwargs)
    assert len(other) == len(data)
    start = payload_start(data)
    assert refused(data[:start] + other[start:], secret) == ("checksum" if secret is None else "authentication")


def test_another_entry_has_another_key(mode):
    """A valid file in a wrong place is for the caller to notice, before any segment is read."""
    data, secret = mode
    with ChunkFile(data, secret=secret) as file:
        assert file.key == CHUNK.key
    kwargs = {} if secret is None else BUILD["sealed"]
    with ChunkFile(encode_chunk(make_chunk(seed=1), **kwargs), secret=secret) as file:
        assert file.key != CHUNK.key


def test_sealed_and_plain_are_never_mixed_up():
    plain, sealed = encode_chunk(CHUNK), encode_chunk(CHUNK, secret=SECRET)
    assert refused(plain, SECRET) == "authentication"
    assert refused(sealed) == "authentication"
    assert refused(sealed, OTHER) == "authentication"


def test_secrets_are_rotated_by_key_id():
    old, new = (encode_chunk(CHUNK, secret=s, key_id=i) for s, i in ((OTHER, b"2024"), (SECRET, b"2025")))
    both = {b"2024": OTHER, b"2025": SECRET}
    for data in (old, new):
        assert_same(decode_chunk(data, secret=both), CHUNK)
    assert refused(old, {b"2025": SECRET}) == "authentication"
    assert refused(old, {b"2024": SECRET}) == "authentication"
    at = old.index(b"2024")
    assert refused(reseal(old[:at] + b"2025" + old[at + 4 :]), both) == "authentication"


@pytest.mark.parametrize("field", ["tenant", "f" * 32, "t" * 32, "Grüße"])
def test_a_changed_identity_is_found_where_it_matters(field):
    """Without a secret, anybody may write such a file; with one, nobody else."""
    forged = field[:-1] + "!" * len(field[-1].encode())
    plain, sealed = encode_chunk(CHUNK), encode_chunk(CHUNK, secret=SECRET)
    changed = [reseal(data.replace(field.encode(), forged.encode())) for data in (plain, sealed)]
    assert forged in {
        getattr(decode_chunk(changed[0]), name) for name in ("namespace", "fingerprint", "tokenizer", "text")
    }
    assert refused(changed[1], SECRET) == "authentication"


def test_tags_of_namespaces_differ():
    """The same secret, another namespace: no segment's tag is the same."""
    a, b = (encode_chunk(make_chunk(namespace=name), secret=SECRET) for name in ("tenant-a", "tenant-b"))
    assert a[payload_start(a) :] == b[payload_start(b) :]
    with ContainerReader(a, secret=SECRET) as x, ContainerReader(b, secret=SECRET) as y:
        assert not set(x._head.checks) & set(y._head.checks)


@pytest.mark.parametrize("length", [0, 15, 65])
def test_secrets_of_odd_lengths_are_refused(length):
    with pytest.raises(ValueError, match="16 to 64"):
        encode_chunk(CHUNK, secret=b"x" * length)


def test_a_future_version_is_refused_by_number():
    data = bytearray(encode_chunk(CHUNK))
    data[8:10] = struct.pack("<H", 2)
    with pytest.raises(ChunkFileError, match=r"version 2.*reads version 1") as error:
        decode_chunk(reseal(data))
    assert error.value.reason == "version"


def test_unknown_flags_and_dtypes_and_codecs_are_refused():
    data = encode_chunk(CHUNK)
    for bit in range(3, 16):
        assert refused(reseal(data[:10] + struct.pack("<H", 4 | 1 << bit) + data[12:])) == "header"
    for dtype in (0, 4, 255):
        assert refused(reseal(data[:50] + bytes([dtype]) + data[51:])) == "header"
    assert refused(reseal(data[:32] + b"nosuch".ljust(16, b"\0") + data[48:])) == "codec"
    for name in (b"raw\0x", b"", b"Raw", b"r/w", b"r\xe4w"):
        assert refused(reseal(data[:32] + name.ljust(16, b"\0") + data[48:])) == "header"
    assert refused(reseal(data[:48] + struct.pack("<h", 2) + data[50:])) == "codec"
    assert refused(reseal(data[:56] + b"\x01" * 16 + data[72:])) == "profile"


def test_errors_say_what_they_are():
    error = ChunkFileError("what to do", reason="checksum")
    assert isinstance(error, BlendError)
    assert isinstance(error, ValueError)
    assert (str(error), error.reason) == ("what to do", "checksum")


def test_nothing_imports_torch():
    code = "import blendkv.container, sys; assert not {'torch', 'numpy', 'pickle'} & set(sys.modules), 'too much'"
    subprocess.run([sys.executable, "-c", code], check=True)
