"""Chunk files to keys and values on a GPU, many at once: bytes copied by pieces of layers, each decoded on arrival."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import gcd
from typing import Self

import numpy as np
import torch
from torch import Tensor

from blendkv import kernels
from blendkv.chunk import ChunkCache
from blendkv.chunkfile import ChunkFile
from blendkv.codecs import DTYPES, Profile
from blendkv.codecs.klt import GROUP, KLT
from blendkv.codecs.protect import protected_bytes
from blendkv.codecs.rans import lanes_for
from blendkv.codecs.tables import ABSENT, tables
from blendkv.codecs.transform import Part, parts_of
from blendkv.errors import ChunkFileError
from blendkv.kernels.table import upload

PIECES = 4
"""Into how many pieces of layers bytes are cut, so that one is decoded while the next is copied."""
MOST_SYMBOLS = 2**30
"""Symbols that are held at once, two bytes each; more chunks than that are decoded one batch after the other."""
WIDEST = 2**15
"""Channels of a section that the kernel can number."""


def decode_chunks(files: Sequence[ChunkFile], device: torch.device | str, *, pieces: int = PIECES) -> list[ChunkCache]:
    """Keys and values of chunk files, on a device.

    On a GPU files of `klt` and `klt-xl` that are open for a tensor of bytes (pinned, in ordinary memory or on the
    device) are decoded by kernels, all in a few launches, waiting for the device once. Symbols and protected tokens
    are those of the CPU, exactly; keys and values are within a rounding of their dtype, but for `klt-xl` on CPUs that
    multiply bf16, which round more. The checksums of those files are not compared: `ChunkFile.verify` does that, once.
    All others (`cachegen`, `raw`, two streams, without layer 0) are decoded on the CPU and copied.

    Args:
        files: open chunk files; their bytes must not change meanwhile.
        device: where keys and values go.
        pieces: of layers; more of them overlap copying and decoding better, but cost launches.

    Raises:
        ChunkFileError: for the first file that cannot be decoded.
    """
    decoded = decode_each(files, device, pieces=pieces)
    for chunk in decoded:
        if isinstance(chunk, ChunkFileError):
            raise chunk
    return [chunk for chunk in decoded if isinstance(chunk, ChunkCache)]


def decode_each(
    files: Sequence[ChunkFile], device: torch.device | str, *, pieces: int = PIECES
) -> list[ChunkCache | ChunkFileError]:
    """Like `decode_chunks`, with the error in place of each chunk that cannot be decoded."""
    device = _exact(torch.device(device))
    decoded: dict[int, ChunkCache | ChunkFileError] = {}
    batches: dict[tuple, list[int]] = {}
    for i, file in enumerate(files):
        codec = file.codec
        if isinstance(codec, KLT) and by_kernels(file, device):
            batches.setdefault((type(codec), codec.profile, codec.level, file.header.dtype), []).append(i)
        else:
            try:
                decoded[i] = file.read().to(device)
            except ChunkFileError as error:
                decoded[i] = error
    for (*settings, dtype), numbers in batches.items():
        plan = _plan(*settings, device)
        while numbers:
            count = max(1, sum(np.cumsum([len(files[i].ids) for i in numbers]) * plan.channels <= MOST_SYMBOLS))
            batch, numbers = numbers[:count], numbers[count:]
            decoded |= zip(batch, _expand(plan, [files[i] for i in batch], DTYPES[dtype], pieces), strict=True)
    return [decoded[i] for i in range(len(files))]


def by_kernels(file: ChunkFile, device: torch.device) -> bool:
    """Whether a file is decoded by kernels on that device."""
    header, codec = file.header, file.codec
    if not isinstance(codec, KLT) or codec.streams > 1 or not header.layer0 or file.tensor is None:
        return False
    dims = {dim for shape in header.layers for dim in (shape.key_dim, shape.value_dim)}
    return kernels.unusable([device], DTYPES[header.dtype], dims) is None and _fits(codec.profile)


@lru_cache(maxsize=4)
def _fits(profile: Profile) -> bool:
    """Whether matrices are fp16, as they are fitted, and sections not too wide for the kernels."""
    halves = all(t.dtype == torch.float16 for name, t in profile.tensors.items() if name.startswith("matrix."))
    return halves and all(len(part.mean) <= WIDEST for parts in parts_of(profile) for part in parts)


@dataclass(frozen=True, eq=False)
class _Weights:
    """What a profile says, on a device.

    Attributes:
        parts: of all units.
        slab: `[P]` first channel of each part, among those of all parts; and one more for the end.
        matrices, mean: of all parts, flat.
        heads: by head dim a table of heads (`kernels.klt.inverse`), ordered by part, and the part of each of its rows.
        unit: parts of a unit.
        align: every dim is a multiple of it.
    """

    parts: list[Part]
    slab: np.ndarray
    matrices: Tensor
    mean: Tensor
    heads: dict[int, tuple[Tensor, np.ndarray]]
    unit: int
    align: int


@lru_cache(maxsize=4)
def _weights(profile: Profile, device: torch.device) -> _Weights:
    units = parts_of(profile)
    parts = [part for unit in units for part in unit]
    slab = np.cumsum([0, *(len(part.mean) for part in parts)])
    found: dict[int, list[tuple[int, ...]]] = {}
    matrix = 0
    for number, part in enumerate(parts):
        size, own = part.matrix.shape[1], 0
        for head, dim in enumerate(part.heads):
            block, column = divmod(own, size)
            at = matrix + block * size * size + column
            place = (int(slab[number]), len(part.mean), block * size, size, at, size, own)
            found.setdefault(dim, []).append((*place, head, len(part.heads), number))
            own += dim
        matrix += part.matrix.numel()
    heads = {dim: np.array(rows, np.int64) for dim, rows in found.items()}
    return _Weights(
        parts,
        slab,
        torch.cat([part.matrix.flatten() for part in parts]).half().to(device),
        torch.cat([part.mean for part in parts]).to(device),
        {dim: (torch.from_numpy(rows).to(device), rows[:, -1]) for dim, rows in heads.items()},
        len(units[0]),
        gcd(*heads),
    )


class _Plan:
    """What a profile says at one level, on a device."""

    def __init__(self, kind: type[KLT], profile: Profile, level: int, device: torch.device) -> None:
        from blendkv.kernels.rans import describe_rows

        codec = kind(level, profile)
        self.device, self.weights = device, _weights(profile, device)
        self.step, self.kept = codec.step, min(codec.protected, GROUP)
        self.slab, self.channels = self.weights.slab[:-1], int(self.weights.slab[-1])
        self.width = np.diff(self.weights.slab)
        rows = [codec.rows(part) for part in self.weights.parts]
        described = [describe_rows(row) for row in rows]
        self.count = np.array([len(part) for part in described])
        self.first = np.cumsum(self.count) - self.count
        self.described = np.concatenate(described)
        self.on_device = torch.from_numpy(self.described).to(device)
        self.coded = torch.from_numpy((np.concatenate(rows) != ABSENT).astype(np.uint8)).to(device)
        self.template = lru_cache(maxsize=64)(self._template)

    def _template(self, tokens: int) -> np.ndarray:
        """`[P, G, 8]` int64, the sections of a chunk (`kernels.rans.Section`), without what differs among chunks.

        Offsets are within segments, lengths are those of the segments less what stands there, and places in the output
        are within a part's slab, relative to the chunk's first row.
        """
        starts = np.arange(0, tokens, GROUP)
        kept = np.where(starts == 0, min(self.kept, tokens), 0)
        coded = np.minimum(starts + GROUP, tokens) - starts - kept
        table = np.zeros((len(self.width), len(starts), 8), np.int64)
        for part, heads in enumerate(part.heads for part in self.weights.parts):
            table[part, 0, 0] = protected_bytes(int(kept[0]), heads)
            table[part, :, 5] = [lanes_for(int(t), int(self.count[part])) for t in coded]
        table[..., 1] = -table[..., 0]
        table[..., 2], table[..., 3] = self.first[:, None], self.count[:, None]
        table[..., 4] = coded
        table[..., 6] = (starts + kept) * self.width[:, None]
        table[..., 7] = self.width[:, None]
        return table


@lru_cache(maxsize=4)
def _plan(kind: type[KLT], profile: Profile, level: int, device: torch.device) -> _Plan:
    return _Plan(kind, profile, level, device)


@lru_cache(maxsize=8)
def _lut(device: torch.device) -> Tensor:
    return torch.from_numpy(tables().lut.view(np.int32).copy()).to(device)


class _Batch:
    """Where everything of some whole files is, before, between and after the two kernels.

    Attributes:
        sizes: bytes of segments of each file, token streams left out, and where they begin in it.
        bases: where they begin in the data on the device; and one more for the end.
        rows: first row of symbols of each chunk; and one more for the end.
        tables: for each file its sections `[P, G, 8]`.
        protected: `[C, P]` where protected tokens are in the data.
    """

    def __init__(self, plan: _Plan, files: Sequence[ChunkFile]) -> None:
        self.files = files
        self.starts = [_starts(file) for file in files]
        self.bases = np.cumsum([0, *(starts[-1] - starts[0] for starts in self.starts)])
        self.lengths = [file.header.tokens for file in files]
        self.rows = np.cumsum([0, *self.lengths])
        self.tables, protected = [], []
        for starts, base, row, tokens in zip(self.starts, self.bases, self.rows, self.lengths, strict=False):
            table = plan.template(tokens).copy()
            at = (starts[:-1] - starts[0] + base).reshape(table.shape[:2])
            table[..., 0] += at
            table[..., 1] += np.diff(starts).reshape(at.shape)
            table[..., 6] += (self.rows[-1] * plan.slab + row * plan.width)[:, None]
            self.tables.append(table)
            protected.append(at[:, 0])
        self.protected = np.stack(protected)

    def sections(self, parts: range) -> np.ndarray:
        """`[S, 8]` of all files."""
        return np.concatenate([table[parts.start : parts.stop].reshape(-1, 8) for table in self.tables])

    def owners(self, parts: range) -> np.ndarray:
        """`[S]` the number of the file of each section."""
        return np.repeat(np.arange(len(self.tables)), [len(parts) * table.shape[1] for table in self.tables])

    def copy(self, data: Tensor, parts: range) -> None:
        """Queues the copies of all files' segments of some parts."""
        for file, starts, base, table in zip(self.files, self.starts, self.bases, self.tables, strict=False):
            groups = table.shape[1]
            start, stop = int(starts[parts.start * groups]), int(starts[parts.stop * groups])
            to = int(base - starts[0])
            assert file.tensor is not None
            data[to + start : to + stop].copy_(file.tensor[start:stop], non_blocking=True)


