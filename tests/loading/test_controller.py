"""What a controller chooses from what loading and computing cost."""

import json
import math

import pytest
import torch

from blendkv import MissingChunk, Pool, flops
from blendkv.cache import make_schedule
from blendkv.loading.controller import MARGIN, WORTH, Controller, Offer, cheapest, slowest
from blendkv.loading.costs import (
    ComputeCosts,
    Costs,
    SourceCosts,
    asdict_of,
    calibration_path,
    fit_compute,
    machine,
    work_of,
)
from blendkv.loading.measuring import calibrate_machine, measure_source
from blendkv.selectors import get_selector
from blendkv.stores import DiskStore, TieredStore
from tests.stores.dicts import DictStore

SHAPE = flops.ModelShape((flops.LayerShape(4_000, 20_000, 100),) * 8, 50_000)
COMPUTE = ComputeCosts(0.01, 3e9, 1.5e9)
HKVD = get_selector("hkvd")
URL = "far://"


def schedule(ratio):
    return make_schedule(HKVD, ratio, None)


def offers(count=6, tokens=256, nbytes=1 << 20, url=URL):
    return [Offer(f"{i:064x}", tokens, nbytes, 2 * nbytes, url) for i in range(count)]


def costs(rate, latency=0.001, **kwargs):
    return Costs(COMPUTE, {URL: SourceCosts(latency, rate)}, machine="m", fingerprint="f", **kwargs)


def decide(rate, floor=0.15, those=None, **kwargs):
    controller = Controller(costs(rate), floor, **kwargs)
    return controller.decide(SHAPE, those if those is not None else offers(), 40, schedule, True)


def seconds(ratio, from_text=0, total=6 * 256):
    return COMPUTE.seconds(SHAPE, total - from_text, 40 + from_text, schedule(ratio))


def test_costs_are_fitted_to_what_was_measured():
    points = []
    for tokens in (256, 1024):
        for ratio in (0, 0.15, 0.5, 1):
            linear, attention = work_of(SHAPE, tokens, 32, schedule(ratio), True)
            points.append((linear, attention, 0.02 + linear / 3e8 + attention / 7e7))
    fitted = fit_compute(points)
    assert fitted.fixed_s == pytest.approx(0.02, rel=1e-3)
    assert fitted.linear_rate == pytest.approx(3e8, rel=1e-3)
    assert fitted.attention_rate == pytest.approx(7e7, rel=1e-3)
    assert fitted.error < 1e-6


def test_no_cost_is_negative():
    """Slower for less work: a plain fit would have attention give time back."""
    points = [(1e6, 1e5, 1.0), (2e6, 8e5, 1.2), (4e6, 16e5, 2.1), (8e6, 64e5, 3.0)]
    fitted = fit_compute(points)
    assert fitted.fixed_s >= 0
    assert fitted.linear_rate > 0
    assert fitted.attention_rate > 0
    assert fitted.error < 0.6
    for wrong in (points[:2], [*points, (1.0, 1.0, 0.0)], [*points, (1.0, 1.0, math.nan)]):
        with pytest.raises(ValueError, match="measurements"):
            fit_compute(wrong)


def test_a_fast_link_leaves_the_smallest_ratio():
    decision = decide(1e12)
    assert (decision.ratio, decision.text) == (0.15, frozenset())
    assert decision.ttft_s == decision.compute_s == pytest.approx(seconds(0.15))


def test_the_ratio_is_the_largest_that_loading_hides():
    """Against a search of all ratios: as simple as it can be."""
    for rate in (1.6e7, 1.2e7, 9e6):
        decision = decide(rate, text=False)
        assert decision.ratio > 0.15
        hidden = [r / 1000 for r in range(150, 1001) if seconds(r / 1000) <= MARGIN * decision.load_s]
        assert decision.ratio <= max(hidden)
        assert decision.ratio >= max(hidden) - 0.015
        assert decision.compute_s <= decision.load_s == decision.ttft_s


