"""F17: an S3 that fails, stalls, cuts off or answers something else."""

from __future__ import annotations

import time
from pathlib import Path

from blendkv.container import ContainerReader, RangeSource
from blendkv.contract import key_for
from blendkv.errors import ChunkFileError
from blendkv.stores import RemoteStore, deadline
from tests.faults.rows import Result, row
from tests.patience import SLACK_S
from tests.s3 import BUCKET, OPTIONS, Proxy, moto

FAULTS = ("503", "500", "403", "404", "truncated", "longer", "range ignored", "stall", "reset", "garbage")
GOLDEN = Path(__file__).parent.parent / "golden" / "raw-fp32.blendkv"
DEADLINE_S = 0.25


def read(store: RemoteStore, key: str) -> list[bytes] | None:
    """All segments of a chunk file, in ranged reads, or None."""
    size = store.size(key)
    if size is None:
        return None
    source = RangeSource(lambda start, length: store.get(key, start, start + length), size)
    try:
        with ContainerReader(source) as reader:
            return [bytes(segment) for unit in range(reader.header.units) for segment in reader.unit(unit)]
    except ChunkFileError:
        return None


@row
def f17(full: bool) -> Result:
    result, key, data = Result("F17"), key_for("chunk"), GOLDEN.read_bytes()
    with moto() as port:
        proxy = Proxy(port)
        store = RemoteStore(f"s3://{BUCKET}/store", timeout=2.0, endpoint_url=proxy.url, **OPTIONS)
        result.expect(store.put(key, data), "not stored")
        right = read(store, key)
        for _ in range(10 if full else 1):
            for fault in FAULTS:
                proxy.fault, before = fault, proxy.requests
                for ask in (lambda: read(store, key), lambda: store.get(key, 3, 50), lambda: store.get_many([key])):
                    start = time.monotonic()
                    with deadline(DEADLINE_S):
                        got = result.call(ask)
                    took = time.monotonic() - start
                    result.tried += 1
                    result.expect(took < DEADLINE_S * 1.1 + 0.05 + SLACK_S, f"{fault}: {took:.2f} s")
                    if isinstance(got, list):
                        result.expect(got == right, f"{fault}: wrong segments")
                result.expect(proxy.requests - before <= 2 * 8, f"{fault}: {proxy.requests - before} requests")
                result.call(lambda: list(store.keys())) if fault != "stall" else None
                proxy.fault = ""
                back = time.monotonic()
                while read(store, key) != right and time.monotonic() - back < 5 + SLACK_S:
                    time.sleep(0.05)
                took = time.monotonic() - back
                result.expect(took < 2.5 + SLACK_S, f"{fault}: reuse was back after {took:.1f} s")
                result.found += 1
        proxy.fault = "stall"  # the breaker: a prompt waits for nothing once it is open
        for _ in range(6):
            with deadline(DEADLINE_S):
                store.get(key)
        start = time.monotonic()
        store.get(key)
        result.expect(time.monotonic() - start < 0.05 + SLACK_S, "the breaker did not open")
        result.expect(store.stats.faults["breaker"] > 0, "the breaker was not counted")
        proxy.close()
        store.close()
    return result
