"""Valkey or Redis as a store: one server."""

import hashlib
import os
import random
import re
import shutil
import subprocess
import threading
import time
import warnings
from pathlib import Path

import pytest
import redis

from blendkv.errors import StoreError
from blendkv.stores import Store, deadline
from blendkv.stores.catalog import Region
from blendkv.stores.valkey import ValkeyStore
from blendkv.stores.valkey_centre import ValkeyCentre
from blendkv.stores.valkey_server import TimedSocket
from blendkv.stores.valkey_url import parse
from tests.patience import SLACK_S, until
from tests.stores.servers import BINARY, Proxy, Server, answering, bus, free_port, member

pytestmark = pytest.mark.skipif(BINARY is None, reason="no valkey-server or redis-server on this machine")
PIECE = 4096
NAMES = "+eval +hget +hset +time +publish +subscribe +ping +cluster|slots"


def key(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


@pytest.fixture
def store(server):
    server.tell("FLUSHALL")
    store = ValkeyStore.from_url(server.url, piece_bytes=PIECE)
    yield store
    store.close()


def test_entries_come_back_whole_and_by_ranges(store):
    assert isinstance(store, Store)
    for size in (0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 7):
        data = os.urandom(size)
        assert store.put(key(size), data)
        assert store.get(key(size)) == data
        assert store.size(key(size)) == size
        draw = random.Random(size)
        for _ in range(50):
            start, stop = draw.randrange(size + 3), draw.choice([None, draw.randrange(size + 3)])
            assert store.get(key(size), start, stop) == data[start:stop] or (stop or size) < start
    assert sorted(store.keys()) == sorted(map(key, (0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 7)))
    assert not store.stats.misses
    assert not store.stats.faults


def test_an_absent_entry_is_a_miss_and_deleting_leaves_nothing(store, server):
    assert store.get(key(1)) is None
    assert store.size(key(1)) is None
    assert store.get_many([key(1), key(2)]) == {}
    store.delete(key(1))
    assert store.stats.misses == 3
    store.put(key(1), os.urandom(3 * PIECE))
    store.put(key(1), os.urandom(2 * PIECE))
    assert server.tell("DBSIZE") == 3  # what was overwritten is gone
    store.delete(key(1))
    assert server.tell("DBSIZE") == 0
    assert not store.stats.faults


def test_another_stores_overwrite_and_delete_are_noticed(store, server):
    other = ValkeyStore.from_url(server.url, piece_bytes=PIECE // 2)
    first, second = os.urandom(3 * PIECE), os.urandom(2 * PIECE)
    store.put(key(1), first)
    other.put(key(1), second)
    assert store.get(key(1)) == second
    assert store.get(key(1), 10, 20) == second[10:20]
    other.delete(key(1))
    assert store.get(key(1)) is None
    other.close()


def test_readers_of_what_is_overwritten_see_one_or_the_other(store, server):
    values = [bytes([n]) * (3 * PIECE + n) for n in range(8)]
    store.put(key(1), values[0])
    stop, wrong = threading.Event(), []

    def read() -> None:
        mine = ValkeyStore.from_url(server.url)
        while not stop.is_set():
            data = mine.get(key(1))
            if data is not None and data not in values:
                wrong.append(data)
        mine.close()

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(300):
        assert store.put(key(1), values[n % 8])
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.get(key(1)) == values[299 % 8]


def test_a_half_written_or_half_evicted_entry_is_absent(store, server):
    store.put(key(1), os.urandom(3 * PIECE))
    with server.client() as client:
        names = sorted(client.keys("*"))
        manifest, pieces = names[0], names[1:]
        assert client.ttl(pieces[0]) == -1
        client.delete(pieces[1])
        assert store.get(key(1)) is None
        assert store.get(key(1), 0, 10) is not None  # that piece is there
        client.set(manifest, b"blendkv1 99999999999 1 0123456789abcdef")
        assert store.get(key(1), PIECE, PIECE + 1) is None
        client.set(manifest, os.urandom(100))
        assert store.get_many([key(1)]) == {}
        client.delete(manifest)
        client.rpush(manifest, "what")
        assert store.get_many([key(1)]) == {}
        assert not store.put(key(1), b"new")  # that is somebody else's
        assert len(client.keys()) == 3  # nothing was added
    assert store.stats.faults["manifest"] == 2
    assert store.stats.faults["wrongtype"] == 2
    assert store.stats.faults["pieces"] >= 1


class Talk:
    """How often a client said something and then waited for an answer."""

    def __init__(self, monkeypatch) -> None:
        self.said: list[str] = []
        for verb, name in (("s", "sendall"), ("r", "recv"), ("r", "recv_into")):
            plain = getattr(TimedSocket, name)
            monkeypatch.setattr(
                TimedSocket,
                name,
                lambda sock, *args, plain=plain, verb=verb: self.said.append(verb) or plain(sock, *args),
            )

    def trips(self, call):
        self.said.clear()
        result = call()
        return result, "".join(self.said).count("sr")


@pytest.mark.parametrize("size", [500, 10_000])
def test_many_entries_take_two_round_trips(store, server, monkeypatch, size):
    entries = {key(n): os.urandom(size) for n in range(64)}
    for name, data in entries.items():
        store.put(name, data)
    talk = Talk(monkeypatch)
    store.stats.hits = 0
    server.tell("CONFIG", "RESETSTAT")
    assert talk.trips(lambda: store.get_many([*entries, key("absent")])) == (entries, 2)
    assert (store.stats.hits, store.stats.misses) == (64, 1)
    pieces = 64 * -(-size // PIECE)
    assert server.tell("INFO", "commandstats")["cmdstat_getrange"]["calls"] == pieces
    assert talk.trips(lambda: store.get(key(3), 10, 20))[1] == 1  # its manifest is known
    assert talk.trips(lambda: store.size(key(3)))[1] == 1
    assert talk.trips(lambda: store.put(key(65), entries[key(0)]))[1] == 2


def test_a_range_fetches_only_what_it_needs(store, server):
    data = os.urandom(100 * PIECE)
    store.put(key(1), data)
    before = server.tell("INFO", "stats")["total_net_output_bytes"]
    assert store.get(key(1), 50 * PIECE - 10, 51 * PIECE + 10) == data[50 * PIECE - 10 : 51 * PIECE + 10]
    assert server.tell("INFO", "stats")["total_net_output_bytes"] - before < PIECE + 10_000


def test_a_lifetime(server):
    store = ValkeyStore.from_url(f"{server.url}?ttl=100&prefix=brief")
    store.put(key(1), os.urandom(PIECE))
    with server.client() as client:
        lives = [client.ttl(name) for name in client.keys("brief:*")]
    assert len(lives) == 2
    assert all(98 <= life <= 100 for life in lives)
    store.close()


def test_prefixes_are_separate_and_strange_keys_are_misses(store, server):
    other = ValkeyStore.from_url(server.url, prefix="other")
    store.put(key(1), b"mine")
    assert other.get(key(1)) is None
    assert list(other.keys()) == []
    for strange in ("", "x}:{y", "*", "A" * 64, key(1) + ":0", "\n"):
        assert not store.put(strange, b"data")
        assert store.get(strange) is None
        assert store.get_many([strange]) == {}
        assert store.size(strange) is None
        store.delete(strange)
    assert store.get(key(1)) == b"mine"
    assert store.stats.faults["key"] == 6 * 4
    other.close()


def test_values_stay_small(server):
    server.tell("FLUSHALL")
    server.tell("CONFIG", "SET", "proto-max-bulk-len", 4 << 20)
    store, data = ValkeyStore.from_url(server.url), os.urandom((9 << 20) + 1)
    assert store.put(key(1), data)
    assert store.get(key(1)) == data
    assert server.tell("DBSIZE") == 4
    store.close()
    server.tell("CONFIG", "SET", "proto-max-bulk-len", 512 << 20)


def test_many_threads_share_a_store(store):
    entries = {key(n): os.urandom(3 * PIECE) for n in range(20)}
    for name, data in entries.items():
        store.put(name, data)
    wrong = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(50):
            name = draw.choice(list(entries))
            start = draw.randrange(2 * PIECE)
            if draw.random() < 0.1:
                store.put(name, entries[name])
            data = store.get(name, start, start + 5000)
            if data is not None and data != entries[name][start : start + 5000]:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert set(store.stats.faults) <= {"pieces"}
    assert store.stats.hits > 1500


def test_from_a_client(server):
    with server.client(decode_responses=True) as client:
        store = ValkeyStore(client, prefix="client")
        assert store.put(key(1), b"\xff\x00")
        assert store.get(key(1)) == b"\xff\x00"
        store.close()
    with pytest.raises(TypeError, match=r"redis\.Redis"):
        ValkeyStore(object())
    with pytest.raises(ValueError, match="one of the two"):
        ValkeyStore()


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"prefix": "a{b}"}, "prefix"), ({"ttl": 0}, "ttl"), ({"piece_bytes": 1}, "piece_bytes")],
)
def test_settings_that_make_no_sense(server, settings, what):
    with pytest.raises(ValueError, match=what):
        ValkeyStore.from_url(server.url, **settings)


