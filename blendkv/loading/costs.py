"""What loading and computing cost on one machine: measured once, kept in a file, corrected by what is seen."""

from __future__ import annotations

import json
import math
import os
import platform
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from blendkv import flops
from blendkv._paths import blendkv_home

VERSION = 2
"""Of the file. In 1 losses went by the level's name alone, whatever the profile."""
RETRY_S = 60.0
"""A store from which nothing would be loaded is given one chunk to show what it gives now, so many seconds apart."""
_MOST = 1e15
"""Bytes a second that no transfer exceeds: what seems to be more is a clock that cannot tell."""
_OLD = (
    "the calibration does not say of which profile the losses of its levels are: run `blendkv calibrate --levels` "
    "again; until then they are not known"
)
SMOOTHING = 0.5
"""Weight of the newest figure when a rate is corrected."""


@dataclass(frozen=True)
class ComputeCosts:
    """Seconds of a blend: `fixed + linear / linear_rate + attention / attention_rate`.

    Attributes:
        fixed_s: whatever it computes.
        linear_rate: FLOPs a second of linear layers.
        attention_rate: FLOPs a second of attention.
        error: largest relative error at the points that it was fitted to.

    Raises:
        ValueError: for a rate that is not positive, or a time that is negative or without end.
    """

    fixed_s: float
    linear_rate: float
    attention_rate: float
    error: float = 0.0

    def __post_init__(self) -> None:
        """Refuses what no machine has."""
        _check_seconds(self.fixed_s)
        _check_rates(self.linear_rate, self.attention_rate)

    def seconds(
        self, shape: flops.ModelShape, tokens: int, computed: int, schedule: Mapping[int, float], probe: bool = True
    ) -> float:
        """Time of a blend.

        Args:
            shape: of the model.
            tokens: from chunks.
            computed: others: the question, and chunks that are computed from text.
            schedule: layer -> share of the chunks' tokens kept from there on.
            probe: whether rows are chosen by comparing (`flops.blend_flops`).
        """
        linear, attention = work_of(shape, tokens, computed, schedule, probe)
        return self.fixed_s + linear / self.linear_rate + attention / self.attention_rate


@dataclass(frozen=True)
class SourceCosts:
    """A store as it is seen from here.

    Attributes:
        latency_s: of a request.
        bytes_per_s: while it sends.

    Raises:
        ValueError: for a rate that is not positive or without end, or such a time.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        """Refuses what no store has; a rate without end could never be corrected."""
        _check_seconds(self.latency_s)
        _check_rates(self.bytes_per_s)
        _check_seconds(self.bytes_per_s)

    def seconds(self, nbytes: float, requests: int = 1) -> float:
        """Time to fetch bytes in requests one after another."""
        return requests * self.latency_s + nbytes / self.bytes_per_s


def work_of(
    shape: flops.ModelShape, tokens: int, computed: int, schedule: Mapping[int, float], probe: bool
) -> tuple[float, float]:
    """FLOPs of a blend, of linear layers and of attention; a schedule without layers computes everything."""
    if not tokens or not schedule:
        return flops.blend_parts(shape, tokens + computed, 0, {0: 1.0}, probe=False)
    return flops.blend_parts(shape, tokens, computed, schedule, probe=probe and any(schedule.values()))


def fit_compute(points: Sequence[tuple[float, float, float]]) -> ComputeCosts:
    """Fits a cost model to measurements, by least squares of relative errors; no cost is negative.

    Args:
        points: (FLOPs of linear layers, FLOPs of attention, seconds).

    Raises:
        ValueError: for fewer than three points, or times that are not positive.
    """
    if len(points) < 3 or any(not seconds > 0 for *_, seconds in points):
        raise ValueError(f"{len(points)} measurements: at least three, each of a positive time")
    table = torch.tensor([[1.0, linear, attention] for linear, attention, _ in points], dtype=torch.float64)
    seconds = torch.tensor([point[2] for point in points], dtype=torch.float64)
    scale = table.abs().amax(0).clamp_min(1e-300)
    scaled, one = table / scale / seconds[:, None], torch.ones(len(points), 1, dtype=torch.float64)
    best: tuple[float, torch.Tensor] | None = None
    for kept in ([0, 1, 2], [1, 2], [0, 1], [0, 2], [1], [2]):  # the best fit with no negative part
        solution = torch.linalg.lstsq(scaled[:, kept], one).solution[:, 0]
        left = float((scaled[:, kept] @ solution - 1).square().sum())
        if bool((solution >= 0).all()) and (best is None or left < best[0]):
            costs = torch.zeros(3, dtype=torch.float64)
            costs[kept] = solution
            best = left, costs / scale
    assert best is not None
    fixed, *each = best[1].tolist()
    error = float(((table @ best[1]) / seconds - 1).abs().max())
    rates = [1 / cost if cost > 0 else math.inf for cost in each]
    return ComputeCosts(fixed, rates[0], rates[1], error)


def machine(device: torch.device) -> str:
    """What a calibration is good for: processor or card, threads, and versions."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} x{os.cpu_count()}"
    return f"{platform.system()}, {chip}, {torch.get_num_threads()} threads, torch {torch.__version__}"


