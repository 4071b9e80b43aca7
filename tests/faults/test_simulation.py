"""The simulated world is the same for the same seed, finds what is broken on purpose, and keeps its own promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("greenlet")

from tests.faults.simulation import simulate
from tests.faults.world.disks import Disk, Node
from tests.faults.world.mutants import MUTANTS
from tests.faults.world.running import live
from tests.faults.world.scheduler import Process, Scheduler, Stuck
from tests.faults.world.standins import Lock

pytestmark = pytest.mark.skipif(os.name != "posix", reason="stores in folders are for POSIX systems")
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_library_is_found(name):
    with MUTANTS[name]():
        assert any(live(seed).wrong for seed in range(200)), f"{name} was not noticed"


def test_a_seed_is_replayed_whatever_python_hashes():
    code = "from tests.faults.world.running import live; print([live(seed).digest for seed in range(4)])"
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
    assert len(set(eval(said.pop()))) == 4


def test_a_trace_tells_every_event_and_changes_nothing():
    lines: list[str] = []
    assert simulate(range(3, 4), lines.append).ok
    assert len(lines) > 300
    assert any("FAULT" in line for line in lines)
    plain, traced = live(3), live(3, lines.append)
    assert (plain.events, plain.turns, plain.counts) == (traced.events, traced.turns, traced.counts)


def test_the_scheduler_knows_a_deadlock():
    scheduler = Scheduler(Random(0))
    process = Process("p")
    a, b = (Lock(scheduler, reentrant=False) for _ in range(2))

    def take(first: Lock, second: Lock) -> None:
        with first:
            scheduler.sleep(1)
            with second:
                pass

    scheduler.spawn(lambda: take(a, b), process, "one")
    scheduler.spawn(lambda: take(b, a), process, "two")
    with pytest.raises(Stuck, match="everybody waits"):
        scheduler.run(lambda: False, before=2000)
    scheduler.kill(process)
    scheduler.run(lambda: True, before=2000)


def test_what_is_not_synced_is_lost_with_the_power():
    kept = set()
    for seed in range(20):
        disk = Disk()
        folder = disk.root.names["f"] = Node("dir")
        folder.names["a"], folder.names["b"] = Node("file"), Node("file")
        folder.names["a"].data = b"first"
        for node in (folder.names["a"], folder, disk.root):
            node.sync()
        folder.names["a"].data = b"first and second"
        del folder.names["b"]
        folder.names["c"] = Node("file")
        disk.power_lost(Random(seed))
        assert folder.names["a"].data.startswith(b"first")
        kept.add((len(folder.names["a"].data), *sorted(folder.names)))
    assert len(kept) > 4
