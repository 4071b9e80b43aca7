"""What a regional gateway asks a central one for, and keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Literal

from blendkv.loading.scheduler import TransferScheduler
from blendkv.serving.entries import OpenEntry, look_at
from blendkv.serving.metrics import Metrics
from blendkv.stores.base import Store
from blendkv.stores.checking import check_bytes

Kept = Literal["kept", "failed"]


class Central:
    """A store far away, asked for what is not here. What it gives is checked, kept, and only then sent on.

    Args:
        store: far away.
        local: where what it gave is kept.
        scheduler: of transfers from there: clients take turns.
        metrics: of the gateway.
        verify: whether entries are checked.
    """

    def __init__(
        self, store: Store, local: Store, scheduler: TransferScheduler, metrics: Metrics, verify: bool = True
    ) -> None:
        self.store, self.scheduler = store, scheduler
        self._local, self._metrics, self._verify = local, metrics, verify
        self._under_way: dict[str, asyncio.Task[bytes | None]] = {}

    async def fetch(self, client: Hashable, key: str) -> bytes | None:
        """An entry from there, or None. Those who ask at the same time wait for the same transfer."""
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.create_task(self._transfer(client, key))
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._under_way.pop(key, None))
        return await asyncio.shield(task)

    async def look_at(self, client: Hashable, key: str) -> OpenEntry | None:
        """Size and tag of an entry there."""
        return await asyncio.wrap_future(self.scheduler.submit(client, look_at, self.store, key))

    async def put(self, client: Hashable, key: str, data: bytes) -> Kept:
        """Hands an entry on."""
        put = self.scheduler.submit(client, self.store.put, key, data, cost_bytes=len(data))
        return "kept" if await asyncio.wrap_future(put) else "failed"

    async def _transfer(self, client: Hashable, key: str) -> bytes | None:
        return await asyncio.wrap_future(self.scheduler.submit(client, self._fetch, key))

    def _fetch(self, key: str) -> bytes | None:
        data = self.store.get(key)
        if data is None:
            self._metrics.central.labels("missed").inc()
            return None
        if self._verify and check_bytes(key, data)[0] not in ("ok", "sealed"):
            self._metrics.central.labels("damaged").inc()
            return None
        kept = self._local.put(key, data)
        self._metrics.central.labels("fetched" if kept else "not kept").inc()
        return data
