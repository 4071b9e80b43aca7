"""The disk store: files, rights, the least recently used, quarantine, errors when it is opened."""

import errno
import os
import stat
import subprocess
import sys
import time

import pytest

from blendkv.chunkfile import ChunkFile
from blendkv.chunkwriter import encode_chunk
from blendkv.contract import bytes_for, key_for
from blendkv.errors import BlendError, StoreError
from blendkv.stores import DiskStore, SavedStore, deadline, open_store
from tests.chunks import assert_same, make_chunk
from tests.faults.systems import system
from tests.patience import SLACK_S


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_imports_no_torch():
    code = "import sys, blendkv.stores.disk, blendkv.stores; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_file_an_entry_for_this_user_only(tmp_path):
    above = tmp_path / "not" / "there"
    store, key = DiskStore(above / "store"), key_for(1)
    store.put(key, b"data")
    file = above / "store" / key[:2] / f"{key}.bkv"
    assert file.read_bytes() == b"data"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in (file.parent, above / "store", above, above.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_is_there_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    DiskStore(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_another_process_finds_it(tmp_path):
    key = key_for(1)
    DiskStore(tmp_path).put(key, b"data")
    code = f"from blendkv.stores import open_store; assert open_store({str(tmp_path)!r}).get({key!r}) == b'data'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_chunk_file_is_read_by_layers_while_it_is_deleted(tmp_path):
    store, chunk = DiskStore(tmp_path), make_chunk()
    store.put(chunk.key, encode_chunk(chunk))
    with store.source(chunk.key) as source, ChunkFile(source) as file:
        store.delete(chunk.key)
        assert store.get(chunk.key) is None
        assert_same(file.read(), chunk)


def test_least_recently_used_goes_first_whoever_used_it(tmp_path):
    store, other = DiskStore(tmp_path, capacity_bytes=3000), DiskStore(tmp_path, capacity_bytes=3000)
    a, b, c, d = map(key_for, "abcd")
    for key in (a, b, c):
        assert store.put(key, bytes(1000))
    other.get(a)
    assert store.put(d, bytes(1000))
    assert sorted(store.keys()) == sorted((a, c, d))
    assert store.stats.evictions == 1
    other.put(b, bytes(1000))  # it sees what the first did
    assert sorted(other.keys()) == sorted((a, b, d))


def test_opening_with_a_smaller_cap_evicts(tmp_path):
    store = DiskStore(tmp_path)
    for name in range(10):
        store.put(key_for(name), bytes(1000))
    assert len(list(DiskStore(tmp_path, capacity_bytes=4500).keys())) == 4


def test_larger_than_the_cap_is_refused_and_evicts_nothing(tmp_path):
    store = DiskStore(tmp_path, capacity_bytes=1000)
    store.put(key_for(1), b"small")
    assert not store.put(key_for(2), bytes(1001))
    assert store.get(key_for(1)) == b"small"
    assert store.stats.faults == {"capacity": 1}


def test_the_default_cap_is_finite(tmp_path):
    assert DiskStore(tmp_path).capacity_bytes == 64 << 30
    with pytest.raises(ValueError, match="positive"):
        DiskStore(tmp_path, capacity_bytes=0)


def test_files_deleted_by_others_free_room(tmp_path):
    store = DiskStore(tmp_path, capacity_bytes=2500)
    for name in "ab":
        store.put(key_for(name), bytes(1000))
    os.unlink(tmp_path / key_for("a")[:2] / f"{key_for('a')}.bkv")
    assert store.put(key_for("c"), bytes(1000))
    assert store.stats.evictions == 0


@pytest.mark.parametrize("cut", [0, 1, 20, 40, -1])
def test_a_chunk_file_of_another_length_is_a_miss_and_goes_to_bad(tmp_path, cut):
    store, chunk = DiskStore(tmp_path), make_chunk()
    data, file = encode_chunk(chunk), tmp_path / chunk.key[:2] / f"{chunk.key}.bkv"
    for attempt in (1, 2):
        assert store.put(chunk.key, data)
        assert store.get(chunk.key) == data
        file.write_bytes(data[:cut] if cut >= 0 else data + b"x")
        if cut in (0, 1):  # no magic: nothing that a store could know
            assert store.get(chunk.key) == data[:cut]
            store.quarantine(chunk.key)
        else:
            assert store.get(chunk.key, 100, 200) is None
            assert store.stats.faults["length"] == attempt
        assert files(tmp_path) == [f"bad/{chunk.key}.{number + 1}" for number in range(attempt)]
    assert not store.put(chunk.key, data)  # rewritten once, no more
    assert not DiskStore(tmp_path).put(chunk.key, data)
    assert store.stats.faults["quarantined"] == 1
    (tmp_path / "bad" / f"{chunk.key}.2").unlink()
    assert DiskStore(tmp_path).put(chunk.key, data)


def test_few_bad_entries_are_kept(tmp_path):
    store = DiskStore(tmp_path)
    for name in range(40):
        store.put(key_for(name), b"bad")
        store.quarantine(key_for(name))
    store.quarantine(key_for("unknown"))
    store.quarantine("../x")
    assert files(tmp_path) == sorted(f"bad/{key_for(name)}.1" for name in range(24, 40))


def test_links_and_pipes_are_not_followed(tmp_path):
    secret, key = tmp_path / "secret", key_for(1)
    secret.write_bytes(b"secret")
    store = DiskStore(tmp_path / "store")
    folder = tmp_path / "store" / key[:2]
    folder.mkdir(exist_ok=True)
    file = folder / f"{key}.bkv"
    file.symlink_to(secret)
    assert store.get(key) is None
    assert store.size(key) is None
    file.unlink()
    os.mkfifo(file)
    assert store.get(key) is None
    file.unlink()
    file.mkdir()
    assert store.get(key) is None
    assert store.stats.faults == {"link": 2, "folder": 1}
    file.rmdir()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert not store.put(key, b"data")
    assert files(tmp_path / "elsewhere") == []
    folder.unlink()
    assert store.put(key, b"data")
    assert store.get(key) == b"data"


def test_a_folder_that_is_a_link_is_not_entered(tmp_path):
    store, key = DiskStore(tmp_path / "store"), key_for(1)
    assert store.put(key, b"data")
    folder = tmp_path / "store" / key[:2]
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert store.get(key) is None
    assert store.source(key) is None
    assert sum(store.stats.faults.values()) == 2


def test_a_read_sets_the_time_of_the_last_use(tmp_path):
    store, key = DiskStore(tmp_path), key_for(1)
    store.put(key, b"data")
    file = tmp_path / key[:2] / f"{key}.bkv"
    os.utime(file, ns=(1, 1))
    before = time.time_ns()
    assert store.get(key) == b"data"
    assert before <= file.stat().st_mtime_ns <= time.time_ns()


def test_a_read_leaves_no_descriptor(tmp_path):
    store, key = DiskStore(tmp_path), key_for(1)
    store.put(key, b"data")
    before = os.listdir("/proc/self/fd")
    source = store.source(key)
    assert (source.read(0, 10), source.read(1, 2), source.read(9, 1)) == (b"data", b"at", b"")
    source.close()
    source.close()  # once more is fine, and closes nobody else's file
    with pytest.raises(OSError, match="descriptor"):
        source.read(0, 1)
    source = store.source(key)
    del source  # forgotten
    assert store.get(key) == b"data"
    assert store.get(key_for(2)) is None
    assert os.listdir("/proc/self/fd") == before


def test_temporary_files_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path):
    DiskStore(tmp_path)
    dead, old = tmp_path / "00" / "dead.tmp", tmp_path / "00" / "old.tmp"
    dead.write_bytes(b"x")

    def meanwhile(name):
        if name == "rename":
            DiskStore(tmp_path)  # another one is opened

    with system(before=meanwhile):
        assert DiskStore(tmp_path).put(key_for(1), b"data")
    assert files(tmp_path) == [f"{key_for(1)[:2]}/{key_for(1)}.bkv"]
    old.write_bytes(b"x")
    dead.write_bytes(b"x")
    os.utime(old, (time.time() - 3600,) * 2)
    store = DiskStore(tmp_path, capacity_bytes=1 << 20)
    assert not dead.exists()
    assert not old.exists()
    old.write_bytes(b"x")
    os.utime(old, (time.time() - 3600,) * 2)
    store.put(key_for(2), b"data")
    assert not old.exists()


def test_a_passed_deadline_is_a_miss(tmp_path):
    store, key = DiskStore(tmp_path), key_for(1)
    store.put(key, b"data")
    with deadline(0):
        assert store.get(key) is None
    assert store.get(key) == b"data"
    assert store.stats.faults == {"deadline": 1}


def test_durable_waits_for_the_disk_and_the_other_does_not(tmp_path):
    for durable, expected in ((True, [3, 2]), (False, [0, 0])):
        calls, counts = [], []
        with system(before=calls.append):
            store = DiskStore(tmp_path / str(durable), durable=durable)
            (tmp_path / str(durable) / key_for(1)[:2]).mkdir()  # by others, who may not have waited for the disk
            for _ in range(2):
                calls.clear()
                store.put(key_for(1), b"data")
                counts.append(calls.count("fsync"))
        assert counts == expected


def test_many_entries_are_found_quickly(tmp_path):
    store = DiskStore(tmp_path)
    for name in range(1000):
        store.put(key_for(name), b"x")
    start = time.perf_counter()
    assert len(list(DiskStore(tmp_path).keys())) == 1000
    assert time.perf_counter() - start < 0.5 + SLACK_S


@pytest.mark.parametrize("url", ["{}", "file://{}", "file://localhost{}"])
def test_open_store(tmp_path, url):
    store = open_store(url.format(tmp_path / "a b").replace(" ", "%20" if "//" in url else " "), durable=True)
    assert isinstance(store, DiskStore)
    assert store.durable
    assert store.url == f"file://{tmp_path}/a b"


def test_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    open_store("~/chunks")
    assert (tmp_path / "chunks").is_dir()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    for path in ("file", "file/below"):
        with pytest.raises(StoreError, match=r"there is a file of that name.*choose another folder"):
            open_store(tmp_path / path)
    assert issubclass(StoreError, OSError)
    assert issubclass(StoreError, BlendError)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EACCES, "permission denied; give this user"),
        (errno.EROFS, "read-only; mount it for writing"),
        (errno.ENOSPC, "the disk is full; make room"),
        (errno.EDQUOT, "the quota is used up"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_folder_that_cannot_be_written(tmp_path, code, words):
    def fail(name):
        if name == "write":
            raise OSError(code, os.strerror(code))

    with system(before=fail), pytest.raises(StoreError, match=words):
        open_store(tmp_path)


def test_a_full_disk_with_entries_can_be_opened(tmp_path):
    DiskStore(tmp_path).put(key_for(1), b"data")

    def fail(name):
        if name == "write":
            raise OSError(errno.ENOSPC, "full")

    with system(before=fail):
        assert DiskStore(tmp_path).get(key_for(1)) == b"data"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become somebody else")
def test_permission_denied_in_earnest(tmp_path):
    code = (
        "import sys, blendkv.stores.disk\nfrom blendkv.stores import open_store\n"
        "from blendkv.errors import StoreError\n"
        "import os; os.setuid(65534)\n"
        "try:\n    open_store(sys.argv[1])\nexcept StoreError as error:\n    print(error)\n"
    )
    tmp_path.chmod(0o700)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "permission denied" in done.stdout


def test_bytes_of_entries_are_those_of_their_keys(tmp_path):
    """The twin of every fault test: nothing injected, everything found."""
    store = DiskStore(tmp_path, durable=True)
    for name in range(50):
        assert store.put(key_for(name), bytes_for(name))
    again = DiskStore(tmp_path)
    assert all(again.get(key_for(name)) == bytes_for(name) for name in range(50))
    assert (again.stats.hits, again.stats.misses, +again.stats.faults) == (50, 0, {})


@pytest.mark.parametrize("name", ["a#b", "a?b", "50%25", "ü 日", "line\nbreak", "a;b"])
@pytest.mark.parametrize("kind", [DiskStore, SavedStore])
def test_the_url_of_a_folder_opens_it_again(tmp_path, name, kind):
    (tmp_path / name).mkdir()
    store = kind(tmp_path / name)
    DiskStore(tmp_path / name).put(key_for(1), b"data")
    assert open_store(store.url, create=False).get(key_for(1)) == b"data"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "give a folder"),
        ("s3:/bucket/folder", "two slashes"),
        ("redis:", "two slashes"),
        ("FILE:/tmp/chunks", "two slashes"),
        ("memory:", "two slashes"),
        ("file:///chunks#1", "%23"),
        ("file:///chunks?1", "%3F"),
    ],
)
def test_what_is_hardly_a_folder_is_refused_and_none_is_made(tmp_path, monkeypatch, url, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=words):
        open_store(url)
    assert not list(tmp_path.iterdir())
    if not url:
        with pytest.raises(StoreError, match=words):
            DiskStore(url)


def test_a_folder_may_be_called_nearly_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("./s3:", "a:b", "c:", "x:/y"):
        open_store(name)
        assert (tmp_path / name / "00").is_dir()
