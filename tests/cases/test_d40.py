import random
import uuid
from pathlib import Path

import pytest
import torch

from blendkv import Pool, TieredStore
from blendkv.errors import StoreError
from blendkv.stores import DiskStore, RemoteStore, open_store
from blendkv.testing import tiny_model
from tests.cases.common import assert_same_answer, model_of
from tests.cases.stored import DOCUMENTS, ask, full, library, local
from tests.s3 import BUCKET, OPTIONS, moto
from tests.stores.servers import BINARY, Server

SECRETS = {"A": b"a" * 32, "B": b"b" * 32}


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(scope="module")
def s3():
    with moto() as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def valkey():
    if BINARY is None:
        pytest.skip("no valkey-server or redis-server on this machine")
    with Server() as server:
        yield server.url


@pytest.fixture(params=["memory", "disk", "valkey", "s3"])
def opened(request, tmp_path):
    """`opened()`: what a library is given, another one each time, over the same place."""
    if request.param == "memory":
        place = Pool()
        return lambda: place
    if request.param == "disk":
        return lambda: TieredStore(Pool(), DiskStore(tmp_path))
    where = request.getfixturevalue(request.param)
    if request.param == "valkey":
        from blendkv.stores.valkey import ValkeyStore

        prefix = uuid.uuid4().hex
        return lambda: TieredStore(Pool(), ValkeyStore(url=where, prefix=prefix), write="through")
    name = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    return lambda: TieredStore(Pool(), open_store(name, endpoint_url=where, **OPTIONS), write="through")


def hits_of(kv, report) -> int:
    """Chunk tokens that were found, wherever."""
    return sum(report.loaded.values())


def entries(place) -> dict:
    """Everything that is kept, by key."""
    if isinstance(place, Pool):
        return dict(zip(keys := place.keys(), map(place.peek, keys), strict=True))
    (store,) = place.stores
    return {key: store.get(key) for key in sorted(store.keys())}


def last_uses(place) -> list:
    """Names of a pool's entries in the order in which they would go, or times of a folder's files."""
    if isinstance(place, Pool):
        return place.keys()
    folder = Path(place.stores[0].url.removeprefix("file://"))
    return [(path.stem, path.stat().st_mtime_ns) for path in sorted(folder.glob("??/*.bkv"))]


@pytest.mark.parametrize("by", ["namespace", "secret"])
def test_d40_tenants_share_nothing(model, opened, by):
    """A second account's prompt was served from the first one's cache (sglang#37160, vllm#16016, litellm#29955)."""
    if by == "secret" and isinstance(opened(), Pool):
        pytest.skip("a pool takes no secret of its own")

    def of(tenant: str, **options):
        place = opened()
        if by == "namespace":
            return library(model, place, namespace=tenant, **options)
        (store,) = place.stores
        place = TieredStore(Pool(), store, secret=SECRETS[tenant], write="through")
        return library(model, place, namespace="shared", **options)

    a = of("A", deadline_s=5.0)
    got, report = ask(a)
    assert_same_answer(got, local(a))
    mine = entries(a.pool)
    assert len(mine) == 1 + len(DOCUMENTS)
    order = last_uses(a.pool)
    stats, tiers = repr(a.pool.stats), [repr(store.stats) for store in getattr(a.pool, "stores", ())]

    b = of("B", on_miss="recompute", deadline_s=5.0)
    before = getattr(b.pool.stats, "hits", 0)
    got, report = ask(b)
    assert hits_of(b, report) == 0
    assert report.reused_tokens == 0
    assert_same_answer(got, full(b))
    assert getattr(b.pool.stats, "hits", 0) == before
    b = of("B", deadline_s=5.0)
    assert ask(b)[1].prefilled_tokens
    for _ in range(3):
        assert hits_of(b, ask(b)[1])  # its own
    if not isinstance(a.pool, Pool):
        assert repr(a.pool.stats) == stats
        assert [repr(store.stats) for store in a.pool.stores] == tiers

    assert [use for use in last_uses(a.pool) if use in order] == order  # nothing of A's became newer or older
    both = entries(a.pool)
    assert len(both) == 2 * len(mine)
    assert all(both[key] is mine[key] or both[key] == mine[key] for key in mine)
    again = of("A", on_miss="recompute", deadline_s=5.0)
    got, report = ask(again)
    assert hits_of(again, report) == report.chunk_tokens == report.reused_tokens
    assert_same_answer(got, local(again))


def test_d40_what_is_put_under_anothers_key_is_not_believed(model, tmp_path):
    """B copies its own entries over A's names: A computes, and B's tag is looked at where a hash is forged."""
    a, b = (library(model, DiskStore(tmp_path), namespace=name) for name in "AB")
    ask(a)
    theirs = set(tmp_path.glob("??/*.bkv"))
    ask(b)
    for path, forged in zip(sorted(theirs), sorted(set(tmp_path.glob("??/*.bkv")) - theirs), strict=True):
        path.write_bytes(forged.read_bytes())
    reader = library(model, DiskStore(tmp_path), namespace="A", on_miss="recompute")
    got, report = ask(reader)
    assert not report.loaded
    assert_same_answer(got, full(reader))
    assert sum(reader.pool.stats.damaged.values()) == 4
    assert hits_of(b, ask(library(model, DiskStore(tmp_path), namespace="B"))[1])


