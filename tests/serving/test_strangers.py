"""Without a token nothing is told; what is slow, huge or garbage is cut off, and others are served meanwhile."""

import itertools
import socket
import statistics
import time

import pytest

from blendkv.errors import StoreError
from blendkv.serving.tokens import Tokens, token_file
from tests.patience import until
from tests.serving.gateways import AUTH, TOKEN, chunk_file, disk, gateway, path_of

KEY, DATA = chunk_file(0)
LINE = f"Authorization: {AUTH['Authorization']}\r\n"


class Watched:
    """A store that notes whether it was asked."""

    url = "watched://"

    def __init__(self, store):
        self._store, self.stats, self.asked = store, store.stats, 0

    def __getattr__(self, name):
        self.asked += 1
        return getattr(self._store, name)


@pytest.fixture
def store(tmp_path):
    store = disk(tmp_path)
    store.put(KEY, DATA)
    return store


WRONG = [
    {},
    {"Authorization": "Bearer wrong-token-wrong-token"},
    {"Authorization": f"Bearer {TOKEN}x"},
    {"Authorization": f"Bearer {TOKEN[:-1]}"},
    {"Authorization": "Bearer "},
    {"Authorization": f"Basic {TOKEN}"},
    {"Authorization": TOKEN},
    {"X-Token": TOKEN},
]


def test_without_a_token_everything_is_the_same(store):
    """Whatever is asked: what is there, what is not, what is no path; and the store is not asked at all."""
    watched = Watched(store)
    paths = [path_of(KEY), path_of("0" * 64), "/chunks", "/names/x", "/names", "/metrics", "/nowhere", "/%00", "/"]
    paths.append(f"{path_of(KEY)}?token={TOKEN}")
    with gateway(watched) as running:
        before = watched.asked
        answers = set()
        for path, headers, method in itertools.product(paths, WRONG, ("GET", "PUT", "POST", "DELETE", "OPTIONS")):
            status, told, body = running.ask(method, path, b"body" if method == "PUT" else None, headers)
            answers.add((status, tuple(sorted(told.items())), body))
        assert len(answers) == 1
        ((status, told, body),) = answers
        assert status == 401
        assert dict(told)["www-authenticate"] == "Bearer"
        heads = {str(running.ask("HEAD", path, None, {})[:2]) for path in paths}
        assert len(heads) == 1
        assert watched.asked == before
        assert running.ask("GET", path_of(KEY))[2] == DATA  # with the token it is
        assert watched.asked > before


def test_without_a_token_it_takes_as_long_whether_an_entry_is_there(store):
    """Medians of requests in turn over one connection; a look at the disk alone would be several times the bound."""
    import http.client

    with gateway(store) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
        seconds = {KEY: [], "0" * 64: []}
        for _ in range(300):
            for key, taken in seconds.items():
                begin = time.perf_counter()
                connection.request("GET", path_of(key))
                connection.getresponse().read()
                taken.append(time.perf_counter() - begin)
        connection.close()
    there, absent = (statistics.median(taken) for taken in seconds.values())
    assert abs(there - absent) < 0.5 * min(there, absent)


def test_tokens():
    tokens = Tokens(["first-token-of-two", "second-token-of-two"], ["third-only-reads"])
    found = [tokens.find(f"Bearer {token}".encode()) for token in ("first-token-of-two", "second-token-of-two")]
    assert all(caller.writes for caller in found)
    assert found[0].name != found[1].name
    assert not tokens.find(b"bearer third-only-reads").writes
    assert tokens.find(b"Bearer \xff\xfe") is None
    assert tokens.find(None) is None
    assert "token" not in found[0].name
    with pytest.raises(ValueError, match="no token"):
        Tokens([])
    with pytest.raises(ValueError, match="at least 16"):
        Tokens(["short"])
    with pytest.raises(ValueError, match="printable"):
        Tokens(["a token with\nlines in it"])


def test_the_file_of_tokens(tmp_path):
    path = tmp_path / "new" / "token"
    (token,), made = token_file(path)
    assert made
    assert len(token) >= 43
    assert path.stat().st_mode & 0o777 == 0o600
    assert token_file(path) == ([token], False)
    path.write_text("# two\nfirst-token-of-two\n\nsecond-token-of-two\n")
    assert token_file(path)[0] == ["first-token-of-two", "second-token-of-two"]
    path.write_text("\n")
    with pytest.raises(StoreError, match="is empty"):
        token_file(path)
    path.chmod(0o644)
    with pytest.raises(StoreError, match="open to other users: chmod 600"):
        token_file(path)
    with pytest.raises(StoreError, match="cannot be read or made"):
        token_file(tmp_path)


def test_health_needs_no_token_and_tells_nothing(store):
    with gateway(store) as running:
        assert running.ask("GET", "/healthz", None, {})[::2] == (200, b"ok\n")
        assert running.ask("POST", "/healthz", None, {})[0] == 405


