"""What levels weigh, cost and lose is measured, and a real stream of them is what the simulation says it is made of."""

import json

import pytest
import torch

from blendkv.bench.bandwidth import Bandwidth
from blendkv.bench.codec import in_16_bits
from blendkv.bench.links import links_of
from blendkv.bench.sending import MOVES
from blendkv.bench.streaming_levels import Levels, examples, levels_of, sending_rows
from blendkv.bench.tasks import Example
from blendkv.bench.throttle import ThrottledStore
from blendkv.cache import BlendedCache
from blendkv.loading.client import StreamClient, Wanted
from blendkv.loading.levels import write_levels
from blendkv.loading.orders import ORDERS
from blendkv.loading.policies import FixedLevel
from blendkv.testing import byte_tokenizer, tiny_model
from tests.stores.dicts import DictStore

PROMPTS = [
    Example("Who?", ["Ada: Ada wrote notes. " * 8, "Bob: Bob slept. " * 8, "Cid: Cid won. " * 8], ["Ada"]),
    Example("What?", ["Bob: Bob slept. " * 8, "Ada: Ada wrote notes. " * 8], ["notes"]),
]


@pytest.fixture(scope="module")
def levels(tiny_profiles):
    return Levels(tiny_model("llama"), byte_tokenizer(), levels_of(tiny_profiles["klt"], (-8, 0, 8)), PROMPTS)


def test_a_prompt_is_what_its_files_weigh(levels):
    prompt = levels.prompt()
    assert len(prompt.items) == 3  # without the head
    assert prompt.levels[0] == "raw"
    assert prompt.text_s > prompt.after_s > 0
    for item in prompt.items:
        by_name = {rung.name: rung for rung in item.rungs}
        assert by_name["raw"].nbytes > by_name["klt@-8"].nbytes > by_name["klt@0"].nbytes > by_name["klt@8"].nbytes
        assert by_name["raw"].loss == 0
        assert all(rung.decode_s > 0 for rung in item.rungs)
    assert prompt.raw_bytes < sum(item.rungs[0].nbytes for item in prompt.items)  # with heads
    rows = {row["level"]: row for row in levels.rows(prompt)}
    assert rows["raw"]["bits"] > 16
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_losses_are_those_of_the_chunks(levels):
    assert levels.loss(["text"]) == 0.0
    assert levels.loss(["raw"]) < 1e-4
    assert levels.loss(["klt@-8"]) < levels.loss(["klt@8"])
    assert levels.loss_from_full(["text"]) > 0  # what is lost by reusing
    assert levels.loss(["klt@8", "klt@8", "klt@8"][:1]) == levels.loss(["klt@8"])


def test_mixes_are_measured(levels):
    one = Levels(levels._model, byte_tokenizer(), list(levels.codecs.values()), PROMPTS[:1])
    losses = {name: one.loss([name]) for name in one.codecs}
    chosen = [("klt@8", "text", "raw")] * 3 + [("text", "text", "text"), ("klt@8", "klt@8", "klt@8")]
    first, *_ = rows = one.mixes(chosen, losses, 2)
    assert len(rows) == 2
    assert (first["chosen"], first["times"]) == (["klt@8", "text", "raw"], 3)
    assert first["kl_predicted"] == pytest.approx((losses["klt@8"] + losses["raw"]) / 3)
    assert 0 < first["kl"] != first["kl_predicted"]
    whole = one.mixes(chosen[-1:], losses, 1)[0]
    assert whole["kl"] == pytest.approx(whole["kl_predicted"])


def test_rows_of_sending(levels, tiny_profiles):
    found = sending_rows(levels, tiny_profiles["klt"], {"uniform": links_of("uniform", 2, 0.1)}, 1.0)
    assert {row["order"] for row in found["orders"]} == set(ORDERS)
    assert {row["move"] for row in found["moves"]} == set(MOVES)


def test_what_was_streamed_answers_as_what_was_simulated_from(levels):
    """Bytes through a link in real time become the chunks whose loss was measured."""
    trial = levels.trials[0]
    head, *chunks = trial.case.chunks
    store = DictStore()
    codecs = [levels.codecs[name] for name in ("klt@0", "klt@8")]
    wanted = [
        Wanted(c.key, tuple(write_levels(store, in_16_bits(c), codecs)), {"klt@0": 0.01, "klt@8": 0.2}, 10.0)
        for c in chunks
    ]
    client = StreamClient(ThrottledStore(store, Bandwidth.constant(5e6)), FixedLevel("klt@8"))
    streamed = client.run(wanted, lambda item: chunks[item], 30.0)
    assert streamed.chosen == ("klt@8",) * 3
    for got, chunk in zip(streamed.chunks, chunks, strict=True):
        expected, _, _ = levels.coded(chunk, "klt@8")
        for a, b in zip((*got.keys, *got.values), (*expected.keys, *expected.values), strict=True):
            assert torch.equal(a.to(b.dtype), b)
    assert BlendedCache([head, *streamed.chunks]) is not None


def test_prompts_that_come_with_the_package():
    made = examples()
    assert len(made) == 3
    assert len({prompt.question for prompt in made}) == 3
    assert all(len(prompt.chunks) == 12 for prompt in made)
