"""Names: the centre decides, regions never answer with what is older than they say."""

import random
import threading
import time
from types import SimpleNamespace

import pytest

from blendkv.errors import StoreError
from blendkv.stores.catalog import MemoryCentre, Region
from tests.patience import SLACK_S, until
from tests.stores.servers import BINARY, Proxy, Server

needs_server = pytest.mark.skipif(BINARY is None, reason="no valkey-server or redis-server on this machine")


class Deaf:
    """A centre whose announcements can be held back."""

    def __init__(self) -> None:
        self.centre, self.since, self.as_of, self.reads, self.dead = MemoryCentre(), float("inf"), 0.0, 0, False
        self.heard = None

    def read(self, name):
        self.reads += 1
        if self.dead:
            raise StoreError("no answer")
        return self.centre.read(name)

    def write(self, name, keys):
        return self.centre.write(name, keys)

    def follow(self, heard):
        self.heard = heard
        return self

    def close(self) -> None:
        pass


@pytest.fixture
def now(monkeypatch):
    """`now[0]`: seconds that `time.monotonic` shows to a region."""
    shown = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: shown[0], time=time.time)
    monkeypatch.setattr("blendkv.stores.catalog.time", clock)
    return shown


def test_versions_count_and_forgotten_names_are_unknown():
    region = Region(MemoryCentre())
    assert region.get("a") is None
    first = region.put("a", ["k1", "k2"])
    assert (first.version, first.keys) == (1, ("k1", "k2"))
    assert region.get("a") == first
    assert region.put("a", ["k3"]).version == 2
    region.forget("a")
    assert region.get("a") is None
    assert region.get("a", force_latest=True) is None
    assert region.put("a", ["k4"]).version == 4


def test_regions_hear_of_updates_without_asking():
    centre = MemoryCentre()
    one, two = Region(centre), Region(centre)
    one.put("a", ["k1"])
    assert two.get("a").keys == ("k1",)
    one.put("a", ["k2"])
    assert two.get("a").keys == ("k2",)
    state = two.state
    assert (state.connected, state.entries, state.asked, state.served, state.stale_avoided) == (True, 1, 0, 2, 1)
    assert state.lag < 0.1 + SLACK_S
    assert abs(state.announced - time.time()) < 5
    two.close()
    one.close()


def test_what_was_not_confirmed_is_asked_again(now):
    centre = Deaf()
    region = Region(centre, delay=0.05)
    centre.write("a", ["k1"])
    assert region.get("a").keys == ("k1",)
    assert region.get("a").keys == ("k1",)
    assert centre.reads == 1  # asked within the delay
    centre.write("a", ["k2"])  # not heard of
    now[0] += 0.06
    assert region.get("a").keys == ("k2",)
    assert region.state.stale_avoided == 1
    assert not region.state.connected
    assert region.state.lag == float("inf")
    now[0] += 0.01
    centre.since = centre.as_of = now[0]  # follows again, but what it knew may have changed meanwhile
    now[0] += 0.06
    centre.as_of = now[0]
    reads = centre.reads
    region.get("a")
    assert centre.reads == reads + 1
    now[0] += 0.06
    centre.as_of = now[0]  # everything was heard up to now: no need to ask
    region.get("a")
    assert centre.reads == reads + 1


def test_a_late_announcement_is_not_news_and_an_early_one_is(now):
    centre = Deaf()
    region = Region(centre, delay=10.0)
    centre.since = centre.as_of = now[0]
    old, new = centre.write("a", ["k1"]), centre.write("a", ["k2"])
    assert region.get("a") == new
    centre.heard(old)
    assert region.get("a") == new
    plain = centre.centre.read
    centre.centre.read = lambda name: (centre.heard(new), old)[1]  # the announcement overtakes the answer
    assert region.get("a", force_latest=True) == new
    centre.centre.read = plain


def test_what_comes_late_is_as_old_as_the_last_confirmation(now):
    centre = Deaf()
    region = Region(centre, delay=0.05)
    centre.since = centre.as_of = now[0]
    old = centre.write("a", ["k1"])
    centre.write("a", ["k2"])  # its announcement is on its way
    now[0] += 0.06
    centre.heard(old)
    assert region.get("a").keys == ("k2",)


def test_a_centre_that_lost_its_names_is_believed_when_asked():
    centre = Deaf()
    region = Region(centre)
    for _ in range(5):
        region.put("a", ["k"])
    centre.centre = MemoryCentre()
    centre.write("a", ["other"])
    assert region.get("a", force_latest=True).version == 1


def test_who_asks_is_not_told_what_another_was_told_before():
    deaf = Deaf()
    region = Region(deaf)
    deaf.write("a", ["k1"])
    begun, answer = threading.Event(), threading.Event()
    plain, told = deaf.centre.read, []

    def late(name):
        named = plain(name)  # before the centre loses its names
        begun.set()
        answer.wait(5)
        return named

    def afterwards(name):
        answer.set()  # the first answer comes while the second question is on its way
        first.join(5)
        return plain(name)

    deaf.centre.read = late
    first = threading.Thread(target=lambda: told.append(region.get("a", force_latest=True)))
    first.start()
    assert begun.wait(5)
    deaf.centre._names.clear()
    deaf.centre.read = afterwards
    assert region.get("a", force_latest=True) is None
    assert told[0].keys == ("k1",)  # true when it was asked for


def test_a_centre_that_does_not_answer_is_a_miss_not_an_old_answer(now):
    centre = Deaf()
    region = Region(centre, delay=0.02)
    region.put("a", ["k"])
    centre.dead = True
    assert region.get("a", force_latest=True) is None
    now[0] += 0.03
    assert region.get("a") is None
    assert region.state.unreachable == 2


