"""Bytes from a store to a chunk file that may be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from blendkv.chunkfile import ChunkFile
from blendkv.codecs import Codec, Profile, Profiles, load_profile
from blendkv.container.sources import Source
from blendkv.errors import ChunkFileError
from blendkv.expanding import by_kernels
from blendkv.levelkeys import level_key_of


class Opener:
    """Opens files of one codec, or of whatever other they name.

    Args:
        codec: of most files, or None.
        secret: of a tenant: only files that it sealed are opened, and keys are keyed with it.
        key_id: of the secret.
        profiles: where profiles of other codecs are found (`ChunkFile`); None: where `blendkv profile` puts them.
        levels: codecs of files that lie beside those.
    """

    def __init__(
        self,
        codec: Codec | None,
        secret: bytes | None,
        key_id: bytes,
        profiles: Profiles | None,
        levels: Sequence[Codec] = (),
    ) -> None:
        self._codec, self._secret, self._profiles, self._levels = codec, secret, profiles, tuple(levels)
        self._secrets = None if secret is None else {key_id: secret}

    def checked(self, key: str, data: bytes | Tensor, device: torch.device, codec: Codec | None = None) -> ChunkFile:
        """The file under a key, if it is what the key says.

        Args:
            key: that was asked for: of a chunk, or of one of its levels.
            data: what a store gave for it; a uint8 tensor is used as it is.
            device: where it will be decoded; kernels compare no checksums, so that is done here.
            codec: that should have written it; None: that of most files.

        Raises:
            ChunkFileError: for whatever is wrong with it, with its `reason`; "key" if it is something else's.
        """
        content = data
        if device.type != "cpu" and not isinstance(data, Tensor):
            content = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        file = self._keyed(key, self.open(content, codec))
        if by_kernels(file, device):
            file.verify()
        return file

    def checked_head(self, key: str, source: Source, codec: Codec | None = None) -> ChunkFile:
        """The file under a key, if its head is what the key says; segments are verified when they are read.

        Raises:
            ChunkFileError: as for `checked`.
        """
        return self._keyed(key, self.open(source, codec))

    def _keyed(self, key: str, file: ChunkFile) -> ChunkFile:
        own = file.key_with(self._secret)
        if key not in (own, level_key_of(own, file.header)):
            raise ChunkFileError("the chunk file is that of another key; delete it", reason="key")
        file.keyed = "" if self._secret is None else own
        return file

    def open(self, source: bytes | Tensor | Source, codec: Codec | None = None) -> ChunkFile:
        """A file of the codec given, of ours, or of the one that it names."""
        if (expected := codec or self._codec) is not None:
            try:
                return ChunkFile(source, secret=self._secrets, codec=expected)
            except ChunkFileError as error:
                if error.reason not in ("codec", "profile"):
                    raise
        return ChunkFile(source, secret=self._secrets, profiles=self.profile)

    def profile(self, wanted: str) -> Profile | None:
        """The profile of a hash: our codec's, or where others are found."""
        for codec in (self._codec, *self._levels):
            own = getattr(codec, "profile", None)
            if isinstance(own, Profile) and own.hash == wanted:
                return own
        found = load_profile if self._profiles is None else self._profiles
        if isinstance(found, Profile):
            return found
        return found.get(wanted) if isinstance(found, Mapping) else found(wanted)
