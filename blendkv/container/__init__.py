"""The chunk file: a header and checked segments as bytes, and back. It knows nothing of tensors; see docs/format.md."""

from __future__ import annotations

from blendkv.container.header import Arrangement, Head, Header, LayerShape, TokenStream
from blendkv.container.reader import ContainerReader, read_head
from blendkv.container.sources import FileSource, MemorySource, RangeSource, Source
from blendkv.container.writer import pack, write

__all__ = [
    "Arrangement",
    "ContainerReader",
    "FileSource",
    "Head",
    "Header",
    "LayerShape",
    "MemorySource",
    "RangeSource",
    "Source",
    "TokenStream",
    "pack",
    "read_head",
    "write",
]
