"""Chunks to the bytes that a store keeps, and what could not be made into them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from blendkv.chunk import ChunkCache
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import Codec, Profile, get_codec
from blendkv.levelkeys import id_of


@dataclass
class CodingStats:
    """What became of chunks that were to be encoded.

    Attributes:
        uncoded: chunks that the codec refused.
        refusal: what it said when it last refused one.
        foreign: chunks of another model than the codec's profile; of layers of the same shapes, or refused.
    """

    uncoded: int = 0
    refusal: str = ""
    foreign: int = 0


class Coding:
    """One codec, the secret that seals, and counters. Safe to share among threads.

    Attributes:
        writes: what encodes.
        codec: the same, or None where that is `raw`, which needs nothing to be read.

    Args:
        codec: encodes; None for `raw`.
        stats: where to count.
        secret: seals files (`encode_chunk`).
        key_id: of the secret.
    """

    def __init__(
        self, codec: Codec | None, stats: CodingStats, secret: bytes | None = None, key_id: bytes = b""
    ) -> None:
        self.writes = get_codec("raw") if codec is None else codec
        self.codec = None if self.writes.name == "raw" else codec
        self._stats, self._secret, self._key_id = stats, secret, key_id
        self._lock = threading.Lock()

    @property
    def lossy(self) -> bool:
        """Whether what is read is not what was written."""
        return self.codec is not None and self.codec.needs_profile

    def encode(self, chunk: ChunkCache) -> bytes | None:
        """The bytes of a chunk file, or None if the codec refuses the chunk (NaN, Inf, layers not of its profile).

        So is one that was read at a level that loses something, but for that very level: its file would pass for better
        than it is, here and with whoever shares the store.
        """
        profile = getattr(self.codec, "profile", None)
        made_of = profile.about.get("fingerprint") if isinstance(profile, Profile) else None
        try:
            if chunk.coded is not None and chunk.coded.profile and chunk.coded != id_of(self.writes):
                raise ValueError(
                    f"it was read at level {chunk.coded.name}, which loses something: copy its file instead"
                )
            data = encode_chunk(chunk, self.writes, secret=self._secret, key_id=self._key_id)
        except ValueError as error:
            data, refusal = None, str(error)
        with self._lock:
            self._stats.foreign += made_of not in (None, chunk.fingerprint)
            if data is None:
                self._stats.uncoded += 1
                self._stats.refusal = refusal
        return data

    def notes(self, instead: str) -> list[str]:
        """What who uses these chunks should know.

        Args:
            instead: what is done with chunks that the codec refuses.
        """
        name = f"codec {'raw' if self.codec is None else self.codec.name!r}"
        said = []
        if self.lossy:
            said.append(
                f"chunks are kept with {name}, level {getattr(self.codec, 'level', 0)}, which is lossy: answers may "
                "differ from those of exact chunks"
            )
        if self._stats.uncoded:
            said.append(
                f"{name} refused {self._stats.uncoded} chunks since the store was made, which are {instead}; the last "
                f"because: {self._stats.refusal}"
            )
        if self._stats.foreign:
            said.append(
                f"{self._stats.foreign} chunks are of another model than the profile of {name}, or of the same in "
                "another dtype: far more may be lost than was measured; make one of this model (`blendkv profile`)"
            )
        return said