def test_what_is_left_out_takes_no_time_to_load():
    """The more is recomputed, the less is loaded: against a search of all ratios."""
    rate = 9e6
    controller, those = Controller(costs(rate), text=False), offers()

    def load(ratio):
        return 0.002 + sum(offer.nbytes for offer in those) * (1 - ratio) / rate

    whole = controller.decide(SHAPE, those, 40, schedule, True)
    decision = controller.decide(SHAPE, those, 40, schedule, True, kept=lambda offer, ratio: 1 - ratio)
    hidden = [r / 1000 for r in range(150, 1001) if seconds(r / 1000) <= MARGIN * load(r / 1000)]
    assert max(hidden) - 0.015 <= decision.ratio <= max(hidden)
    assert 0.15 < decision.ratio < whole.ratio
    assert decision.load_s == decision.ttft_s == pytest.approx(load(decision.ratio))
    assert set(decision.chosen.values()) == set(those)  # as they were offered


def test_what_takes_longer_to_load_than_to_compute_is_computed_from_text():
    slow = decide(1e5)
    assert len(slow.text) == 6
    assert slow.load_s == 0
    assert slow.ttft_s == pytest.approx(COMPUTE.seconds(SHAPE, 0, 40 + 6 * 256, {}))
    middle = decide(1.2e7)
    count = len(middle.text)
    assert 0 < count < 6
    assert middle.text == {offer.key for offer in offers()[6 - count :]}
    each = [
        max((6 - n) * 2**20 / 1.2e7 + 0.002 * (n < 6), seconds(0.15, 256 * n)) for n in range(7)
    ]  # all choices, one after the other
    assert middle.ttft_s <= 1.02 * min(each)
    assert middle.ttft_s < WORTH * each[0]
    assert decide(1e5, text=False).text == frozenset()


def test_a_store_that_was_slow_is_tried_again(monkeypatch):
    """Where nothing is loaded any more nothing would be learnt any more."""
    known, clock = costs(1e7), [1000.0]
    monkeypatch.setattr("blendkv.loading.costs.time.monotonic", lambda: clock[0])
    known.saw_transfer(URL, 1 << 20, 1e4)  # a stall
    controller = Controller(known)

    def texts():
        return len(controller.decide(SHAPE, offers(), 40, schedule, True).text)

    clock[0] += 59
    assert texts() == 6
    clock[0] += 2
    assert controller.decide(SHAPE, offers(), 40, schedule, True).text == {offer.key for offer in offers()[1:]}
    assert texts() == 6  # not every prompt
    clock[0] += 61
    assert texts() == 5
    known.saw_transfer(URL, 1 << 20, 1e-4)
    assert texts() == 0


def test_a_bound_on_what_may_be_chosen():
    assert decide(1.5e7, most=0.3, text=False).ratio == 0.3
    assert decide(1e12, floor=0.5).ratio == 0.5
    for floor, most in ((-0.1, 1), (0.5, 0.4), (0.1, 1.5), (math.nan, 1)):
        with pytest.raises(ValueError, match="floor"):
            Controller(floor=floor, most=most)


def test_what_is_in_memory_takes_no_time_to_load():
    near = [Offer(offer.key, offer.tokens) for offer in offers()]
    assert decide(1.0, those=near).load_s == 0
    assert decide(1.0, those=near).text == frozenset()
    half = near[:3] + offers()[3:]
    assert decide(1e5, those=half).text == {offer.key for offer in half[3:]}


def test_two_stores_send_at_the_same_time():
    both = costs(2e7)
    both.sources["near://"] = SourceCosts(0.0, 4e7)
    those = offers(3) + offers(6, url="near://")[3:]
    decision = Controller(both, text=False).decide(SHAPE, those, 40, schedule, True)
    assert decision.load_s == pytest.approx(3 * 2**20 / 2e7 + 0.002)


def test_slow_decoding_counts():
    slow = costs(1e12, decoding={"raw": 1e7})
    decision = Controller(slow, text=False).decide(SHAPE, offers(), 40, schedule, True)
    assert decision.load_s == pytest.approx(0.002 + 12 * 2**20 / 1e7)


