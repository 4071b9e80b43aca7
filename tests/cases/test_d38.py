import pickle

import pytest
import torch

from blendkv.chunkfile import ChunkFile, decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec, load_profile
from blendkv.codecs.profile import profile_folder
from blendkv.errors import ChunkFileError
from tests.container.test_no_code import payloads_of, watch
from tests.drawn import CODECS, SMALL, chunk_of, profile_of


@pytest.mark.parametrize("codec", ["raw", *CODECS])
def test_d38_entries_that_carry_code(tmp_path, codec):
    """Who could write to a cache had code run in the reader (LMCache PR #926, CVE-2025-62164, CVE-2025-32434)."""
    canary, path = tmp_path / "canary", tmp_path / "entry"
    profile = None if codec == "raw" else profile_of(codec)
    good = encode_chunk(chunk_of(SMALL), get_codec(codec, **({} if profile is None else {"profile": profile})))
    decode_chunk(good, profiles=lambda _: profile)  # numba reads what it compiled before, by pickle, the first time
    payloads = payloads_of(canary)
    payloads |= {f"{name}, behind a head": good[: len(good) // 2] + data for name, data in payloads.items()}
    for name, data in payloads.items():
        path.write_bytes(data)
        with watch() as seen, pytest.raises(ChunkFileError):
            decode_chunk(path, profiles=lambda _: profile)
        assert not canary.exists(), name
        assert not seen, name
    path.write_bytes(good)
    with watch() as seen, ChunkFile(path, profiles=lambda _: profile) as file:
        file.read()
    assert not seen
    pickle.loads(payloads["pickle"])
    assert canary.exists()


def test_d38_profiles_that_carry_code(tmp_path, monkeypatch):
    """In the folder where a chunk file looks for its profile, by the right name."""
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path))
    profile, canary = profile_of("klt"), tmp_path / "canary"
    data, path = encode_chunk(chunk_of(SMALL), get_codec("klt", profile=profile)), profile.save()
    whole = path.read_bytes()
    payloads = payloads_of(canary)
    payloads |= {f"profile, then {name}": whole + data for name, data in payloads.items()}
    for name, payload in payloads.items():
        path.write_bytes(payload)
        with watch() as seen, pytest.raises(ValueError, match="not a profile"):
            load_profile(profile.hash)
        with watch() as also, pytest.raises(ChunkFileError) as error:
            decode_chunk(data)
        assert error.value.reason == "profile"
        assert not canary.exists(), name
        assert not seen, name
        assert not also, name
    assert profile_folder() == path.parent
    path.write_bytes(whole)
    assert torch.isfinite(decode_chunk(data).keys[0]).all()
