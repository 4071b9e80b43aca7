"""A sample of `make fuzz`, and whether it would notice."""

import json

import pytest
import torch

from blendkv.codecs.raw import Raw
from tests import fuzz


@pytest.mark.slow
def test_a_sample():
    """20,000 inputs: a chunk or a ChunkFileError, at once, in little memory."""
    result = fuzz.run(20_000, seed=20_000)
    assert not result.failures
    assert result.inputs == result.decoded + result.refused.total() == 20_000
    assert result.decoded > 2_000  # mutations that are sealed again reach the codecs
    reasons = {"magic", "version", "header", "limit", "truncated", "length", "checksum", "authentication"}
    assert set(result.refused) >= reasons | {"codec", "profile", "geometry", "symbols", "layer0"}
    assert result.worst_seconds < 0.5
    assert result.peak_bytes < 16 << 20


def test_every_seed_has_what_mutations_need():
    for make in fuzz.SEEDS:
        for seed in make():
            assert len(seed.data) < 8192
            assert seed.segments[-1][2] == len(seed.data)


@pytest.mark.parametrize("fault", [IndexError, RuntimeError, None])
def test_it_notices(monkeypatch, tmp_path, fault):
    """A decoder that raises something else, or gives another shape."""
    right = Raw.decode_unit
    good = {seed.data[start:stop] for seed in fuzz.raw_seeds() for _, start, stop in seed.segments}

    def wrong(self, first, shapes, tokens, dtype, segments, streams):
        keys, values = right(self, first, shapes, tokens, dtype, segments, streams)
        if bytes(segments[0]) not in good:
            if fault is not None:
                raise fault("a bug")
            keys[0] = keys[0][:, :, :0]
        return keys, values

    monkeypatch.setattr(Raw, "decode_unit", wrong)
    monkeypatch.setattr(fuzz, "FAILURES", tmp_path)
    result = fuzz.run(2000, seed=1)
    if fault is None:
        assert result.refused["geometry"] > 60
        return
    assert result.failures
    assert "a bug" in result.failures[0]
    assert list(tmp_path.glob("*.bin"))


def test_the_command(capsys, monkeypatch):
    """One line of JSON; the workers are processes of their own."""
    assert fuzz.main(["--count", "5300", "--workers", "1"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["inputs"] == 5300
    assert said["failures"] == []
    assert torch.get_num_threads() >= 1
