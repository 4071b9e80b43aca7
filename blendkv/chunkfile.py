"""Chunk files, read whole or layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from blendkv.chunk import ChunkCache, chunk_key
from blendkv.codecs import DTYPES, Codec, Profiles, apart, codec_of
from blendkv.codecs.raw import Raw
from blendkv.container import ContainerReader, Header, LayerShape, TokenStream
from blendkv.container.format import MAX_DECODED
from blendkv.container.seals import Secret
from blendkv.errors import ChunkFileError
from blendkv.levelkeys import id_in

Rebuild = Callable[["ChunkFile"], tuple[Tensor, Tensor]]
"""Computes keys and values of layer 0 for a file without it (`prefilling.first_layer_of`)."""


def decode_chunk(
    source: Any,
    *,
    profiles: Profiles | None = None,
    secret: Secret | None = None,
    rebuild: Rebuild | None = None,
    device: torch.device | str | None = None,
    max_bytes: int = MAX_DECODED,
) -> ChunkCache:
    """The chunk in a chunk file; arguments and errors are those of `ChunkFile`."""
    with ChunkFile(
        source, profiles=profiles, secret=secret, rebuild=rebuild, device=device, max_bytes=max_bytes
    ) as file:
        return file.read()


class ChunkFile:
    """An open chunk file, to be read layer by layer or whole.

    Args:
        source: bytes, a path, a seekable binary file (fsspec's too), a uint8 tensor on any device, or a
            `blendkv.container.Source`.
        profiles: one, or several by their hash, for codecs that need one; None: where `blendkv profile` puts them.
        secret: of a sealed file: the secret, or secrets by key id.
        codec: that wrote the file, if it is at hand; else the one that the head names is made.
        rebuild: computes layer 0 where it was left out: `first_layer_of(model)`.
        device: where tensors go; None leaves them on the CPU.
        max_bytes: most bytes that keys and values may take.

    Attributes:
        header: what the file says about itself.
        codec: that decodes it.
        tensor: the tensor of its bytes, if it was opened for one.
        size: bytes of the file.
        rebuilt: how often layer 0 was computed.
        keyed: what chunks of this file have as a key (`ChunkCache.keyed`), set by who knows a tenant's secret.

    Raises:
        ChunkFileError: for whatever is wrong with the bytes, with its `reason`.
        OSError: from the source.
    """

    def __init__(
        self,
        source: Any,
        *,
        profiles: Profiles | None = None,
        secret: Secret | None = None,
        codec: Codec | None = None,
        rebuild: Rebuild | None = None,
        device: torch.device | str | None = None,
        max_bytes: int = MAX_DECODED,
    ) -> None:
        self.tensor = source if isinstance(source, Tensor) else None
        source = source if self.tensor is None else TensorSource(self.tensor)
        self._reader = ContainerReader(source, secret=secret, max_bytes=max_bytes)
        try:
            self.codec = codec_of(self._reader.header, profiles, codec)
        except BaseException:
            self._reader.close()
            raise
        self.header: Header = self._reader.header
        self.size = self._reader.size
        self.rebuilt = 0
        self.keyed = ""
        self._rebuild, self._device = rebuild, device

    @property
    def ids(self) -> Tensor:
        """`[T]` token ids."""
        return torch.from_numpy(np.frombuffer(self.header.ids, "<u4").astype(np.int64))

    @property
    def conditioning(self) -> tuple[int, ...]:
        """Ids that stood before the chunk."""
        return tuple(np.frombuffer(self.header.conditioning, "<u4").tolist())

    @property
    def key(self) -> str:
        """The key of the chunk (`ChunkCache.key`), to be compared with the one that was looked up."""
        return self.key_with(None)

    def key_with(self, secret: bytes | None) -> str:
        """The key of the chunk with a tenant's secret (`chunk_key`)."""
        header = self.header
        return chunk_key(self.ids, header.fingerprint, self.conditioning, header.tokenizer, header.namespace, secret)

    def layer(self, layer: int, streams: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys `[H, T, D]`, un-rotated, and values `[H, T, Dv]` of one layer; one ranged read a stream.

        Args:
            layer: counted from the model's layer 0.
            streams: how many of the file's streams to use; None: all.

        Raises:
            IndexError: if the model has no such layer.
        """
        header = self.header
        if not 0 <= layer < len(header.layers):
            raise IndexError(f"layer {layer}: the chunk has layers 0 to {len(header.layers) - 1}")
        if layer not in header.stored:
            return self._rebuilt()
        unit = header.unit_of(layer)
        return self.unit(unit, streams)[layer - header.layers_of(unit).start]

    def unit(self, unit: int, streams: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the layers that are decoded together, `header.layers_of(unit)`; one ranged read a stream.

        Args:
            unit: from 0 to `header.units - 1`.
            streams: as for `layer`.

        Raises:
            IndexError: if there is no such unit.
        """
        if not 0 <= unit < self.header.units:
            raise IndexError(f"unit {unit}: the chunk has units 0 to {self.header.units - 1}")
        count = self._streams(streams)
        return self._decode(unit, [s for stream in range(count) for s in self._reader.unit(unit, stream)], count)

    def units(
        self, units: range, streams: int | None = None, groups: Collection[int] | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the layers of consecutive units; one ranged read for each run of segments that follow.

        Args:
            units: at least one, each from 0 to `header.units - 1`.
            streams: as for `layer`.
            groups: of tokens that are wanted; None: all. Tokens of others are NaN.

        Raises:
            ValueError: for some groups of a codec whose groups need each other.
        """
        if groups is not None and not apart(self.codec):
            raise ValueError(f"codec {self.codec.name!r} decodes groups of tokens only together: leave out groups=")
        count = self._streams(streams)
        if groups is None and self.is_plain:
            return self._in_order(units)
        read: dict[int, memoryview] = {}
        for run in self.runs(units, groups, count):
            read |= zip(run, self._reader.segments(run), strict=True)
        layers = []
        for unit in units:
            numbers = [number for stream in range(count) for number in self.header.segments_of(unit, stream)]
            layers += self._decode(unit, [read.get(number) for number in numbers], count)
        return layers

    def runs(self, units: range, groups: Collection[int] | None = None, streams: int | None = None) -> list[range]:
        """Numbers of the segments of units, of some groups of tokens or all, in runs without gaps in the file.

        Args:
            units: consecutive ones.
            groups: of tokens; None: all.
            streams: as for `layer`.
        """
        header, runs = self.header, list[range]()
        each = header.unit_segments // header.arrangement.parts
        for stream in range(self._streams(streams)):
            for unit in units:
                segments = header.segments_of(unit, stream)
                for at, number in enumerate(segments):
                    if groups is not None and at % each not in groups:
                        continue
                    if runs and runs[-1].stop == number:
                        runs[-1] = range(runs[-1].start, number + 1)
                    else:
                        runs.append(range(number, number + 1))
        return runs

    @cached_property
    def sizes(self) -> np.ndarray:
        """`[streams, units, parts, groups]` bytes of each segment of keys and values in the file; int64."""
        header = self.header
        lengths = np.diff(self.starts)[len(header.token_streams) :]
        return lengths.reshape(header.arrangement.streams, header.units, header.arrangement.parts, -1)

    @cached_property
    def is_plain(self) -> bool:
        """Whether all layers are there, raw, alike, and with no padding among them (`Raw.in_order`)."""
        header = self.header
        if type(self.codec) is not Raw or not header.layer0:
            return False
        return self.codec.is_plain(self.sizes[0], header.layers, header.tokens, DTYPES[header.dtype])

    @cached_property
    def unit_sizes(self) -> list[int]:
        """Bytes of each unit in the file, over all streams."""
        return self.sizes.sum((0, 2, 3)).tolist()

    def read(self, streams: int | None = None) -> ChunkCache:
        """The whole chunk; one ranged read.

        Args:
            streams: how many of the file's streams to use, which are a prefix of the file; None: all.
        """
        header, count = self.header, self._streams(streams)
        step, first = header.unit_segments, len(header.token_streams)
        segments = self._reader.segments(range(first + count * header.units * step))  # scores stand in front of layers
        scores = {stream.name: self._numbers(stream, segments[i]) for i, stream in enumerate(header.token_streams)}
        segments = segments[first:]
        layers = [] if header.layer0 else [self._rebuilt()]
        for unit in range(header.units):
            starts = [(stream * header.units + unit) * step for stream in range(count)]
            layers += self._decode(unit, [s for start in starts for s in segments[start : start + step]], count)
        keys, values = zip(*layers, strict=True)
        fields: dict[str, Any] = self.fields | {
            "coded": id_in(header)._replace(base=count < header.arrangement.streams)
        }
        return ChunkCache(keys=keys, values=values, scores=scores, **fields)

    @property
    def fields(self) -> dict[str, Any]:
        """What the chunk of this file is made of (`ChunkCache`), other than keys, values and scores."""
        header = self.header
        return {
            "ids": self.ids,
            "fingerprint": header.fingerprint,
            "conditioning": self.conditioning,
            "tokenizer": header.tokenizer,
            "namespace": header.namespace,
            "text": header.text,
            "keyed": self.keyed,
            "coded": id_in(self.header),
        }

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each segment begins, counted from the beginning of the file, and where the last one ends; int64."""
        return np.array(self._reader.starts, np.int64)

    def verify(self) -> None:
        """Reads the file once, and compares every segment with its checksum or tag.

        Raises:
            ChunkFileError: for the first that differs.
        """
        self._reader.segments(range(self.header.segments))

    def token_stream(self, name: str) -> Tensor:
        """`[T]` what was stored for each token.

        Raises:
            KeyError: for an unknown name.
        """
        data = self._reader.token_stream(name)
        return self._numbers(next(stream for stream in self.header.token_streams if stream.name == name), data)

    @property
    def scores(self) -> dict[str, Tensor]:
        """All token streams by name; a ranged read each."""
        return {stream.name: self.token_stream(stream.name) for stream in self.header.token_streams}

    def close(self) -> None:
        """Closes the file, if it was opened for a path."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _streams(self, wanted: int | None) -> int:
        there = self.header.arrangement.streams
        if wanted is not None and not 1 <= wanted <= there:
            raise ValueError(f"streams={wanted}: the chunk file has {there}")
        return wanted or there

    def _numbers(self, stream: TokenStream, data: memoryview) -> Tensor:
        """`[T]` of a token stream, from its segment, padded or not."""
        return torch.frombuffer(bytearray(data[: stream.nbytes(self.header.tokens)]), dtype=DTYPES[stream.dtype])

    def _decode(self, unit: int, segments: Sequence[memoryview | None], streams: int) -> list[tuple[Tensor, Tensor]]:
        header, layers = self.header, self.header.layers_of(unit)
        shapes, dtype = [header.layers[layer] for layer in layers], DTYPES[header.dtype]
        keys, values = self.codec.decode_unit(layers.start, shapes, header.tokens, dtype, segments, streams)
        _require_shapes(shapes, header.tokens, dtype, keys, values)
        return [(self._place(k), self._place(v)) for k, v in zip(keys, values, strict=True)]

    def _in_order(self, units: range) -> list[tuple[Tensor, Tensor]]:
        """`units` of a plain file: as many calls for all of them as for one."""
        header, codec, shape = self.header, self.codec, self.header.layers[0]
        assert isinstance(codec, Raw)
        (run,) = self.runs(units)
        data, _ = self._reader.joined(run)
        out = torch.empty(len(units), 2, shape.heads, header.tokens, shape.key_dim, dtype=DTYPES[header.dtype])
        codec.in_order(np.frombuffer(data, np.uint8), out.view(torch.uint8).numpy())
        return [(keys, values) for keys, values in self._place(out)]

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor if self._device is None else tensor.to(self._device)

    def _rebuilt(self) -> tuple[Tensor, Tensor]:
        header = self.header
        if self._rebuild is None:
            raise ChunkFileError(
                "layer 0 is not in the chunk file: pass rebuild=first_layer_of(model), which computes it from the "
                "token ids",
                reason="layer0",
            )
        keys, values = self._rebuild(self)
        _require_shapes(header.layers[:1], header.tokens, DTYPES[header.dtype], [keys], [values])
        self.rebuilt += 1
        return self._place(keys), self._place(values)


class TensorSource:
    """The bytes of a contiguous uint8 tensor, on any device. They must not change while a chunk file is read."""

    def __init__(self, data: Tensor) -> None:
        self._data, self.size = data, len(data)

    def read(self, start: int, length: int) -> memoryview:
        """A view, or a copy of what is on another device."""
        return memoryview(self._data[start : start + length].cpu().numpy())


def _require_shapes(
    shapes: Sequence[LayerShape], tokens: int, dtype: torch.dtype, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> None:
    declared = [((s.heads, tokens, s.key_dim), (s.heads, tokens, s.value_dim)) for s in shapes]
    decoded = [(tuple(k.shape), tuple(v.shape)) for k, v in zip(keys, values, strict=True)]
    if decoded != declared or {t.dtype for t in (*keys, *values)} != {dtype}:
        raise ChunkFileError(f"decoded {decoded}, where the head declares {declared} of {dtype}", reason="geometry")
