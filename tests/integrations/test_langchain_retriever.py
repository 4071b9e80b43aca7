"""The retriever and the callback: chunks are there, or on their way, when the model is asked."""

import asyncio
import threading

import pytest

pytest.importorskip("langchain_core")

from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore

from blendkv.integrations.langchain import ChunkCacheRetriever, ChunkPrefetchHandler

TEXTS = ["The tower is 61 m high.", "It was built in 1923. The architect was M. Ilg."]
DOCUMENTS = [Document(page_content=text, metadata={"n": i}, id=str(i)) for i, text in enumerate(TEXTS)]


@pytest.fixture
def stored(library, tmp_path):
    """A new library over a folder that already has the first document's chunk."""
    with library(store=tmp_path / "kv") as kv:
        kv.prefill(TEXTS[:1])
    with library(store=tmp_path / "kv") as kv:
        yield kv


def finds(documents):
    return RunnableLambda(lambda query: documents)


class Events(BaseCallbackHandler):
    def __init__(self):
        self.events = []
        self.retrievers = 0

    def on_custom_event(self, name, data, **kwargs):
        self.events.append((name, data))

    def on_retriever_end(self, documents, **kwargs):
        self.retrievers += 1


class AsyncEvents(AsyncCallbackHandler):
    def __init__(self):
        self.events = []

    async def on_custom_event(self, name, data, **kwargs):
        self.events.append((name, data))


def test_prefill_computes_what_is_missing_and_attaches_keys_alone(stored):
    seen = Events()
    retriever = ChunkCacheRetriever(retriever=finds(DOCUMENTS), library=stored)
    found = retriever.invoke("tower", config={"callbacks": [seen]})
    keys = stored.keys(TEXTS)
    assert [document.metadata for document in found] == [{"n": i, "chunk_key": keys[i]} for i in range(2)]
    assert [(document.page_content, document.id) for document in found] == [(d.page_content, d.id) for d in DOCUMENTS]
    assert [document.metadata for document in DOCUMENTS] == [{"n": 0}, {"n": 1}]  # what was found is not changed
    assert all(key in stored.pool for key in keys)
    ((name, event),) = seen.events
    assert name == "blendkv.chunks"
    assert event["documents"] == event["chunks"] == 2
    assert sum(event["loaded_tokens"].values()) == len(TEXTS[0])
    assert event["computed_tokens"] == len(TEXTS[1])
    retriever.invoke("tower", config={"callbacks": [seen]})
    assert seen.events[-1][1]["loaded_tokens"] == {"memory": sum(map(len, TEXTS))}
    assert seen.events[-1][1]["computed_tokens"] == 0


def test_load_brings_what_is_stored_into_memory_and_computes_nothing(stored):
    retriever = ChunkCacheRetriever(retriever=finds(DOCUMENTS), library=stored, mode="load")
    found = retriever.invoke("tower")
    assert [document.metadata["chunk_key"] for document in found] == stored.keys(TEXTS)
    assert retriever.wait(60)
    assert stored.pool.pool.keys() == stored.keys(TEXTS[:1])


def test_a_long_document_has_several_keys(library):
    kv = library(chunk_tokens=30)
    (document,) = ChunkCacheRetriever(retriever=finds(DOCUMENTS[1:]), library=kv).invoke("x")
    assert document.metadata["chunk_key"].split(",") == kv.keys(TEXTS[1:])
    assert len(kv.keys(TEXTS[1:])) == 2


def test_async_does_not_block_the_loop(library, monkeypatch):
    kv, seen, ticked = library(), AsyncEvents(), threading.Event()
    retriever = ChunkCacheRetriever(retriever=finds(DOCUMENTS), library=kv)
    real = kv.prefill

    def held(*args):
        assert ticked.wait(60)  # until the loop has gone on meanwhile
        return real(*args)

    monkeypatch.setattr(kv, "prefill", held)

    async def main():
        task = asyncio.create_task(retriever.ainvoke("tower", config={"callbacks": [seen]}))
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert not task.done()
        ticked.set()
        return await task

    found = asyncio.run(main())
    assert [document.metadata["chunk_key"] for document in found] == kv.keys(TEXTS)
    assert seen.events[0][1]["computed_tokens"] == sum(map(len, TEXTS))


def test_the_callers_k_and_callbacks_reach_the_wrapped_retriever(library):
    vectors = InMemoryVectorStore.from_documents(DOCUMENTS, DeterministicFakeEmbedding(size=8))
    kv, seen = library(), Events()
    retriever = ChunkCacheRetriever(retriever=vectors.as_retriever(search_kwargs={"k": 2}), library=kv)
    assert len(retriever.invoke("tower", config={"callbacks": [seen]})) == 2
    assert seen.retrievers == 2  # the wrapped one and ours
    puts = kv.pool.stats.puts
    assert len(retriever.invoke("tower", k=1)) == 1
    assert kv.pool.stats.puts == puts == 2


