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


class ChunkFileError(BlendError, ValueError):
    """Bytes that are no chunk file, or none that may be read here.

    Attributes:
        reason: a short word for counters: "magic", "version", "header", "limit", "truncated", "length", "checksum",
            "authentication", "codec", "profile", "geometry", "symbols" or "layer0".
    """

    def __init__(self, message: str, *, reason: str = "header") -> None:
        super().__init__(message)
        self.reason = reason


def refuse_compiled() -> None:
    """Raises where `torch.compile` traces code that a `BlendedCache` steers: the rows computed are chosen as it runs.

    Raises:
        ValueError: when the traced code is run (under `fullgraph`, torch raises an error of its own).
    """
    import torch  # here: what only raises errors needs no torch

    if torch.compiler.is_compiling():
        torch.compiler.disable(_refuse_compiled)()


def _refuse_compiled() -> None:
    raise ValueError(
        "a model that is compiled would blend wrongly: for a BlendedCache call the model that was not compiled, or "
        "within torch.compiler.set_stance('force_eager')"
    )
