"""Profiles of a model: its keys and values over some texts, and what errors in them would cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.cache_utils import DynamicCache

from blendkv import _compat
from blendkv.attaching import attach, attachment_of
from blendkv.attachment import Attachment
from blendkv.codecs import Profile, cachegen, fitting, get_codec
from blendkv.codecs.cachegen import fit_cachegen
from blendkv.codecs.fitting import fit_transform
from blendkv.codecs.klt import PROTECTED
from blendkv.codecs.statistics import ANCHOR_EVERY, JOINT, LayerShape, Statistics
from blendkv.hooks import require_eval
from blendkv.rope import Rotation, on_device
from blendkv.texts import Passage
from blendkv.trials import Trial

CONTINUATION = 128
SAMPLES = 2
"""Continuations that are drawn for each passage."""
TARGET = 0.005
"""KL divergence, in nats a token of the continuation, at level 0 of every codec."""
MOST_COARSER = 80
"""Sixteenths of an octave by which a fit is made coarser, so that fp16 still holds it."""
FITS = {
    "cachegen": (fit_cachegen, cachegen.coarser),
    "klt": (partial(fit_transform, joint=False), fitting.coarser),
    "klt-xl": (partial(fit_transform, joint=True), fitting.coarser),
}
"""Codecs that need a profile; how each is fitted, and made coarser."""


def calibrate(
    model: nn.Module,
    passages: Sequence[Passage],
    codecs: Sequence[str] = tuple(FITS),
    *,
    continuation: int = CONTINUATION,
    samples: int = SAMPLES,
    protected: int = 1,
    unit_layers: int = 0,
    name: str = "",
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Profile]:
    """Runs a model over passages and fits codecs to its keys and values.

    Each passage is a context and a continuation. The context's keys and values are counted; then the model's own
    next tokens are drawn at every position of the continuation, and the gradient of their log-likelihood with respect
    to the context's keys and values says what an error there would cost (the Fisher information: half of it times the
    squared error is the KL divergence). One passage in eight, at least one, is left out of this: with it the level is
    found at which the divergence is `TARGET`, which becomes level 0.

    Args:
        model: a transformers decoder; it is attached.
        passages: at least two that differ, of one length, longer than `continuation` by a context.
        codecs: of `FITS`.
        continuation: tokens of each passage that follow the context.
        samples: times that next tokens are drawn for each passage.
        protected: first tokens of a chunk that are kept in 8 bits.
        unit_layers: layers that `klt-xl` transforms together; 0: up to three, of at most 2,048 channels and
            half as many as there are tokens to learn from.
        name: of the model, for people.
        seed: of the draws.
        progress: whether to show a bar.

    Returns:
        A profile for each codec.

    Raises:
        ValueError: for unknown codecs, numbers out of range, or passages that are too few or too short.
        UnsupportedModelError: if the model cannot be blended.
    """
    for codec in codecs:
        if codec not in FITS:
            raise ValueError(f"codec {codec!r} has no profile; choose from {', '.join(FITS)}")
    if torch.is_inference_mode_enabled():
        raise ValueError("torch.inference_mode() leaves no gradients to learn from: calibrate outside of it")
    if protected not in PROTECTED:
        raise ValueError(f"protected={protected}: choose {PROTECTED[0]} to {PROTECTED[-1]} tokens")
    if continuation < 1 or samples < 1 or unit_layers < 0:
        raise ValueError(
            f"continuation={continuation}, samples={samples}, unit_layers={unit_layers}: give a token and a sample at "
            "least, and no fewer than 0 layers"
        )
    context = min((len(passage.ids) for passage in passages), default=0) - continuation
    held = passages[:: min(8, max(1, len(passages)))]
    counted = [passage for passage in passages if passage not in held]
    if context < max(ANCHOR_EVERY, protected + 2) or not counted:
        raise ValueError(
            f"{len(passages)} passages, the shortest of {context + continuation} tokens: give at least two that "
            f"differ, of {continuation} tokens after a context"
        )
    state = attachment_of(attach(model))
    require_eval(state.decoder)
    shapes = tuple(LayerShape(*sizes) for sizes in state.facts.sizes)
    joint = min(JOINT, len(counted) * (context - protected) // 2)
    statistics = Statistics(shapes, context, continuation, protected, unit_layers, joint)
    generator = torch.Generator().manual_seed(seed)
    for passage in tqdm(counted, desc="calibrate", unit="passage", disable=not progress, leave=False):
        ids = torch.tensor([passage.ids], device=next(model.parameters()).device)
        states = _context(state, ids[:, :context])
        statistics.add_states(*_plain(state, states))
        for gradients in _gradients(state, ids[:, context:], states, samples, generator):
            statistics.add_gradients(*_plain_gradients(state, gradients))
    about = {
        "model": name,
        "fingerprint": state.facts.fingerprint,
        "passages": len(passages),
        "context": context,
        "continuation": continuation,
        "samples": samples,
        "texts": sorted({digest for passage in passages for digest in passage.digests}),
    }
    trials = [Trial.of(model, torch.tensor(passage.ids), context) for passage in held]
    profiles = {}
    for codec in tqdm(codecs, desc="settle", unit="codec", disable=not progress, leave=False):
        fit, coarser = FITS[codec]
        profile = fit(statistics, about=about)
        profiles[codec] = coarser(profile, _settle(profile, trials))
    return profiles


def _settle(profile: Profile, trials: Sequence[Trial]) -> int:
    """How many sixteenths of an octave coarser a profile must be for `TARGET`; the last of a few steps is a secant."""
    scales = [tensor for name, tensor in profile.tensors.items() if name.startswith(("scale.", "delta."))]
    finest = max(int(scale.max()) for scale in scales) - round(16 * math.log2(fitting.FINEST))
    shift, tried = max(0, finest), {}
    for _ in range(4):
        codec = get_codec(profile.codec, profile=FITS[profile.codec][1](profile, shift))
        tried[shift] = math.log(
            max(sum(trial.divergence(trial.through(codec)) for trial in trials) / len(trials), 1e-9)
        )
        near = sorted(tried, key=lambda at: abs(tried[at] - math.log(TARGET)))[:2]
        slope = 2 * math.log(2) / 16  # of errors that grow with the square of the steps
        if len(near) == 2 and abs(near[0] - near[1]) > 1:
            slope = max((tried[near[0]] - tried[near[1]]) / (near[0] - near[1]), slope / 4)
        shift = near[0] + round((math.log(TARGET) - tried[near[0]]) / slope)
        shift = min(max(shift, finest), MOST_COARSER)
        if shift in tried:
            break
    return shift


@torch.no_grad()
def _context(state: Attachment, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys, rotated, and values `[1, H, T, D]` of each layer."""
    cache = DynamicCache()
    keyword = {_compat.cache_keyword(state.decoder.forward): cache}
    state.decoder(input_ids=ids, use_cache=True, **keyword)
    return _compat.cached_states(cache)


