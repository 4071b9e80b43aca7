"""Scores computed with a chunk, stored with it, and found again by a blend."""

from dataclasses import replace

import pytest
import torch

from blendkv import BlendedCache, ChunkLibrary, decode_chunk, encode_chunk, prefill
from blendkv.layout import encode
from blendkv.prefilling import first_layer_of
from blendkv.scoring import CONTEXT, QUESTION, add_scores
from blendkv.selectors import Stored
from blendkv.testing import byte_tokenizer
from tests.helpers import full, run, tokens
from tests.oracle import Placement, blend


class Letters:
    """A tokenizer of a kind: one id a character."""

    def __call__(self, text, **options):
        return {"input_ids": [ord(c) % 512 for c in text]}


@pytest.fixture
def chunks(attached):
    return prefill(attached(), [tokens(20, 1), tokens(9, 2), tokens(1, 3)], progress=False)


def test_asked_is_the_attention_of_a_question(attached, chunks):
    model = attached()
    question = torch.tensor(encode(Letters(), QUESTION))
    for chunk, scored in zip(chunks[:2], add_scores(model, chunks[:2], ["asked"], Letters()), strict=True):
        want = blend(model, torch.cat([chunk.ids, question]), [Placement(chunk, 0)], {0: 0.0}).attention
        got = scored.scores["asked"]
        torch.testing.assert_close(got.double(), sum(want)[: len(chunk)], atol=1e-4, rtol=1e-4)
        assert scored.key == chunk.key


def test_moved_is_the_distance_from_another_context(attached, chunks):
    model = attached()
    context = encode(Letters(), CONTEXT)
    for chunk, scored in zip(chunks, add_scores(model, chunks, ["moved"], Letters()), strict=True):
        _, cache = full(model, torch.cat([torch.tensor(context), chunk.ids])[None])
        want = sum(
            (layer.values[0, :, len(context) :] - values).square().sum((0, 2))
            for layer, values in zip(cache.layers, chunk.values, strict=True)
        )
        torch.testing.assert_close(scored.scores["moved"], want, atol=1e-3, rtol=1e-3)


def test_one_token_conditioning_and_unknown_names(attached, chunks):
    model = attached()
    assert add_scores(model, chunks[2:], ["asked"], Letters())[0].scores["asked"].tolist() == [1.0]
    (behind,) = prefill(model, [tokens(12, 5)], conditioning=[7, 8], progress=False)
    (scored,) = add_scores(model, [behind], ["asked", "moved"], Letters())
    assert set(scored.scores) == {"asked", "moved"}
    assert all(s.isfinite().all() and (s >= 0).all() for s in scored.scores.values())
    with pytest.raises(ValueError, match="asked, moved"):
        add_scores(model, chunks, ["best"], Letters())


def test_they_are_kept_in_the_file(chunks):
    scored = replace(chunks[0], scores={"asked": torch.rand(20), "moved": torch.rand(20).half()})
    again = decode_chunk(encode_chunk(scored))
    assert {name: s.tolist() for name, s in again.scores.items()} == {n: s.tolist() for n, s in scored.scores.items()}
    assert again.key == chunks[0].key
    assert decode_chunk(encode_chunk(chunks[0])).scores == {}
    without = encode_chunk(scored, layer0=False)
    with pytest.raises(ValueError, match="layer 0"):
        decode_chunk(without)
    with pytest.raises(ValueError, match="one number for each of 20 tokens"):
        replace(chunks[0], scores={"asked": torch.rand(19)})


def test_rebuilt_layers_keep_scores(attached, chunks):
    scored = replace(chunks[0], scores={"asked": torch.rand(20)})
    again = decode_chunk(encode_chunk(scored, layer0=False), rebuild=first_layer_of(attached()))
    assert torch.equal(again.scores["asked"], scored.scores["asked"])


def test_blends_rank_by_them(attached, chunks):
    model = attached()
    a, b = (
        replace(c, scores={"mine": torch.rand(len(c), generator=torch.Generator().manual_seed(i))})
        for i, c in enumerate(chunks[:2])
    )
    ids = torch.cat([tokens(3, 9), a.ids[2:], b.ids, tokens(4, 8)])  # a without its first tokens
    cache = BlendedCache([a, b], 0.4, Stored("mine"))
    got = run(model, ids[None], cache)
    placements = [Placement(a, 3, 2, 18), Placement(b, 21)]
    want = blend(model, ids, placements, {0: 0.4}, torch.cat([a.scores["mine"][2:], b.scores["mine"]]))
    torch.testing.assert_close(got.logits[0, -1].double(), want.logits, atol=1e-4, rtol=1e-4)
    assert cache.schedule == {0: 0.4}
    assert cache.report.notes == []

    bare = BlendedCache([chunks[0], b], 9 / 27, Stored("mine"))
    run(model, ids[None], bare)
    assert bare.report.notes == ["chunks without stored scores 'mine': their tokens are recomputed last"]


def test_a_library_computes_what_its_selector_wants(attached):
    model, tokenizer = attached(), byte_tokenizer(chat=True)
    library = ChunkLibrary(model, tokenizer, selector="stored-asked*stored-moved^0.5")
    inputs = library(["Alpha is the first letter.", "Omega is the last letter."], "Which letter is last?")
    found = [chunk.scores for row in inputs.cache.chunks for chunk in row]
    assert len(found) >= 2
    assert all(set(scores) == {"asked", "moved"} for scores in found)
    model.generate(**inputs, max_new_tokens=2, pad_token_id=0)
    assert inputs.report.notes == []
