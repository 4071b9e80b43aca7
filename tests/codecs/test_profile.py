"""Profiles as files, by their hash."""

import hashlib
import json
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import LayerShape, Profile, get_codec, load_profile
from blendkv.codecs.profile import profile_folder, read_profile
from blendkv.errors import ChunkFileError
from tests.chunks import assert_same
from tests.drawn import CODECS, SMALL, chunk_of, profile_of

TENSORS = {"b": torch.arange(3), "a.1": torch.ones(2, 2).half()}
TINY = Profile("klt", (LayerShape(1, 2, 3),), TENSORS, {"x": 1}, {"n": "m"})


@pytest.mark.parametrize("codec", CODECS)
def test_there_and_back(tmp_path, codec):
    profile, chunk = profile_of(codec), chunk_of(SMALL, 30)
    path = profile.save(tmp_path / "deep" / "p.safetensors")
    assert [p.name for p in path.parent.iterdir()] == ["p.safetensors"]
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode
    again = read_profile(path)
    assert (again.hash, again.codec, again.shapes) == (profile.hash, codec, SMALL)
    assert (dict(again.settings), dict(again.about)) == (dict(profile.settings), dict(profile.about))
    assert again.nbytes == profile.nbytes
    assert again.save(tmp_path / "q").read_bytes() == path.read_bytes()
    data = encode_chunk(chunk, get_codec(codec, profile=str(path)))
    assert data == encode_chunk(chunk, get_codec(codec, profile=profile))
    assert_same(decode_chunk(data, profiles={profile.hash: again}), decode_chunk(data, profiles=lambda _: profile))
    assert_same(decode_chunk(data, profiles=again), decode_chunk(data, profiles=lambda _: profile))


def test_one_bit_of_a_file_is_noticed(tmp_path):
    """Though it is given by its name: numbers would still be finite, and only answers worse."""
    path = profile_of("klt").save(tmp_path / "p.safetensors")
    data = bytearray(path.read_bytes())
    for at in range(len(data) - 1, len(data) - 400, -37):
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(ValueError, match="not what was written"):
            get_codec("klt", profile=path)
        data[at] ^= 1
    path.write_bytes(data)
    assert get_codec("klt", profile=path).profile_hash == profile_of("klt").hash


def test_by_its_hash(tmp_path, monkeypatch):
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path))
    profile, chunk = profile_of("klt"), chunk_of(SMALL)
    assert load_profile(profile.hash) is None
    with pytest.raises(ValueError, match=rf"finds no profile {profile.hash}.*blendkv profile"):
        get_codec("klt", profile=profile.hash)
    data = encode_chunk(chunk, get_codec("klt", profile=profile))
    with pytest.raises(ChunkFileError, match=profile.hash) as error:
        decode_chunk(data)
    assert error.value.reason == "profile"
    path = profile.save()
    assert path == profile_folder() / f"{profile.hash}.safetensors"
    assert encode_chunk(chunk, get_codec("klt", profile=profile.hash)) == data
    decode_chunk(data)
    profile_of("klt-xl").save(path)
    with pytest.raises(ChunkFileError, match="delete it") as error:
        decode_chunk(data)
    assert error.value.reason == "profile"
    path.write_bytes(b"not at all")
    with pytest.raises(ChunkFileError, match="not a profile") as error:
        decode_chunk(data)
    assert error.value.reason == "profile"
    with pytest.raises(FileNotFoundError, match="make one with"):
        get_codec("klt", profile=tmp_path / "nosuch")


