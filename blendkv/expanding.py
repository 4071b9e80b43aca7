"""Chunk files to keys and values on a GPU, many at once: bytes copied by pieces of layers, each decoded on arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from math import gcd

import numpy as np
import torch
from torch import Tensor

from blendkv import kernels
from blendkv.chunk import ChunkCache
from blendkv.chunkfile import ChunkFile
from blendkv.codecs import DTYPES, Profile
from blendkv.codecs.klt import KLT
from blendkv.codecs.protect import protected_bytes
from blendkv.codecs.rans import lanes_for
from blendkv.codecs.tables import ABSENT, LANES, tables
from blendkv.codecs.transform import Part, parts_of
from blendkv.errors import ChunkFileError
from blendkv.kernels.table import ALIGN, upload
from blendkv.overlap import Overlap

PIECES = 3
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
    All others (`cachegen`, `raw`, two streams, without layer 0, sealed, so that tags are compared) are decoded on the
    CPU and copied.

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
                decoded[i] = error.bare()
    for (*settings, dtype), numbers in batches.items():
        plan = _plan(*settings, device)
        while numbers:
            count = max(1, sum(np.cumsum([len(files[i].ids) for i in numbers]) * plan.channels <= MOST_SYMBOLS))
            batch, numbers = numbers[:count], numbers[count:]
            decoded |= zip(batch, _expand(plan, [files[i] for i in batch], DTYPES[dtype], pieces), strict=True)
    return [decoded[i] for i in range(len(files))]


def by_kernels(file: ChunkFile, device: torch.device) -> bool:
    """Whether a file is decoded by kernels on that device."""
    return file.tensor is not None and for_kernels(file, device)


def for_kernels(file: ChunkFile, device: torch.device) -> bool:
    """Whether a file would be decoded by kernels on that device, if it were open for a tensor of all its bytes."""
    header, codec = file.header, file.codec
    if not isinstance(codec, KLT) or codec.streams > 1 or not header.layer0:
        return False
    if header.key_id is not None:  # whoever sealed it wants every tag compared
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
        self.step, self.kept, self.group = codec.step, codec.protected, codec.group
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
        self.layout = lru_cache(maxsize=16)(partial(_Layout.of, self))

    def _template(self, tokens: int) -> np.ndarray:
        """`[P, G, 8]` int64, the sections of a chunk (`kernels.rans.Section`), without what differs among chunks.

        Offsets are within segments, lengths are those of the segments less what stands there, and places in the output
        are within a part's slab, relative to the chunk's first row.
        """
        starts = np.arange(0, tokens, self.group)
        kept = np.where(starts == 0, min(self.kept, tokens), 0)
        coded = np.minimum(starts + self.group, tokens) - starts - kept
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


@dataclass(frozen=True, eq=False)
class _Layout:
    """What chunks of certain lengths need, whatever they hold; sections are ordered by piece, chunk, part and group.

    Attributes:
        cuts: the parts of each piece.
        ends: number of sections before each piece; and one more for the end.
        rows: first row of symbols of each chunk; and one more for the end.
        owner: `[S]` number of the chunk.
        segment: `[S]` number of the segment, counted through all chunks, each with one more for its end.
        least: `[S]` bytes that the segment has at least: what is protected, and the states of the lanes.
        lanes: the most of any section.
        table: `[S, 8]` sections as in `_Plan.template`, with places among the rows of all chunks; on the device.
        segments: `segment`, on the device.
        first: `[C, P]` likewise the segment where each part of a chunk begins; on the device.
        tiles: `[N, 2]` (chunk, first token) of what a program of the inverse transform handles; on the device.
    """

    cuts: list[range]
    ends: list[int]
    rows: np.ndarray
    owner: np.ndarray
    segment: np.ndarray
    least: np.ndarray
    lanes: int
    table: Tensor
    segments: Tensor
    first: Tensor
    tiles: Tensor

    @classmethod
    def of(cls, plan: _Plan, lengths: tuple[int, ...], pieces: int) -> _Layout:
        """The layout of chunks of these lengths."""
        from blendkv.kernels.klt import BLOCK_T
        from blendkv.kernels.rans import describe

        cuts = _cuts(len(plan.width), plan.weights.unit, pieces)
        rows = np.cumsum([0, *lengths])
        tables, segments, count = [], [], 0
        for row, tokens in zip(rows, lengths, strict=False):
            table = plan.template(tokens).copy()
            table[..., 6] += (rows[-1] * plan.slab + row * plan.width)[:, None]
            tables.append(table)
            segments.append(count + np.arange(table[..., 0].size).reshape(table.shape[:2]))
            count += table[..., 0].size + 1
        pairs = [(chunk, parts) for parts in cuts for chunk in range(len(lengths))]
        sizes = [tables[chunk][parts.start : parts.stop, :, 0].size for chunk, parts in pairs]
        table = np.concatenate([tables[c][parts.start : parts.stop].reshape(-1, 8) for c, parts in pairs])
        segment = np.concatenate([segments[c][parts.start : parts.stop].ravel() for c, parts in pairs])
        placed = table.copy()
        placed[:, 0], placed[:, 1] = 0, 4 * table[:, 5]
        describe(placed, plan.described, 4 * LANES[-1], int(rows[-1]) * plan.channels)  # bytes apart, it all fits
        tiles = [(c, at) for c, tokens in enumerate(lengths) for at in range(0, tokens, BLOCK_T)]
        arrays = (table, segment, np.stack([each[:, 0] for each in segments]), np.array(tiles, np.int64))
        on_device = [upload(np.ascontiguousarray(array), plan.device) for array in arrays]
        return cls(
            cuts,
            [0, *np.cumsum(np.add.reduceat(sizes, range(0, len(sizes), len(lengths)))).tolist()],
            rows,
            np.repeat([chunk for chunk, _ in pairs], sizes),
            segment,
            4 * table[:, 5] - table[:, 1],
            int(table[:, 5].max()),
            *on_device,
        )


def _expand(
    plan: _Plan, files: Sequence[ChunkFile], dtype: torch.dtype, pieces: int
) -> list[ChunkCache | ChunkFileError]:
    """Decodes files of one profile, level and dtype: says where everything is, then queues it piece by piece."""
    from blendkv.kernels.klt import inverse
    from blendkv.kernels.rans import decode

    device, weights, lengths = plan.device, plan.weights, tuple(file.header.tokens for file in files)
    layout = plan.layout(lengths, pieces)
    starts = [file.starts[len(file.header.token_streams) :] for file in files]
    moved = np.cumsum([0, *(each[-1] - each[0] for each in starts)])
    tokens, size = int(layout.rows[-1]), int(moved[-1])
    moved = moved[:-1] - [each[0] for each in starts]  # from places in each file to those on the device
    edges = np.concatenate([own + by for own, by in zip(starts, moved, strict=True)])
    short = np.diff(edges)[layout.segment] < layout.least
    with kernels.on(device), Overlap(device, len(layout.cuts)) as overlap:
        outputs = [torch.empty(length * plan.channels, dtype=dtype, device=device) for length in lengths]
        kept = [min(plan.kept, length) for length in lengths]
        places = np.array([[out.data_ptr() for out in outputs], lengths, layout.rows[:-1], kept], np.int64).T
        edges, chunks = upload(np.concatenate([edges, places.ravel()]), device).split([len(edges), places.size])
        sections, begin = layout.table.clone(), edges[layout.segments]
        sections[:, 0] += begin
        sections[:, 1] += edges[layout.segments + 1] - begin
        if short.any():  # not even read, and found to be wrong
            sections[torch.from_numpy(np.flatnonzero(short)).to(device), :5] = 0
        protected = edges[layout.first]
        data = torch.empty(max(size, 4 * LANES[-1]), dtype=torch.uint8, device=device)
        symbols = torch.empty(tokens * plan.channels, dtype=torch.int16, device=device)
        status = torch.zeros(len(sections) + len(files), dtype=torch.int32, device=device)
        overlap.start()
        for piece, parts in enumerate(layout.cuts):
            with overlap.copying(piece):
                for file, own, by in zip(files, starts, moved.tolist(), strict=True):
                    groups = (len(own) - 1) // len(plan.width)
                    start, stop = int(own[parts.start * groups]), int(own[parts.stop * groups])
                    assert file.tensor is not None
                    data[start + by : stop + by].copy_(file.tensor[start:stop], non_blocking=True)
            here = slice(*layout.ends[piece : piece + 2])
            with overlap.decoding(piece):
                decode(data, sections[here], plan.on_device, _lut(device), symbols, layout.lanes, status=status[here])
            with overlap.inverting(piece):
                for dim, (heads, of) in weights.heads.items():
                    inverse(
                        symbols,
                        tokens,
                        data,
                        heads[slice(*np.searchsorted(of, (parts.start, parts.stop)))],
                        dim,
                        weights.align,
                        layout.tiles,
                        chunks,
                        protected,
                        weights.matrices,
                        weights.mean,
                        plan.coded,
                        plan.step,
                        status[len(sections) :],
                        dtype,
                    )
    made = [chunk_in(file, out) for file, out in zip(files, outputs, strict=True)]
    found = status.cpu().numpy()  # waits for the device, this once
    bad = {*layout.owner[short | (found[: len(short)] != 0)], *np.flatnonzero(found[len(short) :])}
    return [_damaged() if c in bad else chunk for c, chunk in enumerate(made)]


def _damaged() -> ChunkFileError:
    return ChunkFileError(
        "symbols that do not end where they should: the bytes are damaged, or were coded with another profile",
        reason="symbols",
    )


def _exact(device: torch.device) -> torch.device:
    """A device with its number."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _cuts(parts: int, unit: int, pieces: int) -> list[range]:
    """Parts cut into pieces of whole units, as equal as they can be."""
    edges = np.unique(np.linspace(0, parts // unit, pieces + 1).round().astype(int)) * unit
    return [range(start, stop) for start, stop in pairwise(edges.tolist())]


def chunk_in(file: ChunkFile, out: Tensor) -> ChunkCache:
    """The chunk of a file whose keys and values are written into a tensor; what a blend will ask is known from there.

    Args:
        file: open.
        out: `[N]` keys and values of layer after layer, each `[H, T, D]`.
    """
    shapes, tokens = file.header.layers, file.header.tokens
    slots = [(s.heads, dim) for s in shapes for dim in (s.key_dim, s.value_dim)]
    sizes = np.array(slots, np.int64)
    lengths, sizes = sizes.prod(1) * tokens, sizes[:, 1] * out.element_size()
    starts = np.cumsum(lengths) - lengths
    places = np.stack([out.data_ptr() + starts * out.element_size(), sizes], 1)

    def states() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        parts = out.split(lengths.tolist())
        views = tuple(part.view(heads, tokens, dim) for part, (heads, dim) in zip(parts, slots, strict=True))
        return views[::2], views[1::2]

    known = {} if (places % ALIGN).any() else {"addresses": places.reshape(-1, 2, 2)}
    return ChunkCache.unchecked(states, homes=(out.device,) * len(shapes), **known, **file.fields, scores=file.scores)
