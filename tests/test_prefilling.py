"""Text to chunks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv import prefill
from blendkv.attaching import attachment_of
from blendkv.layout import encode, split_text
from blendkv.prefilling import batches
from blendkv.testing import FAMILIES, byte_tokenizer, tiny_model
from tests.helpers import full, tokens

TOKENIZER = byte_tokenizer(merges=((".", "Ġ"),))


@pytest.mark.parametrize("family", [*FAMILIES, "mistral-sliding"])
def test_batches_equal_single_chunks(attached, family):
    model = attached("mistral", sliding_window=8) if "sliding" in family else attached(family)
    rows = [tokens(n, n) for n in (20, 3, 17, 1, 18)]
    together = prefill(model, rows, progress=False)
    for row, chunk in zip(rows, together, strict=True):
        (alone,) = prefill(model, [row], progress=False)
        assert torch.equal(chunk.ids, row)
        assert alone.key == chunk.key
        for a, b in zip((*alone.keys, *alone.values), (*chunk.keys, *chunk.values), strict=True):
            torch.testing.assert_close(b, a, atol=5e-5, rtol=1e-5)
            assert b.is_contiguous()
            assert b.untyped_storage().nbytes() == b.nbytes  # no slice that keeps a whole batch alive


def test_a_chunk_is_the_models_own_prefill_unrotated(attached):
    model = attached("qwen3")
    facts = attachment_of(model).facts
    row = tokens(15, 2)
    (chunk,) = prefill(model, [row], progress=False)
    _, cache = full(model, row[None])
    for rotation, layer, k, v in zip(facts.rotations, cache.layers, chunk.keys, chunk.values, strict=True):
        turned = rotation.rotate(k[None], rotation.angles(facts.rotary, torch.arange(15)[None]))
        assert (turned - layer.keys).abs().max() <= 1e-5
        assert (v - layer.values[0]).abs().max() <= 1e-5


def test_conditioning(attached):
    model = attached("llama")
    front, row = tokens(4, 1), tokens(9, 2)
    (chunk,) = prefill(model, [row], conditioning=front.tolist(), progress=False)
    (bare,) = prefill(model, [row], progress=False)
    assert len(chunk) == 9
    assert chunk.conditioning == tuple(front.tolist())
    assert chunk.key != bare.key
    facts = attachment_of(model).facts
    _, cache = full(model, torch.cat([front, row])[None])
    at = torch.arange(13)[None]
    for rotation, layer, k, v in zip(facts.rotations, cache.layers, chunk.keys, chunk.values, strict=True):
        want = rotation.unrotate(layer.keys, rotation.angles(facts.rotary, at))[0, :, 4:]
        assert (k - want).abs().max() <= 1e-5
        assert (v - layer.values[0, :, 4:]).abs().max() <= 1e-5
    assert (chunk.values[2] - bare.values[2]).abs().max() > 1e-2  # it matters


def test_no_graph_and_the_callers_mode(attached):
    model = attached()
    with torch.enable_grad():
        (chunk,) = prefill(model, [tokens(5)], progress=False)
        assert torch.is_grad_enabled()
    assert not any(t.requires_grad for t in (*chunk.keys, *chunk.values))
    with torch.inference_mode():
        (other,) = prefill(model, [tokens(5)], progress=False)
    assert torch.equal(other.keys[0], chunk.keys[0])


def test_training_mode_is_refused():
    """Dropout would be stored for good."""
    model = tiny_model("llama", attention_dropout=0.5)
    prefill(model, [tokens(30)], progress=False)
    model.train()
    with pytest.raises(ValueError, match="eval"):
        prefill(model, [tokens(30)], progress=False)


def test_texts_and_ids(attached):
    model = attached()
    from_text, from_ids = prefill(model, ["abc.", encode(TOKENIZER, "abc.")], TOKENIZER, progress=False)
    assert torch.equal(from_text.ids, from_ids.ids)
    assert from_text.text == "abc."
    assert from_text.key == from_ids.key
    assert prefill(model, [], progress=False) == []
    (special,) = prefill(model, ["<|im_end|>"], TOKENIZER, progress=False)
    assert TOKENIZER.convert_tokens_to_ids("<|im_end|>") not in special.ids.tolist()


def test_bad_input(attached):
    model = attached()
    with pytest.raises(ValueError, match="tokenizer"):
        prefill(model, ["text"], progress=False)
    for empty in ([], "", torch.zeros(0, dtype=torch.long)):
        with pytest.raises(ValueError, match="chunk 1 is empty"):
            prefill(model, [[1], empty], TOKENIZER, progress=False)
    with pytest.raises(ValueError, match="integers"):
        prefill(model, [[0.5]], progress=False)


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 120), st.integers(0, 10))
def test_batches_cover_everything_once_within_the_limit(lengths, limit, front):
    seen = []
    for batch in batches(lengths, limit, front):
        seen += batch
        assert len(batch) == 1 or len(batch) * (front + max(lengths[i] for i in batch)) <= limit
    assert sorted(seen) == list(range(len(lengths)))


texts_ = st.text(st.sampled_from("ab é漢🙂.!?。\"')\n\t"), max_size=120) | st.text(max_size=60)


@settings(deadline=None, max_examples=150)
@given(texts_, st.integers(1, 40))
def test_pieces_joined_are_the_text(text, most):
    pieces = split_text(TOKENIZER, text, most)
    assert "".join(pieces) == text
    assert all(pieces) or text == ""
    for piece in pieces:
        assert len(encode(TOKENIZER, piece)) <= most or len(piece) == 1
    if len(encode(TOKENIZER, text)) <= most:
        assert pieces == [text]  # a retriever's own chunk stays whole


def test_cuts_at_sentence_ends():
    text = 'First sentence. "Second one!" Third?\nFourth line\nFifth。第六。End'
    pieces = split_text(TOKENIZER, text, 31)
    assert pieces[0] == 'First sentence. "Second one!" '
    assert "".join(pieces) == text
    with pytest.raises(ValueError, match="chunk_tokens"):
        split_text(TOKENIZER, text, 0)
