"""A chunk as the entries of a store: one as the tiers' codec writes it, and one for each level beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blendkv.chunk import ChunkCache
from blendkv.codecs import Codec, codec_class, get_codec
from blendkv.levelkeys import EXACT, LevelId, chosen_streams, id_of, level_key, name_of
from blendkv.stores.coding import Coding, CodingStats


@dataclass(frozen=True)
class Form:
    """One form in which a chunk may lie in a store.

    Attributes:
        entry: its key there.
        codec: that wrote it.
        main: whether it is the chunk's own entry, as the tiers' codec writes it, and not one of the levels beside it.
    """

    entry: str
    codec: Codec
    main: bool

    @property
    def level(self) -> str:
        """Name of the level (`levelkeys.name_of`)."""
        return name_of(self.codec)

    def id_of(self, chunk: ChunkCache) -> LevelId:
        """What a chunk that lay there really is: a chunk's own entry may be another codec's, or none's."""
        own = id_of(self.codec)
        return chunk.coded or (EXACT if own.profile else own)

    def unless(self, chunk: ChunkCache) -> str:
        """Name of the level that a chunk is of, "" for what the tiers' codec writes (`Fetched.level`)."""
        found = self.id_of(chunk)
        return "" if self.main and found == id_of(self.codec) else found.name


class Filing:
    """Encodes chunks into their entries, and says which there may be.

    Args:
        main: of the chunk's own entry.
        levels: of the others: codecs, or numbers of levels of the codec of `main`, the least lossy first.
        secret: seals files.
        key_id: of the secret.

    Attributes:
        codecs: of the levels, without that of `main`.
        stats: what became of chunks that were to be encoded at levels.

    Raises:
        ValueError: for numbers where the codec has no levels, or not these, or a level that is named twice.
    """

    def __init__(
        self, main: Coding, levels: Sequence[int | Codec] = (), secret: bytes | None = None, key_id: bytes = b""
    ) -> None:
        self._main = main
        self._codec = main.writes
        found = [_level(main.writes, each) for each in levels]
        if len({level_key("", codec) for codec in found}) < len(found):
            raise ValueError(f"levels {', '.join(map(name_of, found))}: name each once")
        own = level_key("", main.writes)
        self.codecs = tuple(codec for codec in found if level_key("", codec) != own)
        self.stats = CodingStats()
        self._others = [(codec, Coding(codec, self.stats, secret, key_id)) for codec in self.codecs]

    def encode(self, chunk: ChunkCache) -> dict[str, bytes]:
        """Files of a chunk by key, the main one first; without those that a codec refuses."""
        files = {chunk.key: self._main.encode(chunk)}
        files |= {level_key(chunk.key, codec): coding.encode(chunk) for codec, coding in self._others}
        return {entry: data for entry, data in files.items() if data is not None}

    def forms(self, key: str) -> list[Form]:
        """Forms in which a chunk may lie in stores, the main one first, then levels as they were given."""
        return [Form(key, self._codec, True), *(Form(level_key(key, each), each, False) for each in self.codecs)]

    def notes(self) -> list[str]:
        """What who uses these chunks should know."""
        if not self.stats.uncoded:
            return []
        return [
            f"{self.stats.uncoded} levels of chunks could not be made, and are not in stores; the last because: "
            f"{self.stats.refusal}"
        ]


def _level(main: Codec, level: int | Codec) -> Codec:
    if not isinstance(level, int):
        return get_codec(level)
    if not main.needs_profile:
        raise ValueError(
            f"level {level} of codec {main.name!r}, which has no levels: give codecs, such as "
            "levels=[get_codec('klt', level=4, profile=...)], or store with such a codec"
        )
    streams = {"streams": streams} if (streams := chosen_streams(main)) else {}
    return codec_class(main.name)(level=level, profile=getattr(main, "profile", None), **streams)
