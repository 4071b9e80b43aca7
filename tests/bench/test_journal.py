"""Figures kept while they are made, and rows made of them."""

import json

import pytest

from blendkv.bench.journal import Journal
from blendkv.bench.settings import Setting
from blendkv.bench.summary import rows_of, verdict_of

HEADER = {"model": "m", "steps": 12, "max_new_tokens": {"qa": 32}}


def key(item, ratio=0.15):
    return {"item": item, "digest": "d", "method": "blend", "selector": "hkvd", "ratio": ratio}


def test_what_was_kept_is_there_again(tmp_path):
    path = tmp_path / "new" / "items.jsonl"
    first = Journal(path, HEADER)
    first.add(key(0), {"kl": 0.5})
    first.add(key(0, 0.3), {"kl": 0.1})
    again = Journal(path, HEADER)
    assert len(again) == 2
    assert again.get(key(0))["kl"] == 0.5
    assert again.get(key(0, 0.3))["kl"] == 0.1
    assert again.get(key(1)) is None
    assert again.get(key(0) | {"digest": "changed"}) is None
    again.add(key(1), {"kl": 0.2})
    assert len(Journal(path, HEADER)) == 3


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "items.jsonl"
    Journal(path, HEADER).add(key(0), {"kl": 0.5})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"item": 1, "kl"')
    journal = Journal(path, HEADER)
    assert len(journal) == 1
    assert path.read_bytes() == whole
    journal.add(key(1), {"kl": 0.2})
    assert len(Journal(path, HEADER)) == 2


def test_other_settings_are_noticed_and_nothing_is_written(tmp_path):
    path = tmp_path / "items.jsonl"
    Journal(path, HEADER).add(key(0), {"kl": 0.5})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="steps was 12, is 8; dtype was None, is 'bfloat16'"):
        Journal(path, HEADER | {"steps": 8, "dtype": "bfloat16"})
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ['{"rows": []}\n', "text\n", "3\n", '{"header": {}}\nx\n'])
def test_a_file_of_another_kind_is_left_alone(tmp_path, text):
    path = tmp_path / "items.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="choose another path"):
        Journal(path, HEADER)
    assert path.read_text() == text


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal = Journal(None, HEADER)
    journal.add(key(0), {"kl": 0.5})
    assert journal.get(key(0))["kl"] == 0.5
    assert list(tmp_path.iterdir()) == []


def figures(kl, f1, **others):
    base = {"charged_budget": 0.2, "kl": kl, "kl_first": kl, "same": kl == 0, "f1": f1, "rouge_l": f1, "ttft_s": 1.0}
    return base | others


def test_rows_are_relative_to_the_reference_prompt_by_prompt():
    reference = Setting("blend", "hkvd", 0.15)
    other = ("blend", "boundary", 0.15)
    found = {
        reference.key: [figures(0.1, 0.0), figures(0.3, 1.0), figures(0.2, 0.5)],
        other: [figures(0.05, 0.0), figures(0.15, 1.0), figures(0.1, 0.5)],
        ("mapreduce", None, None): [figures(None, 1.0, kl_first=None, same=None)] * 3,
    }
    hkvd, boundary, mapping = rows_of(found, reference)
    assert hkvd["kl"] == pytest.approx(0.2)
    assert hkvd["relative"] == pytest.approx(1)
    assert boundary["relative"] == pytest.approx(0.5)
    assert boundary["ci"]["relative"] == pytest.approx([0.5, 0.5])
    assert (mapping["kl"], mapping["relative"], mapping["ci"]["kl"]) == (None, None, None)
    assert mapping["f1"] == 1
    json.dumps([hkvd, boundary, mapping], allow_nan=False)


def verdict(full, alone):
    found = {("full", None, None): [figures(0, f) for f in full]}
    found["nocontext", None, None] = [figures(3, f) for f in alone]
    return verdict_of(found, "f1")


def test_a_task_that_the_model_cannot_do_is_said():
    cannot = verdict([0.0, 0.5, 0.0, 0.0] * 5, [0.5, 0.0, 0.0, 0.0] * 5)
    assert cannot["can_do"] is False
    assert "cannot do this task" in cannot["told"]
    assert cannot["full_gets_nothing"] == 0.75
    can = verdict([1.0, 0.5, 0.0, 1.0] * 5, [0.0, 0.0, 0.0, 0.5] * 5)
    assert can["can_do"] is True
    assert can["gain"] == pytest.approx(0.5)
    few = verdict([1.0] * 3, [0.0] * 3)
    assert few["can_do"] is None
    assert "too few" in few["told"]
    assert verdict([None] * 9, [None] * 9)["can_do"] is None
