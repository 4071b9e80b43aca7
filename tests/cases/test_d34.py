import random
import threading
import time

import pytest

from blendkv import Pool, TieredStore
from blendkv.chunkwriter import encode_chunk
from blendkv.stores import DiskStore
from tests.cases.common import assert_same_answer, digest, model_of
from tests.cases.stored import ask, library, local
from tests.chunks import make_chunk
from tests.faults.sharing import there

CHUNKS = [make_chunk(tokens=24, layers=2, seed=seed) for seed in range(100)]
KEYS, DIGESTS = [chunk.key for chunk in CHUNKS], [digest(chunk) for chunk in CHUNKS]
ENTRY = max(len(encode_chunk(chunk)) for chunk in CHUNKS)
CAP, SECONDS = 10, 2.5
READERS, WRITERS = 8, 2


@pytest.mark.parametrize("write", [None, "back"])
def test_d34_evicting_while_others_read(tmp_path, write):
    """KeyError or FileNotFoundError at the first eviction killed the engine (LMCache#4405, #5228, #1981, #3130)."""
    disk = DiskStore(tmp_path, capacity_bytes=CAP * ENTRY)
    tiers = TieredStore(Pool(4 * CHUNKS[0].nbytes), disk, write=write)
    end, errors, found, held = time.monotonic() + SECONDS, [], [0] * READERS, []

    def read(number: int) -> None:
        draw, mine = random.Random(number), []
        while time.monotonic() < end:
            wanted = [draw.randrange(100) for _ in range(draw.choice((1, 3)))]
            for i, chunk in zip(wanted, tiers.get_many([KEYS[i] for i in wanted]), strict=True):
                if chunk is not None:
                    found[number] += 1
                    if digest(chunk) != DIGESTS[i]:
                        errors.append(f"wrong chunk {i}")
                    if len(mine) < 20:
                        mine.append((i, chunk))
        held.extend(mine)

    def put(number: int) -> None:
        draw = random.Random(100 + number)
        while time.monotonic() < end:
            tiers.put(CHUNKS[draw.randrange(100)])

    def run(work, number: int) -> None:
        try:
            work(number)
        except Exception as error:  # a thread's exception would be lost
            errors.append(repr(error))

    threads = [threading.Thread(target=run, args=(read, n)) for n in range(READERS)]
    threads += [threading.Thread(target=run, args=(put, n)) for n in range(WRITERS)]
    for thread in threads:
        thread.start()
    most = 0
    while time.monotonic() < end:
        before = there(str(tmp_path))
        most = max(most, sum(size for _, size in before & there(str(tmp_path))))
        time.sleep(0.005)
    for thread in threads:
        thread.join()
    assert not errors
    assert min(found) > 0
    assert most <= (CAP + 1) * ENTRY
    assert disk.stats.evictions > 10
    assert tiers.pool.stats.evictions > 10
    assert tiers.stats.hits[disk.url] > 0
    assert tiers.stats.hits["memory"] > 0
    assert not tiers.stats.damaged
    assert not disk.stats.faults
    tiers.close()
    for path in tmp_path.glob("??/*.bkv"):
        path.write_bytes(bytes(path.stat().st_size))  # even what was overwritten in place
    tiers.pool.clear()
    assert len(held) > READERS
    assert all(digest(chunk) == DIGESTS[i] for i, chunk in held)  # who holds a chunk keeps its bytes


def test_d34_prompts_while_their_chunks_are_evicted(tmp_path):
    """Memory and folder have room for two documents of eight; four threads ask, every answer is right."""
    model = model_of()
    documents = [[f"Document {n} says {n * 7}."] for n in range(8)]
    kv = library(model, "memory://")
    wanted = [local(kv, each) for each in documents]
    nbytes = kv.prefill(documents[0])[0].nbytes
    disk = DiskStore(tmp_path, capacity_bytes=4 * nbytes)
    kv = library(model, TieredStore(Pool(2 * nbytes), disk))
    failures, loaded = [], []

    def work(number: int) -> None:
        draw = random.Random(number)
        try:
            for _ in range(12):
                i = draw.randrange(8)
                got, report = ask(kv, documents[i])
                assert_same_answer(got, wanted[i])
                assert all(use.hit for use in report.chunks)
                loaded.append(report.loaded)
        except BaseException as error:  # a thread's exception would be lost
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert disk.stats.evictions
    assert sum(each.get("memory", 0) + each.get(disk.url, 0) for each in loaded) > 0
