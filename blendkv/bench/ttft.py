"""`blendkv bench ttft`: time to the first token of each method, beside full recompute in the same process."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from transformers import PreTrainedModel

from blendkv import flops
from blendkv.attaching import attachment_of
from blendkv.bench.decode import decode_rate
from blendkv.bench.gates import require_exact, require_exact_states, require_same
from blendkv.bench.measure import PeakMemory, in_turns, median, time_to_first_token
from blendkv.bench.memory import RESERVE, Peak, expected_peak
from blendkv.bench.methods import METHODS, Answerer, Blend, Case, Full, Method, make_methods
from blendkv.bench.prompts import check_pool, pool_name, random_case
from blendkv.bench.results import Row, model_device_name, versions
from blendkv.selectors import HKVD, Selector

STATES_GATE_TOKENS = 2048, 8192
"""Exact keys and values are blended at the shortest length from the first on, or at the longest if none is that long,
and at no more than the second: there they are held three times over."""
DECODE_REPEATS = 3


def ttft_rows(
    model: PreTrainedModel,
    *,
    tokens: int | Sequence[int] = 4096,
    chunk_tokens: int = 256,
    question_tokens: int = 32,
    ratios: Sequence[float] = (0.15,),
    methods: Sequence[str] = METHODS,
    selectors: str | Selector | Sequence[str | Selector] = "hkvd",
    repeats: int = 3,
    full_repeats: int | None = None,
    runs: int = 1,
    batch: int = 1,
    pool: str | Sequence[str] = "auto",
    decode_tokens: int = 64,
    seed: int = 0,
    shape: str | None = None,
    on_row: Callable[[Row], object] = lambda row: None,
    progress: bool = False,
) -> list[Row]:
    """Measures methods on prompts of random ids (content does not matter for speed).

    First, for every length, a blend must be right (`gates`). Then chunks are computed before the clock starts; a timed
    call makes its own cache from them and ends when `generate` has returned the first token. Each method is timed warm:
    an untimed call, then its repeats one after another (a system that reclaims idle memory would otherwise charge a
    quick method for the slow one before it), those from several pools in turns.

    Args:
        model: a transformers decoder, on its device; no tokenizer is needed.
        tokens: context tokens, all in chunks; several to measure one after another.
        chunk_tokens: tokens of a chunk (the last may be shorter).
        question_tokens: tokens after the context.
        ratios: one row of "blend" each, for each selector.
        methods: names (`methods.METHODS`); full recompute is measured in any case, to compare with.
        selectors: of "blend".
        repeats: timed calls of each method; medians are reported.
        full_repeats: timed calls of full recompute, if not as many.
        runs: how often all of it is measured, so that two runs stand beside each other.
        batch: prompts answered at once; they share the chunks.
        pool: where the chunks lie (`prompts.POOLS`). With several, rows of blends say how long they take in times of
            the first one's (`of_first`).
        decode_tokens: tokens decoded after the first, for "full" and "blend"; 0 leaves decoding out.
        seed: of the ids.
        shape: what to call the model in the rows.
        on_row: called with each row as soon as it is measured.
        progress: whether to say on stderr what was measured.

    Returns:
        One row a run, length, method, selector, ratio and pool, in the order measured; methods that blend nothing have
        one of the first pool.

    Raises:
        BlendError: a blend is not what it must be, so that no time would mean anything.
        ValueError: for an unknown name or a number out of range.
    """
    lengths = [tokens] if isinstance(tokens, int) else list(tokens)
    full_repeats = repeats if full_repeats is None else full_repeats
    if min([*lengths, chunk_tokens, question_tokens, repeats, full_repeats, runs, batch], default=0) < 1 or not lengths:
        raise ValueError("tokens, chunk_tokens, question_tokens, repeats, runs and batch must be at least 1")
    if decode_tokens < 0:
        raise ValueError("decode_tokens must be at least 0")
    wanted = make_methods(methods, ratios, selectors)
    pools = [pool] if isinstance(pool, str) else list(dict.fromkeys(pool))
    if not pools:
        raise ValueError("pool is empty: name at least one")
    for each in pools:
        check_pool(each, next(model.parameters()).device)
    bench = _Bench(wanted, repeats, full_repeats, decode_tokens, shape or model.config.model_type, progress)

    def case_of(length: int, pool: str = pools[0]) -> Case:
        return random_case(model, length, chunk_tokens, question_tokens, seed, batch=batch, pool=pool)

    for length in lengths:
        bench.check(case_of(length))
    bench.check_states(case_of(_states_length(lengths)))
    bench.check_pools([case_of(min(lengths), each) for each in pools])
    rows = []
    for run in range(runs):
        for length in lengths:
            for row in bench.measure([case_of(length, each) for each in pools]):
                rows.append(row | {"chunk_tokens": chunk_tokens, "run": run})
                on_row(rows[-1])
    return rows


def _warm(method: Method) -> int:
    """Untimed calls: a blend's CUDA graphs are recorded in the first and checked in the second."""
    return 1 if isinstance(method, Full) else 3


