"""A file system in memory, which forgets what was not synced when the power goes."""

from __future__ import annotations

import stat
from random import Random
from types import SimpleNamespace


class Node:
    """A file or a folder.

    Attributes:
        kind: "file", "dir" or "link".
        data: of a file.
        names: of a folder.
        synced: what of it outlives a loss of power.
        hurt: whether a fault changed it: nothing is promised of it any more.
        lock: the descriptor that holds it.
    """

    count = 0

    def __init__(self, kind: str, mtime_ns: int = 0) -> None:
        Node.count += 1
        self.number, self.kind, self.mtime_ns = Node.count, kind, mtime_ns
        self.data = b""
        self.names: dict[str, Node] = {}
        self.synced_data = b""
        self.synced_names: dict[str, Node] = {}
        self.hurt = False
        self.lock: object = None

    def sync(self) -> None:
        self.synced_data, self.synced_names = self.data, dict(self.names)

    def status(self) -> SimpleNamespace:
        mode = {"file": stat.S_IFREG | 0o600, "dir": stat.S_IFDIR | 0o700, "link": stat.S_IFLNK | 0o777}[self.kind]
        return SimpleNamespace(
            st_mode=mode,
            st_size=len(self.data),
            st_mtime_ns=self.mtime_ns,
            st_mtime=self.mtime_ns / 1e9,
            st_ino=self.number,
        )


ENDLESS = 1 << 40


class Disk:
    """The disk of a host."""

    def __init__(self) -> None:
        self.root = Node("dir")
        self.capacity_bytes = ENDLESS

    @property
    def limited(self) -> bool:
        return self.capacity_bytes < ENDLESS

    def find(self, path: str, base: Node | None = None) -> Node | None:
        node: Node | None = self.root if path.startswith("/") or base is None else base
        for part in path.split("/"):
            if part and node is not None:
                node = node.names.get(part) if node.kind == "dir" else None
        return node

    def files(self, path: str) -> dict[str, Node]:
        """Files in the folders of a store, by `folder/name`."""
        root = self.find(path)
        if root is None or root.kind != "dir":
            return {}
        return {
            f"{folder}/{name}": node
            for folder, inner in root.names.items()
            if inner.kind == "dir"
            for name, node in inner.names.items()
            if node.kind == "file"
        }

    def used(self) -> int:
        seen: dict[int, int] = {}

        def walk(node: Node) -> None:
            seen[node.number] = len(node.data)
            for inner in node.names.values():
                walk(inner)

        walk(self.root)
        return sum(seen.values())

    def power_lost(self, random: Random) -> None:
        """Each change of a folder that was not synced is kept or lost; so is the end of each file."""
        keep = random.choice((0.0, 0.5, 1.0))
        seen: set[int] = set()

        def walk(node: Node) -> None:
            if node.number in seen:
                return
            seen.add(node.number)
            node.lock = None
            if node.kind == "dir":
                for name in sorted({*node.names, *node.synced_names}):
                    now, before = node.names.get(name), node.synced_names.get(name)
                    chosen = now if now is before or random.random() < keep else before
                    if chosen is None:
                        node.names.pop(name, None)
                    else:
                        node.names[name] = chosen
                for inner in list(node.names.values()):
                    walk(inner)
            elif node.data != node.synced_data and random.random() >= keep:
                length = random.randrange(len(node.synced_data), max(len(node.synced_data), len(node.data)) + 1)
                kept = node.data[:length]
                node.data = kept if random.random() < 0.5 else node.synced_data + bytes(len(kept))
                node.hurt = True
            node.sync()

        walk(self.root)
