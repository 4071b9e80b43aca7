"""Codecs: keys and values as few bytes. One family a file, registered by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

from blendkv.codecs.base import DTYPES, Arrangement, Codec, LayerShape, apart, dtype_name
from blendkv.codecs.profile import Profile, load_profile
from blendkv.container import Header
from blendkv.errors import ChunkFileError
from blendkv.plugins import plugins

__all__ = [
    "DTYPES",
    "Arrangement",
    "Codec",
    "LayerShape",
    "Profile",
    "Profiles",
    "apart",
    "codec_class",
    "codec_names",
    "codec_of",
    "dtype_name",
    "get_codec",
    "load_profile",
]

GROUP = "blendkv.codecs"
"""Entry point group in which other packages register codecs."""
_CODECS = {  # imported when they are first used
    "raw": "blendkv.codecs.raw:Raw",
    "cachegen": "blendkv.codecs.cachegen:CacheGen",
    "klt": "blendkv.codecs.klt:KLT",
    "klt-xl": "blendkv.codecs.klt:KLTXL",
}

Profiles = Profile | Mapping[str, Any] | Callable[[str], Any]
"""One profile, or profiles by their hash: a mapping, or a function that gives None for one it does not have."""


@cache
def _entries() -> dict[str, EntryPoint]:
    own = {name: EntryPoint(name, value, GROUP) for name, value in _CODECS.items()}
    return {**plugins(GROUP), **own}


def codec_names() -> list[str]:
    """Names that `get_codec` knows, those of installed plug-ins (entry point group `blendkv.codecs`) included."""
    return sorted(_entries())


@cache
def _load(name: str) -> type[Codec]:
    return _entries()[name].load()


def codec_class(name: str) -> type[Codec]:
    """The class of that name.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in _entries():
        raise ValueError(f"unknown codec {name!r}; choose one of {', '.join(codec_names())} or pass a Codec")
    return _load(name)


def get_codec(codec: str | Codec, **settings: Any) -> Codec:
    """The codec of that name, or the codec itself.

    Args:
        codec: a name, or a codec, which is returned as it is and takes no settings.
        settings: `level`, `profile` (a `Profile`, its file or its hash) and what else the class takes, where its
            defaults will not do.

    Raises:
        ValueError: for an unknown name, something else that is not a codec, or settings that it cannot have.
        TypeError: for settings that its class does not take.
    """
    if isinstance(codec, str):
        return codec_class(codec)(**settings)
    if not isinstance(codec, Codec):
        raise ValueError(f"{codec!r} is not a codec: pass get_codec(NAME, ...) or a name")
    if settings:
        raise ValueError(f"codec {codec.name!r} is made already, and takes no {', '.join(settings)}: pass its name")
    return codec


def codec_of(header: Header, profiles: Profiles | None = None, codec: Codec | None = None) -> Codec:
    """The codec that decodes a file.

    Args:
        header: of the file.
        profiles: the profile, or where it is, if the codec needs one; None: where `blendkv profile` puts it.
        codec: the codec that wrote the file, if it is at hand; None makes the one that the head names.

    Raises:
        ChunkFileError: with reason "codec" for an unknown codec or level, "profile" for a missing or foreign profile,
            "geometry" for a file that this codec would have cut in another way.
    """
    codec = _made(header, profiles) if codec is None else codec
    if (codec.name, codec.level) != (header.codec, header.level):
        raise ChunkFileError(
            f"the chunk file needs codec {header.codec!r} of level {header.level}; given was {codec.name!r} of level "
            f"{codec.level}",
            reason="codec",
        )
    if codec.profile_hash != header.profile_hash:
        raise ChunkFileError(
            f"the chunk file was coded with profile {header.profile_hash!r}, not with {codec.profile_hash!r}",
            reason="profile",
        )
    try:
        arrangement = codec.arrangement(header.layers, header.tokens)
    except ValueError as error:
        raise ChunkFileError(f"codec {header.codec!r} cannot hold such layers: {error}", reason="geometry") from error
    if arrangement != header.arrangement:
        raise ChunkFileError(
            f"the chunk file is cut as {header.arrangement}, codec {header.codec!r} cuts as {arrangement}; delete it",
            reason="geometry",
        )
    return codec


def _made(header: Header, profiles: Profiles | None) -> Codec:
    if header.codec not in _entries():
        raise ChunkFileError(
            f"the chunk file needs codec {header.codec!r}; installed are {', '.join(codec_names())}", reason="codec"
        )
    kind = codec_class(header.codec)
    profile = _profile(header, profiles) if kind.needs_profile else None
    try:
        return kind(level=header.level, profile=profile, **_streams(kind, header))
    except ValueError as error:
        raise ChunkFileError(
            f"codec {header.codec!r} refuses the settings of the file: {error}", reason="codec"
        ) from error


def _streams(kind: type[Codec], header: Header) -> dict[str, int]:
    """What tells a class that can code in one stream or in several how many the file has."""
    return {"streams": header.arrangement.streams} if hasattr(kind, "max_streams") else {}


def _profile(header: Header, profiles: Profiles | None) -> Any:
    wanted, profiles = header.profile_hash, load_profile if profiles is None else profiles
    profile = None
    if wanted:
        try:
            if isinstance(profiles, Profile):
                profile = profiles
            else:
                profile = profiles.get(wanted) if isinstance(profiles, Mapping) else profiles(wanted)
        except ValueError as error:
            raise ChunkFileError(f"the chunk file needs profile {wanted}: {error}", reason="profile") from error
    if isinstance(profile, Profile) and (profile.hash, profile.codec) != (wanted, header.codec):
        raise ChunkFileError(
            f"the chunk file needs profile {wanted} of codec {header.codec!r}; given was {profile.hash} of "
            f"{profile.codec!r}",
            reason="profile",
        )
    if profile is None:
        raise ChunkFileError(
            f"the chunk file needs profile {wanted or '(it names none)'}: pass it in profiles=, or compute the chunk "
            "again",
            reason="profile",
        )
    return profile