def _states_length(lengths: Sequence[int]) -> int:
    least, most = STATES_GATE_TOKENS
    return min(min((n for n in lengths if n >= least), default=max(lengths)), most)


@dataclass
class _Measured:
    """What was measured of one method."""

    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


@dataclass
class _Bench:
    """Measures methods on one case after another."""

    wanted: list[Method]
    repeats: int
    full_repeats: int
    decode_tokens: int
    shape: str
    progress: bool

    def say(self, line: str) -> None:
        """A line of progress."""
        if self.progress:
            print(line, file=sys.stderr, flush=True)

    def check(self, case: Case) -> None:
        """The gate of every length."""
        selectors = {id(m.selector): m.selector for m in self.wanted if type(m) is Blend and m.selector.ratio is None}
        error = require_exact(case, list(selectors.values()) or [HKVD()])
        self.say(f"{case.tokens:,} tokens: ratio 1 equals full recompute (off by {error:.2g})")

    def check_states(self, case: Case) -> None:
        """The gate of the narrowed layers."""
        error = require_exact_states(case)
        self.say(f"{case.tokens:,} tokens: exact keys and values stay exact (off by {error:.2g})")

    def check_pools(self, cases: Sequence[Case]) -> None:
        """The gate of chunks that lie elsewhere than the first case's."""
        blends = [method for method in self.wanted if isinstance(method, Blend)]
        for other in cases[1:]:
            error = require_same(cases[0], other, blends)
            names = f"{pool_name(other)} says what {pool_name(cases[0])} says"
            self.say(f"{other.tokens:,} tokens: {names} (off by {error:.2g})")

    def measure(self, cases: Sequence[Case]) -> Iterator[Row]:
        """Rows of the methods wanted, each as soon as it is complete; of one prompt with its chunks here and there."""
        case = cases[0]
        full = next((method for method in self.wanted if isinstance(method, Full)), None) or Full()
        methods = self.wanted if full in self.wanted else [full, *self.wanted]
        methods = sorted(methods, key=lambda method: method is not full)  # what others are compared with comes first
        runs = {id(method): method.prepare(case) for method in methods}
        measured = {id(method): _Measured() for method in methods}
        self._decode(case, methods, runs, measured)
        device = next(case.model.parameters()).device
        one_token_s = one_token_seconds(case, self.repeats)
        for method in methods:
            others = cases[1:] if isinstance(method, Blend) else ()
            these = [runs[id(method)], *(method.prepare(other) for other in others)]
            repeats = self.full_repeats if method is full else self.repeats
            times = in_turns([_first(run) for run in these], device, repeats, _warm(method))
            for where, run, seconds in zip([case, *others], these, times, strict=True):
                mine = replace(measured[id(method)], seconds=seconds)
                with PeakMemory(device) as peak:
                    answer = run(1)
                if run is these[0]:
                    measured[id(method)] = mine
                if method not in self.wanted:
                    continue
                row = self._row(where, method, mine, measured[id(full)], answer.report)
                beside = {"first_pool": pool_name(case), "of_first": row["ttft_s"] / median(times[0])} if others else {}
                row |= _against_floor(row, one_token_s) | {"peak_bytes": peak.bytes} | _expected(where, method) | beside
                yield row
                self.say(_line(row))

    def _decode(self, case: Case, methods: list[Method], runs: dict[int, Answerer], measured: dict) -> None:
        """Decoding rates, the methods taking turns."""
        decoders = [method for method in methods if isinstance(method, Full) or type(method) is Blend]
        for _ in range(min(self.repeats, DECODE_REPEATS) if self.decode_tokens else 0):
            for method in decoders:
                rate = decode_rate(runs[id(method)], self.decode_tokens, case.batch)
                measured[id(method)].rates.append(rate)

    def _row(self, case: Case, method: Method, mine: _Measured, full: _Measured, report) -> Row:
        shape, facts = _model_shape(case.model), attachment_of(case.model).facts
        ttft_s, full_s = median(mine.seconds), median(full.seconds)
        limit = method.flop_limit(shape, case) if shape is not None else math.nan
        rate, full_rate = (median(m.rates) if m.rates else None for m in (mine, full))
        token_bytes = sum(h * (k + v) for h, k, v in facts.sizes) * facts.dtype.itemsize
        return {
            "device": model_device_name(case.model),
            "shape": self.shape,
            "dtype": str(facts.dtype).removeprefix("torch."),
            "method": method.name,
            "selector": method.selector.name if type(method) is Blend else None,
            "ratio": method.ratio,
            "tokens": case.tokens,
            "question_tokens": len(case.question),
            "batch": case.batch,
            "pool": pool_name(case),
            "ttft_s": ttft_s,
            "full_ttft_s": full_s,
            "speedup": full_s / ttft_s,
            "flop_limit": _finite(limit),
            "achieved_of_limit": _finite(full_s / ttft_s / limit),
            "charged_budget": _finite(method.charged_budget(case, report)),
            "decode_tokens_per_s": rate,
            "full_decode_tokens_per_s": full_rate if rate is not None else None,
            "decode_ratio": rate / full_rate if rate is not None and full_rate is not None else None,
            "placed_bytes": report.cache_bytes
            if report is not None
            else token_bytes * case.batch * (case.tokens + len(case.question)),
            "pool_bytes": sum(chunk.nbytes for chunk in case.chunks),
            "spread_s": [min(mine.seconds), max(mine.seconds)],
            "all_ttft_s": mine.seconds,
            "stages_s": report.seconds if report is not None else None,
            "versions": versions(),
        }


