"""A gateway as a store: the contract of all stores, tokens, and a library that uses it."""

import pytest

from blendkv.errors import StoreError
from blendkv.stores import DiskStore, open_store
from blendkv.stores.http import token_for
from blendkv.testing import StoreContract
from tests.serving.gateways import READER, TOKEN, chunk_file, disk, gateway, path_of
from tests.stores.servers import BINARY, Server


class TestGatewayOverFolder(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        with gateway(disk(tmp_path), verify=False, deletes=True) as running:
            store = open_store(running.url + "/chunks", token=TOKEN)
            assert not store.read_only
            yield store
            store.close()


@pytest.fixture(scope="module")
def server():
    with Server() as made:
        yield made


@pytest.mark.skipif(BINARY is None, reason="no valkey-server or redis-server")
class TestGatewayOverValkey(StoreContract):
    @pytest.fixture
    def store(self, server):
        server.tell("FLUSHALL")
        below = open_store(server.url)
        with gateway(below, verify=False, deletes=True) as running:
            store = open_store(running.url + "/chunks", token=TOKEN)
            yield store
            store.close()
        below.close()


def test_tokens_of_clients(tmp_path, monkeypatch):
    key, data = chunk_file(0)
    with gateway(disk(tmp_path)) as running:
        url = running.url + "/chunks"
        monkeypatch.delenv("BLENDKV_TOKEN", raising=False)
        for options in ({}, {"token": "not-that-one"}):
            with pytest.raises(StoreError, match=r"refuses: give its token with token=\.\.\. or \$BLENDKV_TOKEN"):
                open_store(url, **options)
        monkeypatch.setenv("BLENDKV_TOKEN", TOKEN)
        store = open_store(url)
        assert store.put(key, data)
        assert store.get(key) == data
        assert TOKEN not in repr(vars(store)) + store.url + repr(store._fs) + store._fs.to_json()
        reader = open_store(url, token=READER)
        assert reader.read_only
        assert reader.get(key, 3, 9) == data[3:9]
        assert not reader.put(key, data)
        assert dict(reader.stats.faults) == {"readonly": 1}


def test_which_token_goes_where(monkeypatch):
    monkeypatch.setenv("BLENDKV_TOKEN", "a.example:8765=one, b.example=two,10.0.0.1=three=")
    assert token_for("http://a.example:8765/chunks") == "one"
    assert token_for("https://B.EXAMPLE:1/chunks") == "two"
    assert token_for("https://user:password@b.example/chunks") == "two"
    assert token_for("http://10.0.0.1/x") == "three="
    for url in ("http://a.example/chunks", "http://a.example:1/x", "http://evil.example/a.example:8765=one"):
        assert token_for(url) is None
    monkeypatch.setenv("BLENDKV_TOKEN", "a.example=one,general")
    assert token_for("http://a.example/") == "one"
    assert token_for("http://other.example/") == "general"


def test_what_a_gateway_refuses_is_a_counted_fault(tmp_path):
    (key, data), (other, _) = chunk_file(0), chunk_file(1)
    with gateway(disk(tmp_path)) as running:
        store = open_store(running.url + "/chunks", token=TOKEN)
        assert not store.put(other, data)
        assert store.stats.put_failures == 1
        assert store.put(key, data)


def test_a_gateway_that_goes_away_is_a_miss(tmp_path):
    key, data = chunk_file(0)
    with gateway(disk(tmp_path)) as running:
        store = open_store(running.url + "/chunks", token=TOKEN)
        store.put(key, data)
    assert store.get(key) is None
    assert store.get(key, 0, 5) is None
    assert not store.put(key, data)
    assert store.stats.faults["io"] == 3


def test_two_gateways_over_one_store_are_interchangeable(tmp_path):
    """Nothing is kept in between: each request may go to either, also in the middle of an entry."""
    with gateway(DiskStore(tmp_path)) as a, gateway(DiskStore(tmp_path)) as b:
        key, data = chunk_file(0)
        assert a.ask("PUT", path_of(key), data)[0] == 201
        tag = a.ask("HEAD", path_of(key))[1]["etag"]
        first = a.ask("GET", path_of(key), Range="bytes=0-999")[2]
        status, _, rest = b.ask("GET", path_of(key), Range="bytes=1000-", **{"If-Range": tag})
        assert (status, first + rest) == (206, data)


def test_a_library_over_a_gateway(tmp_path, attached):
    """Computed by one process, reused by another that knows nothing but the gateway."""
    import torch

    from blendkv import ChunkLibrary
    from blendkv.testing import byte_tokenizer

    model, tokenizer = attached(), byte_tokenizer()
    texts = ["The first document says this.", "And the second one says that."]
    with gateway(disk(tmp_path)) as running:
        answers = []
        for turn in range(2):
            store = open_store(running.url + "/chunks", token=TOKEN)
            library = ChunkLibrary(model, tokenizer, store=store, namespace="tests", deadline_s=30)
            inputs = library(texts, "What does it say?")
            answers.append(model.generate(**inputs, max_new_tokens=4, do_sample=False))
            assert store.stats.hits == (0 if turn == 0 else len(texts))
            library.close() if hasattr(library, "close") else store.close()
        assert torch.equal(*answers)
        assert running.metric("blendkv_gateway_received_bytes_total") > 0


def test_listing_by_the_command(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from blendkv.cli import main

    key, data = chunk_file(0)
    monkeypatch.setenv("BLENDKV_TOKEN", TOKEN)
    with gateway(disk(tmp_path)) as running:
        open_store(running.url + "/chunks").put(key, data)
        for command in (["ls"], ["verify-store"]):
            result = CliRunner().invoke(main, [*command, running.url + "/chunks"])
            assert result.exit_code == 0, result.output
        assert "1 entry" in result.output
        assert TOKEN not in result.output


FAULTS = ["503", "500", "403", "404", "truncated", "reset", "stall", "garbage", "longer", "range ignored"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_road(tmp_path, fault):
    """Dead, stalled or lying on the way: a miss, in time; or bytes that a reader finds wanting; never an exception."""
    import time

    from blendkv.container import ContainerReader
    from blendkv.errors import ChunkFileError
    from blendkv.stores import deadline
    from tests.s3 import Proxy

    key, data = chunk_file(0)
    with gateway(disk(tmp_path)) as running:
        proxy = Proxy(running.port)
        store = open_store(proxy.url + "/chunks", token=TOKEN)
        assert running.ask("PUT", path_of(key), data)[0] == 201
        assert store.get(key) == data
        proxy.fault = fault
        begin = time.monotonic()
        with deadline(0.3 if fault == "stall" else 9.0):
            got, part = store.get(key), store.get(key, 100, 200)
        assert time.monotonic() - begin < 10  # the stall lasts 30 s
        if fault in ("range ignored", "longer", "garbage"):
            assert part in (None, data[100:200]) or fault == "garbage"
            if fault != "range ignored":
                with pytest.raises(ChunkFileError):
                    ContainerReader(got)
        else:
            assert got is part is None
            assert store.stats.misses == 2
        proxy.fault = ""
        proxy.stalled.set()
        assert store.get(key) == data
        proxy.close()


def test_what_can_be_read_at_once(tmp_path):
    store = disk(tmp_path)
    key, data = chunk_file(0)
    store.put(key, data)
    with store.source(key) as source:
        for start, stop in ((0, len(data)), (5, 6), (100, 9000)):
            assert source.read_at_once(start, stop - start) in (data[start:stop], None)
        assert source.read_at_once(0, len(data) + 1) is None
    assert source.read_at_once(0, 1) is None
