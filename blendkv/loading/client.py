"""A stream in real time: one thread brings bytes, the caller's decodes and recomputes, and a policy decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

import torch

from blendkv.chunk import ChunkCache
from blendkv.codecs import Profile, Profiles
from blendkv.container.seals import Secret
from blendkv.errors import ChunkFileError
from blendkv.loading.assembly import Assembly
from blendkv.loading.clocks import Clock, RealClock
from blendkv.loading.handover import Handover
from blendkv.loading.levels import Level
from blendkv.loading.policies import Adaptive
from blendkv.loading.streaming import Load, Policy, Stream, Work
from blendkv.loading.wanted import BASE, Came, Streamed, Wanted
from blendkv.stores.base import Store

__all__ = ["BASE", "Came", "StreamClient", "Streamed", "Wanted"]

PIECE = 1 << 16
LOOK_S = 0.05
"""Most seconds between two looks at whether the link still moves."""
FAILURES = 3
"""Pieces in a row that no source gives at once, after which nothing more is asked for."""


class StreamClient:
    """Brings chunks from stores, or recomputes them, by a target.

    Nothing that a source does keeps a prompt from its chunks: what is absent, late, cut off or wrong is recomputed.

    Args:
        sources: a store, several in order of preference (`Handover`), or a `Handover`.
        policy: decides; None: `Adaptive()`.
        piece: bytes that are asked for at once.
        secret: of sealed files, and of keyed chunks.
        key_id: of the secret.
        profiles: where profiles of codecs are found; those of the levels' codecs are known.
        device: where chunks go.
        clock: shows the time; one that goes back is taken to stand still.
        prior: bytes a second that earlier prompts saw; the client keeps it up to date.
    """

    def __init__(
        self,
        sources: Store | Sequence[Store] | Handover,
        policy: Policy | None = None,
        *,
        piece: int = PIECE,
        secret: bytes | None = None,
        key_id: bytes = b"",
        profiles: Profiles | None = None,
        device: torch.device | str | None = None,
        clock: Clock | None = None,
        prior: float | None = None,
    ) -> None:
        self.policy: Policy = Adaptive() if policy is None else policy
        self._clock: Clock = RealClock() if clock is None else clock
        if isinstance(sources, Handover):
            self.source = sources
        else:
            many = [sources] if isinstance(sources, Store) else list(sources)
            self.source = Handover(many, clock=self._clock)
        self._piece, self._secret, self._device, self.prior = piece, secret, device, prior
        self._secrets: Secret | None = None if secret is None else {key_id: secret}
        self._profiles = profiles

    def run(
        self,
        wanted: Sequence[Wanted],
        recompute: Callable[[int], ChunkCache],
        target_s: float,
        *,
        after_s: float = 0.0,
    ) -> Streamed:
        """Gets every chunk.

        Args:
            wanted: chunks, in the order of the prompt.
            recompute: computes the chunk of a number from its text; called in this thread.
            target_s: seconds to the first token.
            after_s: of them, those from the last chunk on.

        Raises:
            ValueError: for a target that is none.
            Exception: what `recompute` raises.
        """
        return _Run(self, wanted, recompute, target_s, after_s).run()


class _Run:
    """One prompt."""

    def __init__(
        self,
        client: StreamClient,
        wanted: Sequence[Wanted],
        recompute: Callable[[int], ChunkCache],
        target_s: float,
        after_s: float,
    ) -> None:
        self._client, self._wanted, self._recompute = client, wanted, recompute
        self._now_s, self._last = 0.0, client._clock.now()
        self._changed = threading.Condition()
        self._stream = Stream(
            [each.item() for each in wanted], client.policy, target_s, after_s=after_s, prior=client.prior
        )
        self._chunks: list[ChunkCache | None] = [None] * len(wanted)
        self._parts: dict[tuple[int, str], Assembly] = {}
        self._closed, self._failures = False, 0
        self._faults: dict[str, int] = {}
        self._gave: dict[tuple[int, str], int] = {}
        self._wrong: set[tuple[str, int]] = set()

    def run(self) -> Streamed:
        """To the end."""
        context = copy_context()  # with the deadline that the caller may have set
        link = threading.Thread(target=context.run, args=(self._bring,), name="blendkv-stream", daemon=True)
        link.start()
        try:
            self._process()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
        stream = self._stream
        self._client.prior = stream.link.mean()
        chunks = tuple(chunk for chunk in self._chunks if chunk is not None)
        return Streamed(
            chunks,
            stream.chosen,
            self._now(),
            stream.target_s,
            stream.loss if chunks else 0.0,
            stream.brought,
            stream.switched,
            self._client.source.told,
            dict(self._faults),
            tuple(map(self._file_of, range(len(chunks)), stream.chosen)),
            frozenset(self._wrong),
            stream.link.mean() if stream.brought else None,
        )

    def _file_of(self, item: int, chosen: str) -> Came | None:
        level = next((each for each in self._wanted[item].levels if each.name == chosen.removesuffix(BASE)), None)
        if level is None:
            return None
        at = item, level.name
        return Came(level, self._gave.get(at, 0), self._parts[at])

    # -- the processor ------------------------------------------------------------------------------------------------

    def _process(self) -> None:
        while True:
            with self._changed:
                now = self._now()
                if self._stream.under_way is not None and not self._stream.still_wanted(now):
                    self._changed.notify_all()
                work = self._stream.work(now)
                if work is None:
                    if self._stream.complete and self._stream.load(now) is None and self._stream.finished:
                        return
                    self._changed.notify_all()
                    wake = self._stream.policy.wake(self._stream, now) - now
                    self._changed.wait(min(LOOK_S, max(0.002, wake)))
                    continue
            chunk = self._done(work)
            with self._changed:
                if chunk is not None:
                    self._chunks[work.item] = chunk
                self._stream.worked(self._now(), chunk is not None)
                self._changed.notify_all()

    def _done(self, work: Work) -> ChunkCache | None:
        """What work gives; None for a level that cannot be used."""
        if work.rung is None:
            return self._recompute(work.item)
        wanted = self._wanted[work.item]
        with self._changed:
            assembly = self._parts[work.item, wanted.level(work.rung).name]
        try:
            file = assembly.file
            if file.key_with(self._client._secret) != wanted.key:
                raise ChunkFileError("the chunk file is that of another key", reason="key")
            file.keyed = "" if self._client._secret is None else wanted.key
            return file.read(1 if work.rung.name.endswith(BASE) else None)
        except (ChunkFileError, OSError) as error:
            self._fault(getattr(error, "reason", "io"))
            level = wanted.level(work.rung)
            self._wrong.add((level.key, self._gave.get((work.item, level.name), 0)))
            return None

    # -- the link -----------------------------------------------------------------------------------------------------

    def _bring(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                load = self._stream.load(self._now())
                if load is None:
                    self._changed.notify_all()
                    self._changed.wait(LOOK_S)
                    continue
                start = load.rung.nbytes - self._stream.loading_left()
                stop = min(start + self._client._piece, load.rung.nbytes)
                level = self._wanted[load.item].level(load.rung)
                self._stream.asked(self._now(), stop - start)
            got = self._client.source.get(level.key, start, stop)
            with self._changed:
                if not self._closed:
                    self._came(load, level, start, got)
                self._changed.notify_all()

    def _came(self, load: Load, level: Level, start: int, got: tuple[bytes, int] | None) -> None:
        """Takes a piece in, or notes that it did not come."""
        wanted = self._stream.under_way is load
        if got is None:
            self._failures += 1
            self._fault("absent")
            if wanted:
                self._stream.failed(self._now())
            if self._failures >= FAILURES:
                self._give_up()
            return
        self._failures = 0
        data, source = got
        if not self._take(load, level, start, data, source):
            if wanted:
                self._stream.failed(self._now())
        elif wanted:
            whole = start + len(data) >= load.rung.nbytes
            sound = not whole or self._mended(load, level)
            if not sound:
                self._fault("checksum")
            if self._stream.under_way is load:  # it may have been given up while it was mended
                if sound:
                    self._stream.came(self._now(), len(data))
                else:
                    self._stream.failed(self._now())

    def _take(self, load: Load, level: Level, start: int, data: bytes, source: int) -> bool:
        """Joins a piece; False if the file cannot become anything."""
        try:
            assembly = self._assembly(load, level)
            self._gave[load.item, level.name] = source
            if assembly.add(start, data, source):
                self._client.source.blame(*assembly.suspects)
                self._wrong.update((level.key, suspect) for suspect in assembly.suspects)
        except (ChunkFileError, ValueError) as error:
            self._fault(getattr(error, "reason", "length"))
            self._client.source.blame(source)
            self._wrong.add((level.key, source))
            return False
        return True

    def _mended(self, load: Load, level: Level) -> bool:
        """Whether all of a rung is there; what was wrong is asked for once more, of another source if there is one."""
        assembly = self._assembly(load, level)
        missing = _within(assembly.missing(), load.rung.nbytes)
        if missing and len(self._client.source.stores) > 1:
            for start, stop in missing:
                self._changed.release()
                try:
                    got = self._client.source.get(level.key, start, stop)
                finally:
                    self._changed.acquire()
                if got is None or not self._take(load, level, start, *got):
                    return False
        return not _within(assembly.missing(), load.rung.nbytes)

    def _assembly(self, load: Load, level: Level) -> Assembly:
        key = (load.item, level.name)
        if key not in self._parts:
            codec, known = (None if level.main else level.codec), self._client._profiles
            profile = getattr(codec, "profile", None)
            known = profile if isinstance(profile, Profile) else known
            settings: dict[str, Any] = {"secret": self._client._secrets, "codec": codec, "profiles": known}
            self._parts[key] = Assembly(level.nbytes or 0, device=self._client._device, **settings)
        return self._parts[key]

    def _give_up(self) -> None:
        """Nothing answers: all that is missing is recomputed."""
        for item, progress in zip(self._stream.items, self._stream.progress, strict=True):
            progress.broken.update(rung.name for rung in item.rungs)

    def _fault(self, word: str) -> None:
        self._faults[word] = self._faults.get(word, 0) + 1

    def _now(self) -> float:
        """Seconds since the beginning, which never go back."""
        with self._changed:
            shown = self._client._clock.now()
            self._now_s += max(0.0, shown - self._last)
            self._last = shown
            return self._now_s


def _within(ranges: Sequence[tuple[int, int]], stop: int) -> list[tuple[int, int]]:
    return [(a, min(b, stop)) for a, b in ranges if a < stop]
