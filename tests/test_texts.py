"""Texts out of files, cut into passages."""

import json
from importlib.resources import files

import pytest

from blendkv.testing import byte_tokenizer
from blendkv.texts import digest, passages, read_texts


def test_plain_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("grün\n".encode() + b"\xff")
    assert read_texts(path) == ["grün\n�"]
    assert read_texts(str(path)) == read_texts(path)
    path.write_text(" \n")
    with pytest.raises(ValueError, match="holds no text"):
        read_texts(path)
    with pytest.raises(FileNotFoundError):
        read_texts(tmp_path / "nosuch")


RECORDS = [
    {"question": "Who?", "context": {"sentences": [["One.", " Two."], ["Three."]]}, "n": 3, "none": None},
    ["a", "b"],
    "alone",
    {"n": 1},
]


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_records(tmp_path, kind):
    """All strings of a record; sentences that begin with spaces go on."""
    path = tmp_path / f"a.{kind}"
    path.write_text(json.dumps(RECORDS) if kind == "json" else "\n".join(map(json.dumps, RECORDS)) + "\n\n")
    assert read_texts(path) == ["Who?\nOne. Two.\nThree.", "a\nb", "alone"]
    path.write_text("{")
    with pytest.raises(ValueError, match=f"{kind} is not what its name says"):
        read_texts(path)
    path.write_text("[]" if kind == "json" else "")
    with pytest.raises(ValueError, match="no text"):
        read_texts(path)


def test_one_record(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(RECORDS[0]))
    assert read_texts(path) == ["Who?\nOne. Two.\nThree."]
    (text,) = read_texts(str(files("blendkv").joinpath("data/passages.json")))
    assert len(text) > 5000


def test_passages(tmp_path):
    """Of one length, from files in turn; short texts are joined, long ones cut, some left out."""
    texts = {"a": ["x" * 50, "y" * 7, "z" * 9, "w"], "b": ["1" * 10, "2" * 10]}
    for name, each in texts.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, each)))
    paths, tokenizer = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], byte_tokenizer()
    found = passages(paths, tokenizer, tokens=10, count=9)
    said = [tokenizer.decode(passage.ids) for passage in found]
    assert said == ["x" * 10, "1" * 10, "y" * 7 + "\n\nz", "2" * 10]
    assert found[2].digests == (digest("y" * 7), digest("z" * 9))
    assert {len(passage.ids) for passage in found} == {10}
    assert passages(paths, tokenizer, 10, 2) == found[:2]
    without = passages(paths, tokenizer, 10, 9, without={digest("x" * 50), digest("1" * 10)})
    assert [tokenizer.decode(passage.ids) for passage in without] == said[2:]
    with pytest.raises(ValueError, match="give more files"):
        passages(paths, tokenizer, 1000, 9)


def test_digest():
    assert digest("a") != digest("b")
    assert len(digest("")) == 16
    assert digest("grün") == digest("grün")
