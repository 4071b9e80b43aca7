"""A regional gateway: reads through to a central one, keeps what it fetched, and hears of names."""

import json
import threading
import time

import pytest

from blendkv.errors import StoreError
from blendkv.stores import open_store
from blendkv.stores.catalog import MemoryCentre, Named, Region
from blendkv.stores.http_centre import HttpCentre
from tests.patience import until
from tests.serving.gateways import AUTH, TOKEN, chunk_file, disk, gateway, path_of
from tests.stores.servers import BINARY, Server

KEYS = ("a" * 64, "b" * 64)


class Pair:
    def __init__(self, tmp_path, centre, **settings):
        self.central = gateway(disk(tmp_path / "central"), catalog=centre)
        far = self.central.__enter__()
        self.far, self.local = far, disk(tmp_path / "region")
        self.store = open_store(far.url + "/chunks", token=TOKEN)
        self.names = HttpCentre(far.url, token=TOKEN, beat=0.05)
        self.regional = gateway(self.local, central=self.store, catalog=self.names, **settings)
        self.near = self.regional.__enter__()

    def close(self):
        self.regional.__exit__(None, None, None)
        self.names.close()
        self.central.__exit__(None, None, None)


@pytest.fixture
def pair(tmp_path):
    made = Pair(tmp_path, MemoryCentre())
    yield made
    made.close()


def test_reads_through_and_keeps(pair):
    key, data = chunk_file(0)
    assert pair.near.ask("GET", path_of(key))[0] == 404
    assert pair.near.ask("HEAD", path_of(key))[0] == 404
    pair.far.ask("PUT", path_of(key), data)
    status, headers, _ = pair.near.ask("HEAD", path_of(key))
    assert (status, headers["content-length"]) == (200, str(len(data)))
    assert pair.local.size(key) is None  # a look fetches nothing
    status, near, body = pair.near.ask("GET", path_of(key), Range="bytes=10-19")
    assert (status, body) == (206, data[10:20])
    assert near["etag"] == headers["etag"]
    assert pair.local.get(key) == data
    served = pair.far.metric("blendkv_gateway_sent_bytes_total")
    assert pair.near.ask("GET", path_of(key))[2] == data
    assert pair.far.metric("blendkv_gateway_sent_bytes_total") == served


def test_many_who_ask_at_once_cost_one_transfer(pair):
    key, data = chunk_file(1, tokens=2000)
    pair.far.ask("PUT", path_of(key), data)
    answers, barrier = [], threading.Barrier(12)

    def ask():
        barrier.wait()
        answers.append(pair.near.ask("GET", path_of(key))[2])

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [data] * 12
    assert pair.far.metric("blendkv_gateway_sent_bytes_total") <= 2 * len(data)  # one, or two that just missed it


def test_puts_reach_the_centre(pair):
    key, data = chunk_file(2)
    status, headers, _ = pair.near.ask("PUT", path_of(key), data)
    assert (status, headers["blendkv-central"]) == (201, "kept")
    assert pair.far.ask("GET", path_of(key))[2] == data
    assert pair.local.get(key) == data


def test_without_the_centre_a_region_serves_what_it_has(pair):
    (key, data), (other, more) = chunk_file(0), chunk_file(1)
    pair.near.ask("PUT", path_of(key), data)
    pair.far.server.stop()
    until(lambda: pair.store.get(key) is None)
    assert pair.near.ask("GET", path_of(key))[2] == data
    begin = time.monotonic()
    assert pair.near.ask("GET", path_of(other))[0] == 404
    assert time.monotonic() - begin < 20
    status, headers, _ = pair.near.ask("PUT", path_of(other), more)
    assert (status, headers["blendkv-central"]) == (201, "failed")
    assert pair.near.ask("GET", path_of(other))[2] == more


def test_a_lying_centre_is_not_believed(tmp_path):
    (key, data), (other, _) = chunk_file(0), chunk_file(1)
    lying = disk(tmp_path / "lies")
    lying.put(other, data)  # under another one's key
    local = disk(tmp_path / "region")
    with gateway(local, central=lying) as near:
        assert near.ask("GET", path_of(other))[0] == 404
        assert list(local.keys()) == []
        lying.put(key, data)
        assert near.ask("GET", path_of(key))[2] == data
        assert near.metric("blendkv_gateway_central_total") == 2


def name(running, text, **query):
    path = f"/names/{text}" + ("?" + "&".join(f"{k}={v}" for k, v in query.items()) if query else "")
    status, _, body = running.ask("GET", path)
    return json.loads(body) if status == 200 else status


def put_name(running, text, keys):
    status, _, body = running.ask("PUT", f"/names/{text}", json.dumps({"keys": keys}))
    return json.loads(body) if status == 200 else status