def _starts(file: ChunkFile) -> np.ndarray:
    return np.array(file.starts[len(file.header.token_streams) :], np.int64)


def _expand(
    plan: _Plan, files: Sequence[ChunkFile], dtype: torch.dtype, pieces: int
) -> list[ChunkCache | ChunkFileError]:
    """Decodes files of one profile, level and dtype."""
    whole = [file for file in files if _is_whole(plan, file)]
    decoded = iter(_expand_whole(plan, whole, dtype, pieces) if whole else [])
    return [next(decoded) if file in whole else _damaged() for file in files]


def _is_whole(plan: _Plan, file: ChunkFile) -> bool:
    """Whether every section has room for the states of its lanes."""
    template = plan.template(file.header.tokens)
    lengths = np.diff(_starts(file)).reshape(template.shape[:2]) + template[..., 1]
    return bool((lengths >= 4 * template[..., 5]).all())


def _damaged() -> ChunkFileError:
    return ChunkFileError(
        "symbols that do not end where they should: the bytes are damaged, or were coded with another profile",
        reason="symbols",
    )


def _expand_whole(
    plan: _Plan, files: Sequence[ChunkFile], dtype: torch.dtype, pieces: int
) -> list[ChunkCache | ChunkFileError]:
    from blendkv.kernels.klt import BLOCK_T, inverse
    from blendkv.kernels.rans import decode, describe

    device, weights, batch = plan.device, plan.weights, _Batch(plan, files)
    cuts = _cuts(len(weights.parts), weights.unit, pieces)
    tokens = int(batch.rows[-1])
    sections = [batch.sections(parts) for parts in cuts]
    owners = np.concatenate([batch.owners(parts) for parts in cuts])
    ends = np.cumsum([0, *map(len, sections)])
    described = describe(np.concatenate(sections), plan.described, int(batch.bases[-1]), tokens * plan.channels)
    with kernels.on(device):
        data = torch.empty(int(batch.bases[-1]), dtype=torch.uint8, device=device)
        symbols = torch.empty(tokens * plan.channels, dtype=torch.int16, device=device)
        outputs = [torch.empty(t * plan.channels, dtype=dtype, device=device) for t in batch.lengths]
        status = torch.zeros(len(described) + len(files), dtype=torch.int32, device=device)
        places = [
            (out.data_ptr(), length, row, min(plan.kept, length))
            for out, length, row in zip(outputs, batch.lengths, batch.rows, strict=False)
        ]
        tiles = [(c, begin) for c, length in enumerate(batch.lengths) for begin in range(0, length, BLOCK_T)]
        arrays = (described, tiles, places, batch.protected)
        table, tiles, chunks, protected = (upload(np.array(array, np.int64), device) for array in arrays)
        lanes = max(int(part[..., 5].max()) for part in batch.tables)
        with _Overlap(device, len(cuts)) as overlap:
            for number, (parts, (begin, end)) in enumerate(zip(cuts, pairwise(ends), strict=True)):
                with overlap.copying(number):
                    batch.copy(data, parts)
                with overlap.decoding(number):
                    here = slice(begin, end)
                    decode(data, table[here], plan.on_device, _lut(device), symbols, lanes, status=status[here])
                    for dim, (heads, of) in weights.heads.items():
                        inverse(
                            symbols,
                            tokens,
                            data,
                            heads[slice(*np.searchsorted(of, (parts.start, parts.stop)))],
                            dim,
                            weights.align,
                            tiles,
                            chunks,
                            protected,
                            weights.matrices,
                            weights.mean,
                            plan.coded,
                            plan.step,
                            status[len(table) :],
                            dtype,
                        )
        made = [_chunk(file, out) for file, out in zip(files, outputs, strict=True)]
        found = status.cpu().numpy()  # waits for the device, this once
    bad = set(owners[np.flatnonzero(found[: len(table)])]) | set(np.flatnonzero(found[len(table) :]))
    return [_damaged() if c in bad else chunk for c, chunk in enumerate(made)]


