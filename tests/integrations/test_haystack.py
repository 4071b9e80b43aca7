"""Haystack: components in a pipeline, from a file of it, and from an event loop."""

import asyncio
import threading

import pytest
import torch

pytest.importorskip("haystack")

from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.utils import print_streaming_chunk
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.dataclasses import ChatMessage, ImageContent, ToolCall
from haystack.document_stores.in_memory import InMemoryDocumentStore

from blendkv.integrations.answering import PromptTooLongError
from blendkv.integrations.haystack import BlendedChatGenerator, ChunkPrefetcher, shared_library
from blendkv.testing import byte_tokenizer, tiny_model
from tests.helpers import unprintable

TEXTS = ["The tower is 61 m high.", "The tower was built in 1923."]
SYSTEM, QUESTION = "Answer from these.", "How high is the tower?"
MESSAGES = [ChatMessage.from_system(SYSTEM), ChatMessage.from_user(QUESTION)]


@pytest.fixture(scope="module")
def name(tmp_path_factory):
    """A folder with a tiny model: Haystack's components know models by name."""
    folder, tokenizer, model = tmp_path_factory.mktemp("model"), byte_tokenizer(chat=True), tiny_model("llama")
    model.generation_config.suppress_tokens = unprintable(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def kv(name):
    library = shared_library(name)
    library.clear()
    return library


def documents():
    return [Document(content=text, meta={"n": i}) for i, text in enumerate(TEXTS)]


def generator(name, **options):
    return BlendedChatGenerator(name, generation_kwargs={"max_tokens": 8}, **options)


def pipeline(name):
    store = InMemoryDocumentStore()
    store.write_documents(documents())
    pipe = Pipeline()
    pipe.add_component("retriever", InMemoryBM25Retriever(store, top_k=2))
    pipe.add_component("prefetcher", ChunkPrefetcher(name, mode="prefill"))
    pipe.add_component("prompt", ChatPromptBuilder([*MESSAGES[:1], ChatMessage.from_user("{{question}}")]))
    pipe.add_component("generator", generator(name))
    pipe.connect("retriever", "prefetcher")
    pipe.connect("prefetcher", "generator.documents")
    pipe.connect("prompt", "generator.messages")
    return pipe


def test_a_pipeline_reuses_chunks_also_when_it_comes_from_a_file(name, kv):
    asked = {"retriever": {"query": QUESTION}, "prompt": {"question": QUESTION}}
    reply = pipeline(name).run(asked)["generator"]["replies"][0]
    assert reply.meta["blend"]["loaded"]["memory"] == sum(map(len, TEXTS))  # the prefetcher had computed them
    assert reply.meta["model"]
    assert reply.text
    again = Pipeline.loads(pipeline(name).dumps(), allowed_modules=["blendkv.integrations.haystack"])
    again = again.run(asked)["generator"]["replies"][0]
    assert again.text == reply.text
    assert again.meta["blend"]["prefilled_tokens"] == 0
    assert again.meta["usage"]["prompt_tokens_details"]["cached_tokens"] == again.meta["blend"]["layers"][-1]["reused"]
    assert all(use["hit"] for use in again.meta["blend"]["chunks"])
    assert len(again.meta["blend"]["chunks"]) == 3


def test_ratio_one_equals_plain_generate_on_the_same_ids(name, plain, monkeypatch):
    options = {"recompute_ratio": 1.0}
    component = generator(name, library_kwargs=options)
    reply = component.run(MESSAGES, documents())["replies"][0]
    kv = shared_library(name, library_kwargs=options)
    assert component._library is kv
    suppressed = kv.model.generation_config.suppress_tokens
    ids = torch.tensor([kv.assemble(TEXTS, QUESTION, SYSTEM).ids])
    end = kv.tokenizer.eos_token_id
    out = plain().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=end,
        suppress_tokens=suppressed,
    )
    assert reply.text == kv.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert reply.meta["usage"]["prompt_tokens"] == ids.shape[1]


def test_the_prefetcher_copies_documents_and_attaches_keys(name, kv):
    given = [*documents(), Document(content=None, meta={"n": 2}), Document(content="")]
    prefetcher = ChunkPrefetcher(name, mode="prefill")
    found = prefetcher.run(given)["documents"]
    assert [document.meta.get("chunk_key") for document in found] == [*kv.keys(TEXTS), None, None]
    assert [document.id for document in found] == [document.id for document in given]
    assert given[0].meta == {"n": 0}
    assert len(kv.pool) == 2
    kv.clear()
    prefetcher = ChunkPrefetcher(name, mode="load")
    assert prefetcher.run(given)["documents"] == found
    assert prefetcher.wait(60)
    assert len(kv.pool) == 0
    assert prefetcher.run([]) == {"documents": []}


