"""Readers of blendkv.bench.tasks on small files, and on the shared data where it is there."""

import json
from pathlib import Path
from typing import Any

import pytest

from blendkv.bench import tasks
from blendkv.bench.tasks import Example, Record, cut, read_examples

DATA = Path(__file__).parents[3] / "shared" / "data"


class Words:
    """A tokenizer of single characters, with the part of the Hugging Face interface that is used."""

    def __init__(self, is_fast: bool = True) -> None:
        self.is_fast = is_fast

    def __call__(
        self, text: str, *, max_length: int, return_offsets_mapping: bool, **options: object
    ) -> dict[str, Any]:
        assert options == {"add_special_tokens": False, "truncation": True}
        ids = [ord(char) for char in text[:max_length]]
        offsets = {"offset_mapping": [(i, i + 1) for i in range(len(ids))]} if return_offsets_mapping else {}
        return {"input_ids": ids, **offsets}

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        return "".join(map(chr, ids))


HOTPOT = {"question": "Who?", "answer": "Ada", "context": [["One", ["A first.", " A second."]], ["Two", ["Third."]]]}
MUSIQUE = {"question": "Where?", "answers": ["Oslo"], "ctxs": [{"title": "", "text": f"{i}" * 600} for i in range(10)]}


def write(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def without(record: dict[str, Any], **changes: object) -> dict[str, Any]:
    merged = record | changes
    return {field: value for field, value in merged.items() if value is not None}


def test_hotpot(tmp_path: Path) -> None:
    examples = read_examples("hotpot", write(tmp_path / "data.json", [HOTPOT, HOTPOT]))
    assert examples[0] == Example("Who?", ["One: A first. A second.\n\n", "Two: Third.\n\n"], ["Ada"])
    assert len(examples) == 2


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path / "data.json", [HOTPOT, {}])
    assert len(read_examples("hotpot", path, limit=1)) == 1


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(HOTPOT)}\n\n{json.dumps(without(HOTPOT, question=None))}\n", encoding="utf-8")
    assert len(read_examples("hotpot", path, limit=1)) == 1
    with pytest.raises(ValueError, match=r"data.jsonl, line 3, field 'question': missing"):
        read_examples("hotpot", path)


@pytest.mark.parametrize("is_fast", [True, False])
def test_musique(tmp_path: Path, is_fast: bool) -> None:
    path = write(tmp_path / "data.json", [MUSIQUE])
    (example,) = read_examples("musique", path, Words(is_fast))  # type: ignore[arg-type]
    assert example == Example("Where?", [f"{i}" * 500 + "\n\n" for i in range(6)], ["Oslo"])


def test_musique_wants_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a tokenizer"):
        read_examples("musique", write(tmp_path / "data.json", [MUSIQUE]))


@pytest.mark.parametrize("length", [0, 4, 5, 6])
def test_cut_keeps_short_texts_and_never_changes_a_byte(length: int) -> None:
    text = "aé\n\u4e2d z"[:length]
    assert cut(text, 5, Words()) == text[:5]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (without(HOTPOT, answer=None), "record 1, field 'answer': missing"),
        (without(HOTPOT, question=3), "record 1, field 'question': expected str, found int"),
        (without(HOTPOT, context="x"), "record 1, field 'context': expected list, found str"),
        (without(HOTPOT, context=[["One", ["A."]], ["Two"]]), r"record 1, field 'context'\[1\]\[1\]: missing"),
        (
            without(HOTPOT, context=[["One", ["A.", None]]]),
            r"record 1, .*\[0\]\[1\]\[1\]: expected str, found NoneType",
        ),
        ("text", "record 1, field 'context': missing"),
    ],
)
def test_malformed_records_are_named(tmp_path: Path, record: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"data.json, {message}"):
        read_examples("hotpot", write(tmp_path / "data.json", [HOTPOT, record]))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "data.json: not JSON"), ('{"a": 1}', "data.json: expected a list of records, found dict")],
)
def test_malformed_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "data.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_examples("hotpot", tmp_path / "data.json")


def test_unknown_task(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown task 'nope': one of 2wikimqa, hotpot, longbench"):
        read_examples("nope", tmp_path)


def test_a_new_task_is_one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dialogue(record: Record, tokenizer: object = None) -> Example:
        return Example("Summarise.", [record.text("question")], [record.text("answer")])

    monkeypatch.setitem(tasks.READERS, "dialogue", dialogue)
    (example,) = read_examples("dialogue", write(tmp_path / "data.json", [{"question": "A: hi", "answer": "A greets"}]))
    assert example.chunks == ["A: hi"]


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared evaluation data is not here")
def test_shared_data() -> None:
    hotpot = read_examples("hotpot", DATA / "hotpot_distractor_100.json")
    assert len(hotpot) == 100
    assert hotpot[0].question == "If Gallu is a demon Lilu is what?"
    assert [len(example.chunks) for example in hotpot[:20]] == [10] * 20
    assert hotpot[0].chunks[0].startswith("Demon Dice: Demon Dice, originally")
    assert hotpot[0].chunks[0].endswith(".\n\n")
    assert "Tim Brown. In it, each player" in hotpot[0].chunks[0]
    musique = read_examples("musique", DATA / "musique_s.json", Words())  # type: ignore[arg-type]
    assert len(musique) == 150
    assert {len(example.chunks) for example in musique} == {6}
    assert max(len(chunk) for example in musique for chunk in example.chunks) == 502
