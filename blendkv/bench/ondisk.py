"""Chunks of a prompt in files, which every call reads anew while its layers are computed."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from blendkv.attaching import attachment_of
from blendkv.cache import BlendedCache
from blendkv.chunk import ChunkCache
from blendkv.codecs import get_codec
from blendkv.errors import StoreError
from blendkv.loading.pipeline import Pipeline
from blendkv.loading.sparing import Sparing
from blendkv.stores import DiskStore, Pool, TieredStore


class OnDisk:
    """Chunks in a `DiskStore` of their own, in the system's page cache as a rule; memory keeps none of them.

    Args:
        model: attached.
        chunks: of the prompt, in its order.

    Attributes:
        folder: of the store; it goes with this.

    Raises:
        StoreError: if the folder has no room for them.
    """

    def __init__(self, model: PreTrainedModel, chunks: Sequence[ChunkCache]) -> None:
        self._attachment = attachment_of(model)
        self.folder = tempfile.mkdtemp(prefix="blendkv-bench-")
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        store = DiskStore(self.folder)
        whole = all(home.type == "cuda" for home in self._attachment.homes)  # then no groups are left out
        codec = get_codec("raw", level=0 if whole else 1)
        kept = [is_kept for _, is_kept in TieredStore(Pool(1), store, codec=codec, write="through").put_many(chunks)]
        if not all(kept):
            why = ", ".join(store.stats.faults) or "refused"
            raise StoreError(
                f"{kept.count(False)} of {len(kept)} chunks could not be written to {self.folder} ({why}): let TMPDIR "
                "name a folder with room for all of them, or leave out --pool disk"
            )
        self._pieces = {chunk.key: (chunk.ids.tolist(), chunk.conditioning) for chunk in chunks}
        self._keys = [chunk.key for chunk in chunks]
        self._pipeline = Pipeline(TieredStore(Pool(1), store), rest=False)

    def __call__(self, ids: Tensor, **options: Any) -> list[ChunkCache]:
        """Chunks on their way.

        Args:
            ids: `[T]` of the prompt.
            **options: of its `BlendedCache`.

        Raises:
            RuntimeError: if a file is gone or damaged.
        """
        first, homes = BlendedCache((), **options).reads_from, self._attachment.homes
        spare = Sparing(ids.cpu(), self._pieces, options, len(self._attachment.layers))
        found = [got.chunk for got in self._pipeline.fetch(self._keys, homes, first=first, spare=spare)]
        if len(there := [chunk for chunk in found if chunk is not None]) < len(found):
            raise RuntimeError(f"{len(found) - len(there)} chunks of the benchmark's folder are gone: measure again")
        return there
