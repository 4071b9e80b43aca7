"""The weights of a model as they are now: a digest that decides identity, and cheap ways to see that they changed."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from blendkv import _compat
from blendkv.chunk import framed

_COSMETIC = {
    "_name_or_path",
    "architectures",
    "transformers_version",
    "output_attentions",
    "output_hidden_states",
    "use_cache",
    "return_dict",
    "torch_dtype",
    "dtype",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "problem_type",
}


def model_fingerprint(model: nn.Module) -> str:
    """Digest of everything in a model that decides its keys and values; equal on CPU and GPU.

    Covers the class of every module, the config without cosmetic keys, every parameter and buffer (dtype, shape and a
    checksum of rows and columns of its bits, so that one changed element changes it), the state of adapters, and the
    major version of transformers, between which what a class does may change.
    A pass over the weights: 0.1 s for 135M parameters on a CPU, milliseconds on a GPU.
    """
    digest, head = hashlib.sha256(), _head(model)
    digest.update(framed(s.encode() for s in head))
    named = (*model.named_parameters(), *model.named_buffers())
    parts = (part for name, tensor in named for part in _parts(name, tensor))
    for name, tensor in sorted(parts, key=lambda item: item[0]):
        shape = f"{name}:{tensor.dtype}:{tuple(tensor.shape)}"
        digest.update(framed([shape.encode(), _checksum(tensor.detach())]))
    return digest.hexdigest()


def _head(model: nn.Module) -> list[str]:
    """What decides keys and values besides the numbers: classes, config, state of adapters."""
    config = getattr(model, "config", None)
    settings = config.to_dict() if config is not None else {}
    kinds = [f"{name}:{type(m).__module__}.{type(m).__qualname__}" for name, m in model.named_modules()]
    return [
        json.dumps(kinds),
        json.dumps({k: v for k, v in settings.items() if k not in _COSMETIC}, sort_keys=True, default=str),
        json.dumps(_adapter_state(model), default=str),
        f"transformers {_compat.TRANSFORMERS_VERSION.partition('.')[0]}",
    ]


class _OptimizerSteps:
    """Counts optimizer steps of this process: fused ones write to weights without torch counting it."""

    def __init__(self) -> None:
        self.count = 0
        self._hook: Any = None

    def now(self) -> int:
        """How many there were since this was first asked."""
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._note)
        return self.count

    def _note(self, *args: Any) -> None:
        self.count += 1


_steps = _OptimizerSteps()


@dataclass(frozen=True)
class WeightsVersion:
    """A cheap token that differs after weights are replaced or updated in place, or adapters switched.

    Writes through `tensor.data` cannot be seen (torch does not count them): `attach(model, refresh=True)` is for them.

    Attributes:
        tensors: identity of each tensor's storage, its offset, dtype, shape and count of in-place writes.
        head: classes, config, state of adapters.
        steps: optimizer steps so far.
        refs: weak references to the storages; while one is held, no other storage gets the same identity. Never copied
            (each frees its reference when it goes).
    """

    tensors: tuple
    head: tuple
    steps: int
    refs: tuple = field(compare=False, repr=False)

    def __reduce__(self) -> tuple:
        """Refuses copies and pickles.

        Raises:
            TypeError: always.
        """
        raise TypeError("a WeightsVersion cannot be copied: take a new one with WeightsVersion.of(model)")

    @classmethod
    def of(cls, model: nn.Module) -> WeightsVersion:
        """The version of a model's weights now."""
        whole = (*model.parameters(), *model.buffers())
        tensors = [part for tensor in whole for _, part in _parts("", tensor)]
        refs = tuple(StorageWeakRef(t.untyped_storage()) for t in tensors)
        names = tuple(
            (ref.cdata, t.storage_offset(), t.dtype, tuple(t.shape), _version(t))
            for ref, t in zip(refs, tensors, strict=True)
        )
        return cls(names, tuple(_head(model)), _steps.now(), refs)


