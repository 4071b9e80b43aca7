import time

import pytest

from blendkv import Pool, TieredStore
from tests.cases.common import assert_same_answer, model_of
from tests.cases.stored import ask, full, library, local, within
from tests.chunks import assert_same, make_chunk
from tests.patience import SLACK_S, STRICT, until
from tests.stores.servers import BINARY, Proxy, Server

pytestmark = pytest.mark.skipif(BINARY is None, reason="no valkey-server or redis-server on this machine")

DEADLINE, NOISE = 0.25, 0.05 + SLACK_S
BACK = 2.0 + SLACK_S
LONG = [" ".join(f"Sentence {n} of a document that takes long to send." for n in range(6))]


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture
def server():
    with Server() as server:
        yield server


@pytest.fixture
def proxy(server):
    with Proxy(server.port) as proxy:
        yield proxy


class Reader:
    """A library that reads `LONG` from a server, with nothing in memory, and holds every answer against its time.

    Its memory holds nothing ever: what a prompt went on without may come after it, and would be kept there.

    Attributes:
        waited: longest that a prompt waited for the store beyond one that has none, in seconds.
    """

    def __init__(self, model, url: str, **settings) -> None:
        from blendkv.stores.valkey import ValkeyStore

        self.store = ValkeyStore(url=url, **settings)
        tiers, reads = TieredStore(Pool(1), self.store), {"on_miss": "recompute", "deadline_s": DEADLINE}
        self.kv = library(model, tiers, namespace="n", **reads)
        self.writer = library(model, TieredStore(Pool(), self.store), namespace="n")
        self.blended, self.computed, self.waited = local(self.kv, LONG), full(self.kv, LONG), 0.0
        none = library(model, "memory://", on_miss="recompute")
        self.usual = min(ask(none, LONG)[1].seconds["load"] for _ in range(5))

    @property
    def breaker(self) -> str:
        """Of the server, or, while it still answers small questions, of the prompts that went on without it."""
        states = self.store._servers.nodes()[0].breaker.state, self.kv.pipeline.breakers[0].state
        return next((state for state in states if state != "closed"), "closed")

    def fill(self) -> bool:
        """Computes the chunks and puts them; whether the server took them."""
        self.writer.pool.pool.clear()
        puts = self.store.stats.puts
        assert_same_answer(ask(self.writer, LONG)[0], self.blended)
        assert self.writer.flush(10)
        return self.store.stats.puts > puts or self.read()

    def read(self) -> bool:
        """One prompt; whether its document came from the server. Right in any case, and in time."""
        got, report = ask(self.kv, LONG)
        document = report.chunks[1]
        assert_same_answer(got, self.blended if document.hit else self.computed)
        assert (report.loaded.get(self.store.url, 0) >= document.found) == document.hit
        assert report.reused_tokens == sum(use.found for use in report.chunks if use.hit)
        self.waited = max(self.waited, report.seconds["load"] - self.usual)
        assert self.waited <= 1.1 * DEADLINE + NOISE
        if not document.hit:
            assert sum(report.misses.values()) >= document.found
        return document.hit

    def down(self, seconds: float = 0.0) -> None:
        """Nothing is read; after five failures the server is left alone, and no prompt waits."""
        for asked in range(5 if STRICT else 10):  # with a pause, a prompt before may be done only now
            if asked < 5 or self.breaker == "closed":
                assert not self.read()
        assert self.breaker != "closed"
        end = time.monotonic() + seconds
        self.waited = 0.0
        while time.monotonic() < end:
            assert not self.read()
        assert self.waited <= NOISE
        assert self.kv.pool.stores[0].stats.faults

    def back(self) -> None:
        """Reuse resumes."""
        within(BACK, self.read)

    def there(self) -> None:
        """Reuse at once; where seconds are not judged, when no pause takes up a prompt's whole deadline."""
        within(SLACK_S, self.read)