def one_token_seconds(case: Case, repeats: int = 3) -> float:
    """Seconds of one forward of one token (a row): what launches and reading the weights cost at least."""
    first = case.ids[:, :1]

    @torch.no_grad()
    def call() -> object:
        return case.model(input_ids=first)

    return median(time_to_first_token(call, first.device, repeats=max(5, repeats), warmup=2))


def _against_floor(row: Row, one_token_s: float) -> Row:
    """How near the time is to what it could be: that of the FLOP limit, but not less than one token takes."""
    limit = row["flop_limit"]
    floor = max(row["full_ttft_s"] / limit, one_token_s) if limit else None
    achieved = floor / row["ttft_s"] if floor else None
    return {"one_token_s": one_token_s, "floor_s": floor, "achieved_of_floor": achieved}


def _expected(case: Case, method: Method) -> Row:
    """What the peak is held against (`memory`), for full recompute and blends."""
    try:
        peak = _peak(case, method)
    except ValueError:  # a mixture of experts
        peak = None
    return {"expected_peak_bytes": peak.total if peak else None, "expected_parts": asdict(peak) if peak else None}


def _peak(case: Case, method: Method) -> Peak | None:
    blend = method if isinstance(method, Blend) else None
    if blend is None and not isinstance(method, Full):
        return None
    ratio = blend.kept if blend else 0.0
    static = blend is not None and ratio < 1 and ("deviation" not in blend.selector.needs or not ratio)
    peak = expected_peak(
        case.model.config,
        tokens=case.tokens,
        question_tokens=len(case.question),
        ratio=ratio,
        itemsize=case.chunks[0].dtype.itemsize,
        batch=case.batch,
        full_layer=not static,
        reserve=RESERVE if blend else 0,
    )
    return peak if blend else replace(peak, selected_rows=0)


def _line(row: Row) -> str:
    name = " ".join(str(part) for part in (row["method"], row["selector"], row["ratio"]) if part is not None)
    limit = f" of {row['flop_limit']:.2f}x" if row["flop_limit"] else ""
    where = f", {row['pool']}: {row['of_first']:.2f} of {row['first_pool']}" if "of_first" in row else ""
    return f"{row['tokens']:,} tokens: {name}: {row['ttft_s']:.4f} s, {row['speedup']:.2f}x{limit}{where}"


def _first(run: Answerer) -> Callable[[], object]:
    return lambda: run(1)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _model_shape(model: PreTrainedModel) -> flops.ModelShape | None:
    try:
        return flops.model_shape(model)
    except ValueError:  # a decoder whose layers cannot be counted is measured without its limit
        return None
