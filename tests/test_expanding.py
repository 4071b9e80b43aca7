"""Chunk files decoded by kernels, many at once: what the CPU decodes, up to a rounding."""

import numpy as np
import pytest
import torch

from blendkv import ChunkFile, ChunkFileError, encode_chunk, expanding, kernels
from blendkv.codecs import LayerShape, Profile, get_codec, transform
from blendkv.codecs.tables import ABSENT
from blendkv.expanding import decode_chunks, decode_each
from tests.chunks import make_chunk
from tests.made_up import make_codec

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch):
    """Kernels are used on the CPU too, interpreted; what they are compared with is exact on every CPU."""
    monkeypatch.setattr(transform, "bf16_is_fast", lambda: False)
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "unusable", lambda *args: None)


def opened(chunk, codec, device="cpu"):
    data = torch.from_numpy(np.frombuffer(encode_chunk(chunk, codec), np.uint8).copy())
    return ChunkFile(data.to(device), codec=codec)


def assert_close(got, want):
    """Fields are equal; numbers differ by at most a rounding of their dtype."""
    assert got.key == want.key
    assert (got.text, got.namespace, got.conditioning) == (want.text, want.namespace, want.conditioning)
    rounding = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[want.dtype]
    if DEVICE == "cpu" and want.dtype == torch.bfloat16:
        rounding *= 2  # the interpreter cuts off
    for a, b in zip((*got.keys, *got.values), (*want.keys, *want.values), strict=True):
        assert a.device.type == DEVICE
        assert a.is_contiguous()
        torch.testing.assert_close(a.cpu(), b, rtol=rounding, atol=1e-5 * max(1, float(b.abs().max())))


def check(chunks, codec, device="cpu", pieces=2):
    files = [opened(chunk, codec, device) for chunk in chunks]
    assert all(expanding.by_kernels(file, torch.device(DEVICE)) for file in files)
    for got, file in zip(decode_chunks(files, DEVICE, pieces=pieces), files, strict=True):
        assert_close(got, file.read())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["klt", "klt-xl"])
def test_several_chunks_at_once(name, dtype):
    """One of them of a single token."""
    chunks = [make_chunk(n, 2, 2, 16, dtype=dtype, seed=n, text="t", conditioning=(1,)) for n in (3, 1, 2)]
    check(chunks, make_codec(chunks[0], name))


def test_tags_of_sealed_files_are_compared():
    """Bytes that somebody changed, and gave new checksums if he could, never reach a kernel."""
    chunk, secret = make_chunk(6, 2, 2, 16), b"s" * 32
    codec = make_codec(chunk)
    data = torch.from_numpy(np.frombuffer(encode_chunk(chunk, codec, secret=secret), np.uint8).copy())
    file = ChunkFile(data, codec=codec, secret=secret)
    assert not expanding.by_kernels(file, torch.device(DEVICE))
    assert_close(decode_chunks([file], DEVICE)[0], file.read())
    data[file.starts[0]] ^= 1  # the scale of a protected token
    (error,) = decode_each([file], DEVICE)
    assert isinstance(error, ChunkFileError)
    assert error.reason == "authentication"


def test_several_groups():
    chunks = [make_chunk(n, 1, 1, 8, seed=n) for n in (3, 258)]
    check(chunks, make_codec(chunks[0]))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 8), (40, 64), (24, 96), (8, 256)])
def test_head_dims(key_dim, value_dim):
    chunks = [make_chunk(n, 1, 1, key_dim, value_dim, torch.float16, seed=n) for n in (3, 2)]
    check(chunks, make_codec(chunks[0]))


@pytest.mark.parametrize("unit_layers", [1, 2, 3])
def test_units(unit_layers):
    chunks = [make_chunk(n, 3, 2, 16, 24, seed=n) for n in (4, 2)]
    check(chunks, make_codec(chunks[0], "klt-xl", unit_layers=unit_layers), pieces=5)


@pytest.mark.parametrize("protected", [0, 1, 4])
def test_protected_tokens(protected):
    chunks = [make_chunk(n, 1, 3, 8, seed=n) for n in (2, 6)]
    check(chunks, make_codec(chunks[0], protected=protected))


@pytest.mark.parametrize("level", [-16, 0, 16])
@pytest.mark.parametrize("name", ["klt", "klt-xl"])
def test_levels_with_absent_channels_and_large_symbols(name, level):
    """At the coarsest level some channels are not coded; at the finest some symbols are escapes."""
    chunk = make_chunk(7, 2, 2, 32, seed=1)
    codec = make_codec(chunk, name, level)
    absent = sum(int((codec.rows(part) == ABSENT).sum()) for parts in codec._units for part in parts)
    assert absent or level < 16
    for states in (chunk.keys[1], chunk.values[0]):
        states[0, 5] *= 8
    check([chunk], codec)