def test_components_load_nothing_before_they_are_warm():
    ChunkPrefetcher("no such model")
    component = BlendedChatGenerator("./no/such/model")
    assert BlendedChatGenerator.from_dict(component.to_dict()).to_dict() == component.to_dict()
    with pytest.raises(FileNotFoundError, match="no model at"):
        component.warm_up()


def test_dicts(name):
    component = BlendedChatGenerator(
        name,
        "memory://",
        {"max_tokens": 3, "stop": ["x"]},
        print_streaming_chunk,
        {"dtype": "float32"},
        {"recompute_ratio": 0.3},
    )
    twin = BlendedChatGenerator.from_dict(component.to_dict())
    assert twin.to_dict() == component.to_dict()
    assert twin.streaming_callback is print_streaming_chunk
    prefetcher = ChunkPrefetcher(name, mode="prefill", system="s")
    assert ChunkPrefetcher.from_dict(prefetcher.to_dict()).to_dict() == prefetcher.to_dict()


def test_streams_and_event_loops(name, kv):
    component, parts, aparts, sparts = generator(name), [], [], []
    want = component.run(MESSAGES, documents())["replies"][0].text
    want = component.run(MESSAGES, documents(), streaming_callback=parts.append)["replies"][0].text
    assert [part.content for part in parts] == list(want)

    async def hear(chunk):
        aparts.append(chunk.content)

    async def main():
        whole = await component.run_async(MESSAGES, documents())
        await component.run_async(MESSAGES, documents(), streaming_callback=hear)
        await component.run_async(MESSAGES, documents(), streaming_callback=sparts.append)
        return whole["replies"][0].text

    assert asyncio.run(main()) == want == "".join(aparts) == "".join(part.content for part in sparts)


def test_the_loop_goes_on_and_errors_reach_the_caller(name, kv, monkeypatch):
    component, ticked, real = generator(name), threading.Event(), kv.inputs
    monkeypatch.setattr(kv, "inputs", lambda *args, **options: ticked.wait(60) and real(*args, **options))

    async def main():
        task = asyncio.create_task(component.run_async(MESSAGES, documents()))
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert not task.done()
        ticked.set()
        return await task

    assert asyncio.run(main())["replies"][0].text
    monkeypatch.setattr(kv, "inputs", lambda *args, **options: 1 / 0)
    for call in (component.run, lambda *args: asyncio.run(component.run_async(*args))):
        with pytest.raises(ZeroDivisionError):
            call(MESSAGES, documents())


def test_conversations_and_tools(name, kv):
    component = generator(name)
    history = [*MESSAGES]
    history += [component.run(history, documents())["replies"][0], ChatMessage.from_user("When?")]
    reply = component.run(history, documents())["replies"][0]
    assert reply.meta["blend"]["prefilled_tokens"] == 0
    assert component.run("Hello?", documents())["replies"][0].text
    call = ToolCall("search", {"query": "tower"}, "1")
    tools = [MESSAGES[1], ChatMessage.from_assistant(tool_calls=[call]), ChatMessage.from_tool("61", origin=call)]
    assert component.run(tools)["replies"][0].text


def test_bad_input(name, kv):
    component = generator(name)
    with pytest.raises(ValueError, match="there are no messages"):
        component.run([])
    image = ChatMessage.from_user(content_parts=["see", ImageContent("aGVsbG8=", validation=False)])
    with pytest.raises(ValueError, match="content 1 of message 0 is a ImageContent, and this model reads text alone"):
        component.run([image])
    with pytest.raises(PromptTooLongError, match="retrieve fewer or shorter documents"):
        component.run(QUESTION, [Document(content="x" * 9999)])
    with pytest.raises(TypeError, match="unknown settings max_length: choose among"):
        component.run(QUESTION, generation_kwargs={"max_length": 3})
    with pytest.raises(ValueError, match="mode='both': choose"):
        ChunkPrefetcher(name, mode="both")
    with pytest.raises(ValueError, match="max_tokens=0"):
        BlendedChatGenerator(name, generation_kwargs={"max_tokens": 0})
