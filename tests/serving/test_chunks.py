"""Entries over HTTP: what RFC 9110 says of ranges and conditions, and what may be put."""

import itertools
import threading

import pytest

from blendkv.serving.entries import etag_of
from blendkv.serving.ranges import wanted
from tests.serving.gateways import AUTH, READER, chunk_file, disk, gateway, path_of

KEY, DATA = chunk_file(0)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    store = disk(tmp_path_factory.mktemp("store"))
    store.put(KEY, DATA)
    with gateway(store, {"piece_bytes": 4096}) as made:  # several pieces an entry
        yield made


def test_whole(running):
    status, headers, body = running.ask("GET", path_of(KEY))
    assert (status, body) == (200, DATA)
    assert headers["content-length"] == str(len(DATA))
    assert headers["accept-ranges"] == "bytes"
    assert headers["etag"] == etag_of(DATA, len(DATA)).decode()
    assert len(DATA) > 3 * 4096


def test_head(running):
    status, headers, body = running.ask("HEAD", path_of(KEY), Range="bytes=0-3")
    assert (status, body) == (200, b"")
    assert headers["content-length"] == str(len(DATA))
    assert headers["etag"] == etag_of(DATA, len(DATA)).decode()
    assert running.ask("HEAD", path_of("0" * 64))[0] == 404


def asked(running, text):
    return running.ask("GET", path_of(KEY), Range=text)


@pytest.mark.parametrize(
    ("text", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=7-4095", 7, 4096),
        ("bytes=4095-4097", 4095, 4098),
        ("bytes=100-", 100, None),
        ("bytes=-5", -5, None),
        ("BYTES=1-2", 1, 3),
        ("bytes=5-999999999999999999", 5, None),
        ("bytes=-999999999999999999", 0, None),
    ],
)
def test_ranges(running, text, start, stop):
    status, headers, body = asked(running, text)
    first, last, _ = slice(start, stop).indices(len(DATA))
    assert (status, body) == (206, DATA[start:stop])
    assert headers["content-range"] == f"bytes {first}-{last - 1}/{len(DATA)}"
    assert headers["content-length"] == str(len(body))


@pytest.mark.parametrize("text", [f"bytes={len(DATA)}-", "bytes=-0", "bytes=9999999999999999999-"])
def test_ranges_behind_the_end(running, text):
    status, headers, body = asked(running, text)
    assert (status, body) == (416, b"")
    assert headers["content-range"] == f"bytes */{len(DATA)}"


@pytest.mark.parametrize(
    "text",
    [
        "bytes=",
        "bytes=-",
        "bytes=5-2",
        "bytes=0-1,5-6",
        "bytes=" + "0-0," * 2000 + "0-0",
        "bytes=0x1-2",
        "bytes=+1-2",
        "bytes=-1-2",
        "bytes=1--2",
        "bytes= 1 - 2",
        "items=0-5",
        "bytes=" + "9" * 5000 + "-",
        "bytes=\u00b2-\u00b3".encode().decode("latin-1"),
    ],
    ids=itertools.count(),
)
def test_hostile_ranges_are_none(running, text):
    status, _, body = asked(running, text)
    assert (status, body) == (200, DATA)


def test_conditions(running):
    tag = etag_of(DATA, len(DATA)).decode()
    get = lambda **headers: running.ask("GET", path_of(KEY), None, AUTH | headers)  # noqa: E731
    status, headers, body = get(**{"If-None-Match": tag})
    assert (status, body, headers["etag"]) == (304, b"", tag)
    assert get(**{"If-None-Match": f'"other", {tag}'})[0] == 304
    assert get(**{"If-None-Match": "*"})[0] == 304
    assert get(**{"If-None-Match": '"other"'})[2] == DATA
    assert get(**{"If-Match": '"other"'})[0] == 412
    assert get(**{"If-Match": tag})[2] == DATA
    assert get(**{"If-Range": tag, "Range": "bytes=0-4"})[2] == DATA[:5]
    assert get(**{"If-Range": '"other"', "Range": "bytes=0-4"})[2] == DATA
    assert get(**{"If-Range": "Sat, 28 Nov 2026 00:00:00 GMT", "Range": "bytes=0-4"})[2] == DATA


def test_ranges_of_every_kind_against_a_twin():
    """Python's slices, which nobody here wrote."""
    data = bytes(range(11))
    for first, last in itertools.product(["", *map(str, range(14))], repeat=2):
        want = wanted({b"range": f"bytes={first}-{last}".encode()}, len(data), None)
        if first == last == "" or (first and last and int(last) < int(first)):
            assert want == (200, 0, len(data))
            continue
        expected = data[int(first) : int(last) + 1 if last else None] if first else data[-int(last) :] * (last != "0")
        assert (want.status, data[want.start : want.stop]) == (206 if expected else 416, expected), (first, last)


