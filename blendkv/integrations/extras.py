"""What to say when a framework is not installed."""

from __future__ import annotations

from blendkv import _extras


def missing(extra: str, error: ImportError) -> ModuleNotFoundError:
    """The error to raise instead: which command installs what is missing.

    Args:
        extra: of blendkv, as in `pip install 'blendkv[extra]'`; the module has its name.
        error: what the import raised.
    """
    return _extras.missing(f"blendkv.integrations.{extra.replace('-', '_')}", extra, error)
