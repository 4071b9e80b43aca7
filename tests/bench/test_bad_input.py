"""Wrong data, options and plug-ins: said in a sentence, before the hours of work where that is possible."""

import json
from dataclasses import dataclass

import pytest
import torch

from blendkv.attaching import attach
from blendkv.bench.journal import Journal
from blendkv.bench.quality import measure_quality, quality_rows
from blendkv.bench.settings import settings_of
from blendkv.bench.summary import verdict_of
from blendkv.bench.tasks import Example, Reading, read_task
from blendkv.selectors import First, PerChunk, Product, Selector, Union, Window
from blendkv.testing import byte_tokenizer, tiny_model

GOOD = {"question": "Who wrote?", "chunks": ["Ada wrote notes.\n\n", "Bob slept.\n\n"], "answers": ["Ada"]}
EXAMPLE = Example(GOOD["question"], GOOD["chunks"], GOOD["answers"])


@dataclass
class Odd(Selector):
    """Says whatever it is given."""

    said: object = None
    weighs = True

    def score(self, candidates):
        return self.said(len(candidates.rows))


def rows(model, *selectors, examples=(EXAMPLE,), **options):
    return quality_rows(model, byte_tokenizer(), list(examples), (0.3,), selectors, **options)


@pytest.mark.parametrize(
    "said",
    [
        lambda n: torch.zeros(n + 1),
        lambda n: torch.zeros(n - 1),
        lambda n: torch.zeros(1, n),
        lambda n: torch.tensor(1.0),
        lambda n: [0.0] * n,
        lambda n: None,
        lambda n: torch.zeros(n, dtype=torch.complex64),
    ],
    ids=["longer", "shorter", "2-d", "scalar", "list", "none", "complex"],
)
@pytest.mark.parametrize(
    "inside",
    [
        lambda odd: odd, PerChunk, lambda odd: Window(odd, 3), lambda odd: First(odd, 2),
        lambda odd: Product([odd, Odd(torch.ones)]), lambda odd: Union(odd, Odd(torch.ones)),
    ],
    ids=["alone", "per-chunk", "window", "first", "product", "union"],
)  # fmt: skip
def test_a_plug_in_that_gives_no_score_for_each_token_is_named(attached, said, inside):
    with pytest.raises(ValueError, match=r"selector 'odd': score\(\) gave .*give a tensor of \d+ numbers"):
        rows(attached("llama"), inside(Odd(said)))


@pytest.mark.parametrize(
    "said",
    [
        lambda n: torch.full((n,), torch.nan),
        lambda n: torch.where(torch.arange(n) % 2 == 0, torch.nan, torch.inf),
        lambda n: torch.full((n,), -torch.inf),
        lambda n: torch.arange(n) % 2 == 0,
        lambda n: torch.arange(n, dtype=torch.int32),
    ],
    ids=["nan", "nan and inf", "-inf", "bool", "int"],
)
def test_any_number_ranks_and_the_budget_is_kept(attached, said):
    model = attached("llama")
    full, odd, usual = rows(model, Odd(said), "boundary")
    assert odd["charged_budget"] == pytest.approx(usual["charged_budget"])
    assert 0 < odd["kl"] < 10
    json.dumps([full, odd, usual], allow_nan=False)


def test_a_model_that_computes_nan_has_no_figures_and_no_rank():
    model = attach(tiny_model("llama"))  # which proves it: then weights go wrong
    examples = [EXAMPLE] * 3
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    found = rows(model, "hkvd", examples=examples, answers=True)
    assert all(row["kl"] is None for row in found if row["method"] == "blend")
    assert all(row["relative"] is None for row in found)
    json.dumps(found, allow_nan=False)


def test_prompts_without_accepted_answers_do_not_hide_the_scores_of_others(attached):
    alone = Example("What?", EXAMPLE.chunks, [])
    mixed = rows(attached("llama"), "hkvd", examples=[alone, EXAMPLE, alone], answers=True)
    scored = rows(attached("llama"), "hkvd", examples=[EXAMPLE], answers=True)
    assert [row["f1"] for row in mixed] == [row["f1"] for row in scored]
    assert all(row["f1"] is not None for row in mixed)
    assert all(row["f1"] is None for row in rows(attached("llama"), "hkvd", examples=[alone], answers=True))