def test_the_tag_is_of_the_contents(tmp_path):
    with gateway(disk(tmp_path / "a")) as a, gateway(disk(tmp_path / "b")) as b:
        tags = set()
        for seed in range(3):
            key, data = chunk_file(seed)
            for each in (a, b):
                assert each.ask("PUT", path_of(key), data)[0] == 201
                tags.add(each.ask("HEAD", path_of(key))[1]["etag"])
    assert len(tags) == 3


def test_put_and_get(tmp_path):
    with gateway(disk(tmp_path)) as running:
        key, data = chunk_file(1)
        assert running.ask("GET", path_of(key))[0] == 404
        assert running.ask("PUT", path_of(key), data)[0] == 201
        assert running.ask("GET", path_of(key))[2] == data
        assert running.ask("PUT", path_of(key), data)[0] == 201
        assert disk(tmp_path).get(key) == data


def test_only_sound_chunk_files_under_their_own_key_are_taken(tmp_path):
    store = disk(tmp_path)
    with gateway(store) as running:
        (key, data), (other, _) = chunk_file(1), chunk_file(2)
        flipped = bytearray(data)
        flipped[-40] ^= 1
        for path, body in (
            (path_of(other), data),
            (path_of(key), bytes(flipped)),
            (path_of(key), data[:-1]),
            (path_of(key), data + b"x"),
            (path_of(key), b""),
            (path_of(key), b"GIF89a" * 100),
            (path_of(key), b"\x80\x04\x95" + data),
        ):
            status, _, said = running.ask("PUT", path, body)
            assert status == 422, said
            assert key.encode() not in said
        assert list(store.keys()) == []
        assert running.metric("blendkv_gateway_refused_puts_total") == 7
        assert running.ask("PUT", path_of(key), data)[0] == 201


def test_sealed_files_are_taken_unseen(tmp_path):
    from blendkv.chunk import chunk_key
    from tests.chunks import make_chunk

    secret = b"0123456789abcdef"
    chunk = make_chunk(tokens=40, seed=5)
    key = chunk_key(chunk.ids, chunk.fingerprint, secret=secret)
    _, data = chunk_file(5, secret=secret)
    with gateway(disk(tmp_path)) as running:
        assert running.ask("PUT", path_of(key), data)[0] == 201
        assert running.ask("GET", path_of(key))[2] == data
        assert running.ask("PUT", path_of(key), data[:-1])[0] == 422  # its length can be seen


@pytest.mark.parametrize(
    "path",
    [
        "/chunks/../../etc/passwd",
        "/chunks/%2e%2e/%2e%2e/etc/passwd",
        "/chunks/..%2f..%2fetc%2fpasswd",
        "//etc/passwd",
        f"/chunks/{KEY[:2]}/../{KEY[:2]}/{KEY}.bkv",
        f"/chunks/{KEY[:2]}//{KEY}.bkv",
        f"/chunks/{KEY[:2]}/{KEY}.bkv/",
        f"/chunks/{KEY[:2]}/{KEY}.bkv%00",
        f"/chunks/{KEY[:2]}/{KEY}.bkv%0a",
        f"/chunks/ff/{KEY}.bkv" if KEY[:2] != "ff" else f"/chunks/00/{KEY}.bkv",
        f"/chunks/{KEY[:2].upper()}/{KEY.upper()}.bkv" if KEY[:2].upper() != KEY[:2] else "/chunks/XX/X.bkv",
        f"/chunks/{KEY[:2]}/{KEY}",
        f"/chunks/{KEY[:2]}/{KEY}.tmp",
        "/chunks/bad/" + KEY + ".1",
        "/chunks/" + "a" * 5000,
        "/etc/passwd",
        "/",
    ],
    ids=itertools.count(),
)
def test_no_other_path_leads_anywhere(running, path):
    for method in ("GET", "HEAD", "PUT"):
        status, _, body = running.ask(method, path, DATA if method == "PUT" else None)
        assert status == 404
        assert body == b""


def test_methods(running, tmp_path):
    for method in ("POST", "PATCH", "DELETE", "TRACE"):
        status, headers, _ = running.ask(method, path_of(KEY))
        assert (status, headers["allow"]) == (405, "GET, HEAD, PUT")
    with gateway(disk(tmp_path), deletes=True) as deleting:
        assert deleting.ask("PUT", path_of(KEY), DATA)[0] == 201
        assert deleting.ask("DELETE", path_of(KEY), None, {"Authorization": f"Bearer {READER}"})[0] == 403
        assert deleting.ask("DELETE", path_of(KEY))[0] == 200
        assert deleting.ask("GET", path_of(KEY))[0] == 404
    assert running.ask("GET", path_of(KEY))[2] == DATA


