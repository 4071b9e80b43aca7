"""`blendkv bench throughput`: time to the first token and requests a second, against the rate at which they come."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedModel

from blendkv.attaching import attach, attachment_of
from blendkv.bench.gates import require_exact
from blendkv.bench.methods import METHODS, Blend, Case, Full, Method, make_methods
from blendkv.bench.queueing import fifo, poisson_arrivals, sustained_rate
from blendkv.bench.results import Row, model_device_name, versions
from blendkv.bench.serving import Served, Worker, make_worker
from blendkv.bench.workload import Request, Workload, zipf_workload
from blendkv.selectors import HKVD, Selector

VIRTUAL_REQUESTS = 5000
"""In virtual time the measured requests come again and again, at least so many in all."""
TARGET = 2.0
"""The p95 that is asked for, in mean service times of full recompute, unless another is given."""

WARM_CALLS = {"cuda": 3}
"""Requests of each method before anything is measured, by device; one elsewhere."""


@dataclass
class Measured:
    """A method's requests, each really served once.

    Attributes:
        method: which.
        served: in order.
    """

    method: Method
    served: list[Served] = field(default_factory=list)

    @property
    def first_s(self) -> np.ndarray:
        """`[N]` seconds to the first token from when the worker began."""
        return np.array([one.first_s for one in self.served])

    @property
    def total_s(self) -> np.ndarray:
        """`[N]` seconds that each kept the worker."""
        return np.array([one.total_s for one in self.served])

    def queued(self, rate: float, seed: int, requests: int = VIRTUAL_REQUESTS) -> tuple[np.ndarray, float]:
        """The requests in virtual time, over and over, with Poisson arrivals.

        Returns:
            `[N]` seconds to the first token, waiting included, and completed requests a second.
        """
        rounds = -(-requests // len(self.served))
        first, total = np.tile(self.first_s, rounds), np.tile(self.total_s, rounds)
        return queue(poisson_arrivals(len(total), rate, seed), first, total)


def queue(arrivals: np.ndarray, first_s: np.ndarray, total_s: np.ndarray) -> tuple[np.ndarray, float]:
    """`[N]` seconds from each arrival to the first token, and completed requests a second from first to last."""
    starts = fifo(arrivals, total_s)
    return starts + first_s - arrivals, len(starts) / float(starts[-1] + total_s[-1] - arrivals[0])


def throughput_rows(
    model: PreTrainedModel,
    *,
    rates: Sequence[float],
    methods: Sequence[str] = METHODS,
    ratios: Sequence[float] = (0.15,),
    selectors: str | Selector | Sequence[str | Selector] = "hkvd",
    documents: int = 40,
    chunks: int = 6,
    chunk_tokens: int = 256,
    question_tokens: int = 32,
    requests: int = 40,
    warm_requests: int | None = None,
    zipf: float = 0.9,
    room: float = 0.5,
    new_tokens: int = 1,
    target_s: float | None = None,
    real_rate: float | None = None,
    seed: int = 0,
    shape: str | None = None,
    progress: bool = False,
) -> list[Row]:
    """Serves a workload with each method, then queues it at each rate.

    One worker answers requests in the order in which they come, so what its store holds, and with it what a request
    takes, does not depend on when they come. Every request is therefore really served once by every method, the
    methods taking turns request by request, and the queue is computed in virtual time from those seconds.

    Args:
        model: a transformers decoder, on its device.
        rates: requests a second.
        methods: names (`methods.METHODS`); full recompute is measured in any case, to compare with.
        ratios: of "blend", for each selector.
        selectors: of "blend".
        documents: in all.
        chunks: documents of a request.
        chunk_tokens: of a document.
        question_tokens: of a request's own.
        requests: measured ones.
        warm_requests: before them, which fill the stores and are not measured; as many as measured ones if None.
        zipf: exponent of the law by which documents are wanted.
        room: of each method's store, as a share of all documents' keys and values.
        new_tokens: of an answer.
        target_s: the p95 of the time to the first token at which `sustained_per_s` is given; `TARGET` times what full
            recompute takes if None.
        real_rate: serves the same requests again when they come at this rate, by the clock, beside what the virtual
            queue says for the same arrivals; None leaves it out.
        seed: of workload and arrivals.
        shape: what to call the model in the rows.
        progress: shows a bar on stderr.

    Returns:
        A row for each method (selector, ratio) and rate; `..._of_full` is relative to full recompute. `capacity_per_s`
        is what the worker bears if anybody may wait for any time: where requests of one method differ much in what they
        take (a busy machine), trust it more than `sustained_per_s`.

    Raises:
        BlendError: a blend is not what it must be, so that no time would mean anything.
        ValueError: for an unknown name, or a number out of range.
    """
    warm_requests = requests if warm_requests is None else warm_requests
    _check(rates, requests, warm_requests, new_tokens, room, target_s, real_rate)
    wanted = make_methods(methods, ratios, selectors)
    attach(model)
    workload = zipf_workload(
        model.config.get_text_config().vocab_size,
        documents=documents,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        requests=warm_requests + requests,
        zipf=zipf,
        seed=seed,
    )
    _require_exact(model, workload, wanted)
    measured_methods = wanted if any(isinstance(m, Full) for m in wanted) else [Full(), *wanted]
    capacity = _capacity(model, workload, room)
    cold, measured_requests = workload.requests[:warm_requests], workload.requests[warm_requests:]
    for method in measured_methods:  # code, kernels and CUDA graphs are warm before the clock starts
        first_time = make_worker(method, model, workload, new_tokens, capacity)
        for _ in range(WARM_CALLS.get(first_time.device.type, 1)):
            first_time.serve(workload.requests[0])
    workers = [make_worker(method, model, workload, new_tokens, capacity) for method in measured_methods]
    found = [Measured(method) for method in measured_methods]
    with tqdm(total=len(workers) * (len(cold) + requests), desc="requests", disable=not progress) as bar:
        _warm(workers, cold, bar)
        for request in measured_requests:
            for worker, mine in zip(workers, found, strict=True):
                mine.served.append(worker.serve(request))
                bar.update()
    full = next(mine for mine in found if isinstance(mine.method, Full))
    target_s = TARGET * float(full.first_s.mean()) if target_s is None else target_s
    shared = {
        "bench": "throughput",
        "device": model_device_name(model),
        "shape": shape or model.config.model_type,
        "dtype": str(attachment_of(model).facts.dtype).removeprefix("torch."),
        "documents": documents,
        "chunks": chunks,
        "chunk_tokens": chunk_tokens,
        "question_tokens": question_tokens,
        "requests": requests,
        "warm_requests": warm_requests,
        "zipf": zipf,
        "room": room,
        "new_tokens": new_tokens,
        "p95_target_s": target_s,
        "seed": seed,
    }
    sustained = {id(mine): _sustained(mine, target_s, seed) for mine in found}
    rows: list[Row] = []
    for mine in found:
        if mine.method not in wanted:
            continue
        own = shared | _of_method(mine, chunks * chunk_tokens) | {"sustained_per_s": sustained[id(mine)] or None}
        own["capacity_of_full"] = float(full.total_s.mean() / mine.total_s.mean())
        own["sustained_of_full"] = sustained[id(mine)] / sustained[id(full)] if sustained[id(full)] else None
        for rate in rates:
            rows.append(own | {"clock": "virtual", "rate": rate} | _figures(*mine.queued(rate, seed)))
        if real_rate is not None:
            worker = make_worker(mine.method, model, workload, new_tokens, capacity)
            rows += [own | row for row in _real(worker, mine, cold, measured_requests, real_rate, seed, progress)]
    return [row | {"versions": versions()} for row in rows]


def _real(
    worker: Worker,
    mine: Measured,
    cold: Sequence[Request],
    requests: Sequence[Request],
    rate: float,
    seed: int,
    progress: bool,
) -> list[Row]:
    """Rows of the requests as they come by the clock, and of the virtual queue with those arrivals."""
    arrivals = poisson_arrivals(len(requests), rate, seed)
    with tqdm(total=len(cold) + len(requests), desc=f"{mine.method.name} by the clock", disable=not progress) as bar:
        _warm([worker], cold, bar)
        ttft_s, per_s = serve_by_the_clock(worker, requests, arrivals, bar)
    return [
        {"clock": "real", "rate": rate} | _figures(ttft_s, per_s),
        {"clock": "virtual, as real", "rate": rate} | _figures(*queue(arrivals, mine.first_s, mine.total_s)),
    ]


def serve_by_the_clock(
    worker: Worker, requests: Sequence[Request], arrivals: np.ndarray, bar: tqdm | None = None
) -> tuple[np.ndarray, float]:
    """`[N]` seconds from each arrival to the first token, and completed requests a second; nothing is computed."""
    begin, ttft_s = time.perf_counter(), np.empty(len(requests))
    for i, (request, arrival) in enumerate(zip(requests, arrivals.tolist(), strict=True)):
        time.sleep(max(0.0, begin + arrival - time.perf_counter()))
        start = time.perf_counter()
        ttft_s[i] = start + worker.serve(request).first_s - (begin + arrival)
        if bar is not None:
            bar.update()
    return ttft_s, len(requests) / (time.perf_counter() - begin - float(arrivals[0]))


def _warm(workers: Sequence[Worker], requests: Sequence[Request], bar: tqdm) -> None:
    for request in requests:
        for worker in workers:
            worker.warm(request)
            bar.update()


def _sustained(mine: Measured, target_s: float, seed: int) -> float:
    def p95(rate: float) -> float:
        return float(np.quantile(mine.queued(rate, seed)[0], 0.95))

    return sustained_rate(p95, float(mine.total_s.mean()), target_s)


def _of_method(mine: Measured, tokens: int) -> Row:
    return {
        "method": mine.method.name,
        "selector": mine.method.selector.name if type(mine.method) is Blend else None,
        "ratio": mine.method.ratio,
        "hit_rate": sum(one.hits for one in mine.served) / (tokens * len(mine.served)),
        "service_s": float(mine.total_s.mean()),
        "service_first_s": float(mine.first_s.mean()),
        "service_p95_s": float(np.quantile(mine.total_s, 0.95)),
        "capacity_per_s": 1 / float(mine.total_s.mean()),
    }


def _figures(ttft_s: np.ndarray, per_s: float) -> Row:
    p50, p95 = np.quantile(ttft_s, [0.5, 0.95]).tolist()
    return {"completed_per_s": per_s, "ttft_p50_s": p50, "ttft_p95_s": p95}


def _capacity(model: PreTrainedModel, workload: Workload, room: float) -> int:
    facts = attachment_of(model).facts
    token = sum(heads * (k + v) for heads, k, v in facts.sizes) * facts.dtype.itemsize
    return max(1, math.ceil(room * token * sum(map(len, workload.documents))))


def _require_exact(model: PreTrainedModel, workload: Workload, wanted: Sequence[Method]) -> None:
    """The gate of `bench ttft`, on the first request."""
    request = workload.requests[0]
    case = Case.of(model, [workload.documents[number] for number in request.documents], request.question)
    selectors = {id(m.selector): m.selector for m in wanted if type(m) is Blend and m.selector.ratio is None}
    require_exact(case, list(selectors.values()) or [HKVD()])


def _check(
    rates: Sequence[float],
    requests: int,
    warm_requests: int,
    new_tokens: int,
    room: float,
    target_s: float | None,
    real_rate: float | None,
) -> None:
    """Refuses what cannot be measured, before anything is."""
    given = [*rates, *([] if real_rate is None else [real_rate])]
    if not rates or not all(rate > 0 and math.isfinite(rate) for rate in given):
        raise ValueError(f"rates {list(rates)} and real_rate={real_rate}: give requests a second, each above 0")
    if min(requests, new_tokens) < 1 or warm_requests < 0:
        raise ValueError("requests and new_tokens must be at least 1, warm_requests at least 0")
    if not room > 0:
        raise ValueError(f"room={room}: give the share of all documents that a store holds, above 0")
    if target_s is not None and not target_s > 0:
        raise ValueError(f"target_s={target_s}: give seconds, above 0")
