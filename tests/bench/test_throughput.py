"""`bench throughput`: the queue, the stores of the methods, and rows that say what happened."""

import json

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache
from typer.testing import CliRunner

from blendkv.bench import throughput as bench
from blendkv.bench.methods import Blend, Full, Prefix, Reuse, forward, states_of
from blendkv.bench.plot import plot
from blendkv.bench.queueing import fifo, poisson_arrivals, sustained_rate
from blendkv.bench.results import read_rows, write_rows
from blendkv.bench.serving import Served, make_worker
from blendkv.bench.table import markdown
from blendkv.bench.throughput import Measured, queue, serve_by_the_clock, throughput_rows
from blendkv.bench.throughput_plot import lines_over_rate
from blendkv.bench.workload import Request, zipf_workload
from blendkv.cli import main
from blendkv.selectors import get_selector
from blendkv.testing import VOCABULARY

SIZES = {"documents": 6, "chunks": 3, "chunk_tokens": 12, "question_tokens": 4}


def workload_of(requests=8, **changes):
    return zipf_workload(VOCABULARY, **SIZES | {"requests": requests, "zipf": 0.9, "seed": 1} | changes)


def everything(workload, model):
    """Bytes of all documents of a tiny Llama (4 layers, 2 heads of 16, fp32)."""
    return sum(map(len, workload.documents)) * 4 * 2 * 2 * 16 * 4


# -- the queue --------------------------------------------------------------------------------------------------------


def ticking(arrivals, seconds, step=1):
    """The slow twin, in whole ticks: a worker that looks at its queue again and again."""
    waiting, starts, free, now = [], [None] * len(arrivals), 0, 0
    while None in starts:
        waiting += [i for i, arrival in enumerate(arrivals) if arrival == now]
        if now >= free and waiting:
            starts[waiting[0]] = now
            free = now + seconds[waiting.pop(0)]
        now += step
    return starts


@pytest.mark.parametrize("seed", range(5))
def test_the_queue_equals_one_that_ticks(seed):
    rng = np.random.default_rng(seed)
    arrivals, seconds = np.sort(rng.integers(0, 150, 30)), rng.integers(1, 9, 30)
    assert fifo(arrivals, seconds).tolist() == ticking(arrivals.tolist(), seconds.tolist())


def test_a_queue_by_hand():
    ttft, per_s = queue(np.array([0.0, 1.0, 10.0]), np.array([2.0, 2.0, 2.0]), np.array([3.0, 3.0, 3.0]))
    assert ttft.tolist() == [2.0, 4.0, 2.0]  # the second waits from 1 to 3
    assert per_s == pytest.approx(3 / 13)


def test_waiting_is_what_queueing_theory_says():
    """M/D/1: a mean wait of rho / (2 (1 - rho)) services."""
    arrivals = poisson_arrivals(200_000, 0.7, seed=3)
    waits = fifo(arrivals, np.ones(len(arrivals))) - arrivals
    assert np.diff(arrivals).mean() == pytest.approx(1 / 0.7, rel=0.01)
    assert waits.mean() == pytest.approx(0.7 / (2 * 0.3), rel=0.06)


def test_the_same_arrivals_closer_together():
    slow, fast = poisson_arrivals(50, 0.5, 4), poisson_arrivals(50, 2.0, 4)
    np.testing.assert_allclose(slow, 4 * fast)
    with pytest.raises(ValueError, match="above 0"):
        poisson_arrivals(5, 0.0, 0)


@pytest.mark.parametrize("target", [1.3, 2.0, 5.0])
def test_the_rate_that_is_borne(target):
    mine = Measured(Full(), [Served(1.0, 1.2, 0), Served(0.5, 0.6, 0)])

    def p95(rate):
        return float(np.quantile(mine.queued(rate, 0)[0], 0.95))

    found = sustained_rate(p95, 0.9, target)
    assert p95(found) <= target < p95(found * 1.005)
    assert sustained_rate(p95, 0.9, 0.4) == 0.0  # sooner than it takes alone


