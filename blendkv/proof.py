"""What `attach` and `blendkv verify` check: a model is supported because it was proven, not because it is listed."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from blendkv import _compat
from blendkv._paths import blendkv_home
from blendkv._version import __version__
from blendkv.attachment import Attachment, facts_instead
from blendkv.attention import PREFIX
from blendkv.cache import BlendedCache
from blendkv.chunk import ChunkCache
from blendkv.errors import UnsupportedModelError
from blendkv.hooks import switch_attention, unswitch_attention
from blendkv.learning import (
    ROTATION_BOUND,
    bound_of,
    learn,
    moved_error,
    own_states,
    probe_ids,
    refuse_unmovable,
    rms_ratio,
)
from blendkv.rope import Rotation, on_device
from blendkv.selectors import Random

BLEND_BOUND = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of `distance`: error of logits and of every layer's keys and values / RMS of full prefill's, by dtype."""

MOVED = 23
"""How far a whole prompt is moved: only the distances between its tokens may matter to a model (no further, or the
rounding of angles would show)."""


@dataclass(frozen=True)
class Check:
    """One figure and the bound it must hold.

    Attributes:
        name: what was checked.
        value: the figure.
        bound: what it is held against.
        ok: whether it holds.
        at_least: True if the figure must not be below the bound, False if not above.
        detail: for people.
    """

    name: str
    value: float
    bound: float
    ok: bool
    at_least: bool = False
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def most(name: str, value: float, bound: float, detail: str = "") -> Check:
    """A check that a figure is not above its bound (NaN fails)."""
    return Check(name, value, bound, value <= bound, False, detail)


def least(name: str, value: float, bound: float, detail: str = "") -> Check:
    """A check that a figure is not below its bound (NaN fails)."""
    return Check(name, value, bound, value >= bound, True, detail)


# -- exact keys and values stay exact ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """A full prefill to compare with.

    Attributes:
        ids: `[1, T]`.
        positions: `[1, T]`.
        logits: `[1, V]` of the last token.
        layers: keys and values of every layer, `[1, H, T, D]`.
    """

    ids: Tensor
    positions: Tensor
    logits: Tensor
    layers: list[tuple[Tensor, Tensor]]


@torch.no_grad()
def full_prefill(state: Attachment, ids: Tensor, offset: int = 0) -> Reference:
    """Full prefill of `ids [1, T]` at positions `offset, offset + 1, ...`."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None] + offset
    cache = DynamicCache()
    logits = run(state, ids, positions, cache)
    return Reference(ids, positions, logits, _compat.cached_states(cache))


