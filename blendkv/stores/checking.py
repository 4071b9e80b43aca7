"""Whether entries are what they should be: every checksum, and that each lies under the key of its contents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from blendkv.chunk import chunk_key
from blendkv.container import ContainerReader, Header, read_head
from blendkv.errors import ChunkFileError
from blendkv.levelkeys import level_key_of
from blendkv.stores.base import Entry, Store
from blendkv.stores.upkeep import in_turn, peek

WORKERS = 4
"""Entries that are in memory at a time."""
ANY_SIZE = 1 << 62
"""Checking decodes nothing, so no chunk is too large for it."""
LOST = ("pieces", "link", "folder")
"""Faults of stores that mean that an entry is there, and is none."""
Outcome = Literal["ok", "damaged", "foreign", "sealed", "unread", "gone"]


@dataclass(frozen=True)
class Checked:
    """What came of checking an entry.

    Attributes:
        entry: what the store knows of it.
        outcome: "ok"; "damaged": it is no whole chunk file; "foreign": it is one, under a key that is not that of its
            contents, or one of a tenant's secret that was not given; "sealed": by a secret that was not given, and not
            checked; "unread": the store did not give it, or this version cannot read it; "gone" meanwhile.
        reason: of what is damaged or unread, in a word.
    """

    entry: Entry
    outcome: Outcome
    reason: str = ""


def contents_keys(header: Header, secret: bytes | None = None) -> list[str]:
    """Keys that a chunk file may lie under: of its contents, with a tenant's secret, and as one of several levels."""
    ids, conditioning = (np.frombuffer(data, "<u4") for data in (header.ids, header.conditioning))
    rest = (header.fingerprint, conditioning.tolist(), header.tokenizer, header.namespace)
    keys = [chunk_key(ids, *rest, secret=each) for each in dict.fromkeys((None, secret))]
    return [*keys, *(level_key_of(key, header) for key in keys)]


def check_bytes(key: str, data: bytes, secret: bytes | None = None) -> tuple[Outcome, str]:
    """What comes of checking the bytes of an entry, and a reason.

    Args:
        key: that it lies under.
        data: all of it.
        secret: of sealed files, and of keys. A file with another one's seal is "sealed": it may be sound.
    """
    try:
        header = read_head(data).header
        sealed = header.key_id is not None
        if sealed and secret is None:
            return "sealed", ""
        try:
            reader = ContainerReader(data, secret=secret if sealed else None, max_bytes=ANY_SIZE)
        except ChunkFileError as error:
            if error.reason != "authentication":
                raise
            return "sealed", ""
        with reader:
            reader.segments(range(header.segments))
    except ChunkFileError as error:
        return ("unread" if error.reason == "version" else "damaged"), error.reason
    return ("ok" if key in contents_keys(header, secret) else "foreign"), ""


def check_all(store: Store, entries: Sequence[Entry], secret: bytes | None = None) -> Iterator[Checked]:
    """Reads each entry once and checks it, a few at a time; that is no use of it, where the store can read like that.

    Those that the store did not give come last, and are asked for once more, one by one.

    Raises:
        ValueError: for a secret of a wrong length.
    """
    if secret is not None and not 16 <= len(secret) <= 64:
        raise ValueError(f"a secret of {len(secret)} bytes: it has 16 to 64")
    again = []
    for entry, checked in in_turn(lambda entry: (entry, _check(store, entry, secret)), entries, WORKERS):
        if checked is None:
            again.append(entry)
        else:
            yield checked
    for entry in again:  # nobody else asks now, so faults that are counted are of this entry
        before = store.stats.faults.copy()
        checked = _check(store, entry, secret)
        there = checked is not None or store.size(entry.key) is not None
        faults = store.stats.faults - before
        if checked is not None:
            yield checked
        elif lost := next((word for word in LOST if faults[word]), ""):
            yield Checked(entry, "damaged", lost)
        elif there or faults:
            yield Checked(entry, "unread", next(iter(faults), "unknown"))
        else:
            yield Checked(entry, "gone")


def _check(store: Store, entry: Entry, secret: bytes | None) -> Checked | None:
    data = peek(store, entry.key)
    return None if data is None else Checked(entry, *check_bytes(entry.key, data, secret))


def put_away(store: Store, key: str) -> bool:
    """Takes a damaged entry out of the way, into quarantine if the store has one, else for good; whether it is gone."""
    getattr(store, "quarantine", store.delete)(key)
    return store.size(key) is None


@dataclass
class Verdict:
    """What came of checking a store.

    Attributes:
        url: of the store.
        entries: that were checked, which are `ok`, `damaged`, `foreign`, `sealed` or `unread`.
        bytes: of them.
        ok: how many hold.
        damaged: key and reason of each.
        foreign: keys.
        sealed: how many were not checked, for lack of their secret.
        unread: key and reason of each.
        removed: keys of damaged ones that were put away.
        complete: whether all entries were looked at.
    """

    url: str
    entries: int = 0
    bytes: int = 0
    ok: int = 0
    damaged: list[dict[str, str]] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    sealed: int = 0
    unread: list[dict[str, str]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    complete: bool = False

    def add(self, checked: Checked) -> None:
        """Counts an entry."""
        key, outcome = checked.entry.key, checked.outcome
        if outcome == "gone":
            return
        self.entries += 1
        self.bytes += checked.entry.size
        if outcome == "ok":
            self.ok += 1
        elif outcome == "sealed":
            self.sealed += 1
        elif outcome == "foreign":
            self.foreign.append(key)
        else:
            (self.damaged if outcome == "damaged" else self.unread).append({"key": key, "reason": checked.reason})

    @property
    def holds(self) -> bool:
        """Whether nothing was found wanting, and all was looked at."""
        return self.complete and not self.damaged and not self.unread

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


def judge(store: Store, checks: Iterable[Checked], delete: bool = False) -> Iterator[Verdict]:
    """The verdict so far, after each entry; the last one is complete. Damaged entries are put away as they are found.

    Stopping in between leaves a store as it was, less what was put away.
    """
    verdict = Verdict(store.url)
    for checked in checks:
        verdict.add(checked)
        if delete and checked.outcome == "damaged" and put_away(store, checked.entry.key):
            verdict.removed.append(checked.entry.key)
        yield verdict
    verdict.complete = True
    yield verdict