# -- requests and stores ----------------------------------------------------------------------------------------------


def test_a_workload_is_what_it_says():
    drawn = zipf_workload(100, documents=30, chunks=2, chunk_tokens=5, question_tokens=3, requests=4000, zipf=1, seed=0)
    counts = np.bincount([n for request in drawn.requests for n in request.documents], minlength=30)
    assert counts[0] > 1.6 * counts[1] * 0.8 > counts[10]
    assert (len(drawn.documents), {len(d) for d in drawn.documents}) == (30, {5})
    assert all(len(set(request.documents)) == 2 for request in drawn.requests)
    assert len({request.question for request in drawn.requests}) > 3900
    assert drawn.ids(drawn.requests[0])[:5] == list(drawn.documents[drawn.requests[0].documents[0]])
    assert drawn == zipf_workload(
        100, documents=30, chunks=2, chunk_tokens=5, question_tokens=3, requests=4000, zipf=1, seed=0
    )
    with pytest.raises(ValueError, match="more documents"):
        workload_of(documents=2)
    with pytest.raises(ValueError, match="zipf"):
        workload_of(zipf=-1)


@pytest.mark.parametrize("room", [0.4, 10.0])
def test_prefixes_are_exact_and_counted(attached, room):
    """Whatever is found is what full prefill computes; a document behind another prefix is not found."""
    model, workload = attached("llama"), workload_of(20)
    worker = make_worker(Prefix(), model, workload, 1, int(room * everything(workload, model)))
    seen = set()
    for request in workload.requests:
        cache, hits = worker.start(request)
        known = 0
        while known < 3 and request.documents[: known + 1] in seen:
            known += 1
        assert hits == 12 * known if room > 1 else hits <= 12 * known
        if hits:
            want = DynamicCache()
            with torch.no_grad():
                forward(model, torch.tensor([workload.ids(request)[:hits]]), want)
            for mine, full in zip(states_of(cache), states_of(want), strict=True):
                torch.testing.assert_close(mine, full, atol=1e-5, rtol=1e-4)
        assert worker.serve(request).hits == hits
        assert worker.bytes <= worker.capacity_bytes
        seen |= {request.documents[: i + 1] for i in range(3)}
    assert any(worker.start(request)[1] for request in workload.requests)


@pytest.mark.parametrize("room", [0.5, 1.0])
def test_blends_take_from_a_bounded_pool(attached, room):
    model, workload = attached("llama"), workload_of(30)
    capacity = int(room * everything(workload, model))
    worker = make_worker(Blend(0.3, get_selector("hkvd")), model, workload, 1, capacity)
    recent = []
    for request in workload.requests:
        held = set(recent[-int(6 * room) :])
        served = worker.serve(request)
        assert served.hits == 12 * len(held & set(request.documents))
        for number in [n for n in request.documents if n in held] + [n for n in request.documents if n not in held]:
            recent = [n for n in recent if n != number] + [number]
        assert worker.pool.stats.bytes <= capacity
    assert (worker.pool.stats.evictions == 0) == (room == 1.0)


@pytest.mark.parametrize("method", [Full(), Prefix(), Reuse(), Blend(1.0, get_selector("hkvd"))])
def test_workers_answer_the_whole_prompt(attached, monkeypatch, method):
    model, workload = attached("llama"), workload_of(4)
    worker, said = make_worker(method, model, workload, 3, 10**9), []
    own = type(model).generate

    def listening(self, **options):
        out = own(self, **options)
        said.append(out[0].tolist())
        return out

    monkeypatch.setattr(type(model), "generate", listening)
    for request in workload.requests:
        served = worker.serve(request)
        assert 0 < served.first_s <= served.total_s
    want = [
        own(model, input_ids=torch.tensor([workload.ids(r)]), max_new_tokens=3, min_new_tokens=3, do_sample=False)
        for r in workload.requests
    ]
    assert [len(one) for one in said] == [len(workload.ids(r)) + 3 for r in workload.requests]
    if not isinstance(method, Reuse):
        assert said == [one[0].tolist() for one in want]


