"""What `test_sharing.py` runs in processes of their own, for huggingface_hub reads its environment when it is imported.

`python -m tests.sharing_hub push REPO`, `... pull REPO`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blendkv import ChunkLibrary
from blendkv.testing import byte_tokenizer, tiny_model

DOCUMENTS = ["The tower is 61 m high.", "It was built in 1923. The architect was M. Ilg.", "Nothing else is known."]


def push(repo: str) -> dict[str, Any]:
    """Pushes two documents, then all three from a folder that has more in it."""
    kv = ChunkLibrary(tiny_model("llama"), byte_tokenizer(chat=True), recompute_ratio=0.0)
    first = kv.push_to_hub(repo, private=True, documents=DOCUMENTS[:2], commit_message="two")
    with TemporaryDirectory() as folder:
        kv.save_pretrained(folder, ["Not to be pushed."])
        Path(folder, "notes.txt").write_text("mine")
        second = kv.save_pretrained(folder, DOCUMENTS, push_to_hub=True, repo_id=repo)
    assert second is not None
    return {"oids": [first.oid, second.oid], "message": first.commit_message}


def pull(repo: str) -> dict[str, Any]:
    """Loads them, again without asking the hub, and generates."""
    model = tiny_model("llama")
    said: dict[str, Any] = {}
    for local_files_only in (False, True):
        kv = ChunkLibrary.from_pretrained(
            repo, model, byte_tokenizer(chat=True), local_files_only=local_files_only, on_miss="recompute"
        )
        inputs = kv(DOCUMENTS, "How high is it?")
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
        said = {
            "loaded": list(inputs.report.loaded.values()),
            "hits": [use.hit for use in inputs.report.chunks],
            "answer": out[0, inputs["input_ids"].shape[1] :].tolist(),
            "ratio": kv.options["recompute_ratio"],
        }
    try:
        ChunkLibrary.from_pretrained("someone/else", model, byte_tokenizer(chat=True))
    except OSError as error:
        said["error"] = str(error)
    return said


if __name__ == "__main__":
    print("\n" + json.dumps({"push": push, "pull": pull}[sys.argv[1]](sys.argv[2])))
