"""Encoded chunks on a GPU, to where a blend wants them, beside raw ones: part of `blendkv bench kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from blendkv.bench.kernels import Timer
from blendkv.bench.results import device_name
from blendkv.chunk import ChunkCache
from blendkv.chunkfile import ChunkFile
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import LayerShape, Profile
from blendkv.codecs.klt import KLT
from blendkv.codecs.transform import parts_of
from blendkv.expanding import decode_chunks
from blendkv.kernels.table import describe, upload

DISTINCT = 2
"""Chunks that are coded and compared; all others are copies of their bytes."""
CENTRE, WIDTH = 16, 16
"""Of log2 of the components' scales in steps, in 1/16 octave: about three bits a symbol."""


def loading_rows(
    tokens: int = 8192,
    chunk_tokens: int = 512,
    layers: int = 32,
    heads: int = 8,
    dim: int = 128,
    pieces: Sequence[int] = (1, 2, 3, 4, 8),
    repeats: int = 20,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Measures how chunks of `klt` get from memory to the buffers of a blend, in Llama-3.1-8B's shape and bfloat16.

    Everything counts: copying, entropy decoding, the inverse transform, waiting for the status, rotating and placing,
    and what the host does. The profile is made up: random rotations of each head, scales an octave wide. What is
    decoded is compared with what the CPU decodes before anything is timed.

    Args:
        tokens: of the prompt.
        chunk_tokens: of each chunk.
        layers: of the model.
        heads: of keys, and of values.
        dim: of a head.
        pieces: numbers of pieces to try from host memory (`decode_chunks`).
        repeats: timed calls of each; the median counts.
        seed: of the numbers.

    Yields:
        Rows as of `kernel_rows`; a rate is of 16-bit keys and values, `rows` are chunks, and the ceiling is that of
        copying them raw from pinned memory.

    Raises:
        ValueError: without a CUDA device, or if a chunk is decoded wrongly.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench kernels needs a CUDA device: PyTorch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    setting = Loading(tokens // chunk_tokens, chunk_tokens, layers, heads, dim, device, seed)
    setting.check()
    time = Timer(repeats)
    raw = setting.raw(pinned=True)
    flat = [torch.empty_like(t, device=device) for t in raw[0].keys + raw[0].values]
    copied = time(lambda: [to.copy_(t, non_blocking=True) for c in raw for to, t in zip(flat, _states(c), strict=True)])
    ceiling = setting.nbytes / copied / 1e9
    host, resident = setting.files(pinned=True), setting.files(pinned=False)
    placed = setting.decoded(resident)
    runs: list[tuple[str, Callable[[], object]]] = [
        ("raw, pinned: copy", lambda: None),
        ("raw, pinned: place", lambda: setting.place(raw, by_layer=True)),
        ("raw, in GPU memory: place", lambda: setting.place(placed)),
        ("klt, in GPU memory: decode", lambda: setting.decoded(resident, 1)),
        ("klt, in GPU memory: decode and place", lambda: setting.place(setting.decoded(resident, 1))),
        *((f"klt, pinned: decode and place, {n} pieces", _from_host(setting, host, n)) for n in pieces),
    ]
    for name, run in runs:
        seconds = copied if name == "raw, pinned: copy" else time(run)
        rate = setting.nbytes / seconds / 1e9
        yield {
            "device": device_name(device),
            "kernel": name,
            "tokens": tokens,
            "rows": len(raw),
            "bits": setting.bits,
            "seconds": seconds,
            "rate": rate,
            "unit": "GB/s",
            "ceiling": ceiling,
            "of_ceiling": rate / ceiling,
        }


def _from_host(setting: Loading, files: list[ChunkFile], pieces: int) -> Callable[[], object]:
    return lambda: setting.place(setting.decoded(files, pieces))


def _states(chunk: ChunkCache) -> tuple[torch.Tensor, ...]:
    return chunk.keys + chunk.values


class Loading:
    """Chunks of made-up numbers, encoded, and the buffers of a prompt that is made of them.

    Attributes:
        nbytes: of keys and values of all chunks, in 16 bits.
        bits: a symbol.
    """

    def __init__(
        self, count: int, tokens: int, layers: int, heads: int, dim: int, device: torch.device, seed: int = 0
    ) -> None:
        from blendkv.kernels.placing import cut

        self.count, self.tokens, self.device = count, tokens, device
        self.shape = LayerShape(heads, dim, dim)
        generator = torch.Generator(device).manual_seed(seed)
        self.codec = KLT(profile=made_up_profile((self.shape,) * layers, generator))
        self.chunks = [self._draw(generator, number) for number in range(min(DISTINCT, count))]
        self.data = [
            torch.from_numpy(np.frombuffer(encode_chunk(chunk, self.codec), np.uint8).copy()) for chunk in self.chunks
        ]
        self.nbytes = count * self.chunks[0].nbytes
        self.bits = 16 * sum(map(len, self.data)) / sum(chunk.nbytes for chunk in self.chunks)
        length = count * tokens
        buffers = torch.empty(2 * layers, 1, heads, length, dim, dtype=torch.bfloat16, device=device).unbind()
        self.buffers = list(zip(buffers[::2], buffers[1::2], strict=True))
        self._table = upload(describe(self.buffers, length), device)
        self._cuts = [upload(array, device) for array in cut([(0, i * tokens, tokens, tokens) for i in range(count)])]
        angle = torch.rand(1, 1, length, dim // 2, device=device, generator=generator) * 6
        self._angles = angle.cos(), angle.sin()

    def _draw(self, generator: torch.Generator, number: int) -> ChunkCache:
        """Gaussian components of the profile's scales, transformed back."""
        states = []
        for part in (part for parts in parts_of(self.codec.profile) for part in parts):
            sd = torch.from_numpy(part.scale / 16).exp2().float().view(len(part.matrix), 1, -1).to(self.device)
            shape = (len(part.matrix), self.tokens, part.matrix.shape[1])
            components = torch.randn(shape, device=self.device, generator=generator) * sd
            mean = part.mean.view(len(part.matrix), 1, -1).to(self.device)
            states.append((mean + components @ part.matrix.to(self.device)).bfloat16().cpu())
        return ChunkCache(torch.arange(self.tokens) + number, tuple(states[::2]), tuple(states[1::2]), "made up")

    def files(self, pinned: bool) -> list[ChunkFile]:
        """All chunks, in pinned memory or in the device's."""
        where = (lambda data: data.pin_memory()) if pinned else (lambda data: data.to(self.device, copy=True))
        return [ChunkFile(where(self.data[i % len(self.data)]), codec=self.codec) for i in range(self.count)]

    def raw(self, pinned: bool) -> list[ChunkCache]:
        """All chunks as they were, in pinned memory or in the device's."""
        chunks = [self.chunks[i % len(self.chunks)] for i in range(self.count)]
        return [chunk.pin_memory() if pinned else chunk.to(self.device) for chunk in chunks]

    def decoded(self, files: list[ChunkFile], pieces: int = 1) -> list[ChunkCache]:
        """All chunks on the device."""
        return decode_chunks(files, self.device, pieces=pieces)

    def place(self, chunks: list[ChunkCache], by_layer: bool = False) -> None:
        """Rotates and places chunks, as a blend does: all layers at once, or, from pinned memory, one by one."""
        from blendkv.kernels.placing import locate, rotate_and_place

        layers = len(self.buffers)
        sources = upload(locate([(chunk.addresses, 0) for chunk in chunks], range(layers)), self.device)
        step = 1 if by_layer else layers
        for first in range(0, layers, step):
            rotate_and_place(
                sources[first : first + step],
                *self._cuts,
                self._table,
                range(first, first + step),
                (self.shape.heads, self.shape.key_dim, self.shape.value_dim),
                torch.bfloat16,
                "half",
                self._angles,
            )

    def check(self) -> None:
        """Compares what kernels decode, from a copy of each chunk, with what the CPU decodes.

        Raises:
            ValueError: with the figure.
        """
        files = self.files(pinned=False)
        for pieces in (1, 3):
            for got, file in zip(self.decoded(files, pieces)[: len(self.data)], files, strict=False):
                want = file.read()
                for a, b in zip(_states(got), _states(want), strict=True):
                    error = float(((a.cpu().float() - b.float()).abs() / b.float().abs().clamp_min(1)).max())
                    if not error <= 2**-6:
                        raise ValueError(f"a decoded chunk is off by {error:.2g}: no time is reported")


def made_up_profile(shapes: tuple[LayerShape, ...], generator: torch.Generator) -> Profile:
    """A profile of no model for `klt`: a random rotation of each head."""
    device, tensors = generator.device, {}
    for layer, shape in enumerate(shapes):
        for part, dim in enumerate((shape.key_dim, shape.value_dim)):
            name = f"{layer}.{part}"
            drawn = torch.randn(shape.heads, dim, dim, device=device, generator=generator)
            scale = torch.randn(shape.heads, dim, device=device, generator=generator) * WIDTH + CENTRE
            tensors[f"matrix.{name}"] = torch.linalg.qr(drawn).Q.mul(0.25).half().cpu()
            tensors[f"mean.{name}"] = torch.randn(shape.heads * dim, device=device, generator=generator).cpu()
            scale = scale.round().clamp(-36, 80).sort(1, descending=True).values
            tensors[f"scale.{name}"] = scale.flatten().to(torch.int16).cpu()
    return Profile("klt", shapes, tensors, {"joint": False, "unit_layers": 1, "protected": 1})
