"""What a library hands to an unmodified `generate`."""

from __future__ import annotations

from typing import Any

from transformers import BatchEncoding

from blendkv import _compat
from blendkv.cache import BlendedCache
from blendkv.report import BlendReport


class BlendedInputs(BatchEncoding):
    """What `model.generate(**inputs)` takes: `input_ids`, `attention_mask`, and the cache under its keyword."""

    @property
    def cache(self) -> BlendedCache:
        """The cache, whatever the installed transformers calls it."""
        return self.data[_compat.CACHE_ARG]

    @property
    def report(self) -> BlendReport:
        """What the blend did; filled in by `generate`."""
        return self.cache.report

    def to(self, device: Any, **kwargs: Any) -> BlendedInputs:
        """Moves ids and mask; keys and values follow each layer's device by themselves."""
        cache = self.data.pop(_compat.CACHE_ARG)
        try:
            super().to(device, **kwargs)
        finally:
            self.data[_compat.CACHE_ARG] = cache
        return self
