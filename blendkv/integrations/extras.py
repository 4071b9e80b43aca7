"""What to say when a framework is not installed."""

from __future__ import annotations


def missing(extra: str, error: ImportError) -> ModuleNotFoundError:
    """The error to raise instead: which command installs what is missing.

    Args:
        extra: of blendkv, as in `pip install 'blendkv[extra]'`.
        error: what the import raised.
    """
    return ModuleNotFoundError(
        f"blendkv.integrations.{extra.replace('-', '_')} needs a package that is not installed ({error}): "
        f"pip install 'blendkv[{extra}]'"
    )
