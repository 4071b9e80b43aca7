"""`blendkv ls`, `inspect`, `evict` and `verify-store`, from the command line."""

import json
import os
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from blendkv._options import read_age, read_size, shown_age, shown_size
from blendkv.chunkwriter import encode_chunk
from blendkv.cli import main
from blendkv.contract import key_for
from blendkv.stores import DiskStore
from tests.chunks import make_chunk
from tests.stores.servers import BINARY, Server

SECRET = b"s" * 32
DAY = 86400


@pytest.fixture
def run():
    """`run(*arguments)`: the command's result, stdout and stderr apart."""
    return lambda *arguments: CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def chunks():
    """Five chunks of two models and namespaces."""
    made = {}
    for i in range(5):
        fields = {"fingerprint": ("aa" if i < 3 else "bb") * 16, "namespace": "news" if i % 2 else ""}
        made[i] = make_chunk(tokens=10 + 10 * i, seed=i, text=f"text of {i}", **fields)
    return made


@pytest.fixture
def folder(tmp_path, chunks):
    """A store of them, the i-th last used i + 1 days ago."""
    folder = tmp_path / "store"
    store, now = DiskStore(folder), time.time()
    for i, chunk in chunks.items():
        store.put(chunk.key, encode_chunk(chunk))
        os.utime(file_of(folder, chunk.key), (now - (i + 1) * DAY,) * 2)
    return folder


def file_of(folder, key):
    return folder / key[:2] / f"{key}.bkv"


def damage(folder, key):
    data = bytearray(file_of(folder, key).read_bytes())
    data[-20] ^= 1
    file_of(folder, key).write_bytes(data)


def only_json(result):
    return json.loads(result.stdout, parse_constant=pytest.fail)


def left(folder):
    return sorted(DiskStore(folder).keys())


# -- ls ---------------------------------------------------------------------------------------------------------------


def test_ls(run, folder, chunks):
    result = run("ls", folder)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:7]] == [chunk.key[:12] for chunk in chunks.values()]
    for part in ("raw", "aaaaaaaa", "news", "24 h ago", "5 d ago", "5 entries"):
        assert part in result.stdout
    assert not [word for word in ("text of", chunks[0].key) if word in result.stdout]


def test_ls_json(run, folder, chunks):
    told = only_json(run("ls", folder, "--json", "--sort", "size", "--limit", 2))
    assert set(told) == {"url", "entries", "count", "bytes"}
    assert told["url"] == f"file://{folder}"
    assert (told["count"], told["bytes"]) == (5, sum(file.stat().st_size for file in folder.glob("*/*.bkv")))
    assert [entry["key"] for entry in told["entries"]] == [chunks[4].key, chunks[3].key]
    first = told["entries"][0]
    assert (first["codec"], first["level"], first["tokens"], first["dtype"]) == ("raw", 1, 50, "fp32")
    assert (first["fingerprint"], first["namespace"], first["sealed"]) == ("bb" * 16, "", False)
    assert first["last_used"] == pytest.approx(time.time() - 5 * DAY, abs=60)
    assert first["bytes"] == file_of(folder, chunks[4].key).stat().st_size


def test_ls_sorts_and_is_no_use_of_entries(run, folder, chunks):
    store = DiskStore(folder)
    for _ in range(3):
        store.get(chunks[1].key)
    store.close()
    keys = {
        sort: [entry["key"] for entry in only_json(run("ls", folder, "--json", "--sort", sort))["entries"]]
        for sort in ("used", "hits", "key", "size")
    }
    order = [1, 0, 2, 3, 4]
    assert keys["used"] == [chunks[i].key for i in order]
    known = any(entry.hits for entry in store.entries())  # some file systems keep none
    assert keys["hits"][0] == chunks[1].key or not known
    assert keys["key"] == sorted(keys["key"])
    assert keys["size"] == [chunks[i].key for i in (4, 3, 2, 1, 0)]


def test_ls_without_heads_reads_no_entry(run, folder, monkeypatch):
    monkeypatch.setattr(DiskStore, "peek", lambda *args: pytest.fail("an entry was read"))
    monkeypatch.setattr(DiskStore, "get", lambda *args: pytest.fail("an entry was read"))
    result = run("ls", folder, "--no-heads")
    assert result.exit_code == 0, result.stderr
    assert "codec" not in result.stdout
    assert "codec" not in only_json(run("ls", folder, "--no-heads", "--json"))["entries"][0]


def test_ls_shows_what_is_no_chunk_file(run, folder):
    DiskStore(folder).put(key_for("junk"), b"junk")
    assert "(magic)" in run("ls", folder).stdout
    entries = only_json(run("ls", folder, "--json"))["entries"]
    assert [entry["fault"] for entry in entries if entry["key"] == key_for("junk")] == ["magic"]