def test_urls():
    assert parse("redis://me:secret@host:7000/2?prefix=p&ssl_password=x").url == "redis://me@host:7000/2?prefix=p"
    assert "secret" not in repr(parse("redis://me:secret@host:7000/2"))
    assert parse("redis+cluster://host").cluster
    assert parse("valkey://host?cluster=true").cluster
    assert parse("valkeys://host").settings["connection_class"] is redis.SSLConnection
    for wrong in ("http://host", "redis+x://host", "redis://host?ttl=soon", "redis+cluster://host/3", "redis://h:port"):
        with pytest.raises(ValueError, match=r"scheme|query|Cluster"):
            parse(wrong)


def test_opening_says_what_is_wrong():
    with pytest.raises(StoreError, match=r"connection.*look whether it runs"):
        ValkeyStore.from_url(f"redis://127.0.0.1:{free_port()}")
    with Server("--requirepass", "secret") as locked:
        with pytest.raises(StoreError, match=r"auth.*password"):
            ValkeyStore.from_url(locked.url)
        with pytest.raises(StoreError, match=r"auth.*password"):
            ValkeyStore.from_url(f"redis://:wrong@127.0.0.1:{locked.port}")
        with pytest.raises(StoreError, match="no Cluster"):
            ValkeyStore.from_url(f"redis://:secret@127.0.0.1:{locked.port}?cluster=true")
        store = ValkeyStore.from_url(f"redis://:secret@127.0.0.1:{locked.port}")
        assert store.put(key(1), b"data")
        assert "secret" not in store.url
        store.close()
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port, pytest.raises(StoreError, match=r"protocol.*TLS"):
        ValkeyStore.from_url(f"redis://127.0.0.1:{port}")