class WeightsWatch:
    """Sees whether a weight, buffer, submodule, adapter or setting was replaced or written to since it was made.

    The same changes as `WeightsVersion`, at a tenth of its cost: it only says whether, and a change that is undone
    still counts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors, self._wrappers, self._children, self._sizes, self._adapters = [], [], [], [], []
        self._refs: list[StorageWeakRef] = []  # while one is held, no other storage gets the same identity
        self.uncounted = False
        """Whether there are inference tensors, whose writes torch does not count."""
        self._steps = _steps.now()
        for module in model.modules():
            for held in (module._parameters, module._buffers, module._modules):
                self._sizes.append((held, len(held)))
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        self._note(held, name, tensor)
            for name, child in module._modules.items():
                if child is not None:
                    self._children.append((module._modules, name, weakref.ref(child)))
            if _is_adapter(module):
                self._adapters.append(module)
        self._adapter_state = [_state_of(module) for module in self._adapters]
        configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
        self._configs = [(config, _settings(config)) for config in configs.values()]

    def _note(self, held: dict, name: str, tensor: Any) -> None:
        if _is_wrapper(tensor):
            self._wrappers.append((held, name, weakref.ref(tensor)))
            for part in tensor.__tensor_flatten__()[0]:
                inner = vars(tensor) if part in vars(tensor) else {part: getattr(tensor, part)}
                self._note(inner, part, inner[part])
            return
        self._refs.append(StorageWeakRef(tensor.untyped_storage()))
        self.uncounted |= tensor.is_inference()
        self._tensors.append((held, name, self._refs[-1].cdata, tensor.data_ptr(), _version(tensor)))

    def unchanged(self) -> bool:
        """True if everything is as it was."""
        for held, name, storage, address, version in self._tensors:
            tensor = held.get(name)
            if tensor is None or tensor.data_ptr() != address or _version(tensor) != version:
                return False
            if tensor.untyped_storage()._cdata != storage:
                return False
        same = all(held.get(name) is ref() for held, name, ref in (*self._children, *self._wrappers))
        if not same or self._steps != _steps.now() or not all(len(held) == size for held, size in self._sizes):
            return False
        if any(_settings(config, copies=False) != settings for config, settings in self._configs):
            return False
        return self._adapter_state == [_state_of(module) for module in self._adapters]


def _settings(config: Any, copies: bool = True) -> dict:
    """The fields of a config that decide something."""
    fields = vars(config) if hasattr(config, "__dict__") else {}
    found = {k: v for k, v in fields.items() if k not in _COSMETIC and not k.startswith("_")}
    return copy.deepcopy(found) if copies else found


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor is made of others, as quantised weights of torchao are."""
    return hasattr(tensor, "__tensor_flatten__")


def _parts(name: str, tensor: Any) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors that a tensor is made of, mostly itself, named after it and what else decides its numbers."""
    if not _is_wrapper(tensor):
        yield name, tensor
        return
    inner, context = tensor.__tensor_flatten__()
    how = re.sub(r"0x[0-9a-f]+", "", f"{type(tensor).__qualname__}{context}")  # addresses say nothing
    for part in inner:
        yield from _parts(f"{name}.{part}:{how}", getattr(tensor, part))


@dataclass
class Fingerprints:
    """The fingerprint of a model as it is now; weights are read again only after something changed.

    A copy or pickle starts with nothing known: weak references must not be copied.
    """

    model: nn.Module
    _known: dict = field(default_factory=dict, repr=False)
    watch: WeightsWatch | None = field(default=None, repr=False)
    _latest: str = ""

    def now(self) -> str:
        """`model_fingerprint` of the weights as they are."""
        if self.unchanged():
            if self.watch is not None and self.watch.uncounted:
                self._latest = model_fingerprint(self.model)
            return self._latest
        self.watch, version = WeightsWatch(self.model), WeightsVersion.of(self.model)
        if version not in self._known:
            if len(self._known) >= 16:  # an adapter that is switched to and fro is looked up, not read again
                self._known.clear()
            self._known[version] = model_fingerprint(self.model)
        self._latest = self._known[version] if not self.watch.uncounted else model_fingerprint(self.model)
        return self._latest

    def unchanged(self) -> bool:
        """Whether nothing was replaced or written to since `now` was last asked."""
        return self.watch is not None and self.watch.unchanged()

    def forget(self) -> None:
        """Has everything read again, for writes that torch does not count."""
        self._known.clear()
        self.watch = None

    def __getstate__(self) -> dict:
        """The model alone."""
        return {"model": self.model, "_known": {}, "watch": None, "_latest": ""}


def _is_adapter(module: nn.Module) -> bool:
    """Whether a module is a layer of PEFT's, of whatever method (models have a method of the same name)."""
    return hasattr(module, "disable_adapters") and not callable(getattr(module, "active_adapters", None))


def _state_of(module: Any) -> list:
    scaling = getattr(module, "scaling", {})
    return [
        list(getattr(module, "active_adapters", ())),
        bool(getattr(module, "disable_adapters", False)),
        list(getattr(module, "merged_adapters", [])),
        sorted(scaling.items()) if isinstance(scaling, dict) else str(scaling),
    ]


def _adapter_state(model: nn.Module) -> list:
    """What PEFT layers would do to a forward beyond their weights: active adapters, scales, merges."""
    return [[name, *_state_of(module)] for name, module in model.named_modules() if _is_adapter(module)]


_INTEGER_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(tensor: Tensor) -> bytes:
    """Sums of a tensor's bits over rows and over columns, as int64 (the same on every device)."""
    if tensor.device.type == "meta":
        return b"meta"
    if tensor.numel() == 0:
        return b""
    bits = tensor.contiguous().view(_INTEGER_VIEW[tensor.element_size()]) if not tensor.is_complex() else tensor.real
    rows = bits.reshape(bits.shape[0] if bits.ndim > 1 else 1, -1)
    sums = (rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64))
    return b"".join(np.ascontiguousarray(s.cpu().numpy(), dtype="<i8").tobytes() for s in sums)