def closed(sock, seconds=15.0):
    """Whether the other side ends a connection within so many seconds; gives what came before."""
    end, got = time.monotonic() + seconds, b""
    while time.monotonic() < end:
        sock.settimeout(max(0.01, end - time.monotonic()))
        try:
            part = sock.recv(1 << 16)
        except ConnectionError:
            return True, got
        except TimeoutError:
            break
        if not part:
            return True, got
        got += part
    return False, got


def drip(sock, data, every=0.05):
    """Sends byte by byte until the other side has enough."""
    end = time.monotonic() + 15
    for byte in itertools.cycle(data):
        if time.monotonic() > end:
            return False
        try:
            sock.sendall(bytes([byte]))
        except OSError:
            return True
        time.sleep(every)
    return False


QUICK = {"head_seconds": 1, "idle_seconds": 1, "stall_seconds": 0.5, "hold_seconds": 0.1, "least_rate": 1 << 20}


def test_slow_heads_are_cut_off(store):
    with gateway(store, QUICK) as running:
        with running.raw() as silent:
            assert closed(silent)[0]
        with running.raw() as slow:
            slow.sendall(b"GET / HTTP/1.1\r\n")
            assert drip(slow, b"X-A: b\r\n")
        with running.raw() as second:  # a good request, then a slow one on the same connection
            second.sendall(f"GET {path_of(KEY)} HTTP/1.1\r\nHost: x\r\n{LINE}\r\n".encode())
            assert second.recv(12) == b"HTTP/1.1 200"
            second.settimeout(0.2)
            try:
                while second.recv(1 << 16):
                    pass
            except TimeoutError:
                pass
            assert drip(second, b"GET / HTTP/1.1\r\nX-A: b\r\n")
        assert running.metric("blendkv_gateway_cut_connections_total") >= 3


def test_idle_connections_are_closed(store):
    with gateway(store, QUICK) as running, running.raw() as idle:
        idle.sendall(f"HEAD {path_of(KEY)} HTTP/1.1\r\nHost: x\r\n{LINE}\r\n".encode())
        ended, got = closed(idle)
        assert ended
        assert got.startswith(b"HTTP/1.1 200")


def test_slow_bodies_are_cut_off(store):
    with gateway(store, QUICK) as running, running.raw() as slow:
        slow.sendall(f"PUT {path_of(KEY)} HTTP/1.1\r\nHost: x\r\n{LINE}Content-Length: 100000\r\n\r\n".encode())
        assert drip(slow, DATA)
        events = [event for event in running.events() if event["event"] == "request"]
        assert [event["status"] for event in events] == [408]


def slow_readers(running, key, count):
    """Connections that ask for an entry and take almost nothing of it."""
    made = []
    for _ in range(count):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(30)
        sock.connect(("127.0.0.1", running.port))
        sock.sendall(f"GET {path_of(key)} HTTP/1.1\r\nHost: x\r\n{LINE}\r\n".encode())
        made.append(sock)
    return made


def test_slow_readers_are_cut_off(tmp_path):
    key, data = chunk_file(3, tokens=8000)  # more than sockets hold
    store = disk(tmp_path)
    store.put(key, data)
    with gateway(store, QUICK | {"slots": 2}) as running:
        slow = slow_readers(running, key, 6)
        end = time.monotonic() + 20
        while running.metric("blendkv_gateway_cut_connections_total") < 6 and time.monotonic() < end:
            time.sleep(0.1)
        assert running.metric("blendkv_gateway_cut_connections_total") == 6
        assert running.metric("blendkv_gateway_slots_taken") == 0
        for sock in slow:
            sock.close()


def test_slow_readers_hold_nobody_up(tmp_path):
    key, data = chunk_file(3, tokens=8000)
    store = disk(tmp_path)
    store.put(key, data)
    with gateway(store, QUICK | {"slots": 2, "stall_seconds": 60}) as running:
        slow = slow_readers(running, key, 6)  # three times the slots
        time.sleep(0.2)
        begin = time.monotonic()
        assert running.ask("GET", path_of(key))[2] == data
        assert time.monotonic() - begin < 30  # they give their slots back after 0.1 s, and are cut off after 60
        for sock in slow:
            sock.close()


