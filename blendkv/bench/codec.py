"""`blendkv bench codec`: what codecs cost, all in, and how quick they are.

Contexts are chunks whose keys and values are in 16 bits. Bits are those of whole chunk files, head and index included;
the KL divergence is that of the tokens that follow a context, from those after the 16-bit one; rates are of 16-bit keys
and values on one core, beside zstd -1 on the same symbols in the same run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from blendkv.bench.coders import sections_of, zstd1
from blendkv.bench.measure import median
from blendkv.bench.results import device_name, versions
from blendkv.chunk import ChunkCache
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import Codec, Profile, codec_class, get_codec
from blendkv.codecs.profile import profile_for
from blendkv.container import ContainerReader
from blendkv.texts import Passage
from blendkv.trials import Trial

TARGET = 0.005
"""KL divergence at which codecs are compared."""
LEVELS = (-4, -2, 0, 2, 4)
SHORT = (64, 256)
"""Tokens of shorter chunks, whose size is measured too."""


@dataclass(frozen=True)
class Measured:
    """One codec on one context; bits are per number, rates in MB/s of 16-bit keys and values."""

    bits: float
    payload_bits: float
    short_bits: tuple[float, ...]
    kl: float
    top1: float
    encode: float
    decode: float
    zstd_decode: float | None
    zstd_bits: float | None


def codec_rows(
    model: PreTrainedModel,
    passages: Sequence[Passage],
    profiles: Mapping[str, Profile | None],
    *,
    levels: Sequence[int] = LEVELS,
    context: int = 1024,
    short: Sequence[int] = SHORT,
    repeats: int = 3,
    about: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """One row for each codec and level, and one for each codec with its bits at a KL divergence of `TARGET`.

    Args:
        model: a transformers decoder.
        passages: contexts with their continuations, none of which the profiles were made of.
        profiles: by the codec's name; None for a codec that needs none, which has level 0 alone.
        levels: of the others.
        context: tokens of a passage that are coded.
        short: tokens, from the first, that are coded as chunks of their own for their size; at most `context`.
        repeats: timed calls for each context; the median of all counts.
        about: added to every row.
        progress: whether to show a bar on stderr.

    Raises:
        ValueError: without passages, or if a profile was made of one of them.
    """
    _require_unseen(passages, profiles)
    codecs = codecs_of(profiles, levels)
    short = [tokens for tokens in short if tokens <= context]
    found: list[list[Measured]] = [[] for _ in codecs]
    device = next(model.parameters()).device
    with (
        one_core(),
        tqdm(total=len(passages) * len(codecs), desc="bench codec", disable=not progress, leave=False) as bar,
    ):
        name = device_name(torch.device("cpu"))
        for passage in passages:
            trial = Trial.of(model, torch.tensor(passage.ids), context)
            chunk = in_16_bits(trial.chunk).to("cpu")
            for codec, measured in zip(codecs, found, strict=True):
                measured.append(measure(trial, chunk, codec, short, repeats))
                bar.update()
    shared = {
        "bench": "codec",
        "device": name if device.type == "cpu" else f"{name}; the model on {device_name(device)}",
        **(about or {}),
        "contexts": len(passages),
        "tokens": context,
        "continuation": len(passages[0].ids) - context,
        "versions": versions(),
    }
    rows = [shared | _row(codec, measured, short) for codec, measured in zip(codecs, found, strict=True)]
    for codec in profiles:
        own = [row for row in rows if row["codec"] == codec]
        rows.append(shared | {"codec": codec, "level": None, "bits_at_kl_0.005": bits_at(own)})
    return rows


def codecs_of(profiles: Mapping[str, Profile | None], levels: Sequence[int]) -> list[Codec]:
    """A codec for each name and level; level 0 alone where there is no profile."""
    return [
        get_codec(name, level=level, profile=profile) if profile is not None else get_codec(name)
        for name, profile in profiles.items()
        for level in (levels if profile is not None else (0,))
    ]


def load_profiles(names: Sequence[str], folder: str | Path | None) -> dict[str, Profile | None]:
    """Profiles `FOLDER/<codec>.safetensors` for those codecs that need one.

    Raises:
        ValueError: for a codec that needs a profile, if there is no folder.
        OSError: if a profile is not there.
    """
    needing = [name for name in names if codec_class(name).needs_profile]
    if needing and folder is None:
        raise ValueError(
            f"{', '.join(needing)}: needs a profile of the model: `blendkv profile MODEL --data FILES --out FOLDER` "
            "makes it, --profiles FOLDER reads it"
        )
    files = {name: Path(folder or "") / f"{name}.safetensors" for name in needing}
    return {name: profile_for(name, files[name]) if name in files else None for name in names}


def measure(trial: Trial, chunk: ChunkCache, codec: Codec, short: Sequence[int] = (), repeats: int = 1) -> Measured:
    """Measures a codec on one context.

    Args:
        trial: of the context.
        chunk: its keys and values as they are coded.
        codec: with level and profile.
        short: see `codec_rows`.
        repeats: see `codec_rows`.
    """
    profile = getattr(codec, "profile", None)
    profiles = {profile.hash: profile} if isinstance(profile, Profile) else None
    data = encode_chunk(chunk, codec)  # not timed: compiles the loops
    decoded = decode_chunk(data, profiles=profiles)
    encode = [_seconds(lambda: encode_chunk(chunk, codec)) for _ in range(repeats)]
    decode = [_seconds(lambda: decode_chunk(data, profiles=profiles)) for _ in range(repeats)]
    sections = sections_of(chunk, codec)
    zstd = None if sections is None else zstd1(sections, repeats)
    numbers = _numbers(chunk)
    with ContainerReader(data) as reader:
        payload = sum(map(len, reader.streams(reader.header.arrangement.streams)))
    likeness = trial.compare(decoded)
    return Measured(
        bits=8 * len(data) / numbers,
        payload_bits=8 * payload / numbers,
        short_bits=tuple(8 * len(encode_chunk(part, codec)) / _numbers(part) for part in _cut(chunk, short)),
        kl=likeness.kl,
        top1=likeness.top1,
        encode=2e-6 * numbers / median(encode),
        decode=2e-6 * numbers / median(decode),
        zstd_decode=None if zstd is None else 2e-6 * numbers / zstd.seconds,
        zstd_bits=None if zstd is None else 8 * zstd.size / numbers,
    )


def bits_at(rows: Sequence[Mapping[str, Any]], kl: float = TARGET) -> float | None:
    """Bits at which a codec has a KL divergence, linear in its logarithm between neighbouring levels; None outside."""
    points = sorted((row["bits_per_element"], math.log(max(row["kl"], 1e-12))) for row in rows)
    for (low, worse), (high, better) in pairwise(points):
        if better <= math.log(kl) <= worse and better < worse:
            return low + (high - low) * (worse - math.log(kl)) / (worse - better)
    return None


def in_16_bits(chunk: ChunkCache) -> ChunkCache:
    """A chunk whose keys and values have 16 bits: those of fp32 in fp16."""
    if chunk.dtype != torch.float32:
        return chunk
    keys, values = (tuple(t.half() for t in states) for states in (chunk.keys, chunk.values))
    return replace(chunk, keys=keys, values=values)


@contextmanager
def one_core() -> Generator[None]:
    """Lets torch use one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _row(codec: Codec, measured: Sequence[Measured], short: Sequence[int]) -> dict[str, Any]:
    bits, kl = _mean([m.bits for m in measured]), [m.kl for m in measured]
    zstd = [m.zstd_decode for m in measured if m.zstd_decode is not None]
    zstd_bits = [m.zstd_bits for m in measured if m.zstd_bits is not None]
    row: dict[str, Any] = {
        "codec": codec.name,
        "level": codec.level,
        "profile": codec.profile_hash or None,
        "bits_per_element": bits,
        "ratio_16bit": 16 / bits,
        "payload_bits_per_element": _mean([m.payload_bits for m in measured]),
        "kl": _mean(kl),
        "top1": _mean([m.top1 for m in measured]),
        "encode_mb_s": median([m.encode for m in measured]),
        "decode_mb_s": median([m.decode for m in measured]),
        "zstd1_decode_mb_s": median(zstd) if zstd else None,
        "zstd1_bits_per_element": _mean(zstd_bits) if zstd_bits else None,
        "all_kl": kl,
        "all_bits": [m.bits for m in measured],
    }
    if not zstd:
        row["note"] = "zstd was not measured: pip install 'blendkv[bench]' brings zstandard"
    for i, tokens in enumerate(short):
        shorter = _mean([m.short_bits[i] for m in measured])
        row |= {f"bits_{tokens}": shorter, f"ratio_{tokens}": 16 / shorter}
    return row


def _require_unseen(passages: Sequence[Passage], profiles: Mapping[str, Profile | None]) -> None:
    if not passages:
        raise ValueError("no passages to measure on")
    measured = {digest for passage in passages for digest in passage.digests}
    for name, profile in profiles.items():
        if profile is not None and (seen := measured & set(profile.about.get("texts", ()))):
            raise ValueError(f"the profile of {name} was made of {len(seen)} of the texts that it is to be measured on")


def _cut(chunk: ChunkCache, lengths: Sequence[int]) -> Iterator[ChunkCache]:
    """The first tokens of a chunk, which see no others, as chunks."""
    for tokens in lengths:
        keys, values = (tuple(t[:, :tokens] for t in states) for states in (chunk.keys, chunk.values))
        yield replace(chunk, ids=chunk.ids[:tokens], keys=keys, values=values)


def _numbers(chunk: ChunkCache) -> int:
    return sum(t.numel() for t in (*chunk.keys, *chunk.values))


def _seconds(call: Callable[[], object]) -> float:
    """Seconds of the core: work beside this one does not count."""
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