def test_ls_of_nothing(run, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    assert run("ls", tmp_path / "empty").stdout == f"file://{tmp_path}/empty: 0 entries, 0 B\n"
    assert list((tmp_path / "empty").iterdir()) == []
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path / "empty"))
    assert only_json(run("ls", "--json")) == {"url": f"file://{tmp_path}/empty", "entries": [], "count": 0, "bytes": 0}


def test_ls_imports_no_torch(folder):
    code = (
        "import sys; from typer.testing import CliRunner; from blendkv.cli import main\n"
        f"result = CliRunner().invoke(main, ['ls', {str(folder)!r}]); assert result.exit_code == 0, result.output\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "command",
    [["ls", "{}"], ["inspect", "abcdef", "--store", "{}"], ["evict", "--all", "--store", "{}"], ["verify-store", "{}"]],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_store_that_is_not_there_is_not_made(run, tmp_path, command, as_json):
    arguments = [part.format(tmp_path / "none") for part in command] + ["--json"] * as_json
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "there is no such folder; look at its name" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:geheim@127.0.0.1:1",
        "redis://:ge/heim@127.0.0.1",
        "redis+nope://me:geheim@127.0.0.1",
        "nope://me:geheim@host/x",
        "file://me:geheim@host/x",
        "memory://me:geheim@x",
        "redis://me:geheim@127.0.0.1?ttl=soon",
    ],
)
def test_passwords_are_never_printed(run, url):
    result = run("ls", url)
    assert result.exit_code == 1
    assert "heim" not in result.output
    assert "me:" not in result.output


@pytest.mark.skipif(BINARY is None, reason="no valkey-server or redis-server on this machine")
def test_valkey(run, chunks):
    from blendkv.stores.valkey import ValkeyStore

    with Server("--requirepass", "geheim") as server:
        url = f"redis://:geheim@127.0.0.1:{server.port}"
        store = ValkeyStore.from_url(url)
        for chunk in chunks.values():
            store.put(chunk.key, encode_chunk(chunk))
        told = only_json(run("ls", url, "--json"))
        assert (told["url"], told["count"]) == (f"redis://127.0.0.1:{server.port}", 5)
        assert {entry["codec"] for entry in told["entries"]} == {"raw"}
        for arguments in (["verify-store", url], ["inspect", chunks[2].key[:8], "--store", url]):
            result = run(*arguments)
            assert result.exit_code == 0, result.output
            assert "geheim" not in result.output
        result = run("evict", "--store", url, "--model", "aa")
        assert result.exit_code == 0, result.output
        assert "3 entries" in result.stdout
        assert sorted(store.keys()) == sorted(chunks[i].key for i in (3, 4))
        store.close()


# -- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect(run, folder, chunks):
    key = chunks[1].key
    result = run("inspect", key[:8], "--store", folder)
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stdout.split())
    for part in (
        key,
        "version 1",
        "raw",
        "fp32",
        "20, after 0 of conditioning",
        "3 of 2 heads, keys 16, values 16",
        "aa" * 16,
        "news",
        "checksums hold",
        "that of its contents",
        f"{2 * 20 * 2 * 16 * 4:,}",
    ):
        assert part in said
    assert "text of 1" not in said
    assert "text of 1" in run("inspect", key[:8], "--store", folder, "--text").stdout
    assert only_json(run("inspect", key[:8], "--store", folder, "--text", "--json"))["text"] == "text of 1"


def test_inspect_a_file(run, folder, chunks, tmp_path):
    key = chunks[0].key
    told = only_json(run("inspect", file_of(folder, key), "--json"))
    assert (told["key"], told["right_key"], told["damaged"]) == (key, True, [])
    assert "text" not in told
    copy = tmp_path / "copy.bkv"
    copy.write_bytes(file_of(folder, key).read_bytes())
    assert only_json(run("inspect", copy, "--json"))["key"] is None
    other = tmp_path / f"{key_for(1)}.bkv"
    other.write_bytes(copy.read_bytes())
    result = run("inspect", other)
    assert result.exit_code == 1
    assert "NOT that of its contents" in " ".join(result.stdout.split())


def test_inspect_a_file_of_something_else(run, tmp_path):
    """It is the reader's own: nobody is told to delete it."""
    (tmp_path / "notes.md").write_text("# Notes, and more than 32 bytes of them\n")
    result = run("inspect", tmp_path / "notes.md")
    assert result.exit_code == 1
    assert "notes.md is not a chunk file of blendkv" in result.stderr
    assert "delete" not in result.stderr


