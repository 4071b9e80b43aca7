"""Rows of measurements as JSON: `{"rows": [...]}`, merged by what they are of.

A row of `bench ttft` is of a method, prompt length and run; rows of other commands name theirs in a field `bench`.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers

from blendkv._paths import require_writable
from blendkv._version import __version__

Row = dict[str, Any]
SETTING = "device", "shape", "dtype", "chunk_tokens", "question_tokens", "batch", "pool"
"""Fields that rows of one table share."""
METHOD = "tokens", "method", "selector", "ratio"
"""Fields that tell the lines of a table apart."""
IDENTITY = (*SETTING, *METHOD, "run")
"""Fields that tell rows apart: a row that agrees in all of them takes the older one's place."""
SETTINGS = {
    "ttft": SETTING,
    "codec": ("model", "dtype", "tokens", "continuation", "contexts"),
    "joint": ("model", "dtype", "task", "prompts", "selector"),
    "stores": ("device",),
    "pool": ("device",),
    "eviction": ("documents", "requests", "seeds"),
    "quality": ("model", "dtype", "device", "task", "data", "records", "prompts", "chunks", "chunk_tokens", "batch"),
    "insights": ("model", "dtype", "device", "task", "data", "prompts"),
    "loading": ("model", "dtype", "device", "tokens", "chunk_tokens", "selector"),
    "throughput": (
        "device", "shape", "dtype", "documents", "chunks", "chunk_tokens", "question_tokens", "requests",
        "warm_requests", "zipf", "room", "new_tokens", "seed",
    ),
}  # fmt: skip
"""For each command the fields that rows of one table share."""
IDENTITIES = {
    "ttft": IDENTITY,
    "codec": (*SETTINGS["codec"], "codec", "level"),
    "joint": (*SETTINGS["joint"], "codec", "level", "change", "ratio"),
    "stores": (*SETTINGS["stores"], "store", "size"),
    "pool": (*SETTINGS["pool"], "entries", "eviction"),
    "eviction": (*SETTINGS["eviction"], "zipf", "drift", "capacity", "policy"),
    "quality": (*SETTINGS["quality"], "method", "selector", "ratio", "condition", "check_layers", "corrector"),
    "insights": (*SETTINGS["insights"], "figure", "layer", "ratio"),
    "loading": (*SETTINGS["loading"], "factor", "method", "ratio", "level"),
    "throughput": (*SETTINGS["throughput"], "method", "selector", "ratio", "clock", "rate"),
}
"""For each command the fields that tell its rows apart."""
_NEEDED = {
    "ttft": ("device", *METHOD, "ttft_s", "speedup"),
    "codec": ("device", *IDENTITIES["codec"]),
    "joint": ("device", *IDENTITIES["joint"], "bits_per_element", "kl"),
    "stores": (*IDENTITIES["stores"], "get_mb_s", "put_mb_s"),
    "pool": (*IDENTITIES["pool"], "get_us"),
    "eviction": (*IDENTITIES["eviction"], "hit_rate", "byte_hit_rate"),
    "quality": ("device", "model", "task", "method", "selector", "ratio", "charged_budget", "kl", "ci"),
    "insights": ("device", "model", "figure", "layer", "value"),
    "loading": (*IDENTITIES["loading"], "link_mb_s", "ttft_s", "load_s", "compute_s", "kl"),
    "throughput": (*IDENTITIES["throughput"], "completed_per_s", "ttft_p50_s", "ttft_p95_s", "hit_rate"),
}
_ORDER = {name: i for i, name in enumerate(("full", "nocontext", "prefix", "reuse", "blend", "mapreduce", "maprerank"))}


def kind(row: Row) -> str:
    """The command that a row is of."""
    return row.get("bench", "ttft")


def identity(row: Row) -> tuple:
    """What a row is of."""
    return (kind(row), *(row.get(field) for field in IDENTITIES[kind(row)]))


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Rows of both, sorted; of two that are of the same thing the new one."""
    rows = {identity(row): row for row in (*old, *new)}
    return sorted(rows.values(), key=_place)


def by_setting(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of one table each, sorted."""

    def setting(row: Row) -> tuple:
        return (kind(row), *(row.get(field) for field in SETTINGS[kind(row)]))

    return [list(same) for _, same in groupby(merged(rows, ()), key=setting)]


def _place(row: Row) -> tuple:
    """Sorts as a reader would: numbers as numbers, methods in their usual order, what is absent first."""
    fields = IDENTITIES[kind(row)]
    values = [_ORDER.get(row[field], len(_ORDER)) if field == "method" else row.get(field) for field in fields]
    values.insert(0, kind(row))
    return tuple((v is not None, isinstance(v, str), v if v is not None else 0) for v in values)


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file.

    Raises:
        ValueError: if it is not one of ours.
        OSError: if it cannot be read.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f'{path}: expected {{"rows": [...]}}, as `blendkv bench ttft --out` writes it')
    for row in rows:
        if kind(row) not in _NEEDED:
            raise ValueError(f"{path}: a row is of bench {kind(row)!r}; this blendkv knows {', '.join(_NEEDED)}")
        missing = [field for field in _NEEDED[kind(row)] if field not in row]
        if missing:
            raise ValueError(f"{path}: a row has no field {', '.join(map(repr, missing))}")
    return rows


def require_room(path: Path | None) -> None:
    """Refuses a file that `write_rows` could not merge rows into, before the hours of work that make them.

    Raises:
        ValueError: if it is there, and not one of ours.
        OSError: if it cannot be read, or its folder not be written to.
    """
    if path is None:
        return
    if path.exists():
        read_rows(path)
    require_writable(path.absolute().parent)


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Merges rows into a file, which is complete at every moment."""
    path = Path(path)
    old = read_rows(path) if path.exists() else []
    lines = [json.dumps(row, allow_nan=False) for row in merged(old, rows)]
    text = '{"rows": [\n' + ",\n".join(lines) + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def device_name(device: torch.device) -> str:
    """The card's name, or the processor's with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' * (threads > 1)}"


def model_device_name(model: torch.nn.Module) -> str:
    """`device_name` of a model; with the number of cards if it is spread over several."""
    devices = list(dict.fromkeys(p.device for p in model.parameters()))
    name = device_name(devices[0])
    return name if len(devices) == 1 else f"{len(devices)} x {name}"


def versions() -> dict[str, str]:
    """Of what decides a figure."""
    return {"blendkv": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine() or "CPU"
