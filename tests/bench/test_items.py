"""One prompt measured by every setting, beside slow twins: whole generation, chunk by chunk."""

import pytest
import torch

from blendkv.bench.answering import Stops, ends, go_on, own_answer
from blendkv.bench.forcing import Reference
from blendkv.bench.items import Examiner
from blendkv.bench.laying import Cell, frame, lay_out
from blendkv.bench.mapping import MapReduce, MapRerank, map_chunks, reduce_ids
from blendkv.bench.measure import token_f1
from blendkv.bench.methods import Blend, forced_logits
from blendkv.bench.settings import NO_CONTEXT, reference_of, settings_of
from blendkv.bench.tasks import Example
from blendkv.cache import BlendedCache
from blendkv.testing import byte_tokenizer
from tests.helpers import generate

EXAMPLE = Example("Who?", ["Ada: Ada wrote notes.\n\n", "Bob: Bob slept.\n\n", "Cid: Cid won.\n\n"], ["Ada"])
LIMIT = 20


@pytest.fixture
def tokenizer():
    return byte_tokenizer(chat=True)


def question_alone(tokenizer):
    """Ids of the prompt without its chunks."""
    before, after = frame(tokenizer, EXAMPLE)
    return before + after


def slow_answer(model, stops, ids, cache=None):
    """Text of a whole generate, cut afterwards."""
    said = generate(model, ids, cache, max_new_tokens=LIMIT)[0, ids.shape[1] :].tolist()
    for n in range(1, len(said) + 1):
        if stops.finished(said[:n]):
            return stops.text(said[:n])
    return stops.text(said)


def test_where_an_answer_ends(tokenizer):
    stops = Stops(tokenizer, frozenset({tokenizer.convert_tokens_to_ids("<|im_end|>")}))

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    assert not stops.finished(ids("\n\n Oslo"))
    assert stops.finished(ids("\n\n Oslo\n"))
    assert stops.finished(ids("Oslo<|im_end|>"))
    assert stops.text(ids("\n Oslo, Norway\nQuestion")) == "Oslo, Norway"
    assert stops.text(ids("Oslo<|im_end|>Bergen")) == "Oslo"


def test_every_setting_says_what_generate_says(attached, tokenizer):
    model = attached("llama")
    examiner = Examiner(model, tokenizer, max_new_tokens=LIMIT)
    case = lay_out(model, tokenizer, EXAMPLE)
    settings = settings_of(("prefix", "reuse", "blend"), ("hkvd", "boundary"), (0.15, 0.5, 1.0))
    found = {s.key: figures for s, figures in examiner.measure(EXAMPLE, Cell(), settings)}
    assert list(found) == [s.key for s in settings]
    for setting in settings:
        ids = case.ids
        if setting.method == NO_CONTEXT:
            ids = torch.tensor([question_alone(tokenizer)])
        blends = setting.method in ("reuse", "blend")
        cache = BlendedCache(case.chunks, setting.ratio, setting.selector or "hkvd") if blends else None
        said = slow_answer(model, examiner.stops, ids, cache)
        figures = found[setting.key]
        assert figures["answer"] == said, setting.key
        assert figures["f1"] == token_f1(said, EXAMPLE.answers)
        assert figures["ttft_s"] > 0
    assert len({figures["answer"] for figures in found.values()}) > 2  # else any answer would do
    assert found["full", None, None]["kl"] == 0
    assert found["blend", "boundary", 1.0]["charged_budget"] == pytest.approx(1)
    assert found[NO_CONTEXT, None, None]["charged_budget"] == 0
    reference = Reference.of(model, tokenizer, EXAMPLE)
    assert found["blend", "hkvd", 0.15]["kl"] == pytest.approx(reference.agreement(Blend(0.15)).kl, rel=1e-4)
    alone = forced_logits(model, torch.tensor([question_alone(tokenizer)]), reference.answer, None)
    kl = (reference.logits.softmax(-1) * (reference.logits.log_softmax(-1) - alone.log_softmax(-1))).sum(-1).mean()
    assert found[NO_CONTEXT, None, None]["kl"] == pytest.approx(float(kl), rel=1e-3)