def test_hash():
    """As docs/format.md says; of all that decoding depends on, and of nothing else."""
    said = {"version": 1, "codec": "klt", "shapes": [[1, 2, 3]], "settings": {"x": 1}}
    parts = [json.dumps(said, sort_keys=True).encode()]
    parts += [b"a.1 torch.float16 (2, 2)", struct.pack("<4e", 1, 1, 1, 1)]
    parts += [b"b torch.int64 (3,)", struct.pack("<3q", 0, 1, 2)]
    framed = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    wanted = hashlib.blake2b(framed, digest_size=16, person=b"blendkv profile ").hexdigest()
    assert TINY.hash == wanted
    assert replace(TINY, about={"other": 1}).hash == wanted
    assert replace(TINY, tensors=dict(reversed(TINY.tensors.items()))).hash == wanted
    others = [
        replace(TINY, codec="klt-xl"),
        replace(TINY, shapes=SMALL),
        replace(TINY, settings={"x": 2}),
        replace(TINY, tensors={"b": torch.arange(3)}),
        replace(TINY, tensors=dict(TINY.tensors) | {"b": torch.arange(3).int()}),
        replace(TINY, tensors=dict(TINY.tensors) | {"b": torch.arange(3)[None]}),
        replace(TINY, tensors=dict(TINY.tensors) | {"b": torch.tensor(1)}),
        replace(TINY, tensors=dict(TINY.tensors) | {"b": torch.tensor([0, 1, 3])}),
    ]
    assert len({wanted, *(other.hash for other in others)}) == 1 + len(others)


def test_tensors_that_are_not_contiguous(tmp_path):
    turned = replace(TINY, tensors={"a": torch.arange(6).view(2, 3).T})
    assert read_profile(turned.save(tmp_path / "p")).hash == turned.hash
    assert replace(turned, tensors={"a": turned.tensors["a"].contiguous()}).hash == turned.hash


def _said(**changed) -> dict[str, str]:
    said = {"version": 1, "codec": "klt", "shapes": [[1, 2, 3]], "settings": {}, "about": {}} | changed
    return {"blendkv_profile": json.dumps(said)}


FOREIGN = {
    "no metadata": None,
    "other metadata": {"format": "pt"},
    "no JSON": {"blendkv_profile": "{"},
    "a list": {"blendkv_profile": "[]"},
    "a number": {"blendkv_profile": "1"},
    "empty": {"blendkv_profile": "{}"},
    "deep": {"blendkv_profile": "[" * 100_000},
    "another version": _said(version=2),
    "no layers": _said(shapes=[]),
    "layers of two": _said(shapes=[[1, 2]]),
    "layers of text": _said(shapes=["abc"]),
    "a size of 0": _said(shapes=[[1, 0, 3]]),
    "half a head": _said(shapes=[[1.5, 2, 3]]),
    "an infinite head": {"blendkv_profile": _said()["blendkv_profile"].replace("[1, 2, 3]", "[Infinity, 2, 3]")},
    "settings": _said(settings=[1]),
    "about": _said(about=None),
    "codec": _said(codec=["klt"]),
}


@pytest.mark.parametrize("metadata", FOREIGN.values(), ids=FOREIGN)
def test_foreign_files(tmp_path, metadata):
    save_file({"a": torch.ones(2)}, tmp_path / "p", metadata=metadata)
    with pytest.raises(ValueError, match="not a profile that can be read"):
        load_profile(tmp_path / "p")


GOOD = profile_of("cachegen")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files(tmp_path, data):
    """A profile, of whatever sense, or a ValueError; and a codec of it, or a ValueError."""
    path = tmp_path / "p"
    whole = bytearray(GOOD.save(path).read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    kind = data.draw(st.sampled_from(["cut", "flip", "flip", "set", "insert"]))
    at = data.draw(st.integers(0, header if data.draw(st.booleans()) else len(whole) - 1))
    if kind == "cut":
        del whole[at:]
    elif kind == "flip":
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "set":
        whole[at : at + 4] = data.draw(st.binary(min_size=1, max_size=8))
    else:
        whole[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    path.write_bytes(whole)
    try:
        profile = load_profile(path)
        get_codec("cachegen", profile=profile)
    except ValueError:
        return
    assert len(profile.hash) == 32
