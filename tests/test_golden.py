"""Files written once are read for ever."""

import json

import pytest
import torch

from blendkv.chunkfile import ChunkFile
from blendkv.codecs import codec_names
from tests import goldens

MANIFEST = json.loads(goldens.MANIFEST.read_text())
EXACT = [name for name in MANIFEST if name.startswith("raw")]
PROFILED = [name for name in MANIFEST if name not in EXACT]


def test_nothing_is_missing():
    assert {path.stem for path in goldens.FOLDER.glob("*.blendkv")} == set(MANIFEST)
    assert {path.stem for path in goldens.FOLDER.glob("*.values")} == set(PROFILED)
    assert set(goldens.BUILDERS) <= set(MANIFEST), "run python -m tests.goldens"
    assert {goldens.header(name).codec for name in MANIFEST} == set(codec_names())
    needed = {goldens.header(name).profile_hash for name in PROFILED}
    assert {path.stem for path in goldens.FOLDER.glob("*.safetensors")} == needed
    assert sum(path.stat().st_size for path in goldens.FOLDER.iterdir()) < 100_000


@pytest.mark.parametrize("name", EXACT)
def test_read_bit_by_bit(name):
    assert goldens.digest(goldens.read(name)) == MANIFEST[name]


@pytest.mark.parametrize("name", PROFILED)
def test_read_again(name):
    """Symbols exactly; numbers as near as other processors come."""
    assert goldens.symbols(name) == MANIFEST[name]
    read, then = goldens.read(name), goldens.values(name)
    assert read.key == then.key
    for a, b in zip((*read.keys, *read.values), (*then.keys, *then.values), strict=True):
        torch.testing.assert_close(a, b, rtol=max(1e-5, torch.finfo(a.dtype).eps), atol=1e-5)


@pytest.mark.parametrize("name", PROFILED)
def test_profiles_keep_their_hash(name):
    digest = goldens.header(name).profile_hash
    assert goldens.profile(digest).hash == digest


@pytest.mark.parametrize("name", [name for name in goldens.BUILDERS if name in EXACT])
def test_written_the_same(name):
    """`raw` has one encoding; a lossy codec may learn to write better."""
    assert goldens.BUILDERS[name]() == (goldens.FOLDER / f"{name}.blendkv").read_bytes()


def test_scores_are_there():
    with ChunkFile(goldens.FOLDER / "raw-bf16-scores.blendkv") as file:
        assert file.token_stream("hkvd").tolist() == [i / 8 for i in range(9)]