def test_names(pair):
    assert name(pair.far, "manual") == 404
    assert put_name(pair.far, "manual", KEYS)["version"] == 1
    assert name(pair.far, "manual")["keys"] == list(KEYS)
    assert name(pair.near, "manual", force_latest=1)["version"] == 1
    assert put_name(pair.near, "manual", KEYS[:1])["version"] == 2  # a region hands it on
    assert name(pair.far, "manual", force_latest=1)["keys"] == list(KEYS[:1])
    assert put_name(pair.far, "manual", [])["version"] == 3  # forgotten
    assert name(pair.far, "manual") == 404
    assert put_name(pair.far, "a%2Fb%20%C3%A9", KEYS)["name"] == "a/b é"
    assert name(pair.near, "a%2Fb%20%C3%A9")["name"] == "a/b é"


def test_a_region_is_told_of_updates(pair):
    put_name(pair.far, "manual", KEYS)
    assert name(pair.near, "manual")["version"] == 1
    region = pair.near.server.app._names.region
    until(lambda: region.state.connected and region.state.lag < 1)
    put_name(pair.far, "manual", KEYS[:1])
    until(lambda: region._known["manual"].named.version == 2)  # nobody asked
    asked = region.state.asked
    assert name(pair.near, "manual")["version"] == 2
    until(lambda: (name(pair.near, "manual"), region.state.served > 0)[1])
    assert region.state.asked <= asked + 1
    assert pair.near.metric("blendkv_gateway_names_lag_seconds") < 5


def test_answers_are_never_further_behind_than_said(pair):
    """A writer at the centre, readers in the region: a read begins after a put has ended by more than `delay`."""
    region = pair.near.server.app._names.region
    written, wrong, stop = [(0.0, 0)], [], threading.Event()

    def write():
        for _ in range(40):
            version = put_name(pair.far, "doc", KEYS)["version"]
            written.append((time.monotonic(), version))
            time.sleep(0.03)
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not stop.is_set():
        begin, known = time.monotonic(), list(written)
        found = region.get("doc")
        least = max(version for when, version in known if when < begin - region.delay)
        if (found.version if found else 0) < least:
            wrong.append((found, least))
        reads += 1
    writer.join()
    assert not wrong
    assert reads > 40


def test_bad_names(pair):
    bad = ['{"keys": ["x"]}', '{"keys": "x"}', "{}", "[]", "nonsense", "[" * 100_000]
    for body in bad:
        assert pair.far.ask("PUT", "/names/x", body)[0] == 400, body[:20]
    assert pair.far.ask("PUT", "/names/x", b" " * (9 << 20))[0] == 413
    for path in ("/names/", "/names/%ff", "/names/" + "x" * 5000):
        assert pair.far.ask("GET", path)[0] == 404
    assert pair.far.ask("DELETE", "/names/x")[0] == 405
    for query in ("after=x", "wait=x", "after=1&wait=nan&epoch=%00"):
        status, _, body = pair.far.ask("GET", "/names?" + query)
        assert status == 400 or json.loads(body)["updates"] == []


def test_a_gateway_without_a_catalog(tmp_path):
    with gateway(disk(tmp_path)) as running:
        status, _, body = running.ask("GET", "/names/x")
        assert status == 501
        assert b"--catalog" in body
        with pytest.raises(StoreError, match="--catalog"):
            HttpCentre(running.url, token=TOKEN)


def test_asking_at_all(tmp_path):
    from tests.s3 import free_port

    with pytest.raises(StoreError, match="does not answer"):
        HttpCentre(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ValueError, match="http://host:port"):
        HttpCentre("redis://x")
    with gateway(disk(tmp_path), catalog=MemoryCentre()) as running:
        with pytest.raises(StoreError, match="refuses: give its token"):
            HttpCentre(running.url, token="not-that-one-at-all")
        centre = HttpCentre(running.url, token=TOKEN)
        with pytest.raises(ValueError, match="is no key"):
            centre.write("x", ["no key"])
        assert centre.read("x") is None
        centre.close()


class Broken(MemoryCentre):
    """One that can be switched off."""

    off = False

    def read(self, name):
        if self.off:
            raise StoreError("off")
        return super().read(name)

    write_ = MemoryCentre.write

    def write(self, name, keys):
        if self.off:
            raise StoreError("off")
        return self.write_(name, keys)


def test_a_centre_that_cannot_be_asked_is_no_unknown_name(tmp_path):
    centre = Broken()
    with gateway(disk(tmp_path), catalog=centre) as running:
        put_name(running, "x", KEYS)
        centre.off = True
        assert name(running, "x")["version"] == 1  # known
        assert name(running, "x", force_latest=1) == 503
        assert name(running, "y") == 503
        assert put_name(running, "x", KEYS) == 503
        client = HttpCentre(running.url, token=TOKEN)
        with pytest.raises(StoreError, match="503"):
            client.read("x")
        client.close()


