"""What `library.json` says: whose chunks are in a folder, under which settings, and how they are kept."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from blendkv._version import __version__
from blendkv.correctors import Corrector, get_corrector
from blendkv.errors import StoreError
from blendkv.selectors import Selector, get_selector, selector_names

NAME = "library.json"
FORMAT_VERSION = 1
_SETTINGS = {
    "condition": str,
    "chunk_tokens": int,
    "separator": str,
    "namespace": str,
    "recompute_ratio": (int, float),
    "selector": (str, dict, type(None)),
    "check_layers": (dict, type(None)),
    "corrector": (str, type(None)),
}


@dataclass(frozen=True)
class Manifest:
    """The content of `library.json`. It holds no secrets, and no paths.

    Attributes:
        settings: of the `ChunkLibrary`, JSON: see `settings_json`.
        name_or_path: of the model, without the folder that it lay in.
        fingerprint: of the model.
        dtype: of its keys and values, "fp32", "fp16" or "bf16".
        tokenizer: its digest.
        sealed: whether a secret went into keys and files.
        codecs: name, level and profile hash (and streams, if not one) of the files, that of most of them first.
        chunks: for each key its tokens and the bytes of its file.
        version: of the blendkv that wrote it.
    """

    settings: Mapping[str, Any]
    name_or_path: str
    fingerprint: str
    dtype: str
    tokenizer: str
    sealed: bool
    codecs: tuple[Mapping[str, Any], ...]
    chunks: Mapping[str, Mapping[str, int]] = field(repr=False)
    version: str = __version__

    def write(self, folder: Path) -> None:
        """Writes it whole, in place of one that is there, or not at all.

        Raises:
            OSError: if it cannot be written.
        """
        said = {
            "format_version": FORMAT_VERSION,
            "blendkv_version": self.version,
            "settings": self.settings,
            "model": {"name_or_path": self.name_or_path, "fingerprint": self.fingerprint, "dtype": self.dtype},
            "tokenizer": self.tokenizer,
            "sealed": self.sealed,
            "codecs": list(self.codecs),
            "chunks": self.chunks,
        }
        part = folder / f".{NAME}.{os.getpid()}-{token_hex(4)}.part"
        try:
            part.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
            part.replace(folder / NAME)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    @classmethod
    def read(cls, folder: Path, called: str = "") -> Manifest:
        """What a folder says of itself.

        Args:
            folder: of the library.
            called: what to call it in errors; None: by its path.

        Raises:
            StoreError: if it says nothing, or nothing that can be understood.
        """
        called = called or str(folder)
        try:
            said = json.loads((folder / NAME).read_text(encoding="utf-8"))
            version = said["format_version"]
            if version == FORMAT_VERSION:
                return cls(**_parsed(said))
        except FileNotFoundError:
            raise StoreError(
                f"{called} has no {NAME}: it is no saved library, or saving it was not finished; call save_pretrained "
                "again (a folder of chunk files alone can be opened as a store: ChunkLibrary(store=...))"
            ) from None
        except OSError as error:
            raise StoreError(f"{called}: {NAME} cannot be read: {error.strerror or error}") from error
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise StoreError(f"{called}: {NAME} is damaged ({error!r}): save or download the library again") from error
        raise StoreError(
            f"{called}: {NAME} is of format {version!r}, and this blendkv ({__version__}) reads {FORMAT_VERSION}: "
            "update blendkv, or save the library again with this one"
        )


def _parsed(said: Mapping[str, Any]) -> dict[str, Any]:
    model, settings = said["model"], {"corrector": None, **said["settings"]}  # the first libraries had none
    fields = {
        "settings": {name: settings[name] for name in _SETTINGS},
        "name_or_path": model["name_or_path"],
        "fingerprint": model["fingerprint"],
        "dtype": model["dtype"],
        "tokenizer": said["tokenizer"],
        "sealed": said["sealed"],
        "codecs": tuple(said["codecs"]),
        "chunks": said["chunks"],
        "version": said["blendkv_version"],
    }
    texts = ("name_or_path", "fingerprint", "dtype", "tokenizer", "version")
    wrong = [name for name in texts if not isinstance(fields[name], str)]
    wrong += [name for name, kind in _SETTINGS.items() if not isinstance(settings[name], kind)]
    wrong += [name for name, kind in (("sealed", bool), ("chunks", dict)) if not isinstance(fields[name], kind)]
    if wrong or not all(isinstance(codec, dict) for codec in fields["codecs"]):
        raise TypeError(f"of a wrong type: {', '.join(wrong) or 'codecs'}")
    return fields


def settings_json(
    options: Mapping[str, Any], condition: str, chunk_tokens: int, separator: str, namespace: str
) -> dict[str, Any]:
    """Settings of a library as JSON.

    Args:
        options: of its prompts' caches; the ratio, the selector, the check layers and the corrector are kept.
        condition: as `ChunkLibrary` takes it, like the following.
        chunk_tokens: most of a chunk.
        separator: after each document.
        namespace: part of every key.
    """
    layers = options["check_layers"]
    return {
        "condition": condition,
        "chunk_tokens": chunk_tokens,
        "separator": separator,
        "namespace": namespace,
        "recompute_ratio": options["recompute_ratio"],
        "selector": _selector_json(options["selector"]),
        "check_layers": None if layers is None else {str(layer): ratio for layer, ratio in layers.items()},
        "corrector": _corrector_json(options["corrector"]),
    }


def settings_of(manifest: Manifest, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as `ChunkLibrary` takes them.

    Args:
        manifest: that has them.
        overrides: settings that win.

    Raises:
        ValueError: for a selector that cannot be made here.
    """
    settings = dict(manifest.settings)
    selector, layers = settings.pop("selector"), settings.pop("check_layers")
    if selector is not None and "selector" not in overrides:
        settings["selector"] = selector if isinstance(selector, str) else _selector(selector)
    if layers is not None and "recompute_ratio" not in overrides:  # a schedule would win over the ratio
        settings["check_layers"] = {int(layer): ratio for layer, ratio in layers.items()}
    settings["namespace"] = settings["namespace"] or None
    return settings | dict(overrides)


