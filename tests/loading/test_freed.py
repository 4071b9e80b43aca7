"""What a prompt loaded is freed with the prompt: nothing waits for the garbage collector, which seldom looks at all.

Where torch and transformers are loaded, a full collection takes a quarter of a second, and holds up every prompt.
"""

import gc
import weakref

import pytest

from blendkv import BlendedCache, MissingChunk, Pool
from blendkv.bench.bandwidth import Bandwidth
from blendkv.bench.throttle import Fault, ThrottledStore
from blendkv.loading.pipeline import Pipeline
from blendkv.loading.scheduler import TransferScheduler
from blendkv.stores import Budget, TieredStore
from tests.helpers import exact_chunk, run, tokens
from tests.patience import until
from tests.stores.dicts import DictStore

SELECTORS = {"random": 0.3, "hkvd": 0.3, "attention": 0.3, "20%boundary+attention*hkvd": 0.3}


@pytest.fixture
def uncollected():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("selector", "kind"),
    [
        *((each, "well") for each in SELECTORS),
        *(("hkvd", each) for each in ("cut", "dead", "stall")),
        ("random", "cut"),
    ],
)
def test_prompts_leave_nothing_to_collect(attached, uncollected, selector, kind):
    model, ids = attached("llama"), tokens(70, 4)[None]
    chunks = [exact_chunk(model, ids, *span) for span in ((5, 30), (30, 41), (44, 66))]
    held = DictStore()
    TieredStore(Pool(), held, write="through").put_many(chunks)

    def prompt():
        """References to what was loaded, which nobody holds any more."""
        faults = [] if kind == "well" else [Fault(30_000, kind)]
        store = ThrottledStore(held, Bandwidth.constant(1e8), faults=faults, timeout=0.2)
        scheduler = TransferScheduler(4, linger=0.01)
        pipeline = Pipeline(TieredStore(Pool(1), store), scheduler, piece_bytes=1, whole_bytes=0)
        budget = Budget(5)
        found = pipeline.fetch([chunk.key for chunk in chunks], (), budget)
        if kind != "well":
            budget.left = 0.05
        here = [got.chunk or MissingChunk(chunk.ids) for got, chunk in zip(found, chunks, strict=True)]
        run(model, ids, cache := BlendedCache(here, SELECTORS[selector], selector))
        arrivals = [chunk.__dict__["_arrival"] for chunk in here if "_arrival" in chunk.__dict__]
        assert arrivals
        return scheduler, [weakref.ref(each) for each in [cache, *here, *arrivals]]

    prompt()
    gc.collect()
    found = []
    while 0 not in found and len(found) < 3:  # other threads of this process may leave something; prompts always would
        scheduler, seen = prompt()
        until(lambda scheduler=scheduler: scheduler.state.threads == 0)
        assert [ref() for ref in seen] == [None] * len(seen)
        del scheduler
        found.append(gc.collect())
    assert 0 in found
