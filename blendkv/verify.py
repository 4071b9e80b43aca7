"""`blendkv verify`: every promise of a blend, checked afresh on one model, each with its figure."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from blendkv import _compat, learning, proof
from blendkv.attaching import detach, unwrapped
from blendkv.attachment import Attachment
from blendkv.bench.methods import states_of
from blendkv.cache import BlendedCache
from blendkv.chunk import ChunkCache
from blendkv.hooks import find_layers, install
from blendkv.layout import encode
from blendkv.learning import bound_of, probe_ids, rms_ratio
from blendkv.passages import read_passages
from blendkv.prefilling import prefill
from blendkv.proof import BLEND_BOUND, Check, cut_chunk, full_prefill, most
from blendkv.selectors import HKVD, Random

TOKENS = 64
"""Prompt tokens of the checks on random ids."""
RATIOS = (0.0, 0.1, 0.2, 0.4, 0.7, 1.0)
"""Ratios over which the error must fall."""
SLACK = 1.05
"""Most that the error may grow from one ratio to the next."""


def verify(model: nn.Module, tokenizer: Any = None) -> Iterator[Check]:
    """Runs every check; what `attach` would remember is not believed, and not written.

    A model that cannot be attached gives one failed check that says why. A check that raises is a failed check.

    Args:
        model: a transformers decoder; it is left detached.
        tokenizer: gives the monotony check real text; random ids otherwise.

    Yields:
        Checks as they are done.
    """
    model = unwrapped(model)
    detach(model)
    try:
        state = _attach_unproven(model)
        yield most("the model can be attached", 0, 0)
        yield from _guarded("exactness", proof.exactness_checks, state)
        yield from _guarded("ratio 0 computes nothing", row_checks, state)
        yield from _guarded("error falls with the ratio", monotone_check, state, tokenizer)
        yield from _guarded("mask probe", mask_probe, state)
        yield from _guarded("decode continuity", decode_check, state)
    except Exception as error:
        yield failed("the model can be attached", error)
    finally:
        detach(model)


def failed(name: str, error: Exception) -> Check:
    """A check that could not be made, counted as one failure."""
    reason = str(error) if isinstance(error, proof.UnsupportedModelError) else f"{type(error).__name__}: {error}"
    return most(name, 1, 0, " ".join(reason.split()))


def _attach_unproven(model: nn.Module) -> Attachment:
    """What `attach` does, less the proof that it remembers."""
    learning.refuse_impossible(model)
    state = Attachment(model, *find_layers(model))
    install(state)
    state.learnt, state.dtype = learning.learn(state), next(model.parameters()).dtype
    learning.refuse_unmovable(state)
    return state


def _guarded(name: str, checks: Callable[..., Iterator[Check]], *args: Any) -> Iterator[Check]:
    try:
        yield from checks(*args)
    except Exception as error:
        yield failed(name, error)


# -- ratio 0 computes nothing -----------------------------------------------------------------------------------------


@torch.no_grad()
def row_checks(state: Attachment) -> Iterator[Check]:
    """Counts the rows that really pass through each layer, at ratio 0, and against the report at two ratios."""
    ids = probe_ids(state, TOKENS, seed=2)
    reference = full_prefill(state, ids)
    chunks = [cut_chunk(state, reference, 8, 30), cut_chunk(state, reference, 30, 52)]
    fresh = TOKENS - 44
    wrong = 0
    for ratio in (0.0, 0.25):
        cache = BlendedCache(chunks, ratio, HKVD(), reserve=1)
        with count_rows(state.layers) as (outputs, linears):
            proof.run(state, ids, reference.positions, cache)
        if not ratio:
            extra = max(abs(rows - fresh) for rows in outputs + [rows for rows in linears if rows > fresh])
            yield most("ratio 0 computes nothing", extra, 0, "chunk rows through any layer, or any matrix in it")
        for rows, layer in zip(outputs, cache.report.layers, strict=True):
            told = layer.recomputed + layer.fresh + layer.missed
            wrong += abs(rows - told) + abs(told + layer.reused - TOKENS)
    yield most("the report counts the rows that layers computed", wrong, 0, "rows told wrongly, ratios 0 and 0.25")


@contextmanager
def count_rows(layers: list[nn.Module]) -> Generator[tuple[list[int], list[int]]]:
    """Rows that come out of each layer, and the most rows that any linear module inside it is given."""
    outputs, linears = [0] * len(layers), [0] * len(layers)

    def note_output(i: int) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            outputs[i] += hidden.shape[:-1].numel()

        return hook

    def note_input(i: int) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            if args and isinstance(args[0], Tensor):
                linears[i] = max(linears[i], args[0].shape[:-1].numel())

        return hook

    handles = [layer.register_forward_hook(note_output(i)) for i, layer in enumerate(layers)]
    for i, layer in enumerate(layers):
        handles += [m.register_forward_pre_hook(note_input(i)) for m in layer.modules() if isinstance(m, nn.Linear)]
    try:
        yield outputs, linears
    finally:
        for handle in handles:
            handle.remove()


# -- the error falls as the ratio grows -------------------------------------------------------------------------------


@torch.no_grad()
def monotone_check(state: Attachment, tokenizer: Any = None) -> Iterator[Check]:
    """Error of the question's logits, chunks computed alone, mean over prompts, at growing ratios."""
    bound = bound_of(BLEND_BOUND, state.facts.dtype)
    prompts = _text_prompts(tokenizer) if tokenizer is not None else _random_prompts(state)
    totals = [0.0] * len(RATIOS)
    for pieces, question in prompts:
        ids = torch.tensor([[*(i for piece in pieces for i in piece), *question]], device=probe_ids(state, 1).device)
        chunks = prefill(state.model, pieces, progress=False)
        full = _last_logits(state, ids, None, len(question))
        for i, ratio in enumerate(RATIOS):
            blended = _last_logits(state, ids, BlendedCache(chunks, ratio, HKVD(), reserve=1), len(question))
            totals[i] += rms_ratio(blended, full)
    errors = [max(total / len(prompts), bound) for total in totals]  # below the bound is rounding
    steepest = max(after / before for before, after in pairwise(errors))
    figures = ", ".join(f"{ratio:g}: {total / len(prompts):.2g}" for ratio, total in zip(RATIOS, totals, strict=True))
    yield most("error falls as the ratio grows", steepest, SLACK, f"largest step; errors at {figures}")