def test_a_slow_link_is_no_stall(tmp_path):
    """Whoever takes something all the time is served to the end, however long it takes."""
    key, data = chunk_file(3, tokens=8000)
    store = disk(tmp_path)
    store.put(key, data)
    settings = QUICK | {"stall_bytes": 1000, "stall_seconds": 1.5}
    with gateway(store, settings) as running, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.settimeout(30)
        sock.connect(("127.0.0.1", running.port))
        sock.sendall(f"GET {path_of(key)} HTTP/1.0\r\nHost: x\r\n{LINE}\r\n".encode())
        got, begin = bytearray(), time.monotonic()
        while part := sock.recv(len(data) // 40):
            got += part
            time.sleep(0.16)
    assert time.monotonic() - begin > 4 * settings["stall_seconds"]
    assert bytes(got).partition(b"\r\n\r\n")[2] == data


GARBAGE = [
    b"\x00" * 1000,
    b"\xff\xfe" * 500 + b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"PUT / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET \xe2\x80\xa6 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://[::1/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"GET / HTTP/1.1\r\nA: b\r\n c: folded\r\n\r\nGET",
    b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n\x81\x05hello",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 5000,
    b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000,
    b"GET /" + b"a" * 100_000,
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 50_000,
]


def test_garbage(store):
    """Nothing of it is answered with an entry, each connection ends, and afterwards all is well."""
    with gateway(store, QUICK) as running:
        for data in GARBAGE:
            with running.raw() as sock:
                try:
                    sock.sendall(data)
                except ConnectionError:
                    continue
                ended, got = closed(sock)
                assert ended, data[:40]
                statuses = {part[:3] for part in got.split(b"HTTP/1.1 ")[1:]}
                assert statuses <= {b"400", b"401", b"404", b"431"}, (data[:40], statuses)
        assert running.ask("GET", path_of(KEY))[2] == DATA
        assert not [event for event in running.events() if event["level"] == "error"]


@pytest.mark.parametrize("data", GARBAGE[-3:], ids=["header", "path", "headers"])
def test_long_heads_are_cut_off_at_once(store, data):
    with gateway(store, {"head_seconds": 60}) as running, running.raw() as sock:
        try:
            sock.sendall(data)
        except ConnectionError:
            return
        assert closed(sock)[0]


def test_pipelined_requests_are_answered_in_order(store):
    head = f"HEAD {path_of(KEY)} HTTP/1.1\r\nHost: x\r\n{LINE}\r\n"
    get = f"GET {path_of(KEY)} HTTP/1.1\r\nHost: x\r\nRange: bytes=%d-%d\r\n{LINE}\r\n"
    with gateway(store) as running, running.raw() as sock:
        sock.sendall((head + "".join(get % (at, at + 9) for at in range(0, 100, 10))).encode())
        sock.sendall(f"GET {path_of('0' * 64)} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{LINE}\r\n".encode())
        ended, got = closed(sock)
    assert ended
    answers = got.split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200"] + [b"206"] * 10 + [b"404"]
    assert b"".join(answer.partition(b"\r\n\r\n")[2] for answer in answers[1:-1]) == DATA[:100]


def test_too_many_connections(store):
    with gateway(store, {"connections": 5}) as running:
        held = [running.raw() for _ in range(8)]
        until(lambda: running.ask("GET", path_of(KEY))[0] == 503)
        for sock in held:
            sock.close()
        until(lambda: running.ask("GET", path_of(KEY))[0] == 200)


def test_a_client_that_goes_away_leaves_nothing(tmp_path):
    key, data = chunk_file(3, tokens=8000)
    store = disk(tmp_path)
    store.put(key, data)
    with gateway(store, {"piece_bytes": 65536, "slots": 2}) as running:
        for _ in range(10):
            with running.raw() as sock:
                sock.sendall(f"GET {path_of(key)} HTTP/1.1\r\nHost: x\r\n{LINE}\r\n".encode())
                sock.recv(100)
        assert running.ask("GET", path_of(key))[2] == data
        end = time.monotonic() + 15
        while running.metric("blendkv_gateway_slots_taken") and time.monotonic() < end:
            time.sleep(0.05)
        assert running.metric("blendkv_gateway_slots_taken") == 0
        assert running.metric("blendkv_gateway_slots_waiting") == 0


def test_logs_and_metrics_tell_no_content(store, tmp_path):
    name = "a-secret-document-name"
    with gateway(store) as running:
        running.ask("GET", path_of(KEY))
        running.ask("PUT", path_of(KEY), DATA)
        running.ask("PUT", path_of(KEY), DATA[:-1])
        running.ask("GET", f"/names/{name}")
        running.ask("GET", f"/{name}?{name}", None, {"Authorization": f"Bearer {name}", "X-A": name})
        with running.raw() as sock:
            sock.sendall(f"{name}\r\n\r\n".encode())
            closed(sock)
        text = running.log.getvalue() + running.ask("GET", "/metrics")[2].decode()
        assert KEY[:8] in text
        for secret in (KEY[:9], TOKEN, name, "127.0.0.1:"):
            assert secret not in text.replace(running.url, "")
        events = [event for event in running.events() if event["event"] == "request"]
        assert [event["status"] for event in events][:5] == [200, 201, 422, 501, 401]
        assert events[0]["bytes"] == len(DATA)
        assert all(set(event) >= {"time", "level", "route", "method", "seconds", "client"} for event in events)