def _exact(device: torch.device) -> torch.device:
    """A device with its number."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _cuts(parts: int, unit: int, pieces: int) -> list[range]:
    """Parts cut into pieces of whole units, as equal as they can be."""
    edges = np.unique(np.linspace(0, parts // unit, pieces + 1).round().astype(int)) * unit
    return [range(start, stop) for start, stop in pairwise(edges.tolist())]


def _chunk(file: ChunkFile, out: Tensor) -> ChunkCache:
    """The chunk whose keys and values are written into `out`; its addresses are looked up while the device works."""
    shapes, tokens = file.header.layers, file.header.tokens
    slots = [(s.heads, dim) for s in shapes for dim in (s.key_dim, s.value_dim)]
    if len(set(slots)) == 1:
        states = out.view(len(slots), slots[0][0], tokens, slots[0][1]).unbind()
    else:
        flat = out.split([heads * tokens * dim for heads, dim in slots])
        states = [part.view(heads, tokens, dim) for part, (heads, dim) in zip(flat, slots, strict=True)]
    chunk = file.holding(states[::2], states[1::2])
    _ = chunk.addresses, chunk.homes
    return chunk


class _Overlap:
    """On CUDA a stream that copies and one for each piece, which begins when its bytes are there; elsewhere nothing."""

    def __init__(self, device: torch.device, pieces: int) -> None:
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._current = torch.cuda.current_stream(device)
            self._streams = [torch.cuda.Stream(device) for _ in range(1 + pieces)]
            for stream in self._streams:
                stream.wait_stream(self._current)

    def copying(self, piece: int) -> AbstractContextManager:
        """Within it, copies of a piece are queued."""
        return torch.cuda.stream(self._streams[0]) if self._streams else nullcontext()

    def decoding(self, piece: int) -> AbstractContextManager:
        """Within it, what needs those copies is queued."""
        if not self._streams:
            return nullcontext()
        self._streams[1 + piece].wait_stream(self._streams[0])
        return torch.cuda.stream(self._streams[1 + piece])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """What the current stream does from here on, and with the memory of this, comes after all of that."""
        for stream in self._streams:
            self._current.wait_stream(stream)