def _selector(said: Mapping[str, Any]) -> Selector:
    try:
        return type(get_selector(said["name"]))(**said["settings"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"selector {said} of {NAME} cannot be made here ({error}): pass selector=") from error


def _selector_json(selector: str | Selector) -> str | dict[str, Any] | None:
    """A selector's registered name, with its settings if they are not the defaults."""
    if isinstance(selector, str):
        return selector
    settings = _fields(selector)
    for name in selector_names():
        known = get_selector(name)
        if type(known) is type(selector):
            return name if settings == _fields(known) else {"name": name, "settings": settings}
    warnings.warn(
        f"selector {selector.name!r} has no registered name, so {NAME} names none: who loads the library gets the "
        "default, or passes selector=",
        stacklevel=6,
    )
    return None


def _corrector_json(corrector: str | Corrector | None) -> str | None:
    """A corrector's name, which says its settings too."""
    if corrector is None or isinstance(corrector, str):
        return corrector
    try:
        if get_corrector(corrector.name) == corrector:
            return corrector.name
    except ValueError:
        pass
    warnings.warn(
        f"corrector {corrector.name!r} has no registered name, so {NAME} names none: who loads the library passes "
        "corrector=",
        stacklevel=6,
    )
    return None


def _fields(selector: Any) -> dict[str, Any]:
    return asdict(selector) if is_dataclass(selector) and not isinstance(selector, type) else {}


def name_of(model: Any) -> str:
    """What a model is called: its id on the hub, or the last part of the path that it was loaded from."""
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name, re.ASCII) and not os.path.exists(name):
        return name
    return re.sub(r"[^\w. -]", "", re.split(r"[/\\]", name.rstrip("/\\"))[-1])
