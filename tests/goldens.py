"""Files that must stay readable, bit by bit, in every later version.

`python -m tests.goldens` writes those that are not there yet, and never one that is. To add a codec, a level or a
feature, add a function to BUILDERS under a new name.
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
from blendkv.chunkfile import decode_chunk, encode_chunk

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


BUILDERS: dict[str, Callable[[], bytes]] = {
    "raw-fp32": lambda: encode_chunk(chunk()),
    "raw-fp16": lambda: encode_chunk(chunk(7, torch.float16)),
    "raw-bf16-scores": lambda: encode_chunk(chunk(9, torch.bfloat16), token_streams={"hkvd": torch.arange(9) / 8}),
    "raw-bare": lambda: encode_chunk(chunk(1, conditioning=(), tokenizer="", namespace="", text=None)),
    "raw-sealed": lambda: encode_chunk(chunk(), secret=SECRET, key_id=b"2026"),
}


def digest(chunk: ChunkCache) -> str:
    """SHA-256 of everything that was read."""
    tensors = [t.contiguous().view(torch.uint8).numpy().tobytes() for t in (*chunk.keys, *chunk.values)]
    shapes = json.dumps([[str(t.dtype), *t.shape] for t in (*chunk.keys, *chunk.values)]).encode()
    text = b"" if chunk.text is None else b"+" + chunk.text.encode()
    return hashlib.sha256(framed([chunk.key.encode(), text, shapes, *tensors])).hexdigest()


def read(name: str) -> ChunkCache:
    """The chunk in a golden file."""
    return decode_chunk(FOLDER / f"{name}.blendkv", secret=SECRET if "sealed" in name else None)


def main() -> None:
    """Writes what is not there."""
    manifest = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {}
    for name, build in BUILDERS.items():
        if name not in manifest:
            (FOLDER / f"{name}.blendkv").write_bytes(build())
            manifest[name] = digest(read(name))
            print("new:", name)
    MANIFEST.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
