"""Raw files that are put in order on a device, beside those that are decoded one segment after the other."""

import pytest
import torch

from blendkv.chunkfile import ChunkFile
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec
from blendkv.errors import ChunkFileError
from blendkv.landing import Landing
from tests.chunks import assert_same, make_chunk
from tests.made_up import make_codec

CPU = torch.device("cpu")
CARD = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


def opened(data, at, profiles=None, secret=None):
    room = at.room(len(data))
    room.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return ChunkFile(room, profiles=profiles, secret=secret)


@pytest.mark.parametrize("device", ["cpu", CARD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 100, 511, 512, 513, 1100])
def test_what_lands_is_what_is_decoded(tokens, level, dtype, device):
    chunk = make_chunk(tokens, 3, 8, 64, dtype=dtype)
    data = encode_chunk(chunk, get_codec("raw", level=level), token_streams={"moved": torch.arange(tokens).float()})
    at = Landing(torch.device(device))
    got = at.land(opened(data, at))
    assert got is not None
    assert {t.device.type for t in (*got.keys, *got.values)} == {device}
    want = ChunkFile(data).read()
    assert_same(got, want)
    assert torch.equal(got.scores["moved"].cpu(), want.scores["moved"])
    assert got.key == want.key


@pytest.mark.parametrize("odd", ["codec", "dims", "layers", "padding", "layer 0", "bytes"])
def test_what_does_not_land_is_decoded_elsewhere(odd):
    chunk, options = make_chunk(40, 3, 2, 16), {}
    if odd == "dims":
        chunk = make_chunk(40, 3, 2, 16, value_dim=32)
    if odd == "layers":
        other = make_chunk(40, 3, 4, 16)
        keys, values = (*chunk.keys[:2], other.keys[2]), (*chunk.values[:2], other.values[2])
        chunk = type(chunk)(ids=chunk.ids, keys=keys, values=values, fingerprint=chunk.fingerprint)
    if odd == "padding":
        chunk = make_chunk(33, 3, 1, 4, dtype=torch.float16)
    if odd == "layer 0":
        options["layer0"] = False
    codec = make_codec(chunk) if odd == "codec" else "raw"
    data, at = encode_chunk(chunk, codec, **options), Landing(CPU)
    profile = getattr(codec, "profile", None)
    file = ChunkFile(data, profiles=profile) if odd == "bytes" else opened(data, at, profile)
    assert at.land(file) is None


@pytest.mark.parametrize("secret", [None, b"s" * 32])
@pytest.mark.parametrize("where", [0.3, 0.6, 0.99])
def test_damage_does_not_land(where, secret):
    data, at = bytearray(encode_chunk(make_chunk(100, 3, 8, 64), "raw", secret=secret)), Landing(CPU)
    data[int(where * len(data))] ^= 1
    file = opened(data, at, secret=secret)
    with pytest.raises(ChunkFileError) as caught:
        at.land(file)
    assert caught.value.reason == ("checksum" if secret is None else "authentication")