def test_d37_stopped_before_start_then_started(model):
    """One socket opened at start and no second attempt: every put failed for ever (LMCache#3565, #1938)."""
    server = Server()
    reader = Reader(model, server.url, check=False)
    reader.down(0.3)
    assert_same_answer(ask(reader.writer, LONG)[0], reader.blended)
    with server.start():
        within(BACK, reader.fill)
        reader.there()
        server.kill()  # and once more
        reader.down(0.3)
        server.start()
        within(BACK, reader.fill)
        reader.there()
    reader.store.close()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_d37_killed_while_it_answers(model, server, proxy, share):
    reader = Reader(model, proxy.url)
    assert reader.fill()
    before: list[int] = []
    within(SLACK_S, lambda: before.append(proxy.sent) or reader.read())
    proxy.cut, proxy.on_cut = max(1, int(share * (proxy.sent - before[-1]))), server.kill
    for _ in range(1 if STRICT else 4):
        if proxy.cut is not None:
            assert not reader.read()
    assert proxy.cut is None  # it was killed on the way
    reader.down()
    server.start()
    within(BACK, reader.fill)
    reader.there()
    reader.store.close()


def test_d37_paused(model, server):
    """With a server that hangs the request hung, or time to first token doubled (LMCache#891, aisix#1112)."""
    reader = Reader(model, server.url)
    assert reader.fill()
    reader.there()
    server.pause()
    try:
        reader.down(0.5)
    finally:
        server.resume()
    reader.back()
    assert reader.kv.pool.stores[0].stats.faults["timeout"]
    reader.store.close()


def test_d37_behind_one_megabit(model, server, proxy):
    reader = Reader(model, proxy.url)
    assert reader.fill()
    reader.there()
    proxy.rate = 125_000
    reader.down()
    proxy.rate = None
    proxy.drop()
    reader.back()
    reader.store.close()


def test_d37_a_prompt_of_64_chunks_takes_two_round_trips(model, server, proxy):
    """A round trip a chunk (LMCache#1639)."""
    from blendkv.stores.valkey import ValkeyStore

    documents = [f"Document {n}." for n in range(64)]
    with library(model, ValkeyStore(url=server.url), namespace="n") as kv:
        ask(kv, documents, tokens=1)
    server.tell("CONFIG", "RESETSTAT")
    store = ValkeyStore(url=proxy.url)
    kv, rounds = library(model, store, namespace="n"), store._servers.trips
    got, report = ask(kv, documents, tokens=2)
    assert report.loaded == {store.url: report.chunk_tokens}
    assert report.reused_tokens == report.chunk_tokens
    assert len(report.chunks) == 65
    assert store._servers.trips - rounds == 2
    assert proxy.connections == 1
    calls = server.tell("INFO", "commandstats")
    assert calls["cmdstat_get"]["calls"] == calls["cmdstat_getrange"]["calls"] == 65  # pipelined
    assert_same_answer(got, local(kv, documents, tokens=2))
    kv.close()


def test_d37_large_entries_are_split(server):
    """Values above 512 MB are refused by the server: no value is above 4 MiB."""
    from blendkv.stores import valkey

    chunk = make_chunk(tokens=600, layers=4, heads=8, key_dim=64, namespace="n")
    assert chunk.nbytes > 9 << 20
    store = valkey.ValkeyStore(url=server.url)
    with TieredStore(Pool(), store, write="through") as tiers:
        assert tiers.put(chunk)
        with server.client() as client:
            sizes = [client.strlen(name) for name in client.scan_iter()]
        assert max(sizes) <= 4 << 20
        assert sum(sizes) > chunk.nbytes
        tiers.pool.clear()
        assert_same(tiers.get(chunk.key), chunk)
    with pytest.raises(ValueError, match="piece_bytes"):
        valkey.ValkeyStore(url=server.url, piece_bytes=513 << 20)


def test_d37_entries_beyond_all_measure_are_refused(server, monkeypatch):
    from blendkv.stores import valkey

    monkeypatch.setattr(valkey, "MAX_BYTES", 1 << 20)
    store = valkey.ValkeyStore(url=server.url)
    large, small = make_chunk(tokens=2000, layers=3), make_chunk(tokens=20, layers=3)
    with TieredStore(Pool(), store, write="through") as tiers:
        assert not tiers.put(large)
        assert store.stats.faults == {"size": 1}
        assert tiers.get(large.key) is large  # memory has it
        assert tiers.put(small)
        tiers.pool.clear()
        assert_same(tiers.get(small.key), small)
        assert tiers.get(large.key) is None
    assert until(lambda: server.tell("DBSIZE") == 2, 5) >= 0
