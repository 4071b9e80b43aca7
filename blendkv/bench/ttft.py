"""`blendkv bench ttft`: time to the first token of each method, beside full recompute in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from blendkv import flops
from blendkv.bench.measure import PeakMemory, median, time_to_first_token
from blendkv.bench.methods import METHODS, Answerer, Blend, Case, Full, Method, make_methods
from blendkv.errors import BlendError
from blendkv.learning import rms_ratio
from blendkv.proof import BLEND_BOUND
from blendkv.selectors import Selector


def ttft_rows(
    model: PreTrainedModel,
    *,
    tokens: int = 4096,
    chunk_tokens: int = 256,
    question_tokens: int = 32,
    ratios: Sequence[float] = (0.15,),
    methods: Sequence[str] = METHODS,
    repeats: int = 3,
    selector: str | Selector = "hkvd",
    decode_tokens: int = 64,
    seed: int = 0,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Measures methods on one prompt of random ids (content does not matter for speed).

    Chunks are computed before the clock starts; a timed call makes its own cache from them and ends when `generate`
    has returned the first token. Each method is timed warm: an untimed call, then its repeats one after another (a
    system that reclaims idle memory would otherwise charge a quick method for the slow one before it).

    Args:
        model: a transformers decoder, on its device; no tokenizer is needed.
        tokens: context tokens, all in chunks.
        chunk_tokens: tokens of a chunk (the last may be shorter).
        question_tokens: tokens after the context.
        ratios: one row of "blend" each.
        methods: names (`methods.METHODS`); full recompute is measured in any case, to compare with.
        repeats: timed calls of each method; medians are reported.
        selector: of "blend".
        decode_tokens: tokens decoded after the first, for "full" and "blend"; 0 leaves decoding out.
        seed: of the ids.
        progress: whether to show a bar on stderr.

    Returns:
        One row a method and ratio, in the order asked for.

    Raises:
        BlendError: a blend at ratio 1 is not full prefill, so that no time would mean anything.
        ValueError: for an unknown name or a number out of range.
    """
    if min(tokens, chunk_tokens, question_tokens, repeats) < 1 or decode_tokens < 0:
        raise ValueError("tokens, chunk_tokens, question_tokens and repeats must be at least 1, decode_tokens 0")
    wanted = make_methods(methods, ratios, selector)
    baseline = next((method for method in wanted if isinstance(method, Full)), None) or Full()
    measured: list[Method] = wanted if baseline in wanted else [baseline, *wanted]
    case = random_case(model, tokens, chunk_tokens, question_tokens, seed, progress)
    require_exact(case)
    runs = {id(method): method.prepare(case) for method in measured}
    decoders = [method for method in measured if isinstance(method, Full) or type(method) is Blend]
    decoders = decoders if decode_tokens else []
    device = next(model.parameters()).device
    steps = len(measured) * (2 + repeats) + len(decoders) * repeats
    with tqdm(total=steps, desc="bench ttft", unit="run", disable=not progress, leave=False) as bar:
        reports, peaks, seconds, rates = {}, {}, _lists(measured), _lists(decoders)
        for method in measured:
            reports[id(method)] = runs[id(method)](1).report  # the warm-up
            seconds[id(method)] = time_to_first_token(_first(runs[id(method)]), device, repeats=repeats, warmup=0)
            bar.update(1 + repeats)
        for method in measured:
            with PeakMemory(device) as peak:
                runs[id(method)](1)
            peaks[id(method)] = peak.bytes
            bar.update()
        for _ in range(repeats):
            for method in decoders:
                rates[id(method)].append(decode_rate(runs[id(method)], decode_tokens))
                bar.update()
    shape = _shape(model)
    full_s = median(seconds[id(baseline)])
    rows = []
    for method in wanted:
        key = id(method)
        speedup = full_s / median(seconds[key])
        limit = method.flop_limit(shape, case) if shape is not None else float("nan")
        rows.append(
            {
                "method": method.name,
                "ratio": method.ratio,
                "selector": method.selector.name if type(method) is Blend else None,
                "tokens": tokens,
                "question_tokens": question_tokens,
                "device": device.type,
                "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
                "ttft_s": median(seconds[key]),
                "speedup": speedup,
                "flop_limit": limit,
                "achieved_of_limit": speedup / limit,
                "charged_budget": method.charged_budget(case, reports[key]),
                "peak_bytes": peaks[key],
                "decode_tokens_per_s": median(rates[key]) if rates.get(key) else None,
                "all_ttft_s": seconds[key],
                "stages_s": reports[key].seconds if reports[key] is not None else None,
            }
        )
    return rows


def random_case(
    model: PreTrainedModel, tokens: int, chunk_tokens: int, question_tokens: int, seed: int = 0, progress: bool = False
) -> Case:
    """A prompt of random ids cut into chunks, the question last."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (tokens + question_tokens,), generator=generator).tolist()
    pieces = [ids[start : min(start + chunk_tokens, tokens)] for start in range(0, tokens, chunk_tokens)]
    return Case.of(model, pieces, ids[tokens:], progress)


def require_exact(case: Case) -> None:
    """The gate before any time is reported: ratio 1 says what full recompute says.

    Raises:
        BlendError: with the figure.
    """
    full = Full().prepare(case)(1, output_logits=True)
    blend = Blend(1.0).prepare(case)(1, output_logits=True)
    error, bound = rms_ratio(blend.logits, full.logits), BLEND_BOUND[case.chunks[0].dtype]
    if not (error <= bound and torch.equal(blend.tokens, full.tokens)):
        raise BlendError(
            f"a blend at ratio 1 is not full prefill here (first token {blend.tokens.tolist()} instead of "
            f"{full.tokens.tolist()}, logits off by {error:.3g}, at most {bound:.3g} allowed): no time is reported; "
            "run `blendkv verify` on this model"
        )


def decode_rate(run: Answerer, tokens: int) -> float:
    """Tokens a second after the first one, over `tokens` more."""
    clock = TokenClock()
    run(1 + tokens, min_new_tokens=1 + tokens, streamer=clock)
    first, last = clock.times[0], clock.times[-1]
    return (len(clock.times) - 1) / (last - first)


class TokenClock:
    """A streamer that notes when each new token reached the host."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """Called by `generate` with the prompt, then with each token (on the CPU)."""
        if not self._prompt:
            self.times.append(time.perf_counter())
        self._prompt = False

    def end(self) -> None:
        """Called by `generate` when it is done."""


def _first(run: Answerer) -> Callable[[], object]:
    return lambda: run(1)


def _lists(methods: Sequence[Method]) -> dict[int, list[float]]:
    return {id(method): [] for method in methods}


def _shape(model: PreTrainedModel) -> flops.ModelShape | None:
    try:
        return flops.model_shape(model)
    except ValueError:  # a decoder whose layers cannot be counted is measured without its limit
        return None
