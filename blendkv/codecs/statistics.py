"""What codecs are fitted to: how a model's keys and values are spread, and how much an error in them matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blendkv.codecs.base import LayerShape

ANCHOR_EVERY = 10
"""Tokens of a group of CacheGen (section 5.2 of the paper): an anchor and nine deltas."""
ANCHOR_LEVELS = 127
JOINT = 2048
"""Most channels that are transformed together."""
MOST_LAYERS = 3


def units_of(shapes: Sequence[LayerShape], size: int) -> list[range]:
    """The layers of each unit of `size` layers."""
    return [range(first, min(first + size, len(shapes))) for first in range(0, len(shapes), size)]


def channels(shape: LayerShape) -> tuple[int, int]:
    """Channels of a layer's keys and of its values."""
    return shape.heads * shape.key_dim, shape.heads * shape.value_dim


def flat(states: Tensor) -> Tensor:
    """`[H, T, D]` as `[T, H * D]`."""
    return states.transpose(0, 1).flatten(1)


def scale_of(deviations: Tensor) -> Tensor:
    """What profiles keep of standard deviations in steps: log2, in 1/16 octave, int16."""
    return (16 * torch.log2(deviations.clamp_min(2.0**-60))).round().clamp(-999, 999).to(torch.int16)


@dataclass
class Moments:
    """Count, sum and sum of squares of the rows of many matrices, in fp64."""

    count: int
    total: Tensor
    square: Tensor

    @classmethod
    def of(cls, size: int, joint: bool) -> Moments:
        """Nothing yet; `joint` for all products of two columns, else squares alone."""
        return cls(
            0, torch.zeros(size, dtype=torch.float64), torch.zeros((size,) * (2 if joint else 1), dtype=torch.float64)
        )

    def add(self, rows: Tensor) -> None:
        """Counts rows `[T, C]` in."""
        self.count += len(rows)
        self.total += rows.sum(0).double().cpu()
        self.square += (rows.T @ rows if self.square.ndim == 2 else rows.square().sum(0)).double().cpu()

    @property
    def mean(self) -> Tensor:
        """Of each column."""
        return self.total / self.count

    @property
    def spread(self) -> Tensor:
        """Covariance, or variances."""
        mean = self.mean
        return self.square / self.count - (torch.outer(mean, mean) if self.square.ndim == 2 else mean.square())


@dataclass
class Statistics:
    """Sums over calibration texts. The first tokens of a text are left out: they are protected when coded.

    Attributes:
        shapes: of the model's layers.
        protected: how many first tokens of a text do not count.
        unit_layers: layers whose covariance with each other is known; 0: as many as have up to `joint` channels.
        joint: fewer where there is little text.
        states: for each unit, moments of its channels: layer by layer keys, then values, each `[H * D]`.
        gradients: for each layer (keys, values): second moments `[C, C]` of gradients of the log-likelihood of the
            model's own continuation, the blocks of the Fisher information that say what an error costs.
        deltas: for each layer (keys, values), moments of the differences to the first token of ten.
        anchors: likewise of those first tokens, scaled so that the largest channel is `ANCHOR_LEVELS`.
        context: tokens of a text.
        continuation: tokens whose likelihood was differentiated.
    """

    shapes: tuple[LayerShape, ...]
    context: int
    continuation: int
    protected: int = 1
    unit_layers: int = 0
    joint: int = JOINT
    states: list[Moments] = field(default_factory=list)
    gradients: list[tuple[Moments, Moments]] = field(default_factory=list)
    deltas: list[tuple[Moments, Moments]] = field(default_factory=list)
    anchors: list[tuple[Moments, Moments]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Makes room."""
        widest = max(sum(channels(shape)) for shape in self.shapes)
        self.unit_layers = self.unit_layers or min(MOST_LAYERS, max(1, self.joint // widest))
        for unit in units_of(self.shapes, self.unit_layers):
            self.states.append(Moments.of(sum(sum(channels(self.shapes[layer])) for layer in unit), True))
        for shape in self.shapes:
            k, v = channels(shape)
            self.gradients.append((Moments.of(k, True), Moments.of(v, True)))
            self.deltas.append((Moments.of(k, False), Moments.of(v, False)))
            self.anchors.append((Moments.of(k, False), Moments.of(v, False)))

    def add_states(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Counts one text in.

        Args:
            keys: of each layer `[H, T, D]`, un-rotated.
            values: `[H, T, Dv]`.
        """
        rows = [(flat(k.float()), flat(v.float())) for k, v in zip(keys, values, strict=True)]
        for unit, moments in zip(units_of(self.shapes, self.unit_layers), self.states, strict=True):
            device = rows[unit.start][0].device
            moments.add(torch.cat([part[self.protected :].to(device) for layer in unit for part in rows[layer]], 1))
        for layer, pair in enumerate(rows):
            for states, deltas, anchors in zip(pair, self.deltas[layer], self.anchors[layer], strict=True):
                whole = states[: len(states) // ANCHOR_EVERY * ANCHOR_EVERY].unflatten(0, (-1, ANCHOR_EVERY))
                first = whole[:, 0]
                deltas.add((whole[:, 1:] - first[:, None]).flatten(0, 1))
                anchors.add(first * (ANCHOR_LEVELS / first.abs().amax(1, keepdim=True).clamp_min(1e-30)))

    def add_gradients(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Counts the gradients of one continuation in; shapes as for `add_states`."""
        for moments, *pair in zip(self.gradients, keys, values, strict=True):
            for part, gradient in zip(moments, pair, strict=True):
                part.add(flat(gradient.float())[self.protected :])

    def metric(self, layer: int) -> tuple[Tensor, Tensor]:
        """`[C, C]` fp64 twice: what a square error in a layer's keys, and in its values, costs."""
        keys, values = self.gradients[layer]
        return keys.square / keys.count, values.square / values.count

    def spread(self, layer: int) -> tuple[Tensor, Tensor]:
        """`[C]` fp64 twice: variances of a layer's keys, and of its values."""
        unit, within = divmod(layer, self.unit_layers)
        variances = self.states[unit].spread.diagonal()
        sizes = [size for shape in self.shapes[unit * self.unit_layers :][: within + 1] for size in channels(shape)]
        keys, values = variances[: sum(sizes)].split(sizes)[-2:]
        return keys, values