def test_the_system_prompt_is_part_of_the_key_where_it_conditions(library):
    kv = library(condition="system")
    (document, _) = ChunkCacheRetriever(retriever=finds(DOCUMENTS), library=kv, system="Be brief.").invoke("x")
    assert document.metadata["chunk_key"] == kv.keys(TEXTS[:1], "Be brief.")[0] != kv.keys(TEXTS[:1])[0]
    kv(TEXTS, "How?", system="Be brief.")
    assert kv.pool.stats.puts == 3  # and the head: documents were found


def test_nothing_found_empty_and_repeated_documents(library):
    kv, seen = library(), Events()
    assert ChunkCacheRetriever(retriever=finds([]), library=kv).invoke("x", config={"callbacks": [seen]}) == []
    assert not seen.events
    documents = [DOCUMENTS[0], Document(page_content=""), DOCUMENTS[0]]
    found = ChunkCacheRetriever(retriever=finds(documents), library=kv).invoke("x")
    assert ["chunk_key" in document.metadata for document in found] == [True, False, True]
    assert kv.pool.stats.puts == 1


@pytest.mark.parametrize(
    ("found", "match"),
    [
        (["text"], "the wrapped retriever returned a str among its documents: each must be"),
        (None, "the wrapped retriever returned a NoneType: it must return a list"),
    ],
)
def test_what_is_no_document(library, found, match):
    retriever = ChunkCacheRetriever(retriever=finds(found), library=library())
    with pytest.raises(TypeError, match=match):
        retriever.invoke("x")
    with pytest.raises(TypeError, match=match):
        asyncio.run(retriever.ainvoke("x"))


def test_bad_modes(library):
    with pytest.raises(ValueError, match="'prefill' or 'load'"):
        ChunkCacheRetriever(retriever=finds([]), library=library(), mode="both")
    with pytest.raises(ValueError, match="mode='both': choose 'prefill'"):
        ChunkPrefetchHandler(library(), mode="both")


def test_an_error_of_the_retriever_is_the_callers(library):
    def fail(query):
        raise ConnectionError("no vectors today")

    with pytest.raises(ConnectionError, match="no vectors today"):
        ChunkCacheRetriever(retriever=RunnableLambda(fail), library=library()).invoke("x")


@pytest.mark.parametrize("mode", ["load", "prefill"])
def test_the_callback_starts_once_and_returns_at_once(stored, mode, monkeypatch):
    release, calls = threading.Event(), []
    name = "prefetch" if mode == "load" else "prefill"
    real = getattr(stored, name)

    def held(texts, *args):
        calls.append((texts, threading.current_thread()))
        assert release.wait(60)
        return real(texts, *args)

    monkeypatch.setattr(stored, name, held)
    handler = ChunkPrefetchHandler(stored, mode)
    vectors = InMemoryVectorStore.from_documents(DOCUMENTS, DeterministicFakeEmbedding(size=8))
    found = vectors.as_retriever().with_config(callbacks=[handler]).invoke("tower")  # returns while loading is held
    assert len(found) == 2
    assert not handler.wait(0)
    release.set()
    assert handler.wait(60)
    ((texts, thread),) = calls
    assert sorted(texts) == sorted(TEXTS)
    assert thread is not threading.current_thread()
    assert len(stored.pool.pool) == (1 if mode == "load" else 2)


def test_the_callback_never_raises(library, caplog, monkeypatch):
    kv = library()
    handler = ChunkPrefetchHandler(kv)
    handler.on_retriever_end([])
    handler.on_retriever_end([Document(page_content="")])
    assert handler.wait(0)
    handler.on_retriever_end([3])
    assert "nothing is prefetched: a document is a int without text" in caplog.text
    monkeypatch.setattr(kv, "prefetch", lambda *args: 1 / 0)
    handler.on_retriever_end(DOCUMENTS)
    assert handler.wait(60)
    assert "2 documents could not be prefetched: ZeroDivisionError" in caplog.text


def test_too_many_requests_are_dropped_and_said(library, caplog, monkeypatch):
    kv, release = library(), threading.Event()
    monkeypatch.setattr(kv, "prefetch", lambda *args: release.wait(60))
    handler = ChunkPrefetchHandler(kv)
    for i in range(20):
        handler.on_retriever_end([Document(page_content=str(i))])
    release.set()
    assert handler.wait(60)
    assert "16 requests to prefetch are waiting, so another is dropped" in caplog.text


def test_as_a_tool_its_documents_are_the_artifact(library):
    tool = create_retriever_tool(
        ChunkCacheRetriever(retriever=finds(DOCUMENTS), library=library()),
        "search",
        "Finds towers.",
        response_format="content_and_artifact",
    )
    message = tool.invoke({"type": "tool_call", "id": "1", "name": "search", "args": {"query": "tower"}})
    assert all("chunk_key" in document.metadata for document in message.artifact)
