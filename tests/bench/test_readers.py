"""Readers of other data sets, records chosen and skipped, and the built-in task."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from blendkv.bench.tasks import UNCUT, read_task, wanted_records
from blendkv.testing import byte_tokenizer

DATA = Path(__file__).parents[3] / "shared" / "data"
OWN = {"question": "Who?", "chunks": ["Ada was.\n\n", "Bob is.\n\n"], "answers": ["Ada"]}


def lines(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    return path


def test_hotpot_as_the_hub_has_it(tmp_path):
    record = {
        "question": "Who?",
        "answer": "Ada",
        "supporting_facts": {"title": ["Two"], "sent_id": [0]},
        "context": {"title": ["One", "Two"], "sentences": [["A.", " B."], ["C."]]},
    }
    (example,) = read_task("hotpot", lines(tmp_path / "d.jsonl", record)).examples
    assert example.chunks == ["One: A. B.\n\n", "Two: C.\n\n"]
    assert example.support == (1,)


def test_2wikimqa_puts_spaces_between_sentences_that_bring_none(tmp_path):
    record = {
        "question": "Q",
        "answer": "A",
        "supporting_facts": [["One", 0]],
        "context": [["One", ["A is.", "B is."]]],
    }
    (example,) = read_task("2wikimqa", lines(tmp_path / "d.jsonl", record)).examples
    assert example.chunks == ["One: A is. B is.\n\n"]
    assert example.support == (0,)


def test_musique_as_published(tmp_path):
    paragraphs = [{"title": f"T{i}", "paragraph_text": "x.", "is_supporting": i == 1} for i in range(3)]
    record = {"question": "Q", "answer": "A", "answer_aliases": ["B"], "paragraphs": paragraphs}
    (example,) = read_task("musique-original", lines(tmp_path / "d.jsonl", record)).examples
    assert example.chunks[1] == "T1: x.\n\n"
    assert (example.answers, example.support) == (["A", "B"], (1,))


def test_longbench_splits_passages_dialogues_and_long_texts(tmp_path):
    common = {"input": "Q?", "answers": ["A"]}
    passages = common | {"context": "Passage 1:\nOne\ntext\n\nPassage 2:\nTwo\n", "dataset": "hotpotqa"}
    shots = common | {"input": "Dialogue: C: hi\nSummary: ", "dataset": "samsum"}
    shots["context"] = "Dialogue: A: a\nSummary: s\nDialogue: B: b\nSummary: t"
    long = common | {"context": "word. " * 400, "dataset": "gov_report_e"}
    path = lines(tmp_path / "d.jsonl", passages, shots, long)
    first, second, third = read_task("longbench", path, byte_tokenizer()).examples
    assert first.chunks == ["One\ntext\n\n", "Two\n\n"]
    assert second.chunks == ["Dialogue: A: a\nSummary: s\n\n", "Dialogue: B: b\nSummary: t\n\n"]
    assert (second.question, second.style) == ("C: hi", "dialogue")
    assert third.style == "summary"
    assert len(third.chunks) > 2
    assert "".join(third.chunks).split() == long["context"].split()


def test_multinews(tmp_path):
    record = {"document": "First article. ||||| Second article. |||||", "summary": "\u2013 Both."}
    (example,) = read_task("multinews", lines(tmp_path / "d.jsonl", record), byte_tokenizer()).examples
    assert (example.chunks, example.answers) == (["First article.\n\n", "Second article.\n\n"], ["Both."])


def test_samsum_takes_examples_of_the_training_split_and_never_the_dialogue_asked_about(tmp_path):
    train = [{"split": "train", "question": f"T{i}: x\r\n", "answer": f"s{i}"} for i in range(12)]
    test = [{"split": "test", "question": f"Q{i}: y", "answer": f"a{i}"} for i in range(3)]
    reading = read_task("samsum", lines(tmp_path / "d.jsonl", *train, *test), records="odd")
    (example,) = reading.examples
    assert reading.numbers == [13]
    assert (example.question, example.answers) == ("Q1: y", ["a1"])
    assert len(set(example.chunks)) == 10
    assert all(re.fullmatch(r"Dialogue: T\d+: x\nSummary: s\d+\n\n", chunk) for chunk in example.chunks)
    plain = [{"dialogue": f"D{i}", "summary": f"s{i}"} for i in range(4)]
    examples = read_task("samsum", lines(tmp_path / "p.jsonl", *plain)).examples
    for i, example in enumerate(examples):
        assert len(example.chunks) == 3
        assert not any(f"D{i}\n" in chunk for chunk in example.chunks)


def test_the_built_in_task_needs_two_chunks():
    examples = read_task("synthetic", limit=30).examples
    assert examples == read_task("synthetic", limit=30).examples
    assert examples[:5] == read_task("synthetic", limit=5).examples
    assert len({"".join(example.chunks) for example in examples}) == 30
    for example in examples:
        person = re.fullmatch(r"In which city does (.+) work\?", example.question)[1]
        (answer,) = example.answers
        with_person = [i for i, chunk in enumerate(example.chunks) if person in chunk]
        with_answer = [i for i, chunk in enumerate(example.chunks) if answer in chunk]
        assert len(with_person) == len(with_answer) == 1
        assert with_person != with_answer
        assert example.support == tuple(sorted(with_person + with_answer))
        place = re.search(r"at the (.+?)\. ", example.chunks[with_person[0]])[1]
        assert [i for i, chunk in enumerate(example.chunks) if place in chunk] == list(example.support)
    with pytest.raises(ValueError, match="give no data"):
        read_task("synthetic", "x.json")


@pytest.mark.parametrize(
    ("records", "wanted"),
    [("all", [0, 1, 2, 3, 4]), ("odd", [1, 3]), ("even", [0, 2, 4]), ("1:4", [1, 2, 3]), ("::3", [0, 3])],
)
def test_which_records(records, wanted):
    assert list(wanted_records(records, 5)) == wanted


@pytest.mark.parametrize("records", ["some", "1", "-2:", "::0", ""])
def test_which_records_not(records):
    with pytest.raises(ValueError, match="give all, odd, even"):
        wanted_records(records, 5)


def test_odd_and_even_share_nothing_and_are_all(tmp_path):
    path = lines(tmp_path / "d.jsonl", *(OWN | {"question": f"{i}?"} for i in range(7)))
    odd, even = (read_task("plain", path, records=which) for which in ("odd", "even"))
    assert odd.numbers == [1, 3, 5]
    assert sorted(odd.numbers + even.numbers) == list(range(7))
    assert [example.question for example in odd.examples] == ["1?", "3?", "5?"]


def test_malformed_records_stop_or_are_skipped_and_counted(tmp_path):
    path = lines(tmp_path / "d.jsonl", OWN, "{", OWN | {"chunks": []}, OWN | {"chunks": ["a", ""]}, "3", OWN)
    with pytest.raises(ValueError, match=r"d.jsonl, line 2: not JSON"):
        read_task("plain", path, UNCUT)
    reading = read_task("plain", path, UNCUT, limit=2, skip_bad=True)
    assert reading.numbers == [0, 5]
    assert [re.match(r"d.jsonl, line (\d)", line)[1] for line in reading.skipped] == ["2", "3", "4", "5"]
    assert read_task("plain", path, UNCUT, limit=1).skipped == []  # what is not read is not judged


def test_records_of_a_list_are_named_with_their_line(tmp_path):
    path = tmp_path / "d.json"
    path.write_text(json.dumps([OWN, {"question": "a \\n b"}, OWN], indent=2), encoding="utf-8")
    line = path.read_text().splitlines().index('    "question": "a \\\\n b"')  # the record begins one above, from 1
    with pytest.raises(ValueError, match=rf"record 1, field 'chunks': missing \(line {line}\)"):
        read_task("plain", path)


def test_a_hub_dataset_needs_datasets_and_is_read_by_split(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install datasets"):
        read_task("plain", "owner/set")
    asked = []

    def load_dataset(where, config):
        asked.append((where, config))
        return {"train": [OWN], "test": [OWN, OWN]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert len(read_task("plain", "owner/set").examples) == 2
    assert len(read_task("plain", "owner/set:small:train").examples) == 1
    assert asked == [("owner/set", None), ("owner/set", "small")]
    with pytest.raises(ValueError, match="no split dev: choose one of train, test"):
        read_task("plain", "owner/set::dev")

    def unreachable(where, config):
        raise ConnectionError("Couldn't reach\nthe hub.")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(OSError, match=r"dataset 'owner/set': Couldn't reach the hub\. Check its name and the network"):
        read_task("plain", "owner/set")


def test_a_path_that_is_not_there_is_no_dataset(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_task("plain", "data/none.json")
    with pytest.raises(ValueError, match="say which"):
        read_task("plain")


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared evaluation data is not here")
def test_shared_dialogues():
    reading = read_task("samsum", DATA / "samsum.jsonl")
    assert len(reading.examples) == 150
    assert {len(example.chunks) for example in reading.examples} == {10}