def test_the_rights_that_the_guide_lists_are_enough():
    guide = (Path(__file__).parents[2] / "docs/guides/valkey.md").read_text()
    rights = re.search(r"\| ACL \| `([^`]*)`", guide)[1].replace("\\|", "|").split()
    with Server() as server:
        server.tell("ACL", "SETUSER", "chunks", "on", ">secret", "-@all", *rights, "~blendkv:*")
        store = ValkeyStore.from_url(f"redis://chunks:secret@127.0.0.1:{server.port}", piece_bytes=PIECE)
        data = os.urandom(3 * PIECE)
        assert store.put(key(1), data)
        assert store.put(key(1), data)
        assert store.get(key(1)) == data
        assert list(store.keys()) == [key(1)]
        assert [(e.key, e.size, e.last_used, e.hits) for e in store.entries()] == [(key(1), len(data), None, None)]
        store.delete(key(1))
        assert server.tell("DBSIZE") == 0
        assert not store.stats.faults
        store.close()
        other = ValkeyStore.from_url(f"redis://chunks:secret@127.0.0.1:{server.port}?prefix=other")
        assert not other.put(key(1), data)
        assert other.get(key(1)) is None
        assert other.stats.faults == {"permission": 2}
        other.close()
        server.tell(
            "ACL", "SETUSER", "names", "on", ">secret", "-@all", *NAMES.split(), "~blendkv:names", "&blendkv:names"
        )
        centre = ValkeyCentre(f"redis://names:secret@127.0.0.1:{server.port}")
        region = Region(centre)
        until(lambda: region.state.connected, 5)
        assert region.put("a", [key(1)]).version == 1
        assert region.get("a", force_latest=True).keys == (key(1),)
        region.close()
        centre.close()