def test_one_who_may_only_read(running):
    reader = {"Authorization": f"Bearer {READER}"}
    assert running.ask("GET", path_of(KEY), None, reader)[2] == DATA
    assert running.ask("PUT", path_of(KEY), DATA, reader)[0] == 403
    assert running.ask("OPTIONS", "/chunks", None, reader)[1]["allow"] == "GET, HEAD, OPTIONS"
    assert running.ask("OPTIONS", "/chunks")[1]["allow"] == "GET, HEAD, OPTIONS, PUT"


def test_bodies_have_a_length_and_a_limit(tmp_path):
    key, data = chunk_file(1)
    with gateway(disk(tmp_path), {"entry_bytes": len(data), "upload_bytes": 3 * len(data)}) as running:
        with running.raw() as sock:  # in pieces, of unknown length
            head = f"PUT {path_of(key)} HTTP/1.1\r\nHost: x\r\nAuthorization: {AUTH['Authorization']}\r\n"
            sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n".encode())
            assert sock.recv(4096).startswith(b"HTTP/1.1 411 ")
        assert running.ask("PUT", path_of(key), data + b"x")[0] == 413
        assert running.ask("PUT", path_of(key), data)[0] == 201
        # nothing of a huge one is read: the answer comes before the body
        with running.raw() as sock:
            head = f"PUT {path_of(key)} HTTP/1.1\r\nHost: x\r\nAuthorization: {AUTH['Authorization']}\r\n"
            sock.sendall(f"{head}Content-Length: {1 << 60}\r\n\r\n".encode())
            assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")
            assert sock.recv(1) == b""
        assert running.ask("GET", path_of(key))[2] == data


def test_bodies_under_way_have_a_limit_together(tmp_path):
    key, data = chunk_file(1)
    with gateway(disk(tmp_path), {"entry_bytes": 2 * len(data), "upload_bytes": 2 * len(data)}) as running:
        head = f"PUT {path_of(key)} HTTP/1.1\r\nHost: x\r\nAuthorization: {AUTH['Authorization']}\r\n"
        with running.raw() as slow:
            slow.sendall(f"{head}Content-Length: {2 * len(data)}\r\n\r\n".encode() + b"x")
            deadline = threading.Event()
            status = 0
            for _ in range(200):  # until the first one has been seen
                status, headers, _ = running.ask("PUT", path_of(key), data)
                if status == 503:
                    break
                deadline.wait(0.02)
            assert (status, headers["retry-after"]) == (503, "1")
        for _ in range(200):
            status = running.ask("PUT", path_of(key), data)[0]
            if status == 201:
                break
            deadline.wait(0.02)
        assert status == 201


def test_a_store_that_cannot_keep_it(tmp_path):
    from blendkv.stores import DiskStore

    key, data = chunk_file(1)
    with gateway(DiskStore(tmp_path, capacity_bytes=len(data) - 1)) as running:
        assert running.ask("PUT", path_of(key), data)[0] == 507


def test_an_entry_that_ends_too_early_is_cut_off(tmp_path):
    """The client must not take half an entry for a whole one."""
    import http.client

    key, data = chunk_file(1)
    store = disk(tmp_path)
    store.put(key, data)

    class Short:
        url, stats = store.url, store.stats

        def get(self, key, start=0, stop=None):
            return store.get(key, start, stop) if start < 8192 else None

        def size(self, key):
            return store.size(key)

    with gateway(Short(), {"piece_bytes": 4096}) as running:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            running.ask("GET", path_of(key))
        assert running.ask("GET", path_of(key), Range="bytes=0-4999")[2] == data[:5000]


def test_replaced_while_it_is_read(tmp_path):
    """A file that is open stays what it was."""
    key, data = chunk_file(1, tokens=4000)
    store = disk(tmp_path)
    store.put(key, data)
    with gateway(store, {"piece_bytes": 65536, "stall_seconds": 30}) as running, running.raw() as sock:
        sock.sendall(f"GET {path_of(key)} HTTP/1.0\r\nAuthorization: {AUTH['Authorization']}\r\n\r\n".encode())
        got = sock.recv(1000)
        store.delete(key)
        while part := sock.recv(1 << 16):
            got += part
    assert got.partition(b"\r\n\r\n")[2] == data


def test_listing(running):
    import json

    status, _, body = running.ask("GET", "/chunks")
    assert status == 200
    assert [json.loads(line)[:2] for line in body.splitlines()] == [[KEY, len(DATA)]]