def test_an_unknown_store_is_learnt_from():
    known = Costs(COMPUTE, machine="m", fingerprint="f")
    controller = Controller(known)
    first = controller.decide(SHAPE, offers(), 40, schedule, True)
    assert (first.ratio, first.text, first.ttft_s) == (0.15, frozenset(), None)
    assert "never seen" in first.why
    known.saw_transfer(URL, 6 << 20, 2.0)
    assert controller.decide(SHAPE, offers(), 40, schedule, True).ttft_s is not None


def test_rates_follow_what_is_seen_and_no_clock_that_jumps():
    known = costs(1e6)
    for _ in range(20):
        known.saw_transfer(URL, 10**7, 1.0)
    assert known.sources[URL].bytes_per_s == pytest.approx(1e7, rel=0.01)
    before = known.sources[URL]
    for nbytes, took in ((10**7, 0.0), (10**7, -5.0), (10**7, math.inf), (10**7, math.nan), (10, 1.0)):
        known.saw_transfer(URL, nbytes, took)
    assert known.sources[URL] == before


def test_the_inverse_question():
    needed = slowest(costs(1), SHAPE, 1536, 6 << 20, 0.15)
    hides = SourceCosts(0.0, needed).seconds(6 << 20)
    assert hides == pytest.approx(COMPUTE.seconds(SHAPE, 1536, 32, {1: 0.15}))
    devices = {"tape": (needed / 100, 1.0), "disk": (needed * 1.01, 5.0), "ssd": (needed * 9, 30.0)}
    assert cheapest(devices, needed) == "disk"
    assert cheapest(devices, needed * 100) is None
    with pytest.raises(ValueError, match="calibrate"):
        slowest(Costs(), SHAPE, 1, 1)


def test_kept_and_read_again(tmp_path):
    one = costs(1e6, decoding={"raw": 1e9})
    one.write(tmp_path / "a" / "c.json")
    assert Costs.read(tmp_path / "a" / "c.json") == one
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["c.json"]
    said = json.loads((tmp_path / "a" / "c.json").read_text())
    for wrong in (
        {},
        [],
        {**said, "version": 9},
        {**said, "compute": {"fixed": 1}},
        {**said, "decoding": {"raw": -1.0}},
    ):
        (tmp_path / "w.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="calibrat"):
            Costs.read(tmp_path / "w.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        *(
            json.dumps({**said, part: value})
            for said in [json.loads(json.dumps(asdict_of(costs(1e6)))) | {"version": 1}]
            for part, value in [
                ("decoding", {"raw": "fast"}),
                ("decoding", {"raw": math.nan}),
                ("sources", {URL: {"latency_s": 0.0, "bytes_per_s": 0}}),
                ("sources", {URL: {"latency_s": 0.0, "bytes_per_s": math.inf}}),
                ("sources", {URL: {"latency_s": 0.0, "bytes_per_s": 10**400}}),
                ("sources", {URL: {"latency_s": -1.0, "bytes_per_s": 1e6}}),
                ("sources", {URL: {"latency_s": math.nan, "bytes_per_s": 1e6}}),
                ("sources", {URL: {"latency_s": None, "bytes_per_s": 1e6}}),
                ("compute", {"fixed_s": 0.0, "linear_rate": "1e9", "attention_rate": 1e9}),
                ("compute", {"fixed_s": 0.0, "linear_rate": -1e9, "attention_rate": 1e9}),
                ("compute", {"fixed_s": math.inf, "linear_rate": 1e9, "attention_rate": 1e9}),
            ]
        ),
    ],
)
def test_a_calibration_that_cannot_be_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path))
    path = calibration_path("f" * 32)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    ready = Controller().ready("f" * 32, torch.device("cpu"), torch.float32)
    assert "is no calibration" in ready.notes[0]
    assert ready.compute.linear_rate > 0
    assert not ready.sources


