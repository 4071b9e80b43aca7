import pytest

from blendkv import ChunkLibrary
from blendkv.testing import byte_tokenizer
from tests.cases.common import bundled_tokenizer, metaspace_tokenizer, model_of, unigram_tokenizer, wordpiece_tokenizer

FAMILIES = {
    "bytes": byte_tokenizer,
    "bytes-bos-template": lambda: byte_tokenizer(bos=True, chat=True),
    "metaspace-bos": lambda: metaspace_tokenizer(bos=True),
    "metaspace": lambda: metaspace_tokenizer(bos=False),
    "wordpiece": wordpiece_tokenizer,
    "unigram": unigram_tokenizer,
    "smollm2": bundled_tokenizer,
}
DOCUMENTS = ["the otters hold hands.", "a raft of otters drifts.", "kelp keeps them in place."]
SEPARATORS = ["", " # # ", "# #", "\n\n"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    tokenizer = FAMILIES[request.param]()
    return model_of(vocab_size=len(tokenizer), num_hidden_layers=2), tokenizer


def chunks_of(kv, documents, question="why?"):
    """Chunk pieces of the layout, and chunks that generate found whole."""
    inputs = kv(documents, question)
    kv.model.generate(**inputs, max_new_tokens=2)
    found = [use for use in inputs.report.chunks if use.hit and use.found % use.tokens == 0]
    assert len(found) == len(inputs.report.chunks)
    return [p for p in kv.assemble(documents, question).pieces if p.kind == "chunk"]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_d23_three_documents_are_three_chunks_whatever_the_separator(family, separator):
    """Splitting at a separator found no border, or too many (LMCache/LMCache#194): chunks are given, not searched."""
    kv = ChunkLibrary(*family, separator=separator)
    assert [piece.text for piece in chunks_of(kv, DOCUMENTS)] == DOCUMENTS


@pytest.mark.parametrize("separator", SEPARATORS)
def test_d23_prose_with_the_separator_in_it_is_not_split(family, separator):
    """A document that holds the separator's text, at an end or in the middle, is one chunk all the same."""
    kv = ChunkLibrary(*family, separator=separator)
    documents = ["issue # # 12 is # open # # still.", "# # begins and ends # #", "plain"]
    assert [piece.text for piece in chunks_of(kv, documents)] == documents


def test_d23_documents_no_longer_than_the_separator(family):
    """Inputs of one character up to the separator's own length are one chunk each."""
    separator = "# #"
    kv = ChunkLibrary(*family, separator=separator)
    for length in range(1, len(separator) + 1):
        assert len(chunks_of(kv, [separator[:length]])) == 1
        assert len(chunks_of(kv, ["abc"[:length]])) == 1


def test_d23_an_empty_document_is_named(family):
    """Nothing cannot be a chunk; the error says which document it is and what to do."""
    with pytest.raises(ValueError, match="document 1 is empty: leave it out"):
        ChunkLibrary(*family)(["some text", ""], "why?")


def test_d23_no_separator_stands_in_the_prompt_unless_asked_for():
    """With an empty separator the documents touch; a mark appears only where the caller put one."""
    model, tokenizer = model_of(num_hidden_layers=2), byte_tokenizer()
    assert "".join(DOCUMENTS) in ChunkLibrary(model, tokenizer, separator="").assemble(DOCUMENTS, "why?").text
    for separator in ("", "\n\n"):
        kv = ChunkLibrary(model, tokenizer, separator=separator)
        ids = kv(DOCUMENTS, "why?")["input_ids"][0]
        assert "#" not in tokenizer.decode(ids)
    kv = ChunkLibrary(model, tokenizer, separator="# #")
    assert kv.assemble(DOCUMENTS, "why?").text.count("# #") == 3
    assert all("#" not in piece.text for piece in kv.assemble(DOCUMENTS, "why?").pieces if piece.kind == "chunk")
