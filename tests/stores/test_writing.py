"""Puts that nobody waits for."""

import os
import subprocess
import sys
import threading
import time

import pytest

from blendkv.contract import key_for
from blendkv.stores.writing import Writer
from tests.patience import SLACK_S
from tests.stores.dicts import DictStore

A, B, C = (key_for(i) for i in range(3))


def test_what_is_queued_is_written_in_order_and_can_be_read_meanwhile():
    store = DictStore()
    store.open.clear()
    writer = Writer(store)
    assert all(writer.put(key, data) for key, data in ((A, b"a"), (B, b"b"), (A, b"aa")))
    assert writer.get(A) == b"aa"
    assert sorted(writer.keys()) == sorted([A, B])
    assert not writer.flush(0.05)
    store.open.set()
    assert writer.flush(5)
    assert store.entries == {A: b"aa", B: b"b"}
    assert writer.get(A) is None
    assert writer.written >= 2


def test_a_full_queue_drops_and_counts_and_nobody_waits():
    store = DictStore()
    store.open.clear()
    writer = Writer(store, capacity_bytes=10)
    begin = time.monotonic()
    assert [writer.put(key, bytes(6)) for key in (A, B, C)] == [True, False, False]
    assert writer.put(A, bytes(9))  # in place of what waits
    assert time.monotonic() - begin < 1 + SLACK_S
    store.open.set()
    assert writer.flush(5)
    assert writer.put(B, bytes(10))
    assert writer.flush(5)
    assert {key: len(data) for key, data in store.entries.items()} == {A: 9, B: 10}
    assert writer.dropped == 2


def test_the_thread_outlives_what_the_store_raises():
    store = DictStore()
    writer = Writer(store)
    store.raises = RuntimeError("no")
    writer.put(A, b"a")
    assert writer.flush(5)
    assert isinstance(writer.error, RuntimeError)
    store.raises = None
    writer.put(B, b"b")
    assert writer.flush(5)
    assert store.entries == {B: b"b"}
    assert (writer.failed, writer.written) == (1, 1)
    assert writer.put_now(C, b"c")
    store.raises = RuntimeError("no")
    assert not writer.put_now(C, b"d")
    assert store.entries[C] == b"c"


def test_it_starts_again_after_the_thread_has_ended():
    store = DictStore()
    writer = Writer(store)
    writer.put(A, b"a")
    assert writer.flush(5)
    end = time.monotonic() + 10
    while writer._thread is not None and time.monotonic() < end:
        time.sleep(0.05)
    assert writer._thread is None
    writer.put(B, b"b")
    assert writer.flush(5)
    assert set(store.entries) == {A, B}


def test_many_threads_lose_nothing():
    store = DictStore()
    writer = Writer(store)

    def put(number: int) -> None:
        for i in range(50):
            writer.put(key_for((number, i)), bytes([number, i]))

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.flush(10)
    assert len(store.entries) == writer.written == 400


def test_a_process_that_ends_writes_first(tmp_path):
    code = f"""
import time
import pytest

from blendkv.contract import key_for
from blendkv.stores import DiskStore
from blendkv.stores.writing import Writer

class Slow(DiskStore):
    def put(self, key, data):
        time.sleep(0.05)
        return super().put(key, data)

writer = Writer(Slow({str(tmp_path)!r}))
for i in range(10):
    writer.put(key_for(i), bytes(100))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert len(list(tmp_path.rglob("*.bkv"))) == 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_was_forked_leaves_the_queue_to_its_parent():
    store = DictStore()
    store.open.clear()
    writer = Writer(store)
    writer.put(A, b"a")
    with writer._changed:  # as the thread holds it now and then
        child = os.fork()
        if child == 0:
            os._exit(0 if writer.flush(2) and not len(writer) else 1)
    end = time.monotonic() + 10
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.02)
    if done[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done == (child, 0)
    store.open.set()
    assert writer.flush(5)
    assert store.entries == {A: b"a"}