# -- rows -------------------------------------------------------------------------------------------------------------


TAKEN_S = {"full": 0.04, "prefix": 0.03, "reuse": 0.005, "blend": 0.01}


@pytest.fixture
def taking(monkeypatch):
    """`taking(slow)`: requests are really served, and by the worker's clock each takes `TAKEN_S`; the last one `slow`.

    What rows make of seconds is tested, not how steady this machine is.
    """

    def set_clock(slow=1.0):
        making = bench.make_worker

        def make(method, *args):
            worker = making(method, *args)
            serve, name = worker.serve, method.name

            def steadily(request):
                hits = serve(request).hits
                seconds = TAKEN_S[name] * (slow if request == worker.workload.requests[-1] else 1)
                return Served(seconds, 1.5 * seconds, hits)

            worker.serve = steadily
            return worker

        monkeypatch.setattr(bench, "make_worker", make)

    return set_clock


def test_rows_and_what_they_become(attached, taking, tmp_path):
    taking()
    rows = throughput_rows(
        attached("llama"),
        rates=[1.0, 50.0],
        ratios=[0.1, 0.3],
        requests=4,
        room=1.0,
        real_rate=40.0,
        shape="tiny",
        **SIZES,
    )
    methods = [("full", None), ("prefix", None), ("reuse", 0.0), ("blend", 0.1), ("blend", 0.3)]
    assert [(r["method"], r["ratio"]) for r in rows if r["rate"] == 1.0] == methods
    clocks = ["virtual", "virtual", "real", "virtual, as real"]
    assert [r["clock"] for r in rows] == clocks * 5
    for row in rows:
        assert 0 < row["ttft_p50_s"] <= row["ttft_p95_s"]
        assert row["completed_per_s"] > 0
        assert 0 <= row["hit_rate"] <= 1
        assert row["service_first_s"] == pytest.approx(TAKEN_S[row["method"]])
        assert row["service_s"] == pytest.approx(1.5 * TAKEN_S[row["method"]])
        assert row["capacity_per_s"] == pytest.approx(1 / row["service_s"])
        assert row["capacity_of_full"] == pytest.approx(TAKEN_S["full"] / TAKEN_S[row["method"]])
        assert row["p95_target_s"] == pytest.approx(2 * TAKEN_S["full"])
    full, blend = (next(r for r in rows if r["method"] == name) for name in ("full", "blend"))
    assert full["hit_rate"] == 0
    assert full["sustained_of_full"] == 1 < blend["capacity_of_full"] < blend["sustained_of_full"]
    assert full["sustained_per_s"] < full["capacity_per_s"]
    assert all(r["hit_rate"] == 1 for r in rows if r["method"] == "blend") == (len(set(_asked(8))) == 6)
    slow, fast = ([r for r in rows if r["rate"] == rate and r["clock"] == "virtual"] for rate in (1.0, 50.0))
    assert all(a["ttft_p95_s"] <= b["ttft_p95_s"] for a, b in zip(slow, fast, strict=True))
    write_rows(tmp_path / "rows.json", rows)
    kept = read_rows(tmp_path / "rows.json")
    assert len(kept) == len(rows)
    text = markdown(kept)
    assert "blend, hkvd, 30%" in text
    assert text.count("full recompute |") >= 5
    assert set(lines_over_rate(kept, "ttft_p95_s")) == {
        "full recompute",
        "prefix reuse",
        "full reuse",
        "blend, hkvd, 10%",
        "blend, hkvd, 30%",
    }
    pytest.importorskip("matplotlib")
    plot(kept, tmp_path / "rows.svg")
    assert "requests a second" in (tmp_path / "rows.svg").read_text()


