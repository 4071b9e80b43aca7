"""What tells one level of a chunk from another: its identity, its key, and its name.

A chunk's key says nothing of a codec, so a level has a key of its own: SHA-256 over length-framed fields, the chunk's
key and what the head of the file says of its codec. Whoever reads a file can compute it again, and whoever knows a
chunk's key can ask for a level without a list. A file with two streams (base and refinement) is one entry: its base is
a prefix.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from blendkv.chunk import framed
from blendkv.codecs import Codec, codec_class
from blendkv.container import Header

_DOMAIN = b"blendkv level 1"
BASE = "/base"
"""How the name of a level's base ends."""


class LevelId(NamedTuple):
    """What a file says of how it was coded: two that agree in it lose the same.

    Attributes:
        codec: its name.
        level: the codec's own number.
        streams: of a codec that is told how many to write; else 0.
        profile: hash of it; "" of a codec that needs none, and loses nothing.
        base: whether some of its streams were not read, so that a chunk lost more; of no file.
    """

    codec: str
    level: int
    streams: int = 0
    profile: str = ""
    base: bool = False

    @property
    def name(self) -> str:
        """For people, such as `klt@4`, `klt@0+2` for two streams, `klt@0+2/base` if only the first was read.

        That of another profile has the same.
        """
        if not self.profile and self.level == (self.codec == "raw"):  # raw's usual level is 1
            return self.codec
        return f"{self.codec}@{self.level}" + (f"+{self.streams}" if self.streams > 1 else "") + BASE * self.base

    def __str__(self) -> str:
        """The name, and of which profile: `klt@4:0a1b...`."""
        return f"{self.name}:{self.profile}" if self.profile else self.name


EXACT = LevelId("raw", 1)
"""Of what was not coded at all."""


def id_of(codec: Codec) -> LevelId:
    """The level that a codec writes."""
    return LevelId(codec.name, codec.level, chosen_streams(codec), codec.profile_hash)


def id_in(header: Header) -> LevelId:
    """The same from the head of a file."""
    return LevelId(header.codec, header.level, _streams_of(header), header.profile_hash)


def level_key(key: str, codec: Codec) -> str:
    """The key under which a chunk lies as a codec writes it: 64 hex digits.

    Args:
        key: of the chunk (`ChunkCache.key`, or `keyed` with a tenant's secret: then nobody else can compute either).
        codec: with its level, streams and profile.
    """
    return _key(key, id_of(codec))


def level_key_of(key: str, header: Header) -> str:
    """The same from the head of a file."""
    return _key(key, id_in(header))


def name_of(codec: Codec) -> str:
    """A level's name for people (`LevelId.name`)."""
    return id_of(codec).name


def name_in(header: Header) -> str:
    """The same from the head of a file."""
    return id_in(header).name


def chosen_streams(codec: Codec) -> int:
    """Streams of a codec that is told how many to write (`klt`); 0 of one that always writes as many."""
    return int(getattr(codec, "streams", 1)) if hasattr(codec, "max_streams") else 0


def _streams_of(header: Header) -> int:
    try:
        chooses = hasattr(codec_class(header.codec), "max_streams")
    except ValueError:  # a plug-in's that is not installed
        chooses = False
    return header.arrangement.streams if chooses else 0


def _key(key: str, level: LevelId) -> str:
    number = struct.pack("<hB", level.level, level.streams)
    fields = [_DOMAIN, key.encode(), level.codec.encode(), number, level.profile.encode()]
    return hashlib.sha256(framed(fields)).hexdigest()
