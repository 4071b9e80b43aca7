"""Rows as JSON: merged by what they are of, complete at every moment."""

import json

import pytest
import torch

from blendkv.bench.results import device_name, identity, merged, read_rows, require_room, versions, write_rows


def row(**fields):
    common = {"device": "card", "shape": "s", "dtype": "bfloat16", "method": "blend", "selector": "hkvd", "ratio": 0.15}
    return common | {"tokens": 64, "run": 0, "ttft_s": 1.0, "speedup": 2.0} | fields


def test_a_row_of_the_same_thing_takes_the_place_of_the_older(tmp_path):
    path = tmp_path / "new" / "results.json"
    write_rows(path, [row(), row(run=1), row(method="full", selector=None, ratio=None)])
    write_rows(path, [row(ttft_s=3.0), row(tokens=32), row(device="another card")])
    rows = read_rows(path)
    assert [(r["device"], r["tokens"], r["method"], r["run"], r["ttft_s"]) for r in rows] == [
        ("another card", 64, "blend", 0, 1.0),
        ("card", 32, "blend", 0, 1.0),
        ("card", 64, "full", 0, 1.0),
        ("card", 64, "blend", 0, 3.0),
        ("card", 64, "blend", 1, 1.0),
    ]
    assert len(path.read_text().splitlines()) == len(rows) + 2  # a row a line, for diffs
    assert list(tmp_path.rglob("*.tmp")) == []


def test_merging_is_sorted_whatever_is_absent():
    rows = [row(batch=4), row(), row(ratio=0.05), row(selector=None, ratio=None), row(batch=1)]
    assert merged(rows, []) == merged([], rows[::-1])
    assert len(merged(rows, rows)) == len({identity(r) for r in rows}) == 5


def test_what_json_cannot_say_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_rows(tmp_path / "r.json", [row(speedup=float("nan"))])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[]", "expected"),
        ('{"rows": 3}', "expected"),
        ('{"rows": [3]}', "expected"),
        (json.dumps({"rows": [{"device": "d"}]}), "no field 'tokens', 'method'"),
    ],
)
def test_a_file_that_is_not_ours(tmp_path, text, why):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=why):
        read_rows(path)
    with pytest.raises(ValueError, match=why):
        write_rows(path, [row()])
    assert path.read_text() == text


def test_a_processor_has_a_name():
    assert device_name(torch.device("cpu")).rpartition(" ")[2] in ("thread", "threads")
    assert set(versions()) == {"blendkv", "torch", "transformers"}


def test_room_for_rows_is_looked_for_before_the_work(tmp_path):
    require_room(None)
    require_room(tmp_path / "new" / "rows.json")
    (tmp_path / "file").write_text("hello")
    with pytest.raises(OSError, match="file"):
        require_room(tmp_path / "file" / "rows.json")
    with pytest.raises(ValueError, match="not JSON"):
        require_room(tmp_path / "file")
