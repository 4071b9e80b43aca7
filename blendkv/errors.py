"""Errors of blendkv. Each message says what to do next."""

import torch


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
    """The bytes of a chunk are not what they should be.

    Attributes:
        reason: in one word, for counting.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def refuse_compiled() -> None:
    """Raises where `torch.compile` traces code that a `BlendedCache` steers: the rows computed are chosen as it runs.

    Raises:
        ValueError: when the traced code is run (under `fullgraph`, torch raises an error of its own).
    """
    if torch.compiler.is_compiling():
        torch.compiler.disable(_refuse_compiled)()


def _refuse_compiled() -> None:
    raise ValueError(
        "a model that is compiled would blend wrongly: for a BlendedCache call the model that was not compiled, or "
        "within torch.compiler.set_stance('force_eager')"
    )
