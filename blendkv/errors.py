"""Errors of blendkv. Each message says what to do next."""


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
