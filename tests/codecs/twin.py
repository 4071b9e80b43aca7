"""Codecs as docs/format.md tells them: files to symbols and numbers, slowly, with nothing of `blendkv.codecs` but the
plain twin of the entropy coder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import safe_open

from blendkv.codecs import naive
from blendkv.container import ContainerReader


class ProfileFile:
    """A profile, read from its file."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, "np") as file:
            self.said = json.loads(file.metadata()["blendkv_profile"])
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self.shapes, self.settings = self.said["shapes"], self.said["settings"]


@dataclass
class Section:
    """What a section holds, and how it was coded."""

    symbols: list[list[int]]
    rows: list[int]
    lanes: int
    context: list[list[int]] | None = None

    @classmethod
    def of(cls, data: bytes, rows: list[int], tokens: int, context: list[list[int]] | None = None) -> Section:
        coded = sum(row >= 0 for row in rows)
        lanes = lanes_for(tokens, coded)
        return cls(naive.decode(data, rows, tokens, lanes, context), rows, lanes, context)

    def encoded(self) -> bytes:
        return naive.encode(self.symbols, self.rows, self.lanes, self.context)


@dataclass
class Decoded:
    """A file's keys and values `[T, H * D]` by (layer, 0 or 1), its sections' symbols, and the bytes they are again."""

    states: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    symbols: dict[str, np.ndarray] = field(default_factory=dict)
    segments: list[bytes] = field(default_factory=list)