def test_memory_is_bounded_in_age_and_number(now):
    centre = Deaf()
    region = Region(centre, delay=10, max_age=0.05, max_entries=10)
    for number in range(50):
        region.put(str(number), ["k"])
    assert region.state.entries == 10
    region.get("49")
    assert centre.reads == 0
    now[0] += 0.06
    region.get("49")
    assert centre.reads == 1
    with pytest.raises(ValueError, match="delay"):
        Region(centre, delay=-1)


class World:
    """Updates and reads, with what was true when."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.written: dict[str, list[tuple[float, int]]] = {}
        self.reads = self.stale = self.missed = 0
        self.behind = 0.0

    def update(self, region: Region, name: str, keys: list[str]) -> None:
        named = region.put(name, keys)
        with self.lock:
            self.written.setdefault(name, []).append((time.monotonic(), named.version))

    def read(self, region: Region, name: str, force: bool) -> None:
        start = time.monotonic()
        with self.lock:
            latest = max((version for _, version in self.written.get(name, [])), default=0)
        named = region.get(name, force_latest=force)
        version = 0 if named is None else named.version
        with self.lock:
            self.reads += 1
            self.missed += named is None and latest > 0
            if force and named is not None:
                self.stale += version < latest
            elif named is not None:
                newer = [when for when, number in self.written[name] if number > version]
                self.behind = max(self.behind, start - min(newer, default=start))


def mixed(world: World, regions: list[Region], count: int, forced: float = 0.4) -> None:
    """Threads that read and update, `count` times in all."""

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for number in range(count // 6):
            name, region = f"document {draw.randrange(40)}", draw.choice(regions)
            if draw.random() < 0.25:
                world.update(region, name, [f"{seed}-{number}"])
            else:
                world.read(region, name, draw.random() < forced)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@needs_server
def test_three_regions_and_a_centre():
    from blendkv.stores.valkey_centre import ValkeyCentre

    delay, world = 0.5, World()
    with Server() as server, Proxy(server.port) as one, Proxy(server.port) as two, Proxy(server.port) as three:
        proxies = [one, two, three]
        patient = {"read_timeout": 20.0, "timeout": 20.0}  # one that is cut says so; a machine that pauses cuts nobody
        centres = [ValkeyCentre(proxy.url, beat=0.1, **patient) for proxy in proxies]
        regions = [Region(centre, delay=delay) for centre in centres]
        until(lambda: all(region.state.connected for region in regions), 5)
        for number in range(40):
            world.update(regions[number % 3], f"document {number}", [])
            world.update(regions[number % 3], f"document {number}", ["first"])
        time.sleep(delay)  # until then a region may answer that a document stands for nothing
        mixed(world, regions, 4000)
        assert all(region.state.served for region in regions)
        cut = threading.Timer(0.2, one.drop)  # in the middle of the next
        cut.start()
        with pytest.MonkeyPatch.context() as patch:  # updates go by the others: a cut connection is an error of put
            patch.setattr(regions[0], "put", regions[1].put)
            mixed(world, regions, 4000)
        cut.join()
        until(lambda: regions[0].state.connected, 3)
        mixed(world, regions, 2000)
        assert world.reads > 7000
        assert world.stale == 0
        assert world.missed == regions[0].state.unreachable <= 6 * 5  # those that were asking when it was cut
        assert world.behind <= delay
        until(lambda: all(region.state.lag < 0.3 for region in regions), 3)
        assert [region.state.unreachable for region in regions[1:]] == [0, 0]
        for closing in (*regions, *centres):
            closing.close()


@needs_server
def test_silent_and_dead_centres():
    from blendkv.stores.valkey_centre import ValkeyCentre

    with Server() as server, Proxy(server.port) as proxy:
        centre = ValkeyCentre(proxy.url, beat=0.1, read_timeout=0.3, timeout=0.3)
        region = Region(centre, delay=0.4)
        until(lambda: region.state.connected, 5)
        region.put("a", ["k1", "k2"])
        region.put("ü\n name", ["k" * 64] * 3000)
        assert region.get("ü\n name", force_latest=True).keys == ("k" * 64,) * 3000
        proxy.rate = 0.0  # nothing comes any more, and nobody says so
        server.tell("HSET", "blendkv:names", "a", "7 1.0 other")
        start = time.monotonic()
        while (named := region.get("a")) is not None:
            assert named.version == 1
            assert time.monotonic() - start < 0.5 + SLACK_S
        until(lambda: not region.state.connected, 2)
        with pytest.raises(StoreError, match="does not answer"):
            region.put("a", ["k3"])
        proxy.rate = None
        proxy.drop()
        until(lambda: region.state.connected, 3)
        until(lambda: (named := region.get("a")) is not None and named.version == 8, 2)  # it was put
        server.kill()
        assert region.get("a", force_latest=True) is None
        server.start()
        until(lambda: region.state.connected, 3)
        until(lambda: region.state.unreachable and centre._servers.nodes()[0].breaker.state == "closed", 3)
        assert region.put("a", ["k"]).version == 1  # it kept nothing on disk
        region.close()
        centre.close()
        with pytest.raises(ValueError, match="letters"):
            centre.write("x" * 5000, [])


@needs_server
def test_a_centre_is_one_server():
    from blendkv.stores.valkey_centre import ValkeyCentre
    from tests.stores.servers import member

    with member() as server:
        server.tell("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        with pytest.raises(StoreError, match="Cluster"):
            ValkeyCentre(server.url)
