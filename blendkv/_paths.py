"""Where blendkv keeps what it may have to make again."""

import os
from pathlib import Path


def require_writable(folder: Path) -> None:
    """Makes a folder, before the work whose results go there.

    Raises:
        OSError: if it cannot be made, or not be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written to: give another folder")


def blendkv_home() -> Path:
    """Returns the folder of caches: `$BLENDKV_HOME` if set, else `~/.cache/blendkv`. It may not exist yet."""
    return Path(os.environ.get("BLENDKV_HOME") or "~/.cache/blendkv").expanduser()
