import json
import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from blendkv.chunk import chunk_key
from tests.cases.common import assert_same_answer, model_of
from tests.cases.stored import DOCUMENTS, ask, assert_hit, differ, files_of, full, library, local

IDS = [1, 2, 70000]
KINDS = {
    "list": list,
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "big-endian": lambda ids: np.array(ids, ">i4"),
    "torch": torch.tensor,
    "torch int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
}
KEY = "fe5b74b048c241f5c5b95d1f675186c9aaf75f1f8067a22f437bffa4ff19d376"
"""As in tests/test_chunk.py."""
CHILD = """
import json, sys
from tests.cases.common import model_of
from tests.cases.stored import DOCUMENTS, ask, library
from tests.cases.test_d29 import keys
kv = library(model_of(), sys.argv[1])
report = ask(kv)[1]
kv.close()
print(json.dumps([hash("text"), keys(), report.prefilled_tokens]))
"""


def keys() -> dict[str, str]:
    return {name: chunk_key(kind(IDS), "f" * 64, kind([5]), "tok", "tenant") for name, kind in KINDS.items()}


def test_d29_a_second_process_hits_what_the_first_one_stored(tmp_path):
    """Keys came from hash(), so that a restart never hit (LMCache#2979, #2136, #1139)."""
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    hashed, theirs, stored = json.loads(done.stdout.splitlines()[-1])
    assert hashed != hash("text")  # another PYTHONHASHSEED than here
    assert stored
    assert set(keys().values()) == {KEY}
    assert theirs == keys()
    assert len(files_of(tmp_path)) == 1 + len(DOCUMENTS)
    report = assert_hit(library(model_of(), tmp_path))
    assert report.chunk_tokens == stored


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_d29_ids_on_a_gpu():
    ids = torch.tensor(IDS, device="cuda")
    assert {chunk_key(ids.to(dtype), "f" * 64, (5,), "tok", "tenant") for dtype in (torch.int32, torch.int64)} == {KEY}


@dataclass
class Document:
    """A retriever's document: its id stays when its text is edited."""

    id: str
    page_content: str


def test_d29_an_edited_document_is_not_the_old_one(tmp_path):
    """Keys came from a document's id, so that old content was served for ever (DingoCache#77, qdrant-loader#209)."""
    model = model_of()
    old, new = Document("7", "The tower is 61 m high."), Document("7", "The tower is 93 m high.")
    kv = library(model, tmp_path)
    before = ask(kv, [old])[0]
    for again in (kv, library(model, tmp_path, on_miss="recompute"), library(model, tmp_path)):
        got, report = ask(again, [new])
        head, document = report.chunks
        assert head.hit
        if again is kv:
            assert report.prefilled_tokens == document.tokens
            assert_same_answer(got, local(kv, [new]))
            edited = got
        elif again.on_miss == "recompute":
            assert document.hit  # what was just stored, of the new text
        assert differ(got, before)
    assert_same_answer(ask(library(model, tmp_path), [new])[0], edited)
    assert_same_answer(ask(library(model, tmp_path), [old])[0], before)  # the old text is still its own
    assert_hit(library(model, tmp_path), [old])
    third = library(model, tmp_path, on_miss="recompute")
    assert_same_answer(
        ask(third, [Document("7", "The tower is 12 m high.")])[0], full(third, ["The tower is 12 m high."])
    )