def test_inspect_damage(run, folder, chunks):
    damage(folder, chunks[0].key)
    result = run("inspect", chunks[0].key, "--store", folder)
    assert result.exit_code == 1
    assert "segments 2 are DAMAGED" in " ".join(result.stdout.split())
    assert chunks[0].key in left(folder)
    file_of(folder, chunks[0].key).write_bytes(b"junk")
    result = run("inspect", chunks[0].key, "--store", folder)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "not a chunk file" in result.stderr


def test_inspect_sealed(run, folder, tmp_path):
    chunk = make_chunk(seed=9)
    DiskStore(folder).put(chunk.key, encode_chunk(chunk, secret=SECRET, key_id=b"k1"))
    said = " ".join(run("inspect", chunk.key, "--store", folder).stdout.split())
    assert "yes, key id 6b31" in said
    assert "not checked: it is sealed" in said
    (tmp_path / "secret").write_bytes(SECRET)
    said = run("inspect", chunk.key, "--store", folder, "--secret-file", tmp_path / "secret").stdout
    assert "checksums hold" in " ".join(said.split())
    (tmp_path / "secret").write_bytes(b"short\n")
    result = run("inspect", chunk.key, "--store", folder, "--secret-file", tmp_path / "secret")
    assert (result.exit_code, "holds 6 bytes" in result.stderr) == (1, True)


def test_inspect_wants_one_entry(run, folder):
    assert "no entry of" in run("inspect", "123456", "--store", folder).stderr
    assert "give its first 6 hex digits" in run("inspect", "12", "--store", folder).stderr
    assert "No such file" in run("inspect", folder / "none.bkv").stderr


