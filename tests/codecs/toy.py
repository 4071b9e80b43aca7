"""A codec that shows what a codec may do: units of two layers, groups, three parts, two streams, a profile."""

from __future__ import annotations

import torch

from blendkv.codecs.base import Arrangement
from blendkv.errors import ChunkFileError

GROUP = 3


class Toy:
    """fp32 bits: the upper halves are stream 0, the lower ones stream 1; part 2 is a label."""

    needs_profile = True
    name = "mine"
    profile_hash = "ab" * 16

    def __init__(self, level=0, profile=None):
        if profile != "p":
            raise ValueError(f"profile {profile!r} is not mine")
        self.level = level

    def arrangement(self, shapes, tokens):
        return Arrangement(group_tokens=GROUP, unit_layers=2, parts=3, streams=2)

    def encode_unit(self, first, keys, values):
        segments = []
        for half in (1, 0):
            for states in (keys, values):
                for start in range(0, keys[0].shape[1], GROUP):
                    halves = [s[:, start : start + GROUP].contiguous().view(torch.int16)[..., half::2] for s in states]
                    segments.append(b"".join(h.contiguous().numpy().tobytes() for h in halves))
            segments += [bytes([first])] * -(-keys[0].shape[1] // GROUP)
        return segments

    def decode_unit(self, first, shapes, tokens, dtype, segments, streams):
        groups = -(-tokens // GROUP)
        assert len(segments) == streams * 3 * groups
        for stream in range(streams):
            if any(s[0] != first for s in segments[(3 * stream + 2) * groups : (3 * stream + 3) * groups]):
                raise ChunkFileError("a label is wrong", reason="symbols")
        decoded = []
        for part in range(2):
            states = [torch.zeros(s.heads, tokens, (s.key_dim, s.value_dim)[part], dtype=dtype) for s in shapes]
            for stream, half in enumerate((1, 0)[:streams]):
                for group in range(groups):
                    data = bytearray(segments[(3 * stream + part) * groups + group])
                    at, wanted = 0, [s[:, group * GROUP : (group + 1) * GROUP] for s in states]
                    for piece in wanted:
                        bits = torch.frombuffer(data, dtype=torch.int16, count=piece.numel(), offset=at)
                        at += 2 * piece.numel()
                        piece.view(torch.int16)[..., half::2] = bits.view(piece.shape)
            decoded.append(states)
        return decoded[0], decoded[1]
