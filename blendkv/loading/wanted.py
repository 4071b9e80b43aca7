"""What a stream is asked for, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from blendkv.chunk import ChunkCache
from blendkv.levelkeys import BASE
from blendkv.loading.assembly import Assembly
from blendkv.loading.handover import Told
from blendkv.loading.levels import Level
from blendkv.loading.streaming import Item, Rung

__all__ = ["BASE", "Came", "Streamed", "Wanted"]


@dataclass(frozen=True)
class Wanted:
    """A chunk, and what is known of its levels.

    Attributes:
        key: of the chunk.
        levels: that a store should have (`write_levels`, `find_levels`).
        loss: KL divergence of each level by its name; of a base by the level's name and `/base`.
        decode_s: seconds of decoding, likewise; 0 where it is not told.
        text_s: seconds of recomputing the chunk.
    """

    key: str
    levels: tuple[Level, ...]
    loss: Mapping[str, float]
    text_s: float
    decode_s: Mapping[str, float] = field(default_factory=dict)

    def item(self) -> Item:
        """For a policy. Levels that are not there, or whose loss nobody knows, are left out."""
        rungs = []
        for level in self.levels:
            if not level.nbytes or level.name not in self.loss:
                continue
            base = level.name + BASE
            if level.base_bytes and base in self.loss:
                rungs.append(Rung(base, level.base_bytes, self.loss[base], self.decode_s.get(base, 0.0)))
            builds_on = base if level.base_bytes and base in self.loss else ""
            seconds = self.decode_s.get(level.name, 0.0)
            rungs.append(Rung(level.name, level.nbytes, self.loss[level.name], seconds, builds_on))
        return Item(tuple(rungs), self.text_s)

    def level(self, rung: Rung) -> Level:
        """The level that a rung is of."""
        name = rung.name.removesuffix(BASE)
        return next(level for level in self.levels if level.name == name)


@dataclass(frozen=True)
class Came:
    """The file that a chunk is made of.

    Attributes:
        level: that it is.
        source: number of who gave its last piece.
        assembly: its bytes.
    """

    level: Level
    source: int
    assembly: Assembly

    @property
    def data(self) -> bytes | None:
        """All of the file, if it has all come."""
        return bytes(self.assembly.read(0, self.assembly.size)) if self.assembly.complete else None


@dataclass(frozen=True)
class Streamed:
    """What came of a prompt's chunks.

    Attributes:
        chunks: all of them.
        chosen: what each was made of: a level's name, or "text".
        seconds: it took.
        target_s: it should have taken.
        loss: mean over chunks, as the levels' losses say.
        brought: bytes.
        switched: loads that were given up for something else.
        told: of the sources.
        faults: why levels could not be used, in a word, and how often.
        came: the file of each chunk; None for those that were recomputed.
        wrong: key of the entry and number of the source of pieces that were not what was written.
        rate: bytes a second of the link; None if nothing came.
    """

    chunks: tuple[ChunkCache, ...]
    chosen: tuple[str, ...]
    seconds: float
    target_s: float
    loss: float
    brought: int
    switched: int
    told: Told
    faults: dict[str, int]
    came: tuple[Came | None, ...] = ()
    wrong: frozenset[tuple[str, int]] = frozenset()
    rate: float | None = None
