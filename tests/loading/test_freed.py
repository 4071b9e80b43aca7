"""What a prompt loaded is freed with the prompt: nothing waits for the garbage collector, which seldom looks at all.

Where torch and transformers are loaded, a full collection takes a quarter of a second, and holds up every prompt.
"""

import gc
import threading
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


class Thing:
    """What can be watched."""


@pytest.fixture
def uncollected():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_scheduler_holds_no_work_that_is_done_or_taken_back(uncollected):
    for end in ("done", "raises", "cancelled", "client", "closed"):
        free, given, result = threading.Event(), Thing(), Thing()
        scheduler, seen = TransferScheduler(1), [weakref.ref(given), weakref.ref(result)]

        def work(_, result=result, end=end):
            if end == "raises":
                raise OSError
            return result

        blocker = scheduler.submit("first", free.wait, 20)
        until(lambda scheduler=scheduler: scheduler.state.running == 1)
        future = scheduler.submit("second", work, given)
        del given, result, work
        assert None not in [ref() for ref in seen]
        if end == "cancelled":
            assert future.cancel()
        elif end == "client":
            assert scheduler.cancel("second") == 1
        elif end == "closed":
            scheduler.close(0.01)
            assert future.cancelled()
        free.set()
        assert blocker.result(20)
        if end in ("done", "raises"):
            assert bool(future.exception(20)) == (end == "raises")
        del future, blocker
        until(lambda seen=seen: [ref() for ref in seen] == [None, None])
        scheduler.close(20)


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
        found = pipeline.fetch([chunk.key for chunk in chunks], (), Budget(5 if kind == "well" else 0.05))
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