def test_an_answer_goes_on_from_where_it_differs(attached, tokenizer):
    """Whatever is forced on a blend, it says by itself what it would have said."""
    model = attached("llama")
    case, stops = lay_out(model, tokenizer, EXAMPLE), Stops(tokenizer, ends(model, tokenizer))
    own = generate(model, case.ids, BlendedCache(case.chunks, 0.15), max_new_tokens=9)[0, case.ids.shape[1] :]
    for same in (0, 3, 5, 6):
        forced = own[:6].clone()
        forced[same:] = (forced[same:] + 1) % 200
        cache = BlendedCache(case.chunks, 0.15)
        logits = forced_logits(model, case.ids, forced, cache)
        said = own_answer(model, cache, case.ids.shape[1], forced, logits.argmax(-1).tolist(), stops, 9)
        assert said == own.tolist()[: len(said)]
        assert len(said) == 9 or stops.finished(said)
        assert go_on(model, cache, said, stops, 9) == said


def test_several_prompts_at_once_cost_time_and_change_nothing_else(attached, tokenizer):
    examiner = Examiner(attached("llama"), tokenizer, answers=False)
    settings = settings_of(("blend",), ("hkvd",), (0.15,), answers=False)
    one, many = (dict(examiner.measure(EXAMPLE, Cell(batch=b), settings)) for b in (1, 3))
    for setting in settings:
        assert one[setting]["kl"] == pytest.approx(many[setting]["kl"])
        assert one[setting]["answer"] is None


def test_map_answers_each_chunk_alone(attached, tokenizer):
    model = attached("llama")
    case, stops = lay_out(model, tokenizer, EXAMPLE), Stops(tokenizer, ends(model, tokenizer))
    mapped = map_chunks(case, stops, LIMIT)
    assert len(mapped.answers) == 3
    for chunk, answer, likelihood in zip(EXAMPLE.chunks, mapped.answers, mapped.likelihoods, strict=True):
        alone = lay_out(model, tokenizer, Example("Who?", [chunk], []))
        assert stops.text(answer) == slow_answer(model, stops, alone.ids)
        logits = forced_logits(model, alone.ids, torch.tensor(answer), None).log_softmax(-1)
        slow = logits.gather(-1, torch.tensor(answer)[:, None]).mean()
        assert likelihood == pytest.approx(float(slow), abs=1e-4)


def test_rerank_takes_the_likeliest_and_reduce_reads_the_answers(attached, tokenizer):
    model = attached("llama")
    case, stops = lay_out(model, tokenizer, EXAMPLE), Stops(tokenizer, ends(model, tokenizer))
    mapped = map_chunks(case, stops, LIMIT)
    best = max(range(3), key=mapped.likelihoods.__getitem__)
    assert MapRerank(stops, LIMIT).prepare(case)(LIMIT).tokens.tolist() == mapped.answers[best]
    texts = [stops.text(answer) for answer in mapped.answers]
    again = lay_out(model, tokenizer, Example("Who?", [f"{text}\n\n" for text in texts if text], []))
    assert reduce_ids(case, mapped, stops).tolist() == again.ids.tolist()
    said = MapReduce(stops, LIMIT).prepare(case)(LIMIT).tokens.tolist()
    assert stops.text(said) == slow_answer(model, stops, again.ids)


def test_settings_are_each_there_once():
    settings = settings_of(("full", "reuse", "blend"), ("hkvd", "none", "hkvd"), (0.0, 0.15, 0.15))
    assert [s.key for s in settings] == [
        ("full", None, None), (NO_CONTEXT, None, None), ("reuse", None, 0.0), ("blend", "hkvd", 0.15),
        ("blend", "none", 0.0),
    ]  # fmt: skip
    assert reference_of(settings).key == ("blend", "hkvd", 0.15)
    assert reference_of(settings, "boundary", 0.3).key == ("blend", "hkvd", 0.15)
    assert reference_of(settings_of(("reuse",), (), ())).key == ("reuse", None, 0.0)
