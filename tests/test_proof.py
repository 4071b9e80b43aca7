"""A model is supported because it was proven."""

import json
import math
import subprocess
import sys

import pytest
import torch

from blendkv import UnsupportedModelError, attach, detach, proof
from blendkv.attaching import attachment_of
from blendkv.rope import Rotation
from blendkv.testing import tiny_model


def forwards(model) -> list:
    seen = []
    model.register_forward_pre_hook(lambda m, a: seen.append(1))
    return seen


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_remembered(home):
    model = tiny_model("llama")
    seen = forwards(model)
    attach(model)
    first = len(seen)
    assert first >= 8
    (record,) = (home / "proofs").glob("*.json")
    checks = json.loads(record.read_text())["checks"]
    assert all(check["ok"] for check in checks)
    names = " ".join(check["name"] for check in checks)
    for part in (
        "rotation of layer 3",
        "ratio 0.0",
        "ratio 0.15",
        "ratio 0.5",
        "offset 0",
        "ratio 1",
        "negative control",
    ):
        assert part in names
    detach(model)
    attach(model)
    other = tiny_model("llama")
    again = forwards(other)
    attach(other)
    assert len(seen) == first
    assert not again  # the same model in another object: known
    changed = tiny_model("llama", seed=1)
    more = forwards(changed)
    attach(changed)
    assert more  # other weights: proven anew
    eager = tiny_model("llama", attn_implementation="eager")
    more = forwards(eager)
    attach(eager)
    assert more


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"checks": []}', '{"checks": [{"ok": false}]}', '{"checks": 3}', "\0"]
)
def test_a_broken_record_means_another_proof(home, content):
    attach(tiny_model("llama"))
    (record,) = (home / "proofs").glob("*.json")
    record.write_text(content)
    model = tiny_model("llama")
    seen = forwards(model)
    attach(model)
    assert seen
    assert json.loads(record.read_text())["checks"]
    assert not list((home / "proofs").glob("*.tmp"))


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path / "file"))
    attach(tiny_model("llama"))


def broken_rotate(self, keys, angles, out=None):
    """Turns twice as far."""
    if angles is not None:
        cos, sin = angles
        angles = cos.square() - sin.square(), 2 * cos * sin
    return RIGHT(self, keys, angles, out)


RIGHT = Rotation.rotate


def refused(model, match):
    before = sorted(model.__dict__), model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=match):
        attach(model)
    assert (sorted(model.__dict__), model.config._attn_implementation) == before
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_broken_rotation_is_refused(home, monkeypatch):
    monkeypatch.setattr(Rotation, "rotate", broken_rotate)
    refused(tiny_model("llama"), "layer 0: no known rotation")
    assert not list(home.rglob("*.json"))


def test_a_rotation_that_is_rounded_is_refused(home, monkeypatch):
    def rounded(self, keys, angles, out=None):
        got = RIGHT(self, keys, angles).bfloat16().to(keys.dtype)
        return got if out is None else out.copy_(got)

    monkeypatch.setattr(Rotation, "rotate", rounded)
    refused(tiny_model("llama"), "rotation")


def test_a_rotation_that_is_wrong_far_out_is_refused(home, monkeypatch):
    right = Rotation.angles

    def capped(self, rotary, positions):
        return right(self, rotary, positions.clamp_max(500))

    monkeypatch.setattr(Rotation, "angles", capped)
    refused(tiny_model("llama"), "rotation of layer 0|offset")


def test_a_blend_that_forgets_a_row_is_refused(home, monkeypatch):
    from blendkv import buffers

    right = buffers._scatter
    monkeypatch.setattr(
        buffers, "_scatter", lambda buffer, rows, states: right(buffer, rows[:, :-1], states[:, :, :-1])
    )
    refused(tiny_model("llama"), "exact KV stays exact|ratio 1")


def test_a_mask_that_shows_too_much_is_refused(home, monkeypatch):
    from blendkv import attention

    def everything(self, rows, keys):
        return torch.ones(rows.shape[0], 1, rows.shape[1], keys, dtype=torch.bool)

    monkeypatch.setattr(attention.LazyMask, "visible", everything)
    refused(tiny_model("llama"), "exact KV stays exact")


def test_a_model_whose_layers_fail_when_narrowed_is_refused(home):
    model = tiny_model("llama")

    def fussy(module, args):
        if args[0].shape[1] not in (64, 12, 16, 8):
            raise RuntimeError("all rows, please")

    handle = model.model.layers[2].mlp.register_forward_pre_hook(fussy)
    with pytest.raises(UnsupportedModelError, match="all rows, please"):
        attach(model)
    handle.remove()
    attach(model)


def test_checks_fail_on_nan():
    assert not proof.most("x", math.nan, 1.0).ok
    assert not proof.least("x", math.nan, 1.0).ok
    assert proof.most("x", 1.0, 1.0).ok
    assert proof.least("x", 1.0, 1.0).ok
    assert proof.most("x", 0.5, 1.0).to_dict()["ok"] is True


def test_dtypes_without_a_bound_are_refused(home):
    refused(tiny_model("llama", dtype=torch.float64), "float64")


def test_short_models(home):
    attach(tiny_model("llama", max_position_embeddings=64))
    attach(tiny_model("llama", max_position_embeddings=32))


def test_figures_are_far_from_their_bounds(attached):
    state = attachment_of(attached("qwen3"))
    for check in proof.exactness_checks(state):
        assert check.ok
        far = check.value >= 10 * check.bound if check.at_least else check.value <= check.bound / 5
        assert far, check


def test_import_is_cheap():
    code = (
        "import sys, blendkv\n"
        "blendkv.__version__, dir(blendkv)\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'numba', 'fsspec') if m in sys.modules])\n"
        "blendkv.BlendedCache; print('torch' in sys.modules)\n"
        "missing = [n for n in blendkv.__all__ if not hasattr(blendkv, n)]; print(missing)\n"
        "try: blendkv.nothing\n"
        "except AttributeError as e: print('nothing' in str(e))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:4] == ["[]", "True", "[]", "True"]


def test_import_patches_nothing():
    code = (
        "import transformers, torch\n"
        "from transformers import AttentionInterface, AttentionMaskInterface\n"
        "before = sorted(AttentionInterface().keys()), sorted(AttentionMaskInterface().keys())\n"
        "import blendkv; blendkv.BlendedCache; blendkv.attach\n"
        "print((sorted(AttentionInterface().keys()), sorted(AttentionMaskInterface().keys())) == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "True"
