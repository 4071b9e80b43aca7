import pytest
import torch

from blendkv.calibrating import calibrate
from blendkv.testing import tiny_model
from blendkv.texts import Passage
from tests.helpers import tokens

CONTEXT, CONTINUATION = 72, 8


def random_passage(seed, length=CONTEXT + CONTINUATION):
    return Passage(tokens(length, seed).tolist(), (f"{seed:016x}",))


@pytest.fixture(scope="session")
def tiny_profiles():
    """Profiles of the tiny Llama that `attached("llama")` is, made of passages 1 to 10; the same weights each time."""
    with torch.random.fork_rng():
        model = tiny_model("llama")
    passages = [random_passage(seed) for seed in range(1, 11)]
    return calibrate(model, passages, continuation=CONTINUATION, samples=1, progress=False)
