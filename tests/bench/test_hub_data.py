"""Evaluation data by dataset id: the real `datasets` package, where it is installed, beside a hub on this machine."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests import hub

OWN = [{"question": f"Q{i}", "chunks": ["a b", "c"], "answers": ["x"]} for i in range(3)]
HOTPOT = {
    "question": "Who?",
    "answer": "Ada",
    "context": {"title": ["One", "Two"], "sentences": [["A first.", " A second."], ["Third."]]},
    "supporting_facts": {"title": ["Two"], "sent_id": [0]},
}
READ = """
import json, sys
from dataclasses import asdict
from blendkv.bench.tasks import read_task
for task, data in json.loads(sys.argv[1]):
    try:
        print(json.dumps([asdict(example) for example in read_task(task, data).examples]))
    except OSError as error:
        print(json.dumps(str(error)))
"""

pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")


def read(url, home, *wanted):
    """What `read_task` makes of each, in a process of its own: `datasets` reads its environment when it is imported."""
    env = os.environ | {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home)}
    command = [sys.executable, "-c", READ, json.dumps(wanted)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] in '["']


def test_datasets_of_a_hub_are_read_by_split(tmp_path):
    with hub.running() as server:
        server.repos["datasets/me/own"] = [
            {"validation.jsonl": "\n".join(map(json.dumps, OWN)).encode(), "train.jsonl": json.dumps(OWN[0]).encode()}
        ]
        server.repos["datasets/me/hotpot"] = [{"validation.jsonl": json.dumps(HOTPOT).encode()}]
        wanted = [("plain", "me/own"), ("plain", "me/own::train"), ("hotpot", "me/hotpot"), ("plain", "me/none")]
        own, train, hotpot, none = read(server.url, tmp_path, *wanted)
    assert [example["question"] for example in own] == ["Q0", "Q1", "Q2"]
    assert own[0]["chunks"] == ["a b", "c"]
    assert len(train) == 1
    assert hotpot[0]["chunks"] == ["One: A first. A second.\n\n", "Two: Third.\n\n"]
    assert hotpot[0]["support"] == [1]
    assert none.startswith("cannot read the Hugging Face dataset 'me/none': ")


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path):
    [told] = read("http://127.0.0.1:9", tmp_path, ("plain", "me/own"))
    assert told.startswith("cannot read the Hugging Face dataset 'me/own': ")
    assert "give the path of that" in told
