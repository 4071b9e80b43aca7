"""A gateway under many clients: are all bytes right, does memory stay, and how fast is it beside a bare file server?"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from blendkv.bench.results import Row
from blendkv.errors import BlendError

SETTLED_MINUTES = 3.0
"""From then on memory should stay as it is."""
TOKEN = "a-token-of-the-benchmark"


def gateway_rows(
    minutes: float = 10.0,
    clients: int = 64,
    entries: int = 16,
    size: int = 4 << 20,
    rounds: int = 5,
    round_seconds: float = 5.0,
    options: Sequence[str] = (),
    progress: bool = False,
) -> list[Row]:
    """A gateway over a temporary folder, in a process of its own, and clients in another.

    Args:
        minutes: of the soak: gets, ranges, heads, puts, keys that are absent and strangers, in random order.
        clients: at once.
        entries: chunk files.
        size: of each, about.
        rounds: turns of the gateway and of Starlette's `FileResponse`, whole entries only.
        round_seconds: of each.
        options: further ones of `blendkv serve`.
        progress: tells on stderr what it does.

    Returns:
        A row of kind `soak` with `requests`, `wrong` (answers that were not what they had to be), `rss_settled_mb` and
        `rss_end_mb` (medians of a minute's tenth) and their ratio; and one of kind `throughput` with the medians of
        both servers and of their ratio, and the seconds of processors that a gigabyte cost each (`cpu_s_gb`), which
        depend less on what else the machine does.

    Raises:
        BlendError: if a server does not start.
    """
    say = (lambda text: print(text, file=sys.stderr)) if progress else (lambda text: None)
    common = {"bench": "gateway", "clients": clients, "entries": entries, "size": size, "cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="blendkv-gateway-") as folder, contextlib.ExitStack() as running:
        files = _make_entries(f"{folder}/store", entries, size)
        asked = {"token": TOKEN, "files": files, "clients": clients}
        gateway = running.enter_context(_server(_serve(f"{folder}/store", options)))
        bare = running.enter_context(_server([sys.executable, "-m", "blendkv.bench.gateway_bare", f"{folder}/store"]))
        turns = []
        for turn in range(rounds):
            rates: dict[str, dict[str, Any]] = {}
            for name, server in (
                (("gateway", gateway), ("bare", bare)) if turn % 2 else (("bare", bare), ("gateway", gateway))
            ):
                before = server.cpu()
                found = _load(asked | {"port": server.port, "seconds": round_seconds, "only": "get"})
                rates[name] = found | {"cpu_s_gb": (server.cpu() - before) / max(found["bytes"] / 1e9, 1e-9)}
            turns.append(rates)
            for name in rates:
                if rates[name]["errors"]:
                    say(f"{name}: {rates[name]['errors']} errors, such as {rates[name]['some_errors'][0]}")
            say(f"{turn + 1} of {rounds}: {rates['gateway']['mb_s']:.0f} MB/s, bare {rates['bare']['mb_s']:.0f}")
        rows = (
            [common | {"kind": "throughput", "rounds": rounds, "round_s": round_seconds} | _rates(turns)]
            if turns
            else []
        )
        if minutes > 0:
            say(f"soak of {minutes:g} minutes")
            rows.append(common | {"kind": "soak", "minutes": minutes} | _soak(gateway, asked, minutes))
    return rows


class _Server:
    def __init__(self, process: subprocess.Popen, port: int) -> None:
        self.process, self.port = process, port

    def rss(self) -> float:
        """Megabytes of memory, as the kernel counts them; NaN where it does not say."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return float("nan")
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def cpu(self) -> float:
        """Seconds of processors that it has used; NaN where the kernel does not say."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return float("nan")
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _serve(folder: str, options: Sequence[str]) -> list[str]:
    given = ["--store", folder, "--port", "0", "--token", TOKEN, "--log-level", "warning", *options]
    return [sys.executable, "-m", "blendkv", "serve", *given]


@contextlib.contextmanager
def _server(command: list[str]) -> Generator[_Server]:
    """A server process that has told its port, on either of its outputs."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    drain = None
    try:
        told, end = b"", time.monotonic() + 60
        while (found := re.search(rb"^(?:.*127\.0\.0\.1:)?(\d+)(?:/chunks)?.*\n", told, re.MULTILINE)) is None:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            part = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                raise BlendError(f"{' '.join(command[1:4])} did not start: {told.decode(errors='replace')[-500:]}")
            told += part
        drain = threading.Thread(target=lambda out: [None for _ in out], args=(process.stdout,), daemon=True)
        drain.start()
        yield _Server(process, int(found[1]))
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if drain is not None:
            drain.join(15)
        process.stdout.close()


def _load(asked: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "blendkv.bench.gateway_load"]
    done = subprocess.run(command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def _rates(turns: Sequence[dict[str, dict[str, Any]]]) -> Row:
    ratios = [turn["gateway"]["mb_s"] / max(turn["bare"]["mb_s"], 1e-9) for turn in turns]
    return {
        "gateway_mb_s": median(turn["gateway"]["mb_s"] for turn in turns),
        "bare_mb_s": median(turn["bare"]["mb_s"] for turn in turns),
        "ratio": median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        "cpu_s_gb": median(turn["gateway"]["cpu_s_gb"] for turn in turns),
        "bare_cpu_s_gb": median(turn["bare"]["cpu_s_gb"] for turn in turns),
        "wrong": sum(turn[name]["wrong"] for turn in turns for name in turn),
        "errors": sum(turn[name]["errors"] for turn in turns for name in turn),
        "request_p99_s": median(turn["gateway"]["request_p99_s"] for turn in turns),
        "bare_request_p99_s": median(turn["bare"]["request_p99_s"] for turn in turns),
    }


def _soak(server: _Server, asked: dict[str, Any], minutes: float) -> Row:
    seen: list[tuple[float, float]] = []
    stop = threading.Event()
    begin, seconds = time.monotonic(), 60 * minutes

    def watch() -> None:
        while not stop.wait(min(1.0, seconds / 50)):
            seen.append((time.monotonic() - begin, server.rss()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    found = _load(asked | {"port": server.port, "seconds": seconds, "only": ""})
    stop.set()
    watcher.join()
    settled = min(60 * SETTLED_MINUTES, seconds / 3)
    window = max(6.0, seconds / 20)
    before = median(rss for at, rss in seen if settled - window / 2 <= at <= settled + window / 2)
    after = median(rss for at, rss in seen if at >= seconds - window)
    memory = {"rss_settled_mb": before, "rss_end_mb": after, "rss_ratio": after / before}
    return found | memory | {"rss_most_mb": max(rss for _, rss in seen)}


def _make_entries(folder: str, count: int, size: int) -> dict[str, str]:
    """Chunk files of random numbers in a store; of each key, its file."""
    import torch

    from blendkv.chunk import ChunkCache
    from blendkv.chunkwriter import encode_chunk
    from blendkv.stores import DiskStore
    from blendkv.stores.keys import place_of

    store, files = DiskStore(folder), {}
    layers, heads, dim = 8, 4, 64
    tokens = max(1, size // (2 * layers * heads * dim * 2))
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        ids = torch.randint(0, 50_000, (tokens,), generator=generator)
        states = torch.randn(2, layers, heads, tokens, dim, generator=generator).to(torch.float16)
        chunk = ChunkCache(ids, tuple(states[0]), tuple(states[1]), fingerprint="0" * 32)
        if not store.put(chunk.key, encode_chunk(chunk)):
            raise BlendError(f"{folder} cannot keep {count} entries of {size} bytes: give fewer, or smaller ones")
        files[chunk.key] = os.path.join(folder, *place_of(chunk.key))
    return files
