"""Errors of blendkv. Each message says what to do next."""

from __future__ import annotations


class BlendError(Exception):
    """Base class of every error that blendkv raises on purpose."""


class UnsupportedModelError(BlendError, ValueError):
    """The model cannot be blended correctly; the message names the layer type or the check that failed."""


class NotAttachedError(BlendError, RuntimeError):
    """A `BlendedCache` reached a model without hooks."""


class CacheStateError(BlendError, ValueError):
    """A `BlendedCache` was given a prompt that it cannot continue."""


class ChunkMissError(BlendError, LookupError):
    """A chunk could not be used, or could not be stored, and `strict=True` asked for an error."""


class ChunkFileError(BlendError, ValueError):
    """Bytes that are no chunk file, or none that may be read here.

    Attributes:
        reason: a short word for counters: "magic", "version", "header", "limit", "truncated", "length", "checksum",
            "authentication", "codec", "profile", "geometry", "symbols" or "layer0".
    """

    def __init__(self, message: str, *, reason: str = "header") -> None:
        super().__init__(message)
        self.reason = reason

    def bare(self) -> ChunkFileError:
        """The same without its traceback: one that is kept would keep the bytes of the file, in a cycle."""
        return ChunkFileError(str(self), reason=self.reason)


class StoreError(BlendError, OSError):
    """A store could not be opened; the message says what to do. Later, whatever goes wrong is a counted miss."""
