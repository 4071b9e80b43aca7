"""`ChatBlended`: which documents it finds in messages, that their chunks are reused, and what it refuses."""

import asyncio
import json
import threading
import time

import pytest
import torch

pytest.importorskip("langchain_core")

from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder

from blendkv import ChunkLibrary
from blendkv.integrations.langchain import ChatBlended, as_content_blocks
from blendkv.testing import byte_tokenizer

DOCUMENTS = ["The tower is 61 m high.", "It was built in 1923."]
SYSTEM, QUESTION = "Answer from these.", "How high?"
MESSAGES = [SystemMessage(SYSTEM), HumanMessage(as_content_blocks(DOCUMENTS)), HumanMessage(QUESTION)]


@pytest.fixture
def chat(library):
    return lambda kv=None, **options: ChatBlended(library=kv or library(), **{"max_tokens": 8} | options)


def cached(message):
    return message.usage_metadata["input_token_details"]


def lengths(chat, *texts):
    return sum(chat.get_num_tokens(text) for text in texts)


def test_ratio_one_equals_plain_generate_on_the_same_ids(library, chat, plain):
    model = chat(kv := library(), recompute_ratio=1.0)
    message = model.invoke(MESSAGES)
    prompt = kv.assemble(DOCUMENTS, QUESTION, SYSTEM)
    ids = torch.tensor([prompt.ids])
    out = plain().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert message.content == kv.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert message.content
    assert message.usage_metadata["input_tokens"] == ids.shape[1]
    assert message.usage_metadata["output_tokens"] == 8
    assert message.response_metadata["finish_reason"] == "length"
    assert message.response_metadata["model_name"] == "llama"


def test_chunks_are_reused_wherever_they_stand(library, chat):
    model = chat(kv := library(recompute_ratio=0.0))
    head = len(kv.layout.head(SYSTEM).ids)
    first = model.invoke(MESSAGES)
    every = head + lengths(model, *DOCUMENTS)
    assert cached(first) == {"cache_read": 0, "cache_creation": every}
    again = model.invoke(MESSAGES)
    assert again.content == first.content
    assert cached(again) == {"cache_read": every, "cache_creation": 0}
    other = model.invoke(
        [SystemMessage(SYSTEM), HumanMessage(["Look: ", *as_content_blocks(DOCUMENTS[::-1]), "When?"])]
    )
    assert cached(other) == {"cache_read": every, "cache_creation": 0}
    blend = other.response_metadata["blend"]
    assert [use["hit"] for use in blend["chunks"]] == [True] * 3
    assert blend["layers"][0]["reused"] == every
    json.dumps(other.response_metadata)


def test_the_next_turn_reuses_the_chunks_of_all_turns(library, chat):
    model = chat(library(recompute_ratio=0.0))
    history = list(MESSAGES)
    for question in ("When?", "By whom?"):
        history += [model.invoke(history), HumanMessage(question)]
    new = "A new document about its door."
    history[-1] = HumanMessage([*as_content_blocks([new]), "By whom?"])
    message = model.invoke(history)
    assert cached(message)["cache_creation"] == lengths(model, new)
    assert len(message.response_metadata["blend"]["chunks"]) == 4
    assert all(use["hit"] for use in message.response_metadata["blend"]["chunks"])
    assert cached(model.invoke([*history, message, HumanMessage("Sure?")]))["cache_creation"] == 0


def test_documents_of_a_tool_message(library, chat):
    model = chat(kv := library(recompute_ratio=0.0))
    kv.prefill(DOCUMENTS)
    call = {"name": "search", "args": {"query": "height"}, "id": "1"}
    documents = [Document(page_content=text) for text in DOCUMENTS]
    messages = [
        HumanMessage(QUESTION),
        AIMessage("", tool_calls=[call]),
        ToolMessage("\n\n".join(DOCUMENTS), artifact=documents, tool_call_id="1"),
    ]
    message = model.invoke(messages)
    assert cached(message)["cache_read"] == lengths(model, *DOCUMENTS)
    text = kv.conversation(_turns(messages)).text
    assert '<tool_call>\n{"name": "search", "arguments": {"query": "height"}}\n</tool_call>' in text
    assert text.count(DOCUMENTS[0]) == 1
    plain = [*messages[:2], ToolMessage("nothing found", artifact=[], tool_call_id="1")]
    assert "nothing found" in kv.conversation(_turns(plain)).text
    other = [*messages[:2], ToolMessage("61", artifact={"any": "thing"}, tool_call_id="1")]
    assert "<|im_start|>tool\n61<|im_end|>" in kv.conversation(_turns(other)).text


