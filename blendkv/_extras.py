"""What to say when a package is not installed that only some of blendkv needs."""

from __future__ import annotations


def missing(what: str, extra: str, error: ImportError) -> ModuleNotFoundError:
    """The error to raise instead: which command installs what is missing.

    Args:
        what: that needs it, as the beginning of a sentence.
        extra: of blendkv, as in `pip install 'blendkv[extra]'`.
        error: what the import raised.
    """
    return ModuleNotFoundError(
        f"{what} needs a package that is not installed ({error}): pip install 'blendkv[{extra}]'", name=error.name
    )
