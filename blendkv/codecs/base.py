"""What a codec does: keys and values of a few layers to segments of bytes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from blendkv.container import Arrangement, LayerShape

__all__ = ["DTYPES", "Arrangement", "Codec", "LayerShape", "apart", "dtype_name"]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Element types that can be stored, by their name in a chunk file."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@runtime_checkable
class Codec(Protocol):
    """Cuts a chunk into units of layers and each unit into segments.

    A class is made as `cls(level=..., profile=...)`, both optional, and raises `ValueError` for a level that it does
    not have or a profile that is not its own.

    Attributes:
        needs_profile: whether it codes by statistics of a model.
        independent_groups: whether each group of tokens can be decoded without the others; a class that does not say so
            is always given all of them (`apart`).
        name: `[a-z0-9-]`, up to 16 characters; written into every file.
        level: int16, the codec's own.
        profile_hash: 32 hex digits, or "" where no profile is needed.
    """

    needs_profile: ClassVar[bool]
    name: str
    level: int
    profile_hash: str

    def __init__(self, level: int = ..., profile: Any = ...) -> None: ...

    def arrangement(self, shapes: Sequence[LayerShape], tokens: int) -> Arrangement:
        """How a chunk is cut; always the same for the same arguments.

        Args:
            shapes: of all layers of the model.
            tokens: of the chunk.

        Raises:
            ValueError: for shapes that the codec or its profile does not know.
        """
        ...

    def encode_unit(self, first: int, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[bytes]:
        """Segments of one unit, in order of stream, part and group.

        Args:
            first: the unit's first layer, counted from the model's layer 0.
            keys: `[H, T, D]` of each layer, finite, on the CPU, in one of `DTYPES`.
            values: `[H, T, Dv]`.
        """
        ...

    def decode_unit(
        self,
        first: int,
        shapes: Sequence[LayerShape],
        tokens: int,
        dtype: torch.dtype,
        segments: Sequence[Any],
        streams: int,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of a unit's layers.

        Args:
            first: the unit's first layer.
            shapes: of the unit's layers.
            tokens: of the chunk.
            dtype: of the tensors that were encoded.
            segments: as encoded, each followed by zeros up to a multiple of 16 bytes (the last of a file by any number
                of them); of the first `streams` streams. Their checksums were verified. With independent groups, None
                stands for those of groups that were left out: their keys and values are NaN.
            streams: how many there are, at least 1; fewer than arranged: the base only.

        Raises:
            ChunkFileError: with reason "symbols", for bytes that no encoder writes.
        """
        ...


def apart(codec: Codec) -> bool:
    """Whether a codec decodes some groups of tokens of a unit without the others."""
    return bool(getattr(codec, "independent_groups", False))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of an element type in a chunk file.

    Raises:
        ValueError: for one that cannot be stored.
    """
    if dtype not in _NAMES:
        raise ValueError(f"keys and values of {dtype} cannot be stored; choose one of {', '.join(map(str, _NAMES))}")
    return _NAMES[dtype]
