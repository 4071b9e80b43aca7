"""Answers at once, streamed and from an event loop: the same text, the same errors, and an end when nobody listens."""

import asyncio
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from blendkv import Guard
from blendkv.conversation import Part, Turn
from blendkv.integrations.answering import Asking, PromptTooLongError, Settings
from blendkv.integrations.detokenizing import AnswerStreamer, StopText
from blendkv.testing import byte_tokenizer

DOCUMENTS = ["The tower is 61 m high.", "It was built in 1923."]
QUESTION = "How high?"


def ask(kv, **settings):
    return Asking(kv, kv.assemble(DOCUMENTS, QUESTION), Settings(**{"max_tokens": 12} | settings))


def collect(generator):
    parts = []
    while True:
        try:
            parts.append(next(generator))
        except StopIteration as end:
            return parts, end.value


async def acollect(asking):
    items = [item async for item in asking.astream()]
    return items[:-1], items[-1]


def plain_answer(kv, model, asking):
    ids = torch.tensor([asking.prompt.ids])
    end = kv.tokenizer.eos_token_id
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=end)
    return kv.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_four_ways_one_answer(library, plain):
    kv = library(recompute_ratio=1.0)
    whole = ask(kv).run()
    parts, streamed = collect(ask(kv).stream())
    aparts, astreamed = asyncio.run(acollect(ask(kv)))
    answers = [whole, streamed, astreamed, asyncio.run(ask(kv).arun())]
    want = plain_answer(kv, plain(), ask(kv))
    assert want
    assert {answer.text for answer in answers} == {"".join(parts), "".join(aparts), want}
    assert len(parts) > 1
    assert all(answer.finish == "length" and answer.tokens == 12 for answer in answers)
    assert whole.prompt_tokens == len(ask(kv).prompt.ids)


def test_what_was_reused(library):
    kv = library(recompute_ratio=0.0)
    first, second = ask(kv).run(), ask(kv).run()
    chunks = sum(len(piece.ids) for piece in ask(kv).prompt.pieces if piece.kind != "text")
    assert (first.cache_read, first.cache_creation) == (0, chunks)
    assert (second.cache_read, second.cache_creation) == (chunks, 0)
    assert second.report.reused_tokens == chunks
    kv.clear()
    kv.prefill(DOCUMENTS[:1])
    mixed = ask(kv).run()
    assert (mixed.cache_read, mixed.cache_creation) == (len(DOCUMENTS[0]), chunks - len(DOCUMENTS[0]))


def test_an_end_token_ends_it(library, monkeypatch):
    kv = library()
    ids = kv.model.generate(**kv(DOCUMENTS, QUESTION), max_new_tokens=12, do_sample=False, pad_token_id=0)
    end = int(ids[0, len(ask(kv).prompt.ids) + 3])
    monkeypatch.setattr(kv.model.generation_config, "eos_token_id", [end])
    answer = ask(kv).run()
    assert answer.finish == "stop"
    assert answer.tokens <= 4


@pytest.mark.parametrize("way", ["run", "stream"])
def test_stop_strings_end_it_and_are_not_shown(library, way):
    kv = library()
    whole = ask(kv).run()
    stop = whole.text[3:6]
    asking = ask(kv, stop=("never seen", stop))
    answer = asking.run() if way == "run" else collect(asking.stream())[1]
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.finish == "stop"
    assert answer.tokens < whole.tokens
    assert ask(kv, stop=("never seen",)).run().text == whole.text  # what was held back comes in the end


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_text_against_the_obvious(size):
    text = "abcabdabcabcab" * 3
    for stops in (["abcabc"], ["bd", "abd"], ["zz"], ["b"], ["cabx", "ca"], []):
        cutter, shown = StopText(stops), ""
        for i in range(0, len(text), size):
            shown += cutter.feed(text[i : i + size])
            at = min((text.find(s) for s in stops if s in text), default=len(text))
            assert text[:at].startswith(shown)  # never more than may be shown
        shown += cutter.flush()
        assert shown == text[:at]
        assert cutter.found == (at < len(text))


