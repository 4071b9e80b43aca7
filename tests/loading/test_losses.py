"""What levels lose on a model, as a controller is told."""

import json

import pytest
import torch
from typer.testing import CliRunner

from blendkv.attaching import attach
from blendkv.calibrating import calibrate
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.cli import main
from blendkv.codecs import get_codec
from blendkv.levelkeys import id_of
from blendkv.loading.costs import Costs
from blendkv.loading.losses import measure_losses
from blendkv.passages import read_passages
from blendkv.prefilling import prefill
from blendkv.testing import byte_tokenizer, tiny_model
from blendkv.texts import Passage
from blendkv.trials import log_likelihood
from tests.helpers import tokens


@pytest.fixture(scope="module")
def setting():
    model = attach(tiny_model("llama", num_hidden_layers=2))
    passages = [Passage(tokens(48, seed).tolist(), ()) for seed in range(4)]
    return model, calibrate(model, passages, ["klt"], continuation=16, progress=False)["klt"]


def test_coarser_levels_lose_more_and_exact_ones_are_not_measured(setting):
    model, profile = setting
    codecs = [get_codec("raw"), *(get_codec("klt", level=level, profile=profile) for level in (-8, 4, 16))]
    found = measure_losses(model, byte_tokenizer(), codecs, context=96, continuation=32, trials=2)
    assert list(found) == [f"klt@{level}:{profile.hash}" for level in (-8, 4, 16)]
    assert 0 <= found[str(id_of(codecs[1]))] < found[str(id_of(codecs[2]))] < found[str(id_of(codecs[3]))]
    assert measure_losses(model, byte_tokenizer(), codecs[:1]) == {}


def test_a_loss_is_the_divergence_of_the_next_tokens(setting):
    """The same by hand, of one context."""
    model, profile = setting
    codec = get_codec("klt", level=8, profile=profile)
    text = "\n\n".join(passage.text for passage in read_passages()[0])
    ids = byte_tokenizer()(text, add_special_tokens=False)["input_ids"][:128]
    (chunk,) = prefill(model, [ids[:96]], progress=False)
    coded = decode_chunk(encode_chunk(chunk, codec), profiles=profile)
    pair = []
    for states in ([t.half() for t in chunk.keys], [t.half() for t in chunk.values]), (coded.keys, coded.values):
        pair.append(log_likelihood(model, torch.tensor(ids[96:]), list(zip(*states, strict=True))))
    want = float((pair[0].exp() * (pair[0] - pair[1])).sum(-1).mean())
    got = measure_losses(model, byte_tokenizer(), [codec], context=96, continuation=32, trials=1)
    assert got == {f"klt@8:{profile.hash}": pytest.approx(want, rel=1e-4)}


def test_each_profile_of_a_codec_has_a_loss_of_its_own(setting):
    model, profile = setting
    passages = [Passage(tokens(48, seed).tolist(), ()) for seed in range(4, 8)]
    other = calibrate(model, passages, ["klt"], continuation=16, progress=False)["klt"]
    codecs = [get_codec("klt", level=8, profile=each) for each in (profile, other)]
    found = measure_losses(model, byte_tokenizer(), codecs, context=96, continuation=32, trials=1)
    assert [(level, kl) for codec in codecs for level, kl in _alone(model, codec).items()] == list(found.items())
    assert len(set(found.values())) == 2


def _alone(model, codec):
    return measure_losses(model, byte_tokenizer(), [codec], context=96, continuation=32, trials=1)


def test_calibrating_keeps_what_levels_lose(setting, tmp_path, monkeypatch):
    model, profile = setting
    profile.save(tmp_path / "klt.safetensors")
    monkeypatch.setattr("blendkv.cli_calibrate.load", lambda *args: (model, byte_tokenizer()))
    options = ["--tokens", "32,64", "--out", str(tmp_path / "c.json"), "--profile", str(tmp_path / "klt.safetensors")]
    found = CliRunner().invoke(main, ["calibrate", "t", *options, "--levels", "klt@0,klt@8", "--json"])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    costs = Costs.read(tmp_path / "c.json")
    assert said["losses"] == costs.losses
    assert 0 <= costs.losses[f"klt@0:{profile.hash}"] < costs.losses[f"klt@8:{profile.hash}"]
    found = CliRunner().invoke(main, ["calibrate", "t", *options, "--levels", "klt@0"], env={"COLUMNS": "200"})
    assert f"lost by klt@0, profile {profile.hash[:8]}" in found.stdout
    assert set(costs.decoding) == {"raw", "klt"}
    kept = json.loads((tmp_path / "c.json").read_text())  # a rate without end is null in `said`
    (tmp_path / "old.json").write_text(json.dumps({k: v for k, v in kept.items() if k != "losses"}))
    assert Costs.read(tmp_path / "old.json").losses == {}
    old = kept | {"version": 1, "losses": {"klt@0": 0.01}}  # of whatever profile
    (tmp_path / "old.json").write_text(json.dumps(old))
    costs = Costs.read(tmp_path / "old.json")
    assert (costs.losses, set(costs.decoding)) == ({}, {"raw", "klt"})
    assert ["run `blendkv calibrate --levels` again" in note for note in costs.notes] == [True]
    (tmp_path / "old.json").write_text(json.dumps(old | {"losses": {}}))
    assert not Costs.read(tmp_path / "old.json").notes
    (tmp_path / "old.json").write_text(json.dumps(old | {"version": 3}))
    with pytest.raises(ValueError, match="version 3"):
        Costs.read(tmp_path / "old.json")
    wrong = json.loads((tmp_path / "c.json").read_text()) | {"losses": {"klt@0": -1.0}}
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match="is no calibration"):
        Costs.read(tmp_path / "wrong.json")
