"""Files written once are read for ever."""

import json

import pytest

from blendkv.chunkfile import ChunkFile
from tests import goldens

MANIFEST = json.loads(goldens.MANIFEST.read_text())


def test_nothing_is_missing():
    assert {path.stem for path in goldens.FOLDER.glob("*.blendkv")} == set(MANIFEST)
    assert set(goldens.BUILDERS) <= set(MANIFEST), "run python -m tests.goldens"


@pytest.mark.parametrize("name", MANIFEST)
def test_read_bit_by_bit(name):
    assert goldens.digest(goldens.read(name)) == MANIFEST[name]


@pytest.mark.parametrize("name", [name for name in goldens.BUILDERS if name.startswith("raw")])
def test_written_the_same(name):
    """`raw` has one encoding; a lossy codec may learn to write better."""
    assert goldens.BUILDERS[name]() == (goldens.FOLDER / f"{name}.blendkv").read_bytes()


def test_scores_are_there():
    with ChunkFile(goldens.FOLDER / "raw-bf16-scores.blendkv") as file:
        assert file.token_stream("hkvd").tolist() == [i / 8 for i in range(9)]