def test_each_model_has_costs_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path))
    device, dtype = torch.device("cpu"), torch.float32
    mine = Costs(COMPUTE, {URL: SourceCosts(0.0, 1e6)}, {}, machine(device), "f")
    controller = Controller(mine)
    for _ in range(3):
        assert controller.ready("f", device, dtype) is mine
        other = controller.ready("g", device, dtype)
        other.saw_transfer("other://", 10**7, 1.0)
    assert not mine.notes
    assert list(mine.sources) == [URL]
    assert len(other.notes) == 1
    assert list(other.sources) == ["other://"]
    assert controller.decide(SHAPE, offers(), 40, schedule, True, other).ttft_s is None
    assert controller.decide(SHAPE, offers(), 40, schedule, True).ttft_s is not None


def test_a_controller_that_raises_loses_no_chunk(attached, monkeypatch):
    from tests.cases.stored import library

    model, store = attached("llama"), DictStore(local=True)
    with library(model, TieredStore(Pool(), store)) as writer:
        writer(["one document of words"], "why?")
    controller = Controller(costs(1e6))
    monkeypatch.setattr(controller, "decide", lambda *args: 1 / 0)
    kv = library(model, TieredStore(Pool(), store), controller=controller)
    kv.pipeline.whole_bytes = 0
    report = kv(["one document of words"], "why?").report
    assert list(report.loaded) == [store.url]
    assert not report.prefilled_tokens
    assert "ZeroDivisionError" in " ".join(report.notes)


def test_a_calibration_of_another_machine_or_model_is_not_used_and_said():
    device, dtype = torch.device("cpu"), torch.float32
    for made in (costs(1e6), Costs(COMPUTE, {}, {}, machine(device), "another")):
        ready = Controller(made).ready("f", device, dtype)
        assert ready.compute != COMPUTE
        assert ready.compute.linear_rate > 0
        assert not ready.sources
        assert len(ready.notes) == 1
        assert "blendkv calibrate" in ready.notes[0]
        assert Controller(ready).ready("f", device, dtype) is ready
        assert len(ready.notes) == 1
    good = Costs(COMPUTE, {}, {}, machine(device), "f")
    assert Controller(good).ready("f", device, dtype).compute == COMPUTE
    assert not good.notes


def test_without_costs_the_kept_ones_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path))
    device = torch.device("cpu")
    assert "no calibration" in Controller().ready("f" * 32, device, torch.float32).notes[0]
    Costs(COMPUTE, {}, {}, machine(device), "f" * 32).write(calibration_path("f" * 32))
    ready = Controller().ready("f" * 32, device, torch.float32)
    assert ready.compute == COMPUTE
    assert not ready.notes
    calibration_path("f" * 32).write_text("no")
    assert "is no calibration" in Controller().ready("f" * 32, device, torch.float32).notes[0]


def test_calibrating_measures_and_leaves_nothing_behind(attached, tmp_path):
    store = DiskStore(tmp_path)
    found = calibrate_machine(attached("llama"), [store], ["raw"], lengths=(32, 64), ratios=(0.0, 0.5, 1.0))
    assert found.compute.linear_rate > 0
    assert found.sources[store.url].bytes_per_s > 0
    assert found.decoding["raw"] > 0
    assert not list(store.keys())
    assert found.machine == machine(torch.device("cpu"))


def test_a_store_that_cannot_be_written_is_measured_by_what_it_has():
    store = DictStore()
    store.refuses = True
    from blendkv.errors import StoreError

    with pytest.raises(StoreError, match="nothing can be measured"):
        measure_source(store)
    store.entries["0" * 64] = bytes(100_000)
    assert measure_source(store).bytes_per_s > 0
    assert list(store.entries) == ["0" * 64]


