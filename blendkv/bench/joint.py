"""`blendkv bench joint`: what a codec costs where its chunks are blended, by how much is recomputed.

The protocol is that of `bench quality`: KL to full recompute over the first answer tokens, teacher-forced. Every chunk
of a prompt goes through a chunk file first. Comparisons are paired, prompt by prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel

from blendkv.bench.codec import codecs_of, in_16_bits
from blendkv.bench.forcing import STEPS, Agreement, Reference
from blendkv.bench.measure import paired_bootstrap
from blendkv.bench.methods import Blend
from blendkv.bench.results import model_device_name, versions
from blendkv.bench.tasks import Example, read_examples
from blendkv.chunk import ChunkCache
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import Codec, Profile, get_codec
from blendkv.codecs.fitting import coarser
from blendkv.selectors import Selector, get_selector
from blendkv.texts import digest as text_digest
from blendkv.texts import read_texts

RATIOS = (0.0, 0.05, 0.15, 0.3)
OCTAVE = 16
KEYS, VALUES = ".0", ".1"
"""How names of a `klt` profile's tensors end."""
CHECK_LAYER = 1


@dataclass(frozen=True)
class Setting:
    """A codec and, in words, what was changed of its profile."""

    codec: Codec
    change: str = ""


def joint_rows(
    model: PreTrainedModel,
    tokenizer: Any,
    examples: Sequence[Example],
    profiles: Mapping[str, Profile | None],
    *,
    levels: Sequence[int] = (-4, 0, 4, 8),
    ratios: Sequence[float] = RATIOS,
    controls: int | None = None,
    selector: str | Selector = "hkvd",
    about: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """One row for each codec, level, change and ratio.

    Args:
        model: a transformers decoder.
        tokenizer: its tokenizer.
        examples: questions with their chunks.
        profiles: by the codec's name; None for a codec that needs none, which has level 0 alone.
        levels: of the others.
        ratios: shares of chunk tokens that are recomputed.
        controls: level of `klt` at which bits are also spent elsewhere (`changed`); None: not at all.
        selector: which tokens are recomputed.
        about: added to every row.
        progress: whether to show a bar on stderr.
    """
    settings = [Setting(codec) for codec in codecs_of(profiles, levels)]
    if controls is not None and (klt := profiles.get("klt")) is not None:
        settings += changed(klt, controls)
    methods = [Blend(ratio, get_selector(selector)) for ratio in ratios]
    sizes = [0.0] * len(settings)
    found: list[list[list[Agreement]]] = [[[] for _ in methods] for _ in settings]
    total = len(examples) * len(settings) * len(methods)
    with tqdm(total=total, desc="bench joint", unit="blend", disable=not progress, leave=False) as bar:
        for example in examples:
            reference = Reference.of(model, tokenizer, example)
            numbers = sum(t.numel() for chunk in reference.case.chunks for t in (*chunk.keys, *chunk.values))
            for i, setting in enumerate(settings):
                chunks, size = through(setting.codec, reference.case.chunks)
                sizes[i] += 8 * size / numbers / len(examples)
                case = replace(reference.case, chunks=chunks)
                for method, agreements in zip(methods, found[i], strict=True):
                    agreements.append(reference.agreement(method, case))
                    bar.update()
    shared = {
        "bench": "joint",
        "device": model_device_name(model),
        **(about or {}),
        "prompts": len(examples),
        "steps": STEPS,
        "selector": methods[0].selector.name,
        "versions": versions(),
    }
    rows = [
        shared | _row(setting, bits, method.kept, agreements)
        for setting, bits, by_ratio in zip(settings, sizes, found, strict=True)
        for method, agreements in zip(methods, by_ratio, strict=True)
    ]
    for row in rows:
        row |= _beside(row, rows)
    return rows


def unseen_examples(
    task: str, path: str | Path, tokenizer: Any, profiles: Mapping[str, Profile | None], limit: int
) -> list[Example]:
    """The first examples of a file whose records no profile was made of.

    Raises:
        ValueError: if there are none, and for what `read_examples` refuses.
    """
    known = {digest for profile in profiles.values() if profile for digest in profile.about.get("texts", ())}
    texts = read_texts(path)
    examples = read_examples(task, path, tokenizer)
    unseen = [example for example, text in zip(examples, texts, strict=True) if text_digest(text) not in known]
    if not unseen:
        raise ValueError(f"{path}: profiles were made of all of its records: give other ones")
    return unseen[:limit]


def changed(profile: Profile, level: int, layer: int = CHECK_LAYER) -> list[Setting]:
    """`klt` with bits spent elsewhere: other protected tokens, keys against values, the check layer.

    Args:
        profile: of `klt`.
        level: of all of them.
        layer: at which selectors compare.
    """

    def between(coarse: str, fine: str) -> Profile:
        return _steps(profile, lambda name: OCTAVE * (name.endswith(coarse) - name.endswith(fine)))

    changes = {
        "0 protected tokens": _protecting(profile, 0),
        "4 protected tokens": _protecting(profile, 4),
        "keys an octave coarser, values finer": between(KEYS, VALUES),
        "keys an octave finer, values coarser": between(VALUES, KEYS),
        f"layer {layer} four octaves finer": _steps(
            profile, lambda name: -4 * OCTAVE * (name.split(".")[1] == str(layer))
        ),
    }
    return [Setting(get_codec("klt", level=level, profile=new), change) for change, new in changes.items()]


def through(codec: Codec, chunks: Sequence[ChunkCache]) -> tuple[tuple[ChunkCache, ...], int]:
    """Chunks, in 16 bits, through their files and back in the dtype they had; and the bytes of the files."""
    profile = getattr(codec, "profile", None)
    profiles = {profile.hash: profile} if isinstance(profile, Profile) else None
    decoded, size = [], 0
    for chunk in chunks:
        data = encode_chunk(in_16_bits(chunk), codec)
        back, size = decode_chunk(data, profiles=profiles, device=chunk.keys[0].device), size + len(data)
        keys, values = (tuple(t.to(chunk.dtype) for t in states) for states in (back.keys, back.values))
        decoded.append(replace(chunk, keys=keys, values=values))
    return tuple(decoded), size


def _protecting(profile: Profile, tokens: int) -> Profile:
    return replace(profile, settings={**profile.settings, "protected": tokens})


def _steps(profile: Profile, sixteenths: Callable[[str], int]) -> Profile:
    """A profile with the steps of each part (`layer.part`) coarser by so many sixteenths of an octave."""
    tensors = dict(profile.tensors)
    for name in tensors:
        if shift := sixteenths(name):
            one = replace(profile, tensors={name: tensors[name]})
            tensors[name] = coarser(one, shift).tensors[name]
    return replace(profile, tensors=tensors)


def _row(setting: Setting, bits: float, ratio: float, agreements: Sequence[Agreement]) -> dict[str, Any]:
    kl = [a.kl for a in agreements]
    mean, low, high = paired_bootstrap(kl)
    return {
        "codec": setting.codec.name,
        "level": setting.codec.level,
        "change": setting.change,
        "ratio": ratio,
        "bits_per_element": bits,
        "kl": mean,
        "kl_low": low,
        "kl_high": high,
        "first_kl": sum(a.first_kl for a in agreements) / len(agreements),
        "same_answer": sum(a.same for a in agreements) / len(agreements),
        "all_kl": kl,
    }


def _beside(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Differences to `raw` at the same ratio and, of a change, to the unchanged codec of as many bits."""
    same = [other for other in rows if other["ratio"] == row["ratio"] and not other["change"]]
    raw = next((other["all_kl"] for other in same if other["codec"] == "raw"), None)
    plain = (
        _at_bits([o for o in same if o["codec"] == row["codec"]], row["bits_per_element"]) if row["change"] else None
    )
    return _difference(row["all_kl"], raw, "raw") | _difference(row["all_kl"], plain, "plain")


def _difference(kl: Sequence[float], other: Sequence[float] | None, name: str) -> dict[str, float | None]:
    fields = [f"kl_minus_{name}{end}" for end in ("", "_low", "_high")]
    if other is None:
        return dict.fromkeys(fields)
    return dict(zip(fields, paired_bootstrap([a - b for a, b in zip(kl, other, strict=True)]), strict=True))


def _at_bits(rows: Sequence[Mapping[str, Any]], bits: float) -> list[float] | None:
    """KL of each prompt at some bits, log-linear between neighbouring levels; None outside of them."""
    rows = sorted(rows, key=lambda row: row["bits_per_element"])
    for few, many in pairwise(rows):
        low, high = few["bits_per_element"], many["bits_per_element"]
        if low <= bits <= high and low < high:
            share = (bits - low) / (high - low)
            pairs = zip(few["all_kl"], many["all_kl"], strict=True)
            return [math.exp((1 - share) * math.log(max(a, 1e-12)) + share * math.log(max(b, 1e-12))) for a, b in pairs]
    return None