# -- evict ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("criteria", "gone"),
    [
        (["--all"], [0, 1, 2, 3, 4]),
        (["--older-than", "60h"], [2, 3, 4]),
        (["--older-than", "30d"], []),
        (["--model", "aa"], [0, 1, 2]),
        (["--model", "AA"], [0, 1, 2]),
        (["--namespace", "news"], [1, 3]),
        (["--namespace", ""], [0, 2, 4]),
        (["--model", "aa", "--namespace", "news"], [1]),
        (["--model", "aa", "--older-than", "60h"], [2]),
        (["--to", "0"], [0, 1, 2, 3, 4]),
        (["--to", "1G"], []),
        (["{1}", "{4}"], [1, 4]),
        (["{1}", "{4}", "--older-than", "60h"], [4]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_evict(run, folder, chunks, criteria, gone):
    criteria = [part.format(*(chunk.key[:8] for chunk in chunks.values())) for part in criteria]
    expected = sorted(chunks[i].key for i in chunks if i not in gone)
    dry = only_json(run("evict", "--store", folder, *criteria, "--dry-run", "--json"))
    assert sorted(row["key"] for row in dry["removed"]) == sorted(chunks[i].key for i in gone)
    assert len(left(folder)) == 5
    sizes = sum(file_of(folder, chunks[i].key).stat().st_size for i in gone)
    result = run("evict", "--store", folder, *criteria)
    assert result.exit_code == 0, result.stderr
    assert f"{len(gone)} entr" in result.stdout
    assert all(chunks[i].key[:12] in result.stdout for i in gone)
    assert dry["bytes"] == sizes
    assert left(folder) == expected


def test_evict_to_a_size_takes_the_least_recently_used(run, folder, chunks):
    total = sum(file.stat().st_size for file in folder.glob("*/*.bkv"))
    told = only_json(run("evict", "--store", folder, "--to", total - 1, "--json"))
    assert [row["key"] for row in told["removed"]] == [chunks[4].key]
    DiskStore(folder).get(chunks[3].key)
    told = only_json(run("evict", "--store", folder, "--to", total - told["bytes"] - 1, "--json"))
    assert [row["key"] for row in told["removed"]] == [chunks[2].key]


@pytest.mark.parametrize(
    "criteria", [[], ["--dry-run"], ["--all", "--to", "1G"], ["abcdef", "--all"], ["--model", ""]], ids=" ".join
)
def test_evict_without_a_criterion_is_an_error(run, folder, criteria):
    result = run("evict", "--store", folder, *criteria)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(left(folder)) == 5


def test_evict_says_what_it_could_not_remove(run, folder, chunks, monkeypatch):
    delete = DiskStore.delete
    monkeypatch.setattr(DiskStore, "delete", lambda self, key: key == chunks[2].key or delete(self, key))
    result = run("evict", "--store", folder, "--all", "--json")
    assert result.exit_code == 1
    assert only_json(result)["kept"] == [chunks[2].key]
    assert left(folder) == [chunks[2].key]


# -- verify-store -----------------------------------------------------------------------------------------------------


def test_verify_store(run, folder, chunks, tmp_path):
    result = run("verify-store", folder)
    assert result.exit_code == 0, result.output
    assert "5 hold" in result.stdout
    store, sealed = DiskStore(folder), make_chunk(seed=9)
    store.put(sealed.key, encode_chunk(sealed, secret=SECRET))
    store.put(key_for("foreign"), encode_chunk(chunks[0]))
    damage(folder, chunks[1].key)
    result = run("verify-store", folder, "--json")
    told = only_json(result)
    assert result.exit_code == 1
    assert told == {
        "url": f"file://{folder}",
        "entries": 7,
        "bytes": sum(file.stat().st_size for file in folder.glob("*/*.bkv")),
        "ok": 4,
        "damaged": [{"key": chunks[1].key, "reason": "checksum"}],
        "foreign": [key_for("foreign")],
        "sealed": 1,
        "unread": [],
        "removed": [],
        "complete": True,
    }
    result = run("verify-store", folder, "--delete")
    assert result.exit_code == 1
    said = " ".join(result.stdout.split())
    for part in (f"{chunks[1].key[:12]} damaged checksum", "4 hold, 1 damaged, 1 foreign, 1 sealed", "1 put away"):
        assert part in said
    assert (folder / "bad" / f"{chunks[1].key}.1").exists()
    (tmp_path / "secret").write_bytes(SECRET)
    result = run("verify-store", folder, "--secret-file", tmp_path / "secret", "--json")
    assert (result.exit_code, only_json(result)["ok"], only_json(result)["sealed"]) == (0, 5, 0)


def test_verify_store_is_no_use_of_entries(run, folder):
    before = {file: file.stat().st_mtime_ns for file in folder.glob("*/*.bkv")}
    assert run("verify-store", folder).exit_code == 0
    assert before == {file: file.stat().st_mtime_ns for file in folder.glob("*/*.bkv")}


def test_verify_store_stopped_by_ctrl_c(run, folder, chunks, monkeypatch):
    from blendkv.stores import checking

    plain = checking.judge

    def judge(*args):
        for number, verdict in enumerate(plain(*args)):
            if number == 2:
                raise KeyboardInterrupt
            yield verdict

    monkeypatch.setattr(checking, "judge", judge)
    result = run("verify-store", folder, "--json", "--delete")
    assert result.exit_code == 130
    told = only_json(result)
    assert (told["complete"], told["entries"] >= 2) == (False, True)
    assert "stopped after" in result.stderr
    assert len(left(folder)) == 5


# -- sizes and ages ---------------------------------------------------------------------------------------------------


def test_sizes_and_ages():
    sizes = {"0": 0, "17": 17, "4k": 4096, "512MiB": 512 << 20, "10G": 10 << 30, "1.5g": 3 << 29, "10GB": 10**10}
    sizes |= {"2 TiB": 2 << 40, "5b": 5, "1kB": 1000}
    assert {text: read_size(text, "--to") for text in sizes} == sizes
    ages = {"90s": 90, "30m": 1800, "12h": 43200, "7d": 7 * DAY, "2w": 14 * DAY, "1.5h": 5400}
    assert {text: read_age(text, "--older-than") for text in ages} == ages
    assert [shown_size(n) for n in (0, 1023, 1024, 1 << 20, (1 << 20) - 1, 3 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.0 MiB", "3.0 TiB"]  # fmt: skip
    assert [shown_age(s) for s in (None, -1, 5, 119, 120, 7200, 2 * DAY)] == [
        "", "0 s ago", "5 s ago", "119 s ago", "2 min ago", "2 h ago", "2 d ago"]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        *(["evict", "--to", size] for size in ("-1", "x", "4X", "1iB", "", "1e3", "4 k k")),
        *(["evict", "--older-than", age] for age in ("7", "-7d", "x", "7y", "")),
        ["ls", "--sort", "age"],
        ["ls", "--limit", "-1"],
        ["inspect"],
        ["verify-store"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(run, arguments):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


# -- terminals --------------------------------------------------------------------------------------------------------


def test_what_others_wrote_moves_no_cursor(run, tmp_path):
    store = DiskStore(tmp_path)
    chunk = make_chunk(namespace="a\x1b]0;title\x07\x9b31m\tü 日", text="\x1b[2Jthe text\nof it")
    store.put(chunk.key, encode_chunk(chunk))
    for arguments in (["ls", tmp_path], ["inspect", chunk.key, "--store", tmp_path, "--text"]):
        told = run(*arguments).stdout
        assert "ü 日" in told
        assert not [c for c in told if (c < " " and c != "\n") or "\x7f" <= c < "\xa0"]
    assert "the text" in told
    assert only_json(run("ls", tmp_path, "--json"))["entries"][0]["namespace"] == chunk.namespace