def test_characters_of_several_tokens_come_whole():
    tokenizer, shown = byte_tokenizer(), []
    text = "naïve 漢字 🙂 é"
    streamer = AnswerStreamer(tokenizer, (), shown.append)
    streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    ids = tokenizer(text)["input_ids"]
    for token in ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(shown) == text == streamer.text
    assert "漢" in shown
    assert len(ids) > len(shown) == len(text)
    half = AnswerStreamer(tokenizer, (), shown.append)
    half.put(torch.tensor([[1]]))
    half.put(torch.tensor(ids[:3]))
    half.end()
    assert half.text == "na\ufffd"  # what `decode` makes of it


def llama_like():
    """Words with their space in front, bytes for the rest; decoding drops the first space of all."""
    words = ["▁the", "▁tower", "is", "▁", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("make", [llama_like, byte_tokenizer])
def test_streamed_text_is_the_whole_text(make, seed):
    tokenizer, shown, draw = make(), [], random.Random(seed)
    ids = []
    for _ in range(12):
        character = draw.choice("aé漢🙂 ")
        whole = {"llama_like": [5 + byte for byte in character.encode()], "byte_tokenizer": None}[make.__name__]
        ids += draw.choice([whole, [draw.randrange(5)]]) if whole else tokenizer(character)["input_ids"]
    streamer = AnswerStreamer(tokenizer, (), shown.append)
    streamer.put(torch.tensor([[1, 2]]))
    for token in ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(shown) == tokenizer.decode(ids)
    assert len(shown) > 3


def test_bytes_that_are_no_text_do_not_hold_the_rest_back():
    shown = []
    streamer = AnswerStreamer(byte_tokenizer(), (), shown.append)
    streamer.put(torch.tensor([[1]]))
    for token in byte_tokenizer()("é")["input_ids"][:1] * 12:
        streamer.put(torch.tensor([token]))
    assert "".join(shown).count("\ufffd") >= 6


class Slow:
    """Counts forwards of a model, and makes each take a moment."""

    def __init__(self, model, seconds=0.02):
        self.count = 0
        self.thread = None
        self.handle = model.register_forward_pre_hook(self)
        self.seconds = seconds

    def __call__(self, module, args):
        self.count += 1
        self.thread = threading.current_thread()
        time.sleep(self.seconds)

    def stays(self):
        before = self.count
        time.sleep(20 * self.seconds)
        return self.count == before


@pytest.fixture
def slow(library):
    kv = library()
    kv.prefill(DOCUMENTS)
    counter = Slow(kv.model)
    yield kv, counter
    counter.handle.remove()


def test_a_stream_streams(slow):
    kv, counter = slow
    seen = []
    for _ in (stream := ask(kv, max_tokens=30).stream()):
        seen.append(counter.count)
    stream.close()
    assert len(seen) > 3
    assert seen[0] < counter.count  # the first text came long before the last token
    assert counter.thread is not threading.current_thread()


def test_closing_a_stream_ends_it(slow):
    kv, counter = slow
    stream = ask(kv, max_tokens=500).stream()
    next(stream)
    stream.close()
    assert counter.stays()
    assert counter.count < 100
    assert not any(thread.name == "blendkv-answer" for thread in threading.enumerate())


def test_cancelling_a_task_ends_it_and_the_loop_is_never_blocked(slow):
    kv, counter = slow

    async def main(way):
        ticks = 0
        task = asyncio.create_task(way(ask(kv, max_tokens=500)))
        while counter.count < 5:
            await asyncio.sleep(0.001)
            ticks += 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return ticks

    for way in (Asking.arun, acollect):
        counter.count = 0
        assert asyncio.run(main(way)) > 5
        assert counter.stays()
        assert counter.count < 100


def test_leaving_an_async_stream_ends_it(slow):
    kv, counter = slow

    async def main():
        stream = ask(kv, max_tokens=500).astream()
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(main())
    assert counter.stays()
    assert counter.count < 100


def test_a_process_can_end_in_the_middle_of_an_answer():
    code = """
import time
from blendkv import ChunkLibrary
from blendkv.integrations.answering import Asking, Settings
from blendkv.testing import byte_tokenizer, tiny_model
kv = ChunkLibrary(tiny_model("llama"), byte_tokenizer(chat=True))
asking = Asking(kv, kv.assemble(["The tower is 61 m high."], "How high?"), Settings(max_tokens=400))
kv.inputs(asking.prompt)
kv.model.generation_config.suppress_tokens = [i for i in range(512) if not 65 <= i < 90]
kv.model.register_forward_pre_hook(lambda *args: time.sleep(1))
next(stream := asking.stream())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)  # 400 tokens would take 400 s


@pytest.mark.parametrize("when", ["in the forward", "while chunks are found"])
def test_errors_reach_the_caller(library, when, monkeypatch):
    kv = library()

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory, or so")

    handle = None
    if when == "in the forward":
        handle = kv.model.register_forward_pre_hook(fail)
    else:
        monkeypatch.setattr(kv, "inputs", fail)
    try:
        with pytest.raises(RuntimeError, match="or so"):
            ask(kv).run()
        with pytest.raises(RuntimeError, match="or so"):
            collect(ask(kv).stream())
        with pytest.raises(RuntimeError, match="or so"):
            asyncio.run(ask(kv).arun())
        with pytest.raises(RuntimeError, match="or so"):
            asyncio.run(acollect(ask(kv)))
    finally:
        if handle is not None:
            handle.remove()


def test_out_of_time(slow):
    kv, counter = slow
    with pytest.raises(TimeoutError, match=r"timeout=0.2 s \(\d+ of at most 500 tokens\)"):
        ask(kv, max_tokens=500, timeout=0.2).run()
    assert counter.count < 100
    assert ask(kv, timeout=60).run().finish == "length"


def test_an_answer_ends_where_the_model_does(library):
    kv = library()
    limit = kv.model.config.max_position_embeddings
    room = limit - len(kv.assemble([], "").ids)
    asking = Asking(kv, kv.assemble([], "x" * (room - 3)), Settings(max_tokens=50))
    assert asking.run().tokens <= 3
    kv.clear()
    with pytest.raises(PromptTooLongError, match=f"takes {limit:,} with its answer: retrieve fewer"):
        Asking(kv, kv.assemble(["x" * 2 * limit], QUESTION), Settings())
    assert not len(kv.pool)  # and nothing was computed


def test_sampling_is_sampling(library):
    kv = library()
    torch.manual_seed(0)
    texts = {ask(kv, temperature=2.0, top_k=50, top_p=0.99).run().text for _ in range(4)}
    assert len(texts) > 1
    assert ask(kv).settings.sampling()["do_sample"] is False


def test_a_guard_checks_answers(library):
    kv = library(guard=Guard(share=1.0))
    ask(kv).run()
    assert kv.guard.checks == 1


def test_threads_answer_as_one_does(library):
    kv = library(recompute_ratio=0.5)
    questions = ["How high?", "When?", "Who built it, and why?", "Where?"]

    def asking(question):
        turns = [Turn("user", (*(Part(text, document=True) for text in DOCUMENTS), Part(question)))]
        return Asking(kv, kv.conversation(turns), Settings(max_tokens=8))

    want = [asking(question).run().text for question in questions]
    kv.clear()
    puts = kv.pool.stats.puts

    async def main():
        return await asyncio.gather(*(asking(question).arun() for question in questions))

    answers = asyncio.run(main())
    assert [answer.text for answer in answers] == want
    assert kv.pool.stats.puts == puts + 3  # the head and two documents, each computed once


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_tokens": 0}, "max_tokens=0: give a whole number"),
        ({"max_tokens": 2.5}, "max_tokens=2.5"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"timeout": 0}, "timeout=0: give seconds"),
        ({"stop": "x"}, "stop='x': give a list"),
        ({"stop": ("",)}, "give a list of strings that are not empty"),
    ],
)
def test_bad_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        Settings(**settings)
