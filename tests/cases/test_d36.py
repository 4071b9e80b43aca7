import pytest

from blendkv import Pool, TieredStore
from blendkv.chunkwriter import encode_chunk
from blendkv.stores import DiskStore, disk, pool
from tests.cases.common import assert_same_answer, model_of
from tests.cases.stored import ask, assert_hit, files_of, library, local
from tests.chunks import make_chunk
from tests.faults.disk_full import Quota
from tests.faults.systems import system


@pytest.fixture(scope="module")
def model():
    return model_of()


def documents(number: int) -> list[str]:
    return [f"Document {number:04} says {number * 7919 % 10_000:04}."]


def size(folder) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_d36_caps_are_finite_by_default(tmp_path):
    """No cap by default filled the disk, and the node evicted the pods (LMCache#4664, CVE-2025-29770)."""
    assert 0 < DiskStore(tmp_path).capacity_bytes == disk.DEFAULT_CAPACITY_BYTES < float("inf")
    assert 0 < Pool().capacity_bytes == pool.DEFAULT_CAPACITY_BYTES < float("inf")


def test_d36_answers_while_the_folder_is_at_its_cap(model, tmp_path):
    with library(model, tmp_path / "first") as kv:
        ask(kv, documents(0))
    entry = max(path.stat().st_size for path in files_of(tmp_path / "first"))
    store = DiskStore(tmp_path / "second", capacity_bytes=5 * entry)
    kv = library(model, TieredStore(Pool(1), store))  # nothing stays in memory
    most = 0
    for number in range(25):
        got, report = ask(kv, documents(number), tokens=2)
        assert_same_answer(got, local(kv, documents(number), tokens=2))
        assert not report.put_failures
        most = max(most, size(tmp_path / "second"))
    assert 4 * entry < most <= 5 * entry
    assert store.stats.evictions >= 20
    assert not store.stats.put_failures
    assert_hit(kv, documents(24))  # the newest are there
    assert ask(kv, documents(0))[1].prefilled_tokens  # the oldest are not


def test_d36_answers_while_the_disk_is_full(model, tmp_path):
    """It was full below the cap, and every write failed for ever (DingoCache#83, vllm#54779)."""
    folder = tmp_path / "store"
    with library(model, tmp_path / "first") as kv:
        ask(kv, documents(0))
    entry = max(path.stat().st_size for path in files_of(tmp_path / "first"))
    store = DiskStore(folder, capacity_bytes=1 << 30)
    kv, quota = library(model, TieredStore(Pool(1), store)), Quota(tmp_path, size(tmp_path) + 4 * entry + 300_000)

    def right(number: int):
        got, report = ask(kv, documents(number), tokens=2)
        assert_same_answer(got, local(kv, documents(number), tokens=2))
        return report

    with system(before=quota):
        for number in range(12):  # far more than there is room for: the oldest give way, and it is tried once more
            assert not right(number).put_failures
        assert store.stats.evictions >= 6
        assert not store.stats.put_failures
        assert_hit(kv, documents(11))
        for key in list(store.keys()):  # now somebody else fills the disk, and nothing is left that could give way
            store.delete(key)
        (tmp_path / "other").write_bytes(bytes(quota.limit - size(tmp_path) - entry // 2))
        for number in range(3):
            report = right(100 + number)
            assert report.put_failures == 2  # the head of the template, and the document
            assert report.store_faults == {store.url: {"full": 2}}
        assert store.stats.put_failures == store.stats.faults["full"] == 6
        assert not files_of(folder)
        assert not list(folder.rglob("*.tmp"))
        (tmp_path / "other").unlink()  # room again, and no restart
        assert not right(200).put_failures
        assert_hit(kv, documents(200))


def test_d36_novel_chunks_level_off_at_the_cap(tmp_path):
    """Ten thousand in the plan, six hundred here."""
    chunks = [make_chunk(tokens=2, layers=1, heads=1, key_dim=4, seed=0, namespace=str(n)) for n in range(600)]
    entry = len(encode_chunk(chunks[0])) + 3
    cap = 100 * entry
    tiers = TieredStore(Pool(10 * chunks[0].nbytes), DiskStore(tmp_path, capacity_bytes=cap))
    for number, chunk in enumerate(chunks):
        assert tiers.put(chunk)
        if number % 50 == 49:
            assert size(tmp_path) <= cap
        assert number < 200 or number % 50 or size(tmp_path) > cap - 2 * entry
    assert len(tiers.pool) == 10
    assert [got is not None for got in tiers.get_many([chunk.key for chunk in chunks[-80:]])] == [True] * 80
    assert tiers.get(chunks[0].key) is None