def test_symbols_are_exact():
    """By a transform that changes nothing; fp16 alone would be off by eight at the end of int16."""
    symbols = [2047, 2048, 2049, -2049, 3071, 3073, 32767, -32767, 0, 1, -1, 127, -127, 128, -128, -32759]
    chunk = make_chunk(4, 1, 1, 16)
    for states in (*chunk.keys, *chunk.values):
        states.copy_(torch.tensor(symbols))
    matrix, scale = torch.eye(16, dtype=torch.float16)[None], torch.full((16,), 40, dtype=torch.int16)
    tensors = {f"matrix.0.{i}": matrix for i in range(2)} | {f"scale.0.{i}": scale for i in range(2)}
    tensors |= {f"mean.0.{i}": torch.zeros(16) for i in range(2)}
    settings = {"joint": False, "unit_layers": 1, "protected": 0}
    profile = Profile("klt", (LayerShape(1, 16, 16),), tensors, settings)
    (got,) = decode_chunks([opened(chunk, get_codec("klt", profile=profile))], DEVICE)
    assert torch.equal(got.keys[0].cpu(), chunk.keys[0])
    assert torch.equal(got.values[0].cpu(), chunk.values[0])


def test_what_kernels_do_not_do_the_cpu_does():
    chunks = [make_chunk(5, 2, 2, 16, seed=n) for n in range(4)]
    codec, plain = make_codec(chunks[0]), opened(chunks[1], get_codec("raw"))
    two = type(codec)(profile=codec.profile, streams=2)
    files = [opened(chunks[0], codec), plain, opened(chunks[2], two)]
    files.append(
        ChunkFile(
            encode_chunk(chunks[3], codec, layer0=False),
            codec=codec,
            rebuild=lambda file: (chunks[3].keys[0], chunks[3].values[0]),
        )
    )
    assert [expanding.by_kernels(file, torch.device(DEVICE)) for file in files] == [True, False, False, False]
    for got, file in zip(decode_chunks(files, DEVICE), files, strict=True):
        assert_close(got, file.read())
    assert decode_chunks([], DEVICE) == []


@pytest.mark.parametrize("name", ["klt", "klt-xl"])
def test_only_the_damaged_chunk_fails(name):
    """By many words (one alone may be a symbol that was escaped), or by a scale of the protected token."""
    chunks = [make_chunk(5, 2, 1, 16, seed=n) for n in range(4)]
    codec = make_codec(chunks[0], name)
    files = [opened(chunk, codec) for chunk in chunks]
    files[1].tensor[sum(files[1].starts[-2:]) // 2 :] ^= 85
    files[2].tensor[files[2].starts[0] : files[2].starts[0] + 4] = torch.tensor([0, 0, 192, 127], dtype=torch.uint8)
    results = decode_each(files, DEVICE)
    assert [isinstance(result, ChunkFileError) for result in results] == [False, True, True, False]
    assert {result.reason for result in results[1:3]} == {"symbols"}
    assert_close(results[3], files[3].read())
    with pytest.raises(ChunkFileError, match="symbols"):
        decode_chunks(files[2:], DEVICE)


def test_sections_too_short_for_their_lanes():
    chunks = [make_chunk(6, 2, 2, 16, seed=n) for n in range(2)]
    codec = make_codec(chunks[0])
    files = [opened(chunk, codec) for chunk in chunks]
    files[0].starts[1] = files[0].starts[0]  # a first segment of no bytes
    results = decode_each(files, DEVICE)
    assert [getattr(result, "reason", "") for result in results] == ["symbols", ""]


def test_more_chunks_than_are_decoded_at_once(monkeypatch):
    monkeypatch.setattr(expanding, "MOST_SYMBOLS", 1300)
    chunks = [make_chunk(5, 2, 2, 16, seed=n) for n in range(4)]
    check(chunks, make_codec(chunks[0]))


GPU = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")]


@pytest.mark.parametrize("where", [pytest.param(where, marks=GPU) for where in ("cpu", "pinned", "cuda")])
@pytest.mark.parametrize("pieces", [1, 4, 32])
@pytest.mark.parametrize("name", ["klt", "klt-xl"])
def test_on_a_gpu(name, pieces, where):
    """The shape of an 8B model's layers, bytes in each kind of memory, over and over."""
    heads = {"klt": 8, "klt-xl": 2}[name]
    chunks = [make_chunk(n, 8, heads, 128, dtype=torch.bfloat16, seed=n) for n in (512, 300, 64)]
    codec = make_codec(chunks[0], name, unit_layers=2)
    files = [opened(chunk, codec, "cuda" if where == "cuda" else "cpu") for chunk in chunks]
    if where == "pinned":
        files = [ChunkFile(file.tensor.pin_memory(), codec=codec) for file in files]
    want = [file.read() for file in files]
    for _ in range(5):
        for got, wanted in zip(decode_chunks(files, DEVICE, pieces=pieces), want, strict=True):
            assert_close(got, wanted)