def lanes_for(tokens: int, channels: int) -> int:
    lanes = 4
    while lanes < 64 and 2 * lanes <= min(tokens * channels // 1536, channels):
        lanes *= 2
    return lanes


def row(scale: int) -> int:
    """The row of a scale, negative where it is too small to have one."""
    return min(34, (int(scale) + 54) // 4)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 16)


def scaled(data: bytes, tokens: int, heads: list[int]) -> tuple[np.ndarray, bytes, bytes]:
    """A block of eight-bit numbers: the numbers, the block, and what follows it."""
    count = tokens * len(heads)
    scales = np.frombuffer(data, "<f4", count).reshape(tokens, len(heads))
    numbers = np.frombuffer(data, "i1", tokens * sum(heads), 4 * count).reshape(tokens, -1)
    size = len(padded(bytes(4 * count + numbers.size)))
    return numbers * np.repeat(scales, heads, axis=1), data[:size], data[size:]


def klt(data: bytes, profile: ProfileFile, streams: int | None = None) -> Decoded:
    """A file of `klt` or `klt-xl`, or the first `streams` streams of it."""
    with ContainerReader(data) as reader:
        header = reader.header
        there = header.arrangement.streams
        segments = [[bytes(s) for u in range(header.units) for s in reader.unit(u, i)] for i in range(there)]
    used, at, found = streams or there, 0, Decoded()
    again: list[list[bytes]] = [[] for _ in range(there)]
    joint, step = profile.settings["joint"], 2.0 ** (header.level / 4)
    for unit in range(header.units):
        layers, number = header.layers_of(unit), unit + header.stored.start
        sides = [(layer, kind) for layer in layers for kind in (0, 1)]
        for part, members in enumerate([sides] if joint else [[side] for side in sides]):
            name = f"{number}.{part}"
            mean, matrix = profile.tensors[f"mean.{name}"], profile.tensors[f"matrix.{name}"].astype(np.float64)
            scale = profile.tensors[f"scale.{name}"].astype(int) - 4 * header.level
            heads = [profile.shapes[a][1 + kind] for a, kind in members for _ in range(profile.shapes[a][0])]
            coded = [c for c in range(len(mean)) if scale[c] >= -37]
            pieces = []
            for start in range(0, header.tokens, header.arrangement.group_tokens):
                tokens, first = min(header.arrangement.group_tokens, header.tokens - start), segments[0][at]
                if start == 0:
                    kept = min(profile.settings["protected"], tokens)
                    numbers, block, first = scaled(first, kept, heads)
                    pieces.append(numbers)
                    tokens -= kept
                else:
                    block = b""
                rows = [max(0, row(scale[c])) for c in coded]
                if there == 1:
                    only = Section.of(first, rows, tokens)
                    again[0].append(block + only.encoded())
                    symbols = np.array(only.symbols).reshape(tokens, len(coded))
                else:
                    base = Section.of(first, [max(0, row(scale[c] - 25)) for c in coded], tokens)
                    again[0].append(block + base.encoded())
                    symbols = 3 * np.array(base.symbols).reshape(tokens, len(coded))
                    if used == 2:
                        context = [[min(3, max(-3, s)) + 3 for s in token] for token in base.symbols]
                        rest = Section.of(segments[1][at], [35 + 7 * r for r in rows], tokens, context)
                        again[1].append(rest.encoded())
                        symbols = symbols + np.array(rest.symbols).reshape(tokens, len(coded))
                found.symbols[f"{name}.{start}"] = symbols
                full = np.zeros((tokens, len(mean)))
                full[:, coded] = symbols
                size = matrix.shape[1]
                blocks = [full[:, b * size : (b + 1) * size] @ matrix[b] for b in range(len(matrix))]
                pieces.append(mean + step * np.concatenate(blocks, axis=1))
                at += 1
            states, first_channel = np.concatenate(pieces), 0
            for layer, kind in members:
                width = profile.shapes[layer][0] * profile.shapes[layer][1 + kind]
                found.states[layer, kind] = states[:, first_channel : first_channel + width]
                first_channel += width
    found.segments = [segment for stream in again for segment in stream]
    return found


def cachegen(data: bytes, profile: ProfileFile, streams: int = 2) -> Decoded:
    """A file of `cachegen`, or its anchors alone."""
    with ContainerReader(data) as reader:
        header = reader.header
        segments = [[bytes(s) for u in range(header.units) for s in reader.unit(u, i)] for i in range(2)]
    at, found, again = 0, Decoded(), ([], [])
    for layer in header.stored:
        for kind in (0, 1):
            name, pieces = f"{layer}.{kind}", []
            mean = profile.tensors[f"mean.{name}"].astype(int)
            anchor_rows = [max(0, row(s)) for s in profile.tensors[f"anchor.{name}"]]
            delta_rows = [max(0, row(int(s) - 4 * header.level)) for s in profile.tensors[f"delta.{name}"]]
            bin_ = float(profile.tensors["bins"][layer, kind]) * 2.0 ** (header.level / 4)
            for start in range(0, header.tokens, 250):
                tokens = min(250, header.tokens - start)
                count, first = -(-tokens // 10), segments[0][at]
                scales = np.frombuffer(first, "<f4", count)
                size = len(padded(bytes(4 * count)))
                section = Section.of(first[size:], anchor_rows, count)
                again[0].append(first[:size] + section.encoded())
                symbols = np.array(section.symbols) + mean
                anchors = symbols * scales[:, None].astype(np.float64)
                group = np.repeat(anchors, 10, axis=0)[:tokens]
                others = [t for t in range(tokens) if t % 10]
                found.symbols[f"anchor.{name}.{start}"] = symbols
                if streams == 2:
                    deltas = Section.of(segments[1][at], delta_rows, len(others))
                    again[1].append(deltas.encoded())
                    steps = np.array(deltas.symbols).reshape(len(others), len(mean))
                    found.symbols[f"delta.{name}.{start}"] = steps
                    group[others] += steps * bin_
                pieces.append(group)
                at += 1
            found.states[layer, kind] = np.concatenate(pieces)
    found.segments = [*again[0], *again[1]]
    return found


def read(data: bytes, profile: ProfileFile, streams: int | None = None) -> Decoded:
    """A file of any codec that has a profile."""
    if profile.said["codec"] == "cachegen":
        return cachegen(data, profile, streams or 2)
    return klt(data, profile, streams)
