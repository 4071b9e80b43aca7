"""The key and the name of one level of a chunk.

A chunk's key says nothing of a codec, so a level has a key of its own: SHA-256 over length-framed fields, the chunk's
key and what the head of the file says of its codec. Whoever reads a file can compute it again, and whoever knows a
chunk's key can ask for a level without a list. A file with two streams (base and refinement) is one entry: its base is
a prefix.
"""

from __future__ import annotations

import hashlib
import struct

from blendkv.chunk import framed
from blendkv.codecs import Codec, codec_class
from blendkv.container import Header

_DOMAIN = b"blendkv level 1"


def level_key(key: str, codec: Codec) -> str:
    """The key under which a chunk lies as a codec writes it: 64 hex digits.

    Args:
        key: of the chunk (`ChunkCache.key`, or `keyed` with a tenant's secret: then nobody else can compute either).
        codec: with its level, streams and profile.
    """
    return _key(key, codec.name, codec.level, chosen_streams(codec), codec.profile_hash)


def level_key_of(key: str, header: Header) -> str:
    """The same from the head of a file."""
    return _key(key, header.codec, header.level, _streams_of(header), header.profile_hash)


def name_of(codec: Codec) -> str:
    """A level's name for people, such as `klt@4`, or `klt@0+2` for two streams."""
    return _name(codec.name, codec.level, chosen_streams(codec), codec.profile_hash)


def name_in(header: Header) -> str:
    """The same from the head of a file."""
    return _name(header.codec, header.level, _streams_of(header), header.profile_hash)


def chosen_streams(codec: Codec) -> int:
    """Streams of a codec that is told how many to write (`klt`); 0 of one that always writes as many."""
    return int(getattr(codec, "streams", 1)) if hasattr(codec, "max_streams") else 0


def _streams_of(header: Header) -> int:
    try:
        chooses = hasattr(codec_class(header.codec), "max_streams")
    except ValueError:  # a plug-in's that is not installed
        chooses = False
    return header.arrangement.streams if chooses else 0


def _name(name: str, level: int, streams: int, profile: str) -> str:
    if not profile and level == (name == "raw"):  # raw's usual level is 1
        return name
    return f"{name}@{level}" + (f"+{streams}" if streams > 1 else "")


def _key(key: str, name: str, level: int, streams: int, profile: str) -> str:
    fields = [_DOMAIN, key.encode(), name.encode(), struct.pack("<hB", level, streams), profile.encode()]
    return hashlib.sha256(framed(fields)).hexdigest()
