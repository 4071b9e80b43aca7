import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from blendkv import ChunkLibrary
from blendkv.layout import encode, split_text
from blendkv.prompt import count_joint_differences
from blendkv.testing import byte_tokenizer
from tests.cases.common import bundled_tokenizer, model_of

MERGES = ((".", "Ġ"), ("Ċ", "Ċ"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ċ", "Ġ"))
TOKENIZERS = {
    "bytes": byte_tokenizer,
    "bytes-bos": lambda: byte_tokenizer(bos=True, chat=True),
    "merges": lambda: byte_tokenizer(merges=MERGES),
    "smollm2": bundled_tokenizer,
}
NASTY = st.sampled_from(
    [" ", "\n", "\n\n", "\t", " the", "the ", ". ", "🙂", "👩‍🔬", "漢字", "é", "e\u0301", "\r\n", "1234", "<s>"]
)
TEXT = st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF), min_size=1, max_size=12)
"""SmolLM2's vocabulary has no bytes for planes 4 to 16; all but the first three are empty or for private use."""
CHUNKS = st.lists(st.lists(TEXT | NASTY, min_size=1, max_size=4).map("".join), min_size=1, max_size=5)
BUDGET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", params=TOKENIZERS)
def kv(request):
    tokenizer = TOKENIZERS[request.param]()
    return ChunkLibrary(model_of(vocab_size=len(tokenizer), num_hidden_layers=2), tokenizer, on_miss="recompute")


def assume_has_bytes(tokenizer, text: str) -> None:
    """Leaves out characters that a vocabulary has no bytes for and drops: SmolLM2's has none for planes 4 to 16."""
    assume(tokenizer.decode(encode(tokenizer, text)) == text)


@BUDGET
@given(texts=CHUNKS, question=TEXT)
def test_d22_the_prompt_is_the_chunks_ids_one_after_the_other(kv, texts, question):
    """Joined text is cut otherwise than its pieces (vllm-project/vllm-omni#3499): the pieces' ids are the prompt."""
    assume_has_bytes(kv.tokenizer, "".join(texts) + question)
    prompt = kv.assemble(texts, question)
    assert [list(p.ids) for p in prompt.pieces if p.kind == "chunk"] == [encode(kv.tokenizer, text) for text in texts]
    inputs = kv(texts, question)
    assert inputs["input_ids"].tolist() == [prompt.ids]
    given_chunks = [chunk.ids.tolist() for row in inputs.cache.chunks for chunk in row]
    assert given_chunks[-len(texts) :] == [encode(kv.tokenizer, text) for text in texts]
    assert kv.tokenizer.decode(prompt.ids, skip_special_tokens=False).encode() == prompt.text.encode()


@BUDGET
@given(texts=CHUNKS, limit=st.integers(1, 9))
def test_d22_cutting_a_long_document_loses_no_byte(kv, texts, limit):
    """Pieces of a document that is too long join to the document, and each decodes to itself."""
    text = "".join(texts)
    assume_has_bytes(kv.tokenizer, text)
    pieces = split_text(kv.tokenizer, text, limit)
    assert "".join(pieces) == text
    for piece in pieces:
        assert kv.tokenizer.decode(encode(kv.tokenizer, piece)) == piece
        assert len(piece) == 1 or len(encode(kv.tokenizer, piece)) <= limit


@BUDGET
@given(texts=CHUNKS)
def test_d22_the_helper_counts_ids_that_joining_would_change(kv, texts):
    """How far a prompt of pieces is from the joined text's own tokenisation is a number to be had."""
    assume_has_bytes(kv.tokenizer, "".join(texts))
    count = count_joint_differences(kv.tokenizer, texts)
    joint = kv.tokenizer("".join(texts), add_special_tokens=False)["input_ids"]
    apart = [i for text in texts for i in kv.tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert 0 <= count <= len(joint)
    assert (count == 0) == (joint == apart)


def test_d22_the_helper_sees_a_merge_across_the_border():
    """A border that a merge runs across is one id of the joined text that the pieces do not have."""
    tokenizer = byte_tokenizer(merges=MERGES)
    assert count_joint_differences(tokenizer, ["One.", " Two."]) == 1
    assert count_joint_differences(tokenizer, ["One", " Two."]) == 0
    assert count_joint_differences(byte_tokenizer(), ["One.", " Two."]) == 0


@pytest.mark.parametrize("style", TOKENIZERS)
def test_d22_generate_gets_the_ids_that_the_caller_got(style):
    """The ids in the cache after generating are those that assemble returned, and every chunk was found whole."""
    tokenizer = TOKENIZERS[style]()
    kv = ChunkLibrary(model_of(vocab_size=len(tokenizer), num_hidden_layers=2), tokenizer)
    texts = ["One. \n\n", " the the", "\n🙂 漢字", ". the end"]
    inputs = kv(texts, " the question")
    out = kv.model.generate(**inputs, max_new_tokens=1)
    wanted = kv.assemble(texts, " the question").ids
    assert out[0, : len(wanted)].tolist() == wanted == inputs.cache.ids[0].tolist()
    assert all(use.hit and use.found == use.tokens for use in inputs.report.chunks)