def _text_prompts(tokenizer: Any) -> list[tuple[list[list[int]], list[int]]]:
    """Three passages and a question each."""
    passages, questions = read_passages()
    texts = [encode(tokenizer, passage.text) for passage in passages]
    prompts = []
    for i in range(0, len(texts) - 2, 3):
        question = questions[(i // 3) % len(questions)].question
        prompts.append((texts[i : i + 3], encode(tokenizer, f"\n\nQuestion: {question}\nAnswer:")))
    return prompts


def _random_prompts(state: Attachment) -> list[tuple[list[list[int]], list[int]]]:
    """Three chunks of random ids and a question each."""
    prompts = []
    for seed in range(4):
        ids = probe_ids(state, 160, seed=10 + seed)[0].tolist()
        prompts.append(([ids[:48], ids[48:96], ids[96:144]], ids[144:]))
    return prompts


def _last_logits(state: Attachment, ids: Tensor, cache: BlendedCache | None, keep: int) -> Tensor:
    """`[keep, V]` logits of the last tokens."""
    given = {} if cache is None else {_compat.cache_keyword(state.model.forward): cache}
    return state.model(input_ids=ids, use_cache=cache is not None, **given).logits[0, -keep:]


# -- nothing looks ahead ----------------------------------------------------------------------------------------------


@torch.no_grad()
def mask_probe(state: Attachment) -> Iterator[Check]:
    """Changes tokens, between chunks and at the end, and compares all keys and values before them bit for bit.

    Where experts are chosen by token, other tokens change how rows are grouped into matrix products, and with it their
    last bits: such models are held to the rounding bound.
    """
    ids = probe_ids(state, TOKENS, seed=3)
    reference = full_prefill(state, ids)
    chunks = [cut_chunk(state, reference, 8, 28), cut_chunk(state, reference, 32, 52)]
    before = _blended(state, ids, chunks)
    worst, missed_change = 0.0, False
    for start, stop in ((28, 32), (60, 64)):
        changed = ids.clone()
        changed[:, start:stop] = (changed[:, start:stop] + 1) % state.config.vocab_size
        after = _blended(state, changed, chunks)
        for old, new in zip(before, after, strict=True):
            if not torch.equal(old[:, :, :start], new[:, :, :start]):
                worst = max(worst, rms_ratio(new[:, :, :start], old[:, :, :start]))
            missed_change |= torch.equal(old[:, :, start:stop], new[:, :, start:stop])
    routed = any(name.endswith("experts") for name, _ in state.decoder.named_modules())
    bound = bound_of(BLEND_BOUND, state.facts.dtype) if routed else 0.0
    yield most("mask probe: a later token changes nothing earlier", worst, bound, "keys and values before the change")
    yield most("mask probe: the change is seen", int(missed_change), 0, "1 if changed tokens kept their old KV")


def _blended(state: Attachment, ids: Tensor, chunks: list[ChunkCache]) -> list[Tensor]:
    """All keys and values after a blend with half of the chunk rows, always the same ones."""
    cache = BlendedCache(chunks, 0.5, Random(), reserve=1)
    proof.run(state, ids, torch.arange(ids.shape[1], device=ids.device)[None], cache)
    return [t for pair in states_of(cache) for t in pair]


# -- decoding goes on as if nothing had happened ----------------------------------------------------------------------


@torch.no_grad()
def decode_check(state: Attachment, steps: int = 8) -> Iterator[Check]:
    """Greedy `generate` after a blend of exact chunks against plain `generate`, logits of every step."""
    ids = probe_ids(state, TOKENS, seed=4)
    reference = full_prefill(state, ids)
    chunks = [cut_chunk(state, reference, 4, 30), cut_chunk(state, reference, 30, 58)]
    plain = _generate(state, ids, steps)
    blended = _generate(state, ids, steps, BlendedCache(chunks, 0.25, Random(), reserve=2))
    tokens = [output.sequences[0, TOKENS:].tolist() for output in (plain, blended)]
    same = next((i for i, (a, b) in enumerate(zip(*tokens, strict=True)) if a != b), steps)
    errors = [rms_ratio(b, a) for a, b in zip(plain.logits[: same + 1], blended.logits[: same + 1], strict=True)]
    bound = bound_of(BLEND_BOUND, state.facts.dtype)
    yield most("decode continuity", max(errors), bound, f"logits over {same} of {steps} equal greedy tokens")
    if state.facts.dtype == torch.float32:  # with fewer bits, near ties may fall the other way
        yield most("decode continuity: tokens differ", steps - same, 0, f"of {steps}")


def _generate(state: Attachment, ids: Tensor, steps: int, cache: BlendedCache | None = None) -> Any:
    given = {} if cache is None else {_compat.CACHE_ARG: cache}
    return state.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **given,
    )
