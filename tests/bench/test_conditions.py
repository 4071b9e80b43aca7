"""What `bench quality` varies beside selector and ratio: what chunks were computed behind, and schedules."""

import time

import pytest
import torch

from blendkv.bench.conditions import conditioned
from blendkv.bench.forcing import Reference, compare
from blendkv.bench.items import Examiner
from blendkv.bench.laying import Cell
from blendkv.bench.methods import forced_logits
from blendkv.bench.settings import Setting, reference_of, settings_of
from blendkv.bench.tasks import Example
from blendkv.cache import BlendedCache
from blendkv.layout import DUMMY, conditioning_ids, encode
from blendkv.prefilling import prefill
from blendkv.testing import byte_tokenizer

EXAMPLE = Example("Who?", ["Ada: Ada wrote notes.\n\n", "Bob: Bob slept.\n\n", "Cid: Cid won.\n\n"], ["Ada"])
ALL = ("none", "bos", "system", "dummy")


def test_what_stands_before_a_chunk():
    tokenizer, head = byte_tokenizer(bos=True), (5, 6)
    bos = tokenizer.bos_token_id
    assert conditioning_ids("none", tokenizer, head) == ()
    assert conditioning_ids("bos", tokenizer, head) == (bos,)
    assert conditioning_ids("system", tokenizer, head) == head
    assert conditioning_ids("dummy", tokenizer, head) == (bos, *encode(tokenizer, DUMMY))
    plain = byte_tokenizer()
    plain.bos_token = None
    assert conditioning_ids("dummy", plain, head) == tuple(encode(plain, DUMMY))
    with pytest.raises(ValueError, match="no BOS"):
        conditioning_ids("bos", plain, head)


def test_each_setting_is_measured_on_chunks_of_its_own_condition(attached):
    """Beside the slow twin: chunks computed behind the prefix, put into a cache by hand."""
    model, tokenizer = attached("llama"), byte_tokenizer(bos=True, chat=True)
    settings = settings_of(("reuse", "blend"), ("hkvd", "stored-moved"), (0.3,), answers=False, conditions=ALL)
    found = {
        s.key: figures for s, figures in Examiner(model, tokenizer, answers=False).measure(EXAMPLE, Cell(), settings)
    }
    assert len(found) == len(settings) == 1 + 4 * 3
    reference = Reference.of(model, tokenizer, EXAMPLE)
    case = reference.case
    for name in ALL:
        ids = conditioning_ids(name, tokenizer, case.chunks[0].ids.tolist())
        chunks = prefill(model, [chunk.ids for chunk in case.chunks[1:]], conditioning=ids, progress=False)
        assert [c.conditioning for c in conditioned(case, name, tokenizer).chunks] == [(), *[ids] * 3]
        extra = () if name == "none" else (name, None)
        for key, ratio in ((("reuse", None, 0.0, *extra), 0.0), (("blend", "hkvd", 0.3, *extra), 0.3)):
            logits = forced_logits(model, case.ids, reference.answer, BlendedCache([case.chunks[0], *chunks], ratio))
            want = compare(reference.logits, logits, reference.answer, reference.end).kl
            assert found[key]["kl"] == pytest.approx(want, rel=1e-3, abs=1e-6), key
    assert len({round(found["reuse", None, 0.0, *e]["kl"], 5) for e in ((), *((n, None) for n in ALL[1:]))}) == 4


def test_a_schedule_is_measured_as_it_is_given(attached):
    model, tokenizer, schedule = attached("llama"), byte_tokenizer(), {1: 0.6, 2: 0.2}
    settings = settings_of(("blend",), ("hkvd", "random"), (0.2,), answers=False, schedules=[schedule])
    assert [s.key for s in settings if s.check_layers] == [("blend", "hkvd", 0.2, None, "1:0.6,2:0.2")]
    found = {s.key: f for s, f in Examiner(model, tokenizer, answers=False).measure(EXAMPLE, Cell(), settings)}
    reference = Reference.of(model, tokenizer, EXAMPLE)
    cache = BlendedCache(reference.case.chunks, check_layers=schedule)
    logits = forced_logits(model, reference.case.ids, reference.answer, cache)
    want = compare(reference.logits, logits, reference.answer, reference.end)
    gradual = found["blend", "hkvd", 0.2, None, "1:0.6,2:0.2"]
    assert gradual["kl"] == pytest.approx(want.kl, rel=1e-3)
    assert gradual["charged_budget"] == pytest.approx(cache.report.charged_budget)
    assert gradual["charged_budget"] > found["blend", "hkvd", 0.2]["charged_budget"]


def test_schedules_are_of_the_first_selector_and_condition():
    settings = settings_of(("blend",), ("hkvd", "random"), (0.15,), conditions=("bos", "none"), schedules=[{2: 0.15}])
    assert [s.key for s in settings if s.check_layers] == [("blend", "hkvd", 0.15, "bos", "2:0.15")]
    assert reference_of(settings).key == ("blend", "hkvd", 0.15)  # what is usual, wherever it stands
    only = settings_of(("blend",), ("hkvd",), (0.15,), conditions=("bos",))
    assert reference_of(only).key == ("blend", "hkvd", 0.15, "bos", None)
    assert Setting(*reference_of(only).key) == reference_of(only)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"conditions": ("bos", "dumy")}, "'dumy'; choose among none, bos, system, dummy"),
        ({"conditions": ()}, "choose among none"),
        ({"schedules": [{1: 0.2, 4: 0.3}]}, "may not grow"),
        ({"schedules": [{1: 1.5}]}, "outside"),
    ],
)
def test_what_cannot_be_varied_is_said(given, message):
    with pytest.raises(ValueError, match=message):
        settings_of(("blend",), ("hkvd",), (0.15,), **given)


def test_speed_is_relative_to_full_recompute_of_the_same_prompt(attached):
    settings = settings_of(("prefix", "blend"), ("hkvd",), (0.0, 0.15), answers=False)
    found = {s.key: f for s, f in Examiner(attached("llama"), byte_tokenizer()).measure(EXAMPLE, Cell(), settings)}
    full = found["full", None, None]
    assert full["speedup"] == 1
    assert torch.tensor([f["speedup"] for f in found.values()]).isfinite().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_what_others_do_on_the_machine_is_not_counted_on_one_thread(attached, threads, monkeypatch):
    """A call that sleeps, or waits for a core, took no time of its own; with more threads the wall clock counts."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    examiner = Examiner(attached("llama"), byte_tokenizer())
    _, seconds = examiner._timed(lambda: time.sleep(0.5))
    assert seconds.wall >= 0.5
    assert (seconds.own < 0.25) == (threads == 1)
