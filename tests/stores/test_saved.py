"""A folder that is only read."""

import os

import pytest

from blendkv import StoreError
from blendkv.contract import bytes_for, key_for
from blendkv.stores import DiskStore, SavedStore, Store

KEYS = [key_for(number) for number in range(5)]


@pytest.fixture
def folder(tmp_path):
    disk = DiskStore(tmp_path / "folder")
    for key in KEYS:
        assert disk.put(key, bytes_for(key))
    return tmp_path / "folder"


def test_it_reads_what_a_disk_store_wrote(folder):
    store = SavedStore(folder)
    assert isinstance(store, Store)
    assert set(store.keys()) == set(KEYS)
    assert store.get_many([*KEYS, key_for("other")]) == {key: bytes_for(key) for key in KEYS}
    assert store.size(KEYS[0]) == 1000
    assert store.size(key_for("other")) is None
    assert store.get(KEYS[0], 3, 17) == bytes_for(KEYS[0])[3:17]
    assert store.get(KEYS[0], 990, 5000) == bytes_for(KEYS[0])[990:]
    assert store.get(KEYS[0], 5, 5) == b""
    assert (store.stats.hits, store.stats.misses) == (len(KEYS) + 3, 1)
    assert not +store.stats.faults


def test_it_changes_nothing(folder):
    def state():
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*.bkv")}

    before, store = state(), SavedStore(folder)
    assert store.put(KEYS[0], b"other") is False
    store.delete(KEYS[0])
    assert store.get(KEYS[0]) == bytes_for(KEYS[0])
    store.quarantine(KEYS[0])
    assert store.get(KEYS[0]) is None
    assert store.size(KEYS[0]) is None
    assert set(store.keys()) == set(KEYS[1:])
    assert state() == before
    assert store.stats.faults == {"readonly": 1, "quarantined": 1}
    assert SavedStore(folder).get(KEYS[0])  # another one may think otherwise


def test_links_are_followed_and_what_is_no_file_is_a_miss(folder, tmp_path):
    paths = [next(folder.rglob(f"{key}.bkv")) for key in KEYS]
    paths[0].rename(tmp_path / "blob")
    paths[0].symlink_to(tmp_path / "blob")
    for path in paths[1:4]:
        path.unlink()
    paths[1].symlink_to(tmp_path / "nowhere")
    os.mkfifo(paths[2])
    paths[3].mkdir()
    store = SavedStore(folder)
    assert store.get(KEYS[0]) == bytes_for(KEYS[0])
    assert [store.get(key) for key in KEYS[1:4]] == [None] * 3
    assert +store.stats.faults == {"link": 2}
    assert [store.size(key) for key in KEYS[:4]] == [1000, None, None, None]


@pytest.mark.parametrize("key", ["", "..", "../" + "a" * 61, "A" * 64, "a" * 63 + "\n"])
def test_bad_keys(folder, key):
    store = SavedStore(folder)
    assert store.get(key) is None
    assert store.size(key) is None
    assert store.stats.faults == {"key": 1}


def test_no_folder(tmp_path):
    with pytest.raises(StoreError, match="there is no folder"):
        SavedStore(tmp_path / "nothing")
    store = SavedStore(tmp_path)
    tmp_path.rmdir()
    assert list(store.keys()) == []
    assert store.get(KEYS[0]) is None