def test_a_target_that_full_recompute_misses_alone(attached, taking):
    """One request in four takes five times as long: no rate at all has its p95 at twice the mean."""
    taking(slow=5.0)
    rows = throughput_rows(attached("llama"), rates=[1.0], methods=["full", "blend"], requests=4, room=1.0, **SIZES)
    full, blend = rows
    assert (full["sustained_per_s"], full["sustained_of_full"], blend["sustained_of_full"]) == (None, None, None)
    assert blend["sustained_per_s"] > 0
    assert full["capacity_of_full"] == 1
    assert "| none |" in markdown(rows)


def _asked(requests):
    return [n for request in workload_of(requests, seed=0).requests for n in request.documents]


def test_the_clock_agrees_with_the_virtual_queue(attached):
    """The same requests and arrivals, and what each took: a queue by the clock is the virtual one, but for sleeping."""
    model, workload = attached("llama"), workload_of(25)
    worker, took = make_worker(Blend(0.3, get_selector("hkvd")), model, workload, 2, 10**9), []
    serve = worker.serve

    def noting(request):
        took.append(serve(request))
        return took[-1]

    worker.serve = noting
    worker.serve(workload.requests[0])
    alone = took.pop().total_s
    arrivals = poisson_arrivals(25, 0.8 / alone, seed=2)
    real, per_s = serve_by_the_clock(worker, workload.requests, arrivals)
    virtual, virtual_per_s = queue(arrivals, np.array([t.first_s for t in took]), np.array([t.total_s for t in took]))
    assert len(took) == 25
    assert (real >= virtual - 1e-3).all()  # nothing is answered before it can be
    assert np.median(real - virtual) < 10 * alone + 1  # what sleeping and a busy machine add
    assert per_s <= virtual_per_s * 1.01


def test_the_clock_really_waits(attached):
    """By a worker that only sleeps: arrivals are waited for, and those that come meanwhile queue."""
    import time

    class Sleeper:
        def serve(self, request):
            time.sleep(0.05)
            return Served(0.05, 0.05, 0)

    requests = [Request((0,), (1,))] * 3
    ttft, per_s = serve_by_the_clock(Sleeper(), requests, np.array([0.1, 0.1, 0.4]))
    assert ttft[0] >= 0.05
    assert ttft[1] >= 0.1
    assert per_s <= 3 / 0.35


def test_what_cannot_be_measured_is_refused_before_anything_is(attached, monkeypatch):
    monkeypatch.setattr(bench, "zipf_workload", lambda *a, **k: pytest.fail("too late"))
    model = attached("llama")
    wrong = [
        {"rates": []}, {"rates": [0.0]}, {"rates": [1.0], "real_rate": -1.0}, {"rates": [1.0], "requests": 0},
        {"rates": [1.0], "room": 0.0}, {"rates": [1.0], "target_s": 0.0}, {"rates": [1.0], "methods": ["nonsense"]},
        {"rates": [float("inf")]}, {"rates": [1.0], "ratios": [2.0]}, {"rates": [1.0], "warm_requests": -1},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(ValueError, match=r"rate|ratio|at least|room|target_s|method"):
            throughput_rows(model, **options)


def test_the_command(attached, monkeypatch, tmp_path):
    monkeypatch.setattr("blendkv.cli_bench_throughput.load", lambda *a: (attached("llama"), None))
    out = tmp_path / "rows.json"
    arguments = (
        "bench throughput tiny --rates 5,20 --methods full,blend --requests 3 --documents 6 --chunks 3 "
        f"--chunk-tokens 12 --question-tokens 4 --room 1 --out {out}"
    ).split()
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["method"], row["rate"]) for row in rows] == [("full", 5), ("full", 20), ("blend", 5), ("blend", 20)]
    assert len(read_rows(out)) == 4
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "requests/s at the p95" in result.stdout
    assert CliRunner().invoke(main, ["bench", "throughput", "tiny", "--rates", "0"]).exit_code == 2