def test_following_by_hand(tmp_path):
    centre = MemoryCentre()
    with gateway(disk(tmp_path), catalog=centre) as running:

        def news(**query):
            path = "/names?" + "&".join(f"{k}={v}" for k, v in query.items())
            return json.loads(running.ask("GET", path)[2])

        first = news()
        assert first["updates"] == []
        centre.write("x", KEYS)
        second = news(after=first["next"], epoch=first["epoch"], wait=5)
        assert [(each["name"], each["version"]) for each in second["updates"]] == [("x", 1)]
        assert second["heard"] >= 0  # all that was announced before it was asked
        begin = time.monotonic()
        threading.Timer(0.1, centre.write, ("y", KEYS)).start()
        third = news(after=second["next"], epoch=second["epoch"], wait=50)
        assert [each["name"] for each in third["updates"]] == ["y"]
        assert time.monotonic() - begin < 30  # it did not wait for the end
        assert news(after=third["next"], epoch=third["epoch"], wait=0.01)["updates"] == []
        gap = news(after=0, epoch="another")
        assert gap["updates"] == []
        assert gap["epoch"] == third["epoch"]
        ahead = news(after=third["next"] + 5, epoch=third["epoch"])
        assert ahead["epoch"] != third["epoch"]


def test_who_missed_too_much_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("blendkv.serving.names.REMEMBERED", 3)
    centre = MemoryCentre()
    with gateway(disk(tmp_path), catalog=centre) as running:
        first = json.loads(running.ask("GET", "/names")[2])
        for _ in range(4):
            centre.write("x", KEYS)
        path = f"/names?after={first['next']}&epoch={first['epoch']}"
        assert json.loads(running.ask("GET", path)[2])["epoch"] != first["epoch"]
        path = f"/names?after={first['next'] + 1}&epoch={first['epoch']}"
        assert len(json.loads(running.ask("GET", path)[2])["updates"]) == 3
        monkeypatch.setattr("blendkv.serving.names.REMEMBERED_KEYS", 5)
        centre.write("x", KEYS)  # three of two keys each
        path = f"/names?after={first['next'] + 2}&epoch={first['epoch']}"
        assert json.loads(running.ask("GET", path)[2])["epoch"] != first["epoch"]
        path = f"/names?after={first['next'] + 3}&epoch={first['epoch']}"
        assert len(json.loads(running.ask("GET", path)[2])["updates"]) == 2


def test_a_listener_notices_that_it_was_away(tmp_path):
    centre = MemoryCentre()
    heard = []
    with gateway(disk(tmp_path), catalog=centre) as running:
        client = HttpCentre(running.url, token=TOKEN, beat=0.05, timeout=2)
        listener = client.follow(heard.append)
        until(lambda: listener.since < float("inf"))
        centre.write("x", KEYS)
        until(lambda: heard)
        assert heard[0] == Named("x", KEYS, 1, heard[0].when)
    until(lambda: listener.since == float("inf"))
    listener.close()
    client.close()


def test_a_region_does_not_trust_silence(tmp_path):
    """Announcements that get stuck on the way to the central gateway: a region there asks, and answers rightly."""

    class Stuck(MemoryCentre):
        def follow(self, heard):
            following = super().follow(lambda named: None)
            return type("Following", (), {"since": following.since, "as_of": following.since, "close": following.close})

    centre = Stuck()
    with gateway(disk(tmp_path), catalog=centre) as running:
        client = HttpCentre(running.url, token=TOKEN, beat=0.02)
        region = Region(client, delay=0.3)
        centre.write("x", KEYS)
        until(lambda: region.state.connected)
        assert region.get("x").version == 1
        centre.write("x", KEYS[:1])
        time.sleep(0.4)
        assert region.get("x").version == 2
        assert region.state.lag > 0.3
        region.close()
        client.close()


@pytest.mark.skipif(BINARY is None, reason="no valkey-server or redis-server")
def test_names_in_valkey_through_two_gateways(tmp_path):
    """No state of their own: what is put through one is heard through the other."""
    from blendkv.stores.valkey_centre import ValkeyCentre

    with Server() as server:
        a, b = ValkeyCentre(server.url), ValkeyCentre(server.url)
        with gateway(disk(tmp_path), catalog=a) as one, gateway(disk(tmp_path), catalog=b) as two:
            assert put_name(one, "x", KEYS)["version"] == 1
            assert name(two, "x")["version"] == 1
            client = HttpCentre(two.url, token=TOKEN, beat=0.05)
            region = Region(client, delay=5)
            until(lambda: region.state.connected)
            assert region.get("x").version == 1
            assert put_name(one, "x", KEYS[:1])["version"] == 2
            until(lambda: region._known["x"].named.version == 2)
            region.close()
            client.close()
        a.close()
        b.close()


def test_authorization_is_needed_for_names_too(pair):
    assert pair.far.ask("GET", "/names/x", None, {})[0] == 401
    assert AUTH