def _turns(messages):
    from blendkv.integrations.langchain_messages import turns_of

    return turns_of(messages)


def test_marks_survive_a_prompt_template(library, chat):
    model = chat(kv := library())
    prompt = ChatPromptTemplate.from_messages(
        [("system", SYSTEM), MessagesPlaceholder("documents"), ("human", "{question}")]
    )
    kv.prefill(DOCUMENTS)
    kv.prefill([])
    documents = [HumanMessage(as_content_blocks([Document(page_content=text) for text in DOCUMENTS]))]
    message = (prompt | model).invoke({"documents": documents, "question": QUESTION})
    assert cached(message)["cache_creation"] == len(kv.layout.head(SYSTEM).ids)
    assert message.content == model.invoke(MESSAGES).content


@pytest.mark.filterwarnings("ignore:no chunk was found")
def test_without_documents_it_is_a_chat_model(library, chat, plain):
    model = chat(kv := library())
    message = model.invoke("Hello?")
    ids = torch.tensor([kv.assemble([], "Hello?").ids])
    out = plain().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert message.content == kv.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    # a retriever that returned nothing
    empty = [HumanMessage(as_content_blocks([])), HumanMessage("Hello?")]
    assert model.invoke(empty).content == message.content


def test_streams(library, chat):
    model = chat(library())
    want = model.invoke(MESSAGES)
    first, *rest = model.stream(MESSAGES)
    assert len(rest) > 2
    whole = first
    for part in rest:
        whole += part
    want = model.invoke(MESSAGES)  # the second, as the stream
    assert whole.content == want.content
    assert whole.usage_metadata == want.usage_metadata
    assert whole.response_metadata["finish_reason"] == "length"
    assert set(whole.response_metadata) == set(want.response_metadata)

    async def main():
        return [part async for part in model.astream(MESSAGES)], await model.ainvoke(MESSAGES)

    parts, message = asyncio.run(main())
    assert "".join(part.content for part in parts) == message.content == want.content
    assert parts[-1].usage_metadata == message.usage_metadata


def test_settings_of_a_call(library, chat):
    model = chat(kv := library(check_layers={1: 0.5}))
    kv.prefill(DOCUMENTS)
    ratio = model.bind(recompute_ratio=1.0).invoke(MESSAGES)
    last = ratio.response_metadata["blend"]["layers"][-1]
    assert last["reused"] == 0
    assert model.invoke(MESSAGES, recompute_ratio=0.0).response_metadata["blend"]["layers"][0]["recomputed"] == 0
    assert model.invoke(MESSAGES, max_tokens=3).usage_metadata["output_tokens"] == 3
    whole = model.invoke(MESSAGES).content
    assert model.invoke(MESSAGES, stop=[whole[2]]).content == whole[: whole.index(whole[2])]
    assert chat(kv, stop=[whole[2]]).invoke(MESSAGES).content == whole[: whole.index(whole[2])]
    with pytest.raises(TypeError, match="does not take max_token: it takes max_tokens"):
        model.invoke(MESSAGES, max_token=3)
    with pytest.raises(TypeError, match=r"does not take tools \(it calls no tools"):
        model.invoke(MESSAGES, tools=[])
    with pytest.raises(NotImplementedError, match="does not call tools: let another"):
        model.bind_tools([])
    with pytest.raises(ValueError, match="max_tokens=0"):
        chat(kv, max_tokens=0)
    with pytest.raises(ValueError, match="outside"):
        model.invoke(MESSAGES, recompute_ratio=2.0)