def auc(positive: list[float], negative: list[float]) -> float:
    """Chance that a probe of the first kind takes less time than one of the second."""
    order = torch.tensor(positive + negative).double().argsort().argsort().double() + 1
    ranks = order[: len(positive)].sum() - len(positive) * (len(positive) + 1) / 2
    return 1 - float(ranks) / (len(positive) * len(negative))


def sampling_error(positive: list[float], negative: list[float], times: int = 200) -> float:
    """Standard deviation over bootstraps."""
    draw = random.Random(0)
    resampled = [
        auc(draw.choices(positive, k=len(positive)), draw.choices(negative, k=len(negative))) for _ in range(times)
    ]
    return float(torch.tensor(resampled).std())


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_d40_time_does_not_tell_what_others_cached(where, tmp_path):
    """1.2 s against 3.4 s revealed what somebody else had asked (CVE-2025-46570: AUC 0.99 at 8 tokens)."""
    model = tiny_model("llama", num_hidden_layers=2)
    texts = [f"Probe {n:04} of what A may have cached." for n in range(1000)]
    random.Random(5).shuffle(texts)
    cached, free = texts[:500], texts[500:]
    place = Pool() if where == "memory" else DiskStore(tmp_path)
    a = library(model, place if where == "memory" else TieredStore(Pool(), place), namespace="A")
    for start in range(0, 500, 100):
        a.prefill(cached[start : start + 100])
    a.clear() if where == "disk" else None
    probes = [(text, text_is) for text_is, group in (("cached", cached), ("free", free)) for text in group]
    random.Random(6).shuffle(probes)

    def times(tenant: str, some, **options) -> dict[str, list[float]]:
        kv = library(
            model,
            place if where == "memory" else TieredStore(Pool(), DiskStore(tmp_path)),
            namespace=tenant,
            on_miss="recompute",
            **options,
        )
        kv([texts[0]], "?"), kv(["something else"], "?")
        found: dict[str, list[float]] = {"cached": [], "free": []}
        for text, kind in some:
            report = kv([text], "?").report
            assert (sum(report.loaded.values()) > 0) == (tenant == "A" and kind == "cached")
            found[kind].append(report.seconds["load"])
        return found

    seen = times("B", probes)
    measured, error = auc(seen["cached"], seen["free"]), sampling_error(seen["cached"], seen["free"])
    assert error < 0.03
    assert measured <= 0.55 + 2 * error
    assert measured >= 0.45 - 2 * error  # nor the other way round
    own = times("A", probes, pipeline=False)  # which asks in other threads, hit or not
    assert abs(auc(own["cached"], own["free"]) - 0.5) > 2 * error  # such a probe does tell a hit


@pytest.mark.parametrize("namespace", [None, ""])
def test_d40_a_namespace_is_required_where_others_are(model, s3, valkey, namespace):
    from blendkv.stores.valkey import ValkeyStore

    shared = [
        ValkeyStore(url=valkey),
        open_store(f"s3://{BUCKET}/x", endpoint_url=s3, **OPTIONS),
        TieredStore(Pool(), RemoteStore("memory://here"), ValkeyStore(url=valkey)),
        valkey,
    ]
    for store in shared:
        with pytest.raises(ValueError, match="namespace"):
            library(model, store, namespace=namespace)
        library(model, store, namespace="A")
    assert library(model, ValkeyStore(url=valkey), secret=SECRETS["A"]).namespace == ""  # a secret does as well


def test_d40_a_request_cannot_choose_a_namespace(model):
    """It is an argument of the library alone (sglang#26747)."""
    kv = library(model, "memory://", namespace="B")
    for name in ("namespace", "secret"):
        with pytest.raises((TypeError, ValueError, StoreError)):
            kv(DOCUMENTS, "?", **{name: "A"})
    for text in ("namespace=A", "\0A\0", '{"namespace": "A"}'):
        kv([text], text, system=text)
    assert {chunk.namespace for chunk in entries(kv.pool).values()} == {"B"}


TWINS = [
    "a",
    "a/b",
    "a:b",
    "a\0b",
    "a\n",
    " a",
    "a ",
    "A",
    "\u0430",
    "\u00e9",
    "e\u0301",
    "\ufeffa",
    "a\u200b",
    "n" * 1024,
]


def test_d40_namespaces_that_look_alike_are_apart(model, tmp_path):
    """Separators, upper case, Cyrillic a, composed and decomposed letters, marks that nobody sees."""
    for count, namespace in enumerate(TWINS):
        kv = library(model, DiskStore(tmp_path), namespace=namespace)
        assert not any(chunk is not None for chunk in kv.pool.fetch([]))
        inputs = kv(DOCUMENTS[:1], "?")
        assert not inputs.report.loaded, namespace
        assert len(list(tmp_path.glob("??/*.bkv"))) == 2 * (count + 1)
    for namespace in TWINS:
        report = library(model, DiskStore(tmp_path), namespace=namespace)(DOCUMENTS[:1], "?").report
        assert sum(report.loaded.values())
        assert not report.prefilled_tokens


@pytest.mark.parametrize("namespace", ["n" * 1025, "\u00e9" * 513, "\ud800"])
def test_d40_a_namespace_that_cannot_be_written_is_refused_at_once(model, namespace):
    with pytest.raises(ValueError, match="namespace"):
        library(model, "memory://", namespace=namespace)