def _gradients(
    state: Attachment,
    ids: Tensor,
    states: Sequence[tuple[Tensor, Tensor]],
    samples: int,
    generator: torch.Generator,
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Gradients of the log-likelihood of drawn next tokens, for every draw; shaped as `states`."""
    context = states[0][0].shape[2]
    with torch.enable_grad():
        leaves = [part.detach().clone().requires_grad_() for pair in states for part in pair]
        cache = DynamicCache()
        for layer in range(len(states)):
            cache.update(leaves[2 * layer], leaves[2 * layer + 1], layer)
        positions = torch.arange(context, context + ids.shape[1], device=ids.device)[None]
        keyword = {_compat.cache_keyword(state.model.forward): cache}
        logits = state.model(input_ids=ids, position_ids=positions, use_cache=True, **keyword).logits[0].float()
        likely = logits.log_softmax(-1)
        for sample in range(samples):
            drawn = torch.multinomial(likely.detach().exp().cpu(), 1, generator=generator).to(likely.device)
            total = likely.gather(1, drawn).sum()
            last = sample + 1 == samples
            found = torch.autograd.grad(total, leaves, retain_graph=not last, allow_unused=True)
            whole = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
            yield list(zip(whole[::2], whole[1::2], strict=True))


def _plain(state: Attachment, states: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Keys brought back to no position, and values, `[H, T, D]`."""
    keys = [rotation.unrotate(rotated.float(), angles)[0] for rotation, rotated, angles in _rotated(state, states)]
    return keys, [values[0] for _, values in states]


def _plain_gradients(state: Attachment, states: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients by un-rotated keys, and by values: turned back like keys, but multiplied by the model's scale again."""
    keys = []
    for rotation, rotated, angles in _rotated(state, states):
        back = angles and (angles[0], -angles[1])
        keys.append(rotation.rotate(rotated.float(), back)[0])
    return keys, [values[0] for _, values in states]


def _rotated(
    state: Attachment, states: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Rotation, Tensor, tuple[Tensor, Tensor] | None]]:
    """For each layer its rotation, keys, and their angles."""
    facts, positions = state.facts, torch.arange(states[0][0].shape[2], device=states[0][0].device)[None]
    for rotation, (keys, _) in zip(facts.rotations, states, strict=True):
        yield rotation, keys, on_device(rotation.angles(facts.rotary, positions), keys.device)