def test_a_verdict_is_of_the_prompts_that_have_answers():
    full = [{"f1": 1.0 if i % 2 else None} for i in range(20)]
    none = [{"f1": 0.0 if i % 2 else None} for i in range(20)]
    found = verdict_of({("full", None, None): full, ("nocontext", None, None): none}, "f1")
    assert (found["full"], found["no_context"], found["can_do"]) == (1.0, 0.0, True)


def write(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "\\ud800", "chunks": ["a"]}', r"own.jsonl, line 2: half of a character \('\\ud800'\)"),
        (b'{"question": "Q", "chunks": ["a", ""]}', "own.jsonl, line 2: an empty chunk"),
        (b'{"question": "Q", "chunks": []}', "own.jsonl, line 2: no chunks"),
        (b"[" * 5, "own.jsonl, line 2: not JSON"),
        (b"null", "own.jsonl, line 2, field 'question': missing"),
    ],
)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, line, message):
    path = write(tmp_path / "own.jsonl", GOOD, line, GOOD)
    with pytest.raises(ValueError, match=message):
        read_task("plain", path)
    reading = read_task("plain", path, skip_bad=True)
    assert reading.numbers == [0, 2]
    assert len(reading.skipped) == 1


def test_bytes_that_are_no_text_and_marks_of_editors(tmp_path):
    bad = write(tmp_path / "bad.jsonl", GOOD, b'{"question": "\xff"}')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: not UTF-8"):
        read_task("plain", bad)
    marked = tmp_path / "marked.json"
    marked.write_bytes(b"\xef\xbb\xbf" + json.dumps([GOOD]).encode())
    assert len(read_task("plain", marked).examples) == 1
    with pytest.raises(ValueError, match="is a folder: give one of its files"):
        read_task("plain", tmp_path)


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([], {}, "has 0 records"),
        ([GOOD], {"records": "5:9"}, r"has 1 records, and no prompt among those that are wanted \(5:9\)"),
        ([b"3"], {"skip_bad": True}, "1 were malformed, the first: own.jsonl, line 1"),
    ],
)
def test_data_without_a_prompt_stops_before_a_model_is_needed(tmp_path, lines, options, message):
    with pytest.raises(ValueError, match=message):
        read_task("plain", write(tmp_path / "own.jsonl", *lines), **options)


def test_prompts_that_the_model_has_no_positions_for_are_named_before_the_work(attached):
    model = attached("llama")
    room = model.config.max_position_embeddings
    long = Example("Who?", ["a" * room], ["x"])
    reading = Reading([EXAMPLE, long], [4, 6])
    with pytest.raises(ValueError, match=rf"records 6 \(counted from 0\): .* the model has {room:,} positions"):
        measure_quality(model, byte_tokenizer(), reading, settings_of(("blend",), ("hkvd",), (0.15,)))


@pytest.mark.parametrize(
    ("selectors", "schedules", "message"),
    [
        ((), (), "blends need a selector"),
        (("stored-nothing",), (), "no score 'nothing' is known; choose of asked, moved"),
        (("attention*hkvd-v",), [{0: 0.15}], "at layer 0 nothing deviates yet"),
    ],
)
def test_settings_that_cannot_be_measured(selectors, schedules, message):
    with pytest.raises(ValueError, match=message):
        settings_of(("blend",), selectors, (0.15,), schedules=schedules)


def test_a_journal_of_another_model_or_of_other_options_is_left_alone(attached, tmp_path):
    out, reading = tmp_path / "items.jsonl", Reading([EXAMPLE], [0])
    settings = settings_of(("blend",), ("hkvd",), (0.15,), answers=False)
    measure_quality(attached("llama"), byte_tokenizer(), reading, settings, answers=False, out=out)
    before = out.read_bytes()
    for family, options, message in (
        ("qwen2", {"answers": False}, "fingerprint was"),
        ("llama", {"answers": True}, "answers was False, is True"),
        ("llama", {"answers": False, "max_new_tokens": 3}, "max_new_tokens was"),
    ):
        with pytest.raises(ValueError, match=message):
            measure_quality(attached(family), byte_tokenizer(), reading, settings, out=out, **options)
        assert out.read_bytes() == before
    more = settings_of(("blend",), ("hkvd",), (0.3,), answers=False, conditions=("none", "system"))
    found = measure_quality(attached("llama"), byte_tokenizer(), reading, more, answers=False, out=out)
    assert found.computed == 2  # another ratio and condition; full recompute was there
    assert len(Journal(out, json.loads(before.splitlines()[0])["header"])) == 4
