"""Which operations make the host wait for the device: a CUDA graph cannot hold them, and trying leaves traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = {
    "nonzero",
    "masked_select",
    "bincount",
    "repeat_interleave",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "_unique",
    "_unique2",
}
"""Operations whose result has a size that only the device knows."""


class Waits(TorchDispatchMode):
    """Notes, in this thread, the first operation of a block that would wait.

    Args:
        device_type: of the tensors that are waited for.

    Attributes:
        first: the operation's name, or None.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        super().__init__()
        self.device_type = device_type
        self.first: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs an operation and looks at what went in and came out."""
        out = func(*args, **(kwargs or {}))
        if self.first is None and self._waits(func, [*tensors(args), *tensors((kwargs or {}).values())], out):
            self.first = func.overloadpacket.__name__
        return out

    def _waits(self, func: Any, given: list[Tensor], out: Any) -> bool:
        on_device = [t for t in given if t.device.type == self.device_type]
        if not on_device:
            return False
        name = func.overloadpacket.__name__
        if name in SIZES or (name.startswith("index") and any(t.dtype == torch.bool for t in on_device)):
            return True
        results = list(tensors((out,)))
        returned = bool(func._schema.returns)
        return returned and (not results or any(t.device.type != self.device_type for t in results))


def tensors(values: Any) -> Iterator[Tensor]:
    """Tensors among values, in lists too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)
