"""Files that must stay readable in every later version, with the profiles that they need.

`python -m tests.goldens` writes those that are not there yet, and never one that is. To add a codec, a level or a
feature, add a function to BUILDERS under a new name. Of `raw` the manifest has a digest of what is read, bit by bit.
The numbers of a codec with a profile depend in their last bits on the machine that multiplies: of those the manifest
has a digest of the symbols, and a `raw` file beside them, `.values`, has numbers that they must be near to.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from blendkv.chunk import ChunkCache, framed
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import LayerShape, Profile, get_codec, load_profile
from blendkv.container import ContainerReader, Header
from tests.codecs import twin
from tests.drawn import SMALL, chunk_of, profile_of

FOLDER = Path(__file__).parent / "golden"
MANIFEST = FOLDER / "manifest.json"
SECRET = b"not a secret at all, it is in the tests"


def states(*shape: int, start: int, dtype: torch.dtype) -> Tensor:
    """Numbers that no random generator has to remember."""
    count = torch.arange(start, start + math.prod(shape))
    return ((count * 37 % 251 - 125) / 64 + (count * 11 % 17) / 512).view(shape).to(dtype)


def chunk(tokens: int = 5, dtype: torch.dtype = torch.float32, layers: int = 2, **fields) -> ChunkCache:
    """A small chunk, always the same."""
    keys = tuple(states(2, tokens, 8, start=1000 * layer, dtype=dtype) for layer in range(layers))
    values = tuple(states(2, tokens, 4, start=1000 * layer + 500, dtype=dtype) for layer in range(layers))
    fields = {"conditioning": (1, 2), "tokenizer": "t" * 8, "namespace": "golden", "text": "grün \N{SNOWMAN}"} | fields
    return ChunkCache(torch.arange(tokens) * 1001 % 50257, keys, values, "f" * 32, **fields)


def raw(told: ChunkCache, level: int = 0, **settings) -> bytes:
    """A chunk as it is."""
    return encode_chunk(told, get_codec("raw", level=level), **settings)


BUILDERS: dict[str, Callable[[], bytes]] = {
    "raw-fp32": lambda: raw(chunk()),
    "raw-fp16": lambda: raw(chunk(7, torch.float16)),
    "raw-bf16-scores": lambda: raw(chunk(9, torch.bfloat16), token_streams={"hkvd": torch.arange(9) / 8}),
    "raw-bare": lambda: raw(chunk(1, conditioning=(), tokenizer="", namespace="", text=None)),
    "raw-sealed": lambda: raw(chunk(), secret=SECRET, key_id=b"2026"),
    "raw-1": lambda: raw(chunk(5, torch.float16), 1),
    "raw-1-groups": lambda: raw(chunk(71, torch.bfloat16), 1),
    "raw-1-sealed": lambda: raw(chunk(33), 1, secret=SECRET, key_id=b"2026"),
}


GROUPS = (LayerShape(1, 4, 2), LayerShape(1, 2, 4))
"""Layers so small that more tokens than a group has are still a small file."""


def coded(
    codec: str, tokens: int, dtype: torch.dtype, shapes: tuple[LayerShape, ...] = SMALL, level: int = 0, **settings
) -> bytes:
    """A chunk through a codec with a profile, which is written beside it."""
    profile = profile_of(codec, shapes)
    profile.save(FOLDER / f"{profile.hash}.safetensors")
    return encode_chunk(chunk_of(shapes, tokens, dtype), get_codec(codec, profile=profile, level=level, **settings))


BUILDERS |= {
    "cachegen": lambda: coded("cachegen", 23, torch.float32),
    "cachegen-fp16-groups": lambda: coded("cachegen", 263, torch.float16, GROUPS, level=-3),
    "klt": lambda: coded("klt", 23, torch.float32),
    "klt-bf16-groups": lambda: coded("klt", 263, torch.bfloat16, GROUPS, level=5),
    "klt-2": lambda: coded("klt", 23, torch.float16, streams=2),
    "klt-xl": lambda: coded("klt-xl", 23, torch.float32),
    "klt-xl-bf16-groups": lambda: coded("klt-xl", 263, torch.bfloat16, GROUPS, level=-4),
    "klt-xl-2": lambda: coded("klt-xl", 23, torch.float16, level=2, streams=2),
}


def header(name: str) -> Header:
    """What a file says about itself."""
    with ContainerReader(FOLDER / f"{name}.blendkv", secret=SECRET if "sealed" in name else None) as reader:
        return reader.header


def profile(digest: str) -> Profile | None:
    """A profile beside the files, by its hash."""
    return load_profile(FOLDER / f"{digest}.safetensors")


def symbols(name: str) -> str:
    """SHA-256 of the symbols in a file, as the plain twin reads them."""
    data = (FOLDER / f"{name}.blendkv").read_bytes()
    told = twin.read(data, twin.ProfileFile(FOLDER / f"{header(name).profile_hash}.safetensors")).symbols
    parts = [f"{key} {told[key].shape}".encode() + told[key].astype("<i4").tobytes() for key in sorted(told)]
    return hashlib.sha256(framed(parts)).hexdigest()


def digest(chunk: ChunkCache) -> str:
    """SHA-256 of everything that was read."""
    tensors = [t.contiguous().view(torch.uint8).numpy().tobytes() for t in (*chunk.keys, *chunk.values)]
    shapes = json.dumps([[str(t.dtype), *t.shape] for t in (*chunk.keys, *chunk.values)]).encode()
    text = b"" if chunk.text is None else b"+" + chunk.text.encode()
    return hashlib.sha256(framed([chunk.key.encode(), text, shapes, *tensors])).hexdigest()


def read(name: str) -> ChunkCache:
    """The chunk in a golden file."""
    secret = SECRET if "sealed" in name else None
    return decode_chunk(FOLDER / f"{name}.blendkv", secret=secret, profiles=profile)


def values(name: str) -> ChunkCache:
    """What was read from a file with a profile when it was new."""
    return decode_chunk(FOLDER / f"{name}.values")


def main() -> None:
    """Writes what is not there."""
    manifest = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {}
    for name, build in BUILDERS.items():
        if name not in manifest:
            (FOLDER / f"{name}.blendkv").write_bytes(build())
            if name.startswith("raw"):
                manifest[name] = digest(read(name))
            else:
                manifest[name] = symbols(name)
                (FOLDER / f"{name}.values").write_bytes(raw(read(name)))
            print("new:", name)
    MANIFEST.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