def test_errors_of_the_generating_thread_and_of_room(library, chat):
    model = chat(kv := library())
    with pytest.raises(ContextOverflowError, match="retrieve fewer or shorter documents"):
        model.invoke([HumanMessage(as_content_blocks(["x" * 9999]))])
    with pytest.raises(ValueError, match="retrieve fewer or shorter documents"):
        list(model.stream([HumanMessage("x" * 9999)]))
    assert not len(kv.pool)

    def fail(*args):
        raise RuntimeError("out of memory, or so")

    handle = kv.model.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="or so"):
            list(model.stream(MESSAGES))
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("messages", "error", "match"),
    [
        ([], ValueError, "there are no messages"),
        ([HumanMessage("a"), AIMessage("b")], ValueError, "the last message is the assistant's"),
        ([HumanMessage("a"), SystemMessage("b"), HumanMessage("c")], ValueError, "put all of them first"),
        (
            [HumanMessage([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}])],
            ValueError,
            "block 0 of message 0 is of the type 'image_url', and this model reads text alone",
        ),
        ([HumanMessage(["a", {"type": "hologram"}])], ValueError, "block 1 of message 0 is of the type 'hologram'"),
        ([HumanMessage([{"text": "a"}])], ValueError, "block 0 of message 0 is of the type None"),
        ([HumanMessage([{"type": "text", "text": 3}])], TypeError, "block 0 of message 0 has a int for its text"),
        (
            [HumanMessage([{"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}])],
            ValueError,
            "block 0 of message 0 is an empty document: leave it out",
        ),
        ([ChatMessage(role="narrator", content="a")], ValueError, "a message of the role 'narrator'"),
        ([FunctionMessage(name="f", content="a")], ValueError, "a message of the role 'function'"),
        ([RemoveMessage(id="1")], ValueError, "a message of the role 'remove'"),
    ],
)
def test_what_it_cannot_take(chat, messages, error, match):
    with pytest.raises(error, match=match):
        chat().invoke(messages)


def test_roles_by_name_and_silent_blocks(chat):
    model = chat()
    messages = [
        ChatMessage(role="developer", content=SYSTEM),
        ChatMessage(role="user", content=QUESTION),
        AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "61 m"}]),
        ChatMessage(role="user", content="Sure?"),
    ]
    text = model.library.conversation(_turns(messages)).text
    assert "hm" not in text
    assert text.startswith(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>")


def test_as_content_blocks(caplog):
    documents = [Document(page_content="a"), "b", Document(page_content=""), "a"]
    blocks = as_content_blocks(documents)
    assert [block["text"] for block in blocks] == ["a", "b", "a"]
    assert all(block["cache_control"] == {"type": "ephemeral"} and block["type"] == "text" for block in blocks)
    assert "1 of 4 documents are empty, and left out" in caplog.text
    assert as_content_blocks([]) == []
    with pytest.raises(TypeError, match="pass a list of documents"):
        as_content_blocks("abc")
    with pytest.raises(TypeError, match="a document is a int without text"):
        as_content_blocks([3])


def test_a_tokenizer_without_a_template(attached):
    with pytest.raises(ValueError, match="has no chat template"):
        ChatBlended(library=ChunkLibrary(attached(), byte_tokenizer())).invoke("Hi")


def test_leaving_a_stream_ends_the_answer(library, chat):
    model, forwards = chat(kv := library(), max_tokens=400), []
    kv.inputs(kv.conversation(_turns(MESSAGES)))
    handle = kv.model.register_forward_pre_hook(lambda *args: (forwards.append(1), time.sleep(0.01))[0])

    def ended():
        before = len(forwards)
        time.sleep(0.3)
        return len(forwards) == before

    async def main():
        stream = model.astream(MESSAGES)
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(model.ainvoke(MESSAGES))
        while len(forwards) < 10:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        stream = model.stream(MESSAGES)
        next(stream)
        stream.close()
        assert ended()
        forwards.clear()
        asyncio.run(main())
        assert ended()
        assert len(forwards) < 200
    finally:
        handle.remove()


def test_laying_out_happens_off_the_loop(library, chat, monkeypatch):
    kv = library()
    model, threads, real = chat(kv), [], kv.conversation
    monkeypatch.setattr(kv, "conversation", lambda *args, **more: threads.append(threading.get_ident()) or real(*args))

    async def main():
        await model.ainvoke(MESSAGES)
        return [part async for part in model.astream(MESSAGES)]

    assert asyncio.run(main())
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_what_answers_depend_on_is_part_of_a_caches_key(library, chat):
    kv = library()
    key = chat(kv)._identifying_params
    json.dumps(key)
    for changes in ({"top_k": 3}, {"stop": ["x"]}, {"recompute_ratio": 0.9}, {"selector": "boundary"}):
        assert chat(kv, **changes)._identifying_params != key
    assert chat(library(recompute_ratio=0.9))._identifying_params == chat(kv, recompute_ratio=0.9)._identifying_params
