"""Rotation of keys to prompt positions, found out from the model itself.

A layer's keys move with position as pairs of dimensions turned by an angle that grows with the position (RoPE, Su et
al. 2021). Which dimensions are paired, how many of them move, at which frequencies and at what scale differs by model;
all of it is read off the model: angles come from its own rotary module, and among the few possible pairings the one is
taken that maps the layer's own keys at one position onto its own keys at another (`proof.py` does it and keeps the
figure). Angles and arithmetic are fp32, and always start from the stored original.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from blendkv.errors import UnsupportedModelError

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""`rope_type`s whose frequencies depend on the total length: a stored key cannot be moved exactly."""


@dataclass(frozen=True)
class Rotation:
    """How the keys of one layer move with position.

    Attributes:
        pairing: "half" pairs dimension i with i + n (Llama), "interleaved" pairs 2i with 2i + 1 (GLM, Cohere), "none"
            leaves keys alone (a NoPE layer).
        table: which columns of the rotary module's cos/sin hold each frequency once: "first" half, "even" ones, "all".
        layer_type: what the rotary module wants to be told about the layer, or None.
        backwards: whether the angle falls as the position grows (NanoChat).
    """

    pairing: Literal["half", "interleaved", "none"]
    table: Literal["first", "even", "all"] = "first"
    layer_type: str | None = None
    backwards: bool = False

    def angles(self, rotary: nn.Module | None, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Scaled cosines and sines at `positions`.

        Args:
            rotary: the model's rotary module.
            positions: `[B, T]` integer positions.

        Returns:
            `[B, 1, T, n]` fp32 twice (times the model's `attention_scaling`, as the model itself multiplies), or None
            for a layer without rotation.
        """
        if self.pairing == "none" or rotary is None:
            return None
        cos, sin = rotary_tables(rotary, positions, self.layer_type)
        if self.table == "first":
            cos, sin = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
        elif self.table == "even":
            cos, sin = cos[..., ::2], sin[..., ::2]
        sin = -sin if self.backwards else sin
        return cos[:, None].contiguous(), sin[:, None].contiguous()

    def rotate(self, keys: Tensor, angles: tuple[Tensor, Tensor] | None, out: Tensor | None = None) -> Tensor:
        """Turns un-rotated keys to their positions.

        Args:
            keys: `[B, H, T, D]`, un-rotated.
            angles: of the T positions (`angles`), or None to copy.
            out: where to write, of the same shape; any dtype. Rounded once from fp32.
        """
        out = torch.empty_like(keys) if out is None else out
        if angles is None:
            return out.copy_(keys)
        cos, sin = angles
        source = keys.float()
        exact = out if out.dtype == torch.float32 else torch.empty_like(source)
        n = cos.shape[-1]
        if 2 * n < keys.shape[-1]:
            exact[..., 2 * n :] = source[..., 2 * n :]
        (a, b), (to_a, to_b) = self._pair(source, n), self._pair(exact, n)
        torch.mul(a, cos, out=to_a).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=to_b).addcmul_(a, sin)
        return out if exact is out else out.copy_(exact)

    def unrotate(self, keys: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """The inverse of `rotate`: keys as the model cached them, brought back to no position and no scale."""
        if angles is None:
            return keys.clone()
        cos, sin = angles
        scale = cos.square() + sin.square()
        return self.rotate(keys, (cos / scale, -sin / scale))

    def _pair(self, x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        if self.pairing == "half":
            return x[..., :n], x[..., n : 2 * n]
        return x[..., 0 : 2 * n : 2], x[..., 1 : 2 * n : 2]


class TableRotary(nn.Module):
    """A rotary module around a table with sines and cosines for each position (GPT-J, CodeGen).

    Args:
        table: `[positions, 2 * n]`, sines first.
    """

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[B, T, n]` at `position_ids [B, T]`."""
        sin, cos = self.table[position_ids].chunk(2, dim=-1)
        return cos, sin


def rotary_tables(rotary: nn.Module, positions: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines as the model's own rotary module makes them, but kept in fp32: `[B, T, n]` twice."""
    device = next((b.device for b in rotary.buffers()), positions.device)
    extra = {} if layer_type is None else {"layer_type": layer_type}
    like = torch.zeros(1, dtype=torch.float32, device=device)
    cos, sin = rotary(like, position_ids=positions.to(device), **extra)
    return cos.float(), sin.float()


def on_device(angles: tuple[Tensor, Tensor] | None, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Angles where a layer's keys are."""
    return None if angles is None else (angles[0].to(device), angles[1].to(device))


def find_rotary(decoder: nn.Module) -> nn.Module | None:
    """The rotary module of a decoder, or None if it has none."""
    for module in decoder.modules():
        if isinstance(table := getattr(module, "embed_positions", None), Tensor):
            return TableRotary(table)
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        rotary = next((m for n, m in decoder.named_modules() if n.endswith(("rotary_emb", "rotary_pos_emb"))), None)
    return rotary


def candidates(rotary: nn.Module | None, config: Any, layer_idx: int, head_dim: int) -> Iterator[Rotation]:
    """Every rotation that this layer could have, likeliest first; `learning.find_rotations` picks the one that fits."""
    types = getattr(config, "layer_types", None)
    layer_type = types[layer_idx] if types else None
    by_type = getattr(config, "rope_parameters", None) or {}
    if rotary is not None and by_type.get(layer_type, {}) is not None:  # None: layers of this type do not rotate
        takes_type = "layer_type" in inspect.signature(rotary.forward).parameters
        base = Rotation("half", layer_type=layer_type if takes_type else None)
        width = rotary_tables(rotary, torch.zeros(1, 1, dtype=torch.long), base.layer_type)[0].shape[-1]
        tables = (("first", width // 2), ("even", width // 2), ("all", width))
        for backwards, pairing, (table, n) in product((False, True), ("half", "interleaved"), tables):
            if n and 2 * n <= head_dim:
                yield replace(base, pairing=pairing, table=table, backwards=backwards)
    yield Rotation("none")


def refuse_length_dependent(config: Any) -> None:
    """Raises if the config's RoPE depends on the total length (dynamic NTK, longrope).

    Raises:
        UnsupportedModelError: with the name of the rope type.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = (
        parameters.values() if parameters and all(isinstance(v, dict) for v in parameters.values()) else [parameters]
    )
    for rope in nested:
        kind = rope.get("rope_type", "default")
        if kind in LENGTH_DEPENDENT:
            raise UnsupportedModelError(
                f"rope_type {kind!r} changes its frequencies with the total length, so a stored key cannot be moved "
                "exactly. Use full prefill for this model, or load it with a fixed rope_type (default, linear, llama3, "
                "yarn)."
            )