def test_through_a_library(attached):
    """A link so slow that text is faster, and one so fast that nothing but the floor is: report, answer, learning."""
    from tests.cases.stored import answer, library

    model = attached("llama")
    documents = [" ".join(f"word{n + 100 * i}" for n in range(60)) for i in range(3)]
    store = DictStore(local=True)
    with library(model, TieredStore(Pool(), store), recompute_ratio=0.15) as writer:
        writer(documents, "why?")

    def asked(rate):
        controller = Controller(Costs(ComputeCosts(0.0, 1e9, 1e9), {store.url: SourceCosts(0.0, rate)}))
        kv = library(model, TieredStore(Pool(), store), recompute_ratio=0.4, controller=controller)
        kv.pipeline.whole_bytes = 0
        kv(["x"], "y")  # the controller finds that these costs are of no machine, and notes this one
        controller.costs.compute = ComputeCosts(0.0, 1e9, 1e9)
        controller.costs.sources[store.url] = SourceCosts(0.0, rate)
        inputs = kv(documents, "why?")
        got = answer(model, inputs["input_ids"], inputs.cache, attention_mask=inputs["attention_mask"])
        return inputs, got, controller

    inputs, _, controller = asked(1e12)
    report = inputs.report
    assert report.loading.decision.ratio == 0.15
    assert set(report.schedule.values()) == {0.15}
    assert not report.misses
    said = report.to_dict()["loading"]
    assert said["decision"]["took_s"] > 0
    assert said["decision"]["loaded_s"] == said["loaded_s"] > 0
    assert controller.costs.sources[store.url].bytes_per_s < 1e12  # it has seen what the store gives
    assert "ratio 0.15" in str(report)

    inputs, (_, logits), _ = asked(10.0)
    missing = [chunk for chunk in inputs.cache.chunks[0] if isinstance(chunk, MissingChunk)]
    assert inputs.report.misses == {"text": sum(map(len, missing))}
    assert sum(map(len, missing)) > 1000
    _, want = answer(model, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    assert (logits - want).abs().max() <= 1e-4


@pytest.mark.parametrize("selector", ["boundary", "hkvd"])
def test_predicted_is_what_is_waited_for(attached, selector):
    """Of a selector that knows its tokens ahead without what the prompt leaves out."""
    from tests.cases.stored import library

    model, documents = attached("llama"), [" ".join(f"word{n + 100 * i}" for n in range(60)) for i in range(3)]
    store = DictStore(local=True)
    with library(model, TieredStore(Pool(), store)) as writer:
        writer(documents, "why?")
    controller = Controller(costs(1e12), floor=0.3, most=0.3, text=False)
    kv = library(model, TieredStore(Pool(), store), selector=selector, controller=controller)
    kv.pipeline.whole_bytes, kv.pipeline.least_gap = 0, 1
    kv(["x"], "y")  # the controller finds that these costs are of no machine, and notes this one
    controller.costs.compute, controller.costs.sources = COMPUTE, {store.url: SourceCosts(0.0, 1e6)}
    loading = kv(documents, "why?").report.loading
    nbytes = sum(store.size(key) for key in loading.levels)
    assert (loading.left_out_bytes > nbytes / 4) == (selector == "boundary")
    assert loading.decision.load_s * 1e6 == pytest.approx(nbytes - loading.left_out_bytes, rel=0.03)


@pytest.mark.parametrize(("floor", "recompute_ratio", "first"), [(0.0, 0.15, 0), (0.2, 0.0, 1)])
def test_layers_come_in_the_order_that_the_chosen_ratio_wants(attached, monkeypatch, floor, recompute_ratio, first):
    """At ratio 0 stored states of the first layer are read, at others not, whatever the library's default was."""
    from blendkv.loading import pipeline
    from tests.cases.stored import library

    model, store, asked = attached("llama"), DictStore(local=True), []
    with library(model, TieredStore(Pool(), store)) as writer:
        writer(["one document of words"], "why?")
    controller = Controller(costs(1e12), floor=floor, most=floor)
    kv = library(model, TieredStore(Pool(), store), recompute_ratio=recompute_ratio, controller=controller)
    kv.pipeline.whole_bytes = 0
    cut = pipeline.cut
    monkeypatch.setattr(pipeline, "cut", lambda coming, at, *rest: asked.append(at) or cut(coming, at, *rest))
    inputs = kv(["one document of words"], "why?")
    assert asked == [first] == [inputs.cache.reads_from]


def test_a_controller_needs_a_road(attached):
    from tests.cases.stored import library

    with pytest.raises(ValueError, match="give a store"):
        library(attached("llama"), "memory://", controller=Controller())
