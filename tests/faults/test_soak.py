"""The soak notices wrong chunks and threads that stand still."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.faults import soak_worker
from tests.faults.soak import percentile
from tests.faults.soak_worker import Dice, Settings, Worker
from tests.faults.world.mutants import no_keys

pytestmark = pytest.mark.skipif(os.name != "posix", reason="stores in folders are for POSIX systems")


class Swapped:
    """The end of a soak: enough chunks arrived under others' keys, or it takes too long."""

    def __init__(self, dice: Dice, times: int, seconds: float) -> None:
        self.dice, self.times, self.late = dice, times, time.time() + seconds

    def enough(self) -> bool:
        return self.dice.faults["another's answer"] >= self.times

    @property
    def value(self) -> float:
        return 0.0 if self.enough() else self.late


@pytest.mark.parametrize("broken", [False, True])
def test_another_chunk_is_noticed(tmp_path, monkeypatch, broken):
    monkeypatch.setattr(soak_worker, "RATE", 0.2)
    monkeypatch.setattr(soak_worker, "CHUNKS", 100)
    dice = Dice(1)
    end = Swapped(dice, times=8, seconds=120)
    with no_keys() if broken else nullcontext():
        made = Worker(Settings(0, 2, str(tmp_path), None, stall_s=30), dice, end)
        made.run()
    assert end.enough()
    assert made.result.found > 0
    assert made.result.exceptions == 0
    assert (made.result.wrong > 0) == broken


def test_a_thread_that_stands_still_is_noticed(tmp_path, monkeypatch):
    end, forever = SimpleNamespace(value=time.time() + 0.5), threading.Event()
    made = Worker(Settings(0, 2, str(tmp_path), None, stall_s=0.3), Dice(1), end)
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
