"""Where blendkv keeps what it may have to make again."""

import os
from pathlib import Path


def blendkv_home() -> Path:
    """Returns the folder of caches: `$BLENDKV_HOME` if set, else `~/.cache/blendkv`. It may not exist yet."""
    return Path(os.environ.get("BLENDKV_HOME") or "~/.cache/blendkv").expanduser()