@dataclass
class Costs:
    """Everything a loading controller knows of a machine. Safe to share among threads.

    Attributes:
        compute: of the model; None where it was not measured.
        sources: by URL of a store.
        decoding: by name of a codec, bytes of keys and values that are decoded in a second.
        machine: that this holds for (`machine`).
        fingerprint: of the model.
        losses: by level (`str(levelkeys.LevelId)`), the KL divergence that it costs, in nats.
        notes: what a user should know of where this comes from.
    """

    compute: ComputeCosts | None = None
    sources: dict[str, SourceCosts] = field(default_factory=dict)
    decoding: dict[str, float] = field(default_factory=dict)
    machine: str = ""
    fingerprint: str = ""
    losses: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _seen: dict[str, float] = field(default_factory=dict, repr=False, compare=False)
    _made: float = field(default_factory=time.monotonic, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuses rates of decoding that are none, and losses likewise."""
        _check_rates(*self.decoding.values())
        for loss in self.losses.values():
            _check_seconds(loss)

    def saw_transfer(self, url: str, nbytes: int, seconds: float) -> None:
        """Corrects the rate of a store by a transfer. One of no time, or too small to tell, says nothing."""
        if nbytes < 1 << 16 or not 0 < seconds < math.inf:
            return
        with self._lock:
            known = self.sources.get(url)
            rate = min(nbytes / seconds, _MOST)
            if known is not None:  # in the logarithm: rates of links are off by factors
                rate = math.exp((1 - SMOOTHING) * math.log(known.bytes_per_s) + SMOOTHING * math.log(rate))
            self.sources[url] = SourceCosts(known.latency_s if known else 0.0, rate)
            self._seen[url] = time.monotonic()

    def try_again(self, url: str) -> bool:
        """Whether a store was neither seen nor tried for `RETRY_S`; it counts as tried now."""
        with self._lock:
            now = time.monotonic()
            due = now - self._seen.get(url, self._made) >= RETRY_S
            if due:
                self._seen[url] = now
            return due

    def load_seconds(self, url: str, files: int, nbytes: float, decoded: float, codec: str) -> float | None:
        """Time until files have come from a store and are decoded, layer by layer, while others come.

        Args:
            url: of the store.
            files: how many.
            nbytes: of all.
            decoded: bytes of their keys and values.
            codec: that wrote them.

        Returns:
            Seconds, or None of a store that was never seen.
        """
        source = self.sources.get(url)
        if source is None:
            return None
        rate = self.decoding.get(codec, math.inf)
        return 2 * source.latency_s * (files > 0) + max(nbytes / source.bytes_per_s, decoded / rate)

    def write(self, path: Path) -> None:
        """Keeps this in a file (JSON), whole or not at all."""
        said = {"version": VERSION} | {key: value for key, value in asdict_of(self).items() if key != "notes"}
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(json.dumps(said, indent=1), encoding="utf-8")
        beside.replace(path)

    @classmethod
    def read(cls, path: Path) -> Costs:
        """What `write` kept; of an older form without losses, which did not say of which profile they were.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is no such file.
        """
        try:
            said = json.loads(path.read_text(encoding="utf-8"), parse_int=float)  # no int is too large
            if said["version"] not in (1, VERSION):
                raise ValueError(f"version {said['version']}")
            compute, losses = said["compute"], said.get("losses", {})
            old = said["version"] == 1 and bool(losses)
            costs = cls(
                None if compute is None else ComputeCosts(**compute),
                {str(url): SourceCosts(**each) for url, each in said["sources"].items()},
                {str(name): rate for name, rate in said["decoding"].items()},
                str(said["machine"]),
                str(said["fingerprint"]),
                {} if old else {str(level): loss for level, loss in losses.items()},
                [_OLD] if old else [],
            )
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} is no calibration: {error}; run `blendkv calibrate` again") from error
        return costs


def _check_rates(*rates: float) -> None:
    if any(not rate > 0 for rate in rates):
        raise ValueError(f"a rate of {min(rates)} a second: rates are positive")


def _check_seconds(value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{value}: give a number, 0 or more, that is not without end")


def asdict_of(costs: Costs) -> dict:
    """The fields of costs as plain numbers and strings."""
    return {
        "machine": costs.machine,
        "fingerprint": costs.fingerprint,
        "compute": None if costs.compute is None else asdict(costs.compute),
        "sources": {url: asdict(source) for url, source in costs.sources.items()},
        "decoding": dict(costs.decoding),
        "losses": dict(costs.losses),
        "notes": list(costs.notes),
    }


def calibration_path(fingerprint: str) -> Path:
    """Where the calibration of a model is kept."""
    return blendkv_home() / "calibrations" / f"{fingerprint[:32]}.json"
