"""The soak notices wrong chunks and threads that stand still."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.faults import soak_worker
from tests.faults.soak import percentile
from tests.faults.soak_worker import Dice, Settings, Worker
from tests.faults.world.mutants import no_keys

pytestmark = pytest.mark.skipif(os.name != "posix", reason="stores in folders are for POSIX systems")


def worker(folder, seconds: float, stall_s: float = 30.0) -> Worker:
    end = SimpleNamespace(value=time.time() + seconds)
    return Worker(Settings(0, 2, str(folder), None, stall_s), Dice(1), end)


@pytest.mark.parametrize("broken", [False, True])
def test_another_chunk_is_noticed(tmp_path, monkeypatch, broken):
    monkeypatch.setattr(soak_worker, "RATE", 0.2)
    monkeypatch.setattr(soak_worker, "CHUNKS", 30)
    if broken:
        with no_keys():
            made = worker(tmp_path, 1.5)
            made.run()
    else:
        made = worker(tmp_path, 1.5)
        made.run()
    assert made.result.found > 0
    assert made.result.exceptions == 0
    assert (made.result.wrong > 0) == broken


def test_a_thread_that_stands_still_is_noticed(tmp_path, monkeypatch):
    made, forever = worker(tmp_path, 0.5, stall_s=0.3), threading.Event()
    monkeypatch.setattr(made.tiers, "fetch", lambda *args, **kwargs: forever.wait(10) and [])
    made.run()
    forever.set()
    assert made.result.wrong == 1
    assert "deadlock" in made.result.why[0]


def test_percentiles_of_a_histogram():
    steps = Counter({100: 98, 200: 2})
    assert percentile(steps, 0.5) == round(1.05**100)
    assert percentile(steps, 0.99) == round(1.05**200)
    assert percentile(Counter(), 0.5) == 0