@pytest.fixture(scope="module")
def alone():
    """A Cluster of one."""
    with member() as server:
        server.tell("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        until(server.well, 10)
        yield server


def test_a_cluster_is_found_out(alone, monkeypatch):
    entries = {key(n): os.urandom(3 * PIECE) for n in range(64)}
    for url in (alone.url, alone.url + "?cluster=true", alone.url.replace("redis:", "valkey+cluster:")):
        store = ValkeyStore.from_url(url, piece_bytes=PIECE)
        assert store._servers.cluster
        assert all(store.put(name, data) for name, data in entries.items())
        talk = Talk(monkeypatch)
        assert talk.trips(lambda store=store: store.get_many(entries)) == (entries, 1)  # it knows their manifests
        other = ValkeyStore.from_url(url, piece_bytes=PIECE)
        assert talk.trips(lambda store=other: store.get_many(entries)) == (entries, 2)
        other.close()
        other = ValkeyStore.from_url(url, piece_bytes=PIECE)
        sizes = {name: len(data) for name, data in entries.items()}
        assert talk.trips(lambda store=other: store.sizes([*entries, key("none")])) == (sizes, 1)
        assert talk.trips(lambda store=other: store.get_many(entries)) == (entries, 1)
        assert all(store.put(name, data[:5]) for name, data in entries.items())  # others write them anew
        assert other.get_many(entries) == {name: data[:5] for name, data in entries.items()}
        assert all(store.put(name, data) for name, data in entries.items())
        other.close()
        assert sorted(store.keys()) == sorted(entries)
        assert store.get(key(5), 10, 20) == entries[key(5)][10:20]
        store.delete(key(5))
        assert store.get(key(5)) is None
        assert not store.stats.faults
        store.close()
    with redis.RedisCluster(host="127.0.0.1", port=alone.port) as client:
        store = ValkeyStore(client, piece_bytes=PIECE)
        assert store.get(key(6)) == entries[key(6)]
        store.close()


def test_a_slot_that_nobody_serves_is_a_miss(alone):
    store = ValkeyStore.from_url(alone.url)
    assert store.put(key(1), b"data")
    alone.tell("CLUSTER", "DELSLOTS", alone.tell("CLUSTER", "KEYSLOT", "{" + key(1) + "}"))
    assert store.get(key(1)) is None
    assert not store.put(key(1), b"data")
    assert set(store.stats.faults) <= {"clusterdown", "pieces"}
    alone.tell("CLUSTER", "ADDSLOTS", alone.tell("CLUSTER", "KEYSLOT", "{" + key(1) + "}"))
    until(lambda: store.put(key(1), b"data"), 5)
    assert store.get(key(1)) == b"data"
    store.close()


def test_slots_on_the_move_cost_a_redirect_and_no_miss():
    with member() as old, member() as new:
        old.tell("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        old.tell("CLUSTER", "MEET", "127.0.0.1", new.port, bus(new))
        until(lambda: old.well() and new.well(), 10)
        theirs, mine = old.tell("CLUSTER", "MYID"), new.tell("CLUSTER", "MYID")
        until(lambda: mine in old.nodes() and theirs in new.nodes(), 10)
        store, data = ValkeyStore.from_url(old.url, piece_bytes=PIECE), os.urandom(5 * PIECE)
        store.put(key(1), data)
        slot = old.tell("CLUSTER", "KEYSLOT", "{" + key(1) + "}")
        new.tell("CLUSTER", "SETSLOT", slot, "IMPORTING", theirs)
        old.tell("CLUSTER", "SETSLOT", slot, "MIGRATING", mine)
        names = old.tell("CLUSTER", "GETKEYSINSLOT", slot, 100)
        assert len(names) == 6
        for name in names:
            old.tell("MIGRATE", "127.0.0.1", new.port, name, 0, 5000)
            assert store.get(key(1)) == data  # ASK, for those that went
            assert store.get_many([key(1)]) == {key(1): data}
        for server in (new, old):
            server.tell("CLUSTER", "SETSLOT", slot, "NODE", mine)
        assert store.get(key(1)) == data  # MOVED
        assert store.put(key(1), data[:PIECE])
        assert store.get(key(1)) == data[:PIECE]
        assert not store.stats.faults
        store.close()


def test_an_answer_that_comes_late_answers_nothing_else(server):
    with Proxy(server.port) as proxy:
        store = ValkeyStore.from_url(proxy.url)
        values = {key(n): bytes([n]) * 5000 for n in range(4)}
        for name, data in values.items():
            store.put(name, data)
        for late in (1, 2, 3):
            proxy.rate = 0.0
            with deadline(0.25):
                assert store.get(key(late)) is None
            timer = threading.Timer(0.05, lambda: setattr(proxy, "rate", None))
            timer.start()
            assert store.get(key(0)) in (values[key(0)], None)
            timer.join()
            assert store.get(key(0)) == values[key(0)]
        assert store.stats.faults["timeout"] == 3
        proxy.garble = lambda data: data + data
        assert store.get(key(1), 0, 10) is None
        proxy.garble = None
        assert store.stats.faults["protocol"] == 1
        assert store.get(key(2)) == values[key(2)]
        store.close()


@pytest.fixture
def tls(tmp_path):
    """A server that speaks TLS with a certificate of its own making."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run(make, check=True, capture_output=True)
    port = free_port()
    files = ["--tls-key-file", key, "--tls-cert-file", cert, "--tls-ca-cert-file", cert, "--tls-auth-clients", "no"]
    with Server("--tls-port", str(port), *files) as server:
        if not server.answers():
            pytest.skip("the server was built without TLS")
        yield port, cert


def test_tls(tls):
    port, cert = tls
    store = ValkeyStore.from_url(f"rediss://127.0.0.1:{port}?ssl_ca_certs={cert}")
    data = os.urandom(9 << 20)
    assert store.put(key(1), data)
    assert store.get(key(1)) == data
    assert store.get_many([key(1), key(2)]) == {key(1): data}
    assert store.get(key(1), 5, 50) == data[5:50]
    store.close()
    with Proxy(port) as proxy:
        store = ValkeyStore.from_url(f"rediss://127.0.0.1:{proxy.port}?ssl_ca_certs={cert}")
        assert store.get(key(1)) == data
        proxy.rate = 1.0
        for _ in range(3):
            start = time.monotonic()
            with deadline(0.25):
                assert store.get(key(1)) is None
            assert time.monotonic() - start < 0.275 + SLACK_S
        proxy.rate = None
        proxy.drop()
        assert store.get(key(1)) == data
        store.close()
    with pytest.raises(StoreError, match="connection"):
        ValkeyStore.from_url(f"rediss://127.0.0.1:{port}")  # nobody vouches for that certificate
    with pytest.raises(StoreError, match=r"protocol|connection"):
        ValkeyStore.from_url(f"redis://127.0.0.1:{port}")


def test_a_closed_store_misses(server):
    store = ValkeyStore.from_url(server.url)
    store.close()
    assert store.get(key(1)) is None
    assert not store.put(key(1), b"data")
    assert list(store.keys()) == []
    store.close()


def test_opened_without_asking(server):
    store = ValkeyStore(url=server.url, check=False)
    until(lambda: store.put(key(1), b"data"), 2)
    assert store.get(key(1)) == b"data"
    store.close()


def test_after_a_fork(store):
    store.put(key(1), b"data")
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        child = os.fork()
    if child == 0:
        os.write(write, store.get(key(1)) or b"none")
        os._exit(0)
    assert store.get(key(1)) == b"data"
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"data"
    assert store.get(key(1)) == b"data"
    os.close(read)
    os.close(write)


def test_a_deadline_that_has_passed_asks_nobody(store):
    store.put(key(1), b"data")
    trips = store._servers.trips
    with deadline(0.0):
        assert store.get(key(1)) is None
        assert store.get_many([key(1)]) == {}
        assert not store.put(key(2), b"data")
    assert store.stats.faults["deadline"] == 3
    assert store._servers.nodes()[0].breaker.state == "closed"
    assert store.get(key(1)) == b"data"
    assert store._servers.trips >= trips
