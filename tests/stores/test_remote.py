"""Stores by fsspec: S3 (moto on 127.0.0.1), HTTP, and what open_store says when it cannot."""

import http.server
import threading
import time
import uuid
from functools import partial

import pytest

from blendkv.contract import bytes_for, key_for
from blendkv.errors import StoreError
from blendkv.stores import DiskStore, RemoteStore, deadline, open_store
from blendkv.stores.breaker import Breaker
from blendkv.testing import StoreContract
from tests.patience import SLACK_S
from tests.s3 import BUCKET, OPTIONS, Proxy, free_port, moto


@pytest.fixture(scope="module")
def s3():
    with moto() as port:
        yield port


class TestS3(StoreContract):
    @pytest.fixture
    def store(self, s3):
        store = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", endpoint_url=f"http://127.0.0.1:{s3}", **OPTIONS)
        assert isinstance(store, RemoteStore)
        yield store
        store.close()


def test_no_bucket(s3):
    with pytest.raises(StoreError, match="no bucket 'nowhere'; make it"):
        open_store("s3://nowhere/x", endpoint_url=f"http://127.0.0.1:{s3}", **OPTIONS)


def test_denied(s3):
    proxy = Proxy(s3)
    proxy.fault = "403"
    with pytest.raises(StoreError, match=r"refuses.*look at key, secret"):
        open_store(f"s3://{BUCKET}/x", endpoint_url=proxy.url, **OPTIONS)
    proxy.close()


def test_unreachable():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(StoreError, match="does not answer"):
        open_store(f"s3://{BUCKET}/x", endpoint_url=url, **OPTIONS)
    with pytest.raises(StoreError, match="does not answer"):
        open_store(url + "/x")


@pytest.fixture
def web(tmp_path):
    """A folder of the disk store, served by a server that knows no ranges."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_http_reads_what_a_disk_store_wrote(tmp_path, web):
    key, data = key_for(1), bytes_for(1)
    DiskStore(tmp_path).put(key, data)
    store = open_store(web)
    assert store.get(key) == data
    assert store.get(key, 10, 20) == data[10:20]
    assert store.size(key) == len(data)
    assert store.get(key_for(2)) is None
    assert store.get_many([key, key_for(2)]) == {key: data}
    assert not store.put(key_for(2), b"x")
    store.delete(key)
    assert store.get(key) == data
    assert store.stats.faults == {"readonly": 1}


def test_messages_and_names():
    with pytest.raises(StoreError, match=r"unknown scheme 'nope'.*file.*s3"):
        open_store("nope://x")
    with pytest.raises(StoreError, match="memory holds chunks"):
        open_store("memory://")
    with pytest.raises(StoreError, match="three slashes"):
        open_store("file://host/x")
    assert RemoteStore("memory://user:password@x/y").url == "memory://x/y"


def test_a_missing_package_is_named(monkeypatch):
    import fsspec.core

    def missing(*args, **kwargs):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("blendkv.stores.remote.url_to_fs", missing)
    with pytest.raises(StoreError, match=r"pip install 'blendkv\[s3\]'"):
        open_store("s3://bucket/x")
    assert fsspec.core.url_to_fs is not missing


def test_a_plugin_opens_its_scheme(monkeypatch):
    class Entry:
        name = "mine"

        def load(self):
            return lambda url, **options: (url, options)

    monkeypatch.setattr("blendkv.stores.plugins", {"blendkv.stores": {"mine": Entry()}}.get)
    assert open_store("mine://x", a=1) == ("mine://x", {"a": 1})


def test_late_answers_are_dropped():
    store, key = RemoteStore("memory://late", calls=2), key_for(1)
    store.put(key, b"data")
    release, slow = threading.Event(), store._fs.cat_file

    def cat_file(*args, **kwargs):
        release.wait(30)
        return slow(*args, **kwargs)

    store._fs.cat_file = cat_file
    for _ in range(3):  # the third finds no free slot
        start = time.monotonic()
        with deadline(0.05):
            assert store.get(key) is None
        assert time.monotonic() - start < 0.15 + SLACK_S
    assert store.stats.faults == {"deadline": 3}
    release.set()
    assert store.get(key) == b"data"


def test_the_breaker_asks_once_a_second():
    now = [0.0]
    breaker = Breaker(clock=lambda: now[0])
    for _ in range(5):
        assert breaker.allows()
        breaker.failed()
    assert breaker.state == "open"
    asked = 0
    for _ in range(100):
        now[0] += 0.05
        if breaker.allows():
            asked += 1
            breaker.failed()
    assert 4 <= asked <= 5
    now[0] += 1.0
    assert breaker.allows()
    assert not breaker.allows()
    breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.allows()