def run(state: Attachment, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
    """Logits `[1, V]` of the last token of one forward."""
    keyword = _compat.cache_keyword(state.model.forward)
    output = state.model(input_ids=ids, position_ids=positions, use_cache=True, **{keyword: cache})
    scores = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return scores[:, -1]


def cut_chunk(state: Attachment, reference: Reference, start: int, stop: int) -> ChunkCache:
    """A chunk whose keys and values are those of a full prefill: exact, if put back where it was."""
    facts = state.facts
    keys, values = [], []
    for rotation, (k, v) in zip(facts.rotations, reference.layers, strict=True):
        angles = on_device(rotation.angles(facts.rotary, reference.positions), k.device)
        keys.append(rotation.unrotate(k, angles)[0, :, start:stop].clone())
        values.append(v[0, :, start:stop].clone())
    return ChunkCache(reference.ids[0, start:stop].cpu(), tuple(keys), tuple(values), facts.fingerprint)


@torch.no_grad()
def blend_error(
    state: Attachment,
    reference: Reference,
    ratio: float,
    layer: int = 0,
    seed: int = 0,
    source: Reference | None = None,
) -> float:
    """`distance` from full prefill of a blend of exact chunks with random rows kept from `layer` on.

    The chunks are cut out of `source`, a prefill of the same ids that may lie elsewhere, or of `reference` itself.
    """
    length = reference.ids.shape[1]
    borders = [length // 8, length // 2, length - length // 8]
    chunks = [cut_chunk(state, source or reference, a, b) for a, b in pairwise(borders)]
    schedule = {layer: ratio} if ratio < 1 else {}
    cache = BlendedCache(chunks, selector=Random(seed), check_layers=schedule, reserve=1)
    logits = run(state, reference.ids, reference.positions, cache)
    if cache.report.chunk_tokens != borders[-1] - borders[0]:
        return math.inf
    return distance(logits, cache, reference)


@torch.no_grad()
def ordinary_use_check(state: Attachment, bound: float) -> Check:
    """Logits of a batch, padded and not, with no blend, are what they were before attention was switched."""
    ids = torch.cat([probe_ids(state, 12, seed) for seed in (3, 4)])
    padded = torch.ones_like(ids)
    padded[0, :5] = 0
    before, after = [], []
    for switch, found in ((unswitch_attention, before), (switch_attention, after)):
        switch(state)
        for mask in (None, padded):
            output = state.model(input_ids=ids, attention_mask=mask, use_cache=False)
            found.append((output.logits if hasattr(output, "logits") else output.last_hidden_state)[:, -1])
    return most("ordinary use stays as it was", max(map(rms_ratio, after, before)), bound)


def offsets(state: Attachment, tokens: int) -> tuple[int, int]:
    """Position offsets to prove at: 0, and as near the model's longest position as `tokens` allow."""
    longest = getattr(state.config, "max_position_embeddings", None) or 4 * tokens
    return 0, max(1, longest - tokens)


def exactness_checks(state: Attachment, tokens: int = 64) -> Iterator[Check]:
    """Re-rotation, exact keys and values staying exact in place and when moved, ratio 1, and the negative control."""
    bound, blend_bound = (bound_of(bounds, state.facts.dtype) for bounds in (ROTATION_BOUND, BLEND_BOUND))
    yield ordinary_use_check(state, bound)
    yield from rotation_checks(state, tokens, bound)
    ids = probe_ids(state, tokens, seed=1)
    for offset in offsets(state, tokens):
        reference = full_prefill(state, ids, offset)
        for ratio, layer in ((0.0, 0), (0.15, min(1, len(state.layers) - 1)), (0.5, 0)):
            error = blend_error(state, reference, ratio, layer)
            yield most(f"exact KV stays exact, ratio {ratio}, offset {offset}", error, blend_bound)
    error = blend_error(state, reference, 1.0)
    yield most("ratio 1 equals full prefill", error, blend_bound)
    yield negative_control(state, reference, bound)
    here, there = (full_prefill(state, ids, offset) for offset in (0, MOVED))
    yield most(f"exact KV moved by {MOVED} stays exact", blend_error(state, there, 0.15, source=here), blend_bound)


def distance(logits: Tensor, cache: Any, reference: Reference) -> float:
    """How far logits, and keys and values of every layer, are from full prefill's; infinite if not a number.

    In fp32 the worst RMS error. In half precision a rounding may flip a router's choice of expert, which changes that
    token for good and says nothing of the blend: there the median over tokens of each layer (tokens that are equal to
    the bit, reused values, do not count), and a fifth of the logits' RMS error.
    """
    layers = zip(_compat.cached_states(cache), reference.layers, strict=True)
    pairs = [pair for ours, own in layers for pair in zip(ours, own, strict=True)]
    if reference.logits.dtype == torch.float32:
        errors = [rms_ratio(logits, reference.logits), *(rms_ratio(a, b) for a, b in pairs)]
    else:
        errors = [rms_ratio(logits, reference.logits) / 5, *(_median_error(a, b) for a, b in pairs)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _median_error(value: Tensor, reference: Tensor) -> float:
    """Median over tokens of the RMS error of `[B, H, T, D]` / RMS of the whole reference."""
    value, reference = value.detach().double(), reference.detach().double()
    if not bool(value.isfinite().all()):
        return math.inf
    errors = (value - reference).square().mean((0, 1, 3)).sqrt() / reference.square().mean().sqrt().clamp_min(1e-30)
    errors = errors[errors > 0]
    return float(errors.median()) if len(errors) else 0.0


@torch.no_grad()
def rotation_checks(state: Attachment, tokens: int, bound: float) -> Iterator[Check]:
    """One check a layer: keys moved to two other places, and values as they are, against the model's own there."""
    facts = state.facts
    ids = probe_ids(state, 16)
    here = torch.arange(16, device=ids.device)[None]
    worst = [0.0] * len(state.layers)
    for offset in (1000 % offsets(state, tokens)[1] + 1, offsets(state, 16)[1]):
        for i, (own_here, own_there) in enumerate(own_states(state, ids, here, here + offset)):
            error = moved_error(facts.rotations[i], facts.rotary, own_here[0], here, own_there[0], here + offset)
            worst[i] = max(worst[i], error, rms_ratio(own_here[1], own_there[1]))
    for i, error in enumerate(worst):
        rotation = facts.rotations[i]
        yield most(f"rotation of layer {i}", error, bound, f"{rotation.pairing} {rotation.layer_type or ''}".strip())


@torch.no_grad()
def negative_control(state: Attachment, reference: Reference, bound: float) -> Check:
    """Keys placed without rotation must be wrong by ten times the bound of rotation, or the checks prove nothing."""
    name = "negative control: un-rotated keys are caught"
    facts, length = state.facts, reference.ids.shape[1]
    turned = [i for i, rotation in enumerate(facts.rotations) if rotation.pairing != "none"]
    if not turned:
        return least(name, math.inf, 10 * bound, "no layer rotates its keys")
    cache = BlendedCache(
        [cut_chunk(state, reference, length // 8, length - length // 8)], recompute_ratio=0.0, reserve=1
    )
    wrong = replace(facts, rotations=tuple(Rotation("none") for _ in facts.rotations))
    token = facts_instead.set(wrong)
    try:
        run(state, reference.ids, reference.positions, cache)
    finally:
        facts_instead.reset(token)
    states = _compat.cached_states(cache)
    errors = [rms_ratio(states[i][0], reference.layers[i][0]) for i in turned]
    return least(name, min(errors), 10 * bound, "smallest error of keys over layers")


# -- remembered -------------------------------------------------------------------------------------------------------


def require(state: Attachment) -> None:
    """Learns what must be known of a model, and proves it unless this was done before for these weights and versions.

    Raises:
        UnsupportedModelError: naming the first check that failed, with its figure.
    """
    checks = []
    try:
        state.learnt, state.dtype = learn(state), next(state.model.parameters()).dtype
        record = _record_path(state)
        if _remembered(record):
            return
        refuse_unmovable(state)
        for check in exactness_checks(state):
            checks.append(check)
            if not check.ok:
                break
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(state.model).__name__} could not be run with narrowed rows ({type(error).__name__}: {error}); "
            f"{_instead(state)}"
        ) from error
    failed = next((check for check in checks if not check.ok), None)
    if failed is not None:
        sign = "at least" if failed.at_least else "at most"
        raise UnsupportedModelError(
            f"{type(state.model).__name__} failed the proof: {failed.name}: {failed.value:.3g}, must be {sign} "
            f"{failed.bound:.3g}. Blending it would answer wrongly; {_instead(state)}"
        )
    _remember(record, checks)


def _instead(state: Attachment) -> str:
    """What to do about a model that failed."""
    own_code = state.masks == "dense" and state.config._attn_implementation != f"{PREFIX}eager"
    eager = "load it with attn_implementation='eager', or " if own_code else ""
    return f"{eager}use full prefill for this model"


def _record_path(state: Attachment) -> Path:
    """Where the proof of this model, on these versions, is remembered."""
    facts = state.facts
    devices = sorted({p.device.type for p in state.model.parameters()})
    base = str(state.config._attn_implementation).removeprefix(PREFIX)
    versions = _compat.TRANSFORMERS_VERSION, torch.__version__, __version__
    parts = (facts.fingerprint, _code(state.model), versions, base, devices)
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return blendkv_home() / "proofs" / f"{digest[:40]}.json"


def _code(model: nn.Module) -> list[str]:
    """What would run: the class of every module, and a digest of its forward."""
    code = set()
    for kind in {type(module) for module in model.modules()}:
        body = getattr(inspect.unwrap(kind.forward), "__code__", None)
        parts = () if body is None else (body.co_code, body.co_names, [c for c in body.co_consts if not _is_code(c)])
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        code.add(f"{kind.__module__}.{kind.__qualname__}:{digest}")
    return sorted(code)


def _is_code(constant: Any) -> bool:
    """Whether a constant is itself code (its repr holds an address)."""
    return hasattr(constant, "co_code")


def _remembered(path: Path) -> bool:
    try:
        record = json.loads(path.read_text())
        return bool(record["checks"]) and all(check["ok"] is True for check in record["checks"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remember(path: Path, checks: list[Check]) -> None:
    """Writes the figures; a folder that cannot be written costs a proof at the next start, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump({"checks": [check.to_dict() for check in checks]}, file)
        os.replace(file.name, path)
    except OSError:
        pass
