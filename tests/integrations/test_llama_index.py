"""LlamaIndex: nodes get their chunks, and a query engine answers from them as the library does."""

import asyncio
import threading

import pytest
import torch

pytest.importorskip("llama_index.core")

from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from blendkv.integrations.answering import PromptTooLongError
from blendkv.integrations.llama_index import BlendedSynthesizer, ChunkCachePostprocessor

SYSTEM, QUESTION = "Answer from these.", "How high?"
NODES = [
    TextNode(text="The tower is 61 m high.", id_="a", metadata={"file": "towers.txt"}),
    TextNode(text="It was built in 1923.", id_="b"),
]
TEXTS = [node.get_content(metadata_mode=MetadataMode.LLM) for node in NODES]


def scored():
    return [NodeWithScore(node=node, score=1.0 - i / 10) for i, node in enumerate(NODES)]


def engine(kv, **options):
    index = VectorStoreIndex(NODES, embed_model=MockEmbedding(embed_dim=4))
    synthesizer = BlendedSynthesizer(kv, system=SYSTEM, **{"max_tokens": 8} | options)
    postprocessors = [ChunkCachePostprocessor(library=kv)]
    return RetrieverQueryEngine.from_args(
        index.as_retriever(), llm=MockLLM(), response_synthesizer=synthesizer, node_postprocessors=postprocessors
    )


def order(response):
    return [TEXTS["ab".index(node.node.node_id)] for node in response.source_nodes]


def test_a_query_engine_answers_as_plain_generate_on_the_same_ids(library, plain):
    kv = library(recompute_ratio=1.0)
    response = engine(kv).query(QUESTION)
    ids = torch.tensor([kv.assemble(order(response), QUESTION, SYSTEM).ids])
    out = plain().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert str(response) == kv.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert len(str(response)) > 2


def test_chunks_of_nodes_are_reused(library):
    kv, answers = library(recompute_ratio=0.0), []
    response = engine(kv, on_answer=answers.append).query(QUESTION)
    blend = response.metadata["blend"]
    assert [use["hit"] for use in blend["chunks"]] == [True] * 3
    assert blend["layers"][0]["reused"] == answers[0].report.reused_tokens
    assert blend["loaded"] == {"memory": sum(map(len, TEXTS))}  # the postprocessor had computed them
    assert answers[0].cache_read + answers[0].cache_creation == sum(map(len, TEXTS)) + blend["prefilled_tokens"]
    engine(kv, on_answer=answers.append).query("When?")
    assert answers[1].cache_creation == 0
    assert answers[1].text


def test_the_postprocessor_shows_the_key_to_nobody(library):
    kv = library()
    nodes = ChunkCachePostprocessor(library=kv).postprocess_nodes(scored(), query_str=QUESTION)
    assert [node.node.metadata["chunk_key"] for node in nodes] == kv.keys(TEXTS)
    assert [node.score for node in nodes] == [1.0, 0.9]
    assert [node.node.get_content(metadata_mode=MetadataMode.LLM) for node in nodes] == TEXTS
    want = [node.get_content(metadata_mode=MetadataMode.EMBED) for node in NODES]
    assert [node.node.get_content(metadata_mode=MetadataMode.EMBED) for node in nodes] == want
    assert "chunk_key" not in NODES[0].metadata
    assert kv.pool.stats.puts == 2


def test_load_computes_nothing(library, tmp_path):
    with library(store=tmp_path / "kv") as kv:
        kv.prefill(TEXTS[:1])
    with library(store=tmp_path / "kv") as kv:
        postprocessor = ChunkCachePostprocessor(library=kv, mode="load")
        nodes = asyncio.run(postprocessor.apostprocess_nodes(scored()))
        assert postprocessor.wait(60)
        assert kv.pool.pool.keys() == kv.keys(TEXTS[:1])
        assert [node.node.metadata["chunk_key"] for node in nodes] == kv.keys(TEXTS)


def test_streams_and_event_loops(library):
    kv, answers = library(), []
    want = str(engine(kv).query(QUESTION))
    want = str(engine(kv).query(QUESTION))
    parts = list(engine(kv, streaming=True, on_answer=answers.append).query(QUESTION).response_gen)
    assert len(parts) > 2

    async def main():
        whole = await engine(kv, on_answer=answers.append).aquery(QUESTION)
        response = await engine(kv, streaming=True, on_answer=answers.append).aquery(QUESTION)
        return str(whole), [part async for part in response.async_response_gen()]

    whole, aparts = asyncio.run(main())
    assert {want, "".join(parts), whole, "".join(aparts)} == {want}
    assert [answer.text for answer in answers] == [want] * 3


def test_the_loop_goes_on(library, monkeypatch):
    kv, ticked = library(), threading.Event()
    real = kv.inputs
    monkeypatch.setattr(kv, "inputs", lambda *args, **options: ticked.wait(60) and real(*args, **options))

    async def main():
        task = asyncio.create_task(BlendedSynthesizer(kv, max_tokens=2).asynthesize(QUESTION, scored()))
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert not task.done()
        ticked.set()
        return await task

    assert str(asyncio.run(main()))


def test_nothing_found_empty_huge_and_repeated_nodes(library):
    kv = library()
    synthesizer = BlendedSynthesizer(kv, max_tokens=4, empty_response="I know nothing.")
    assert str(synthesizer.synthesize(QUESTION, [])) == "I know nothing."
    assert ChunkCachePostprocessor(library=kv).postprocess_nodes([]) == []
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in ("a tower", "", "a tower")]
    kept = ChunkCachePostprocessor(library=kv).postprocess_nodes(nodes)
    assert ["chunk_key" in node.node.metadata for node in kept] == [True, False, True]
    assert kv.pool.stats.puts == 1
    response = synthesizer.synthesize(QUESTION, kept)
    assert len(response.metadata["blend"]["chunks"]) == 3  # the head, and the document twice
    with pytest.raises(PromptTooLongError, match="retrieve fewer or shorter documents"):
        synthesizer.synthesize(QUESTION, [NodeWithScore(node=TextNode(text="x" * 9999))])
    with pytest.raises(ValueError, match="max_tokens=0"):
        BlendedSynthesizer(kv, max_tokens=0)


def test_errors_reach_the_caller(library, monkeypatch):
    kv = library()
    monkeypatch.setattr(kv, "inputs", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine(kv).query(QUESTION)
    with pytest.raises(ZeroDivisionError):
        list(engine(kv, streaming=True).query(QUESTION).response_gen)
