"""A profile: what a codec knows of one model's keys and values, calibrated once and named by every chunk file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from blendkv._paths import blendkv_home
from blendkv.codecs.base import LayerShape

VERSION = 1
PROFILES = "profiles"
"""The folder of profiles in blendkv's own, and in that of a saved library."""
_KEY = "blendkv_profile"
FAR_OUTSIDE = (
    "keys or values are far outside what the profile was made of: is it a profile of this model? codec='raw' stores "
    "anything"
)
"""What a codec says of numbers that it cannot code."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Statistics of one model for one codec; `blendkv profile` makes it.

    Attributes:
        codec: the codec that it is for.
        shapes: of the model's layers.
        tensors: the codec's own, by name.
        settings: the codec's own, JSON.
        about: for people, JSON: model, texts, what was predicted. Not part of the hash.
    """

    codec: str
    shapes: tuple[LayerShape, ...]
    tensors: Mapping[str, Tensor] = field(repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def hash(self) -> str:
        """32 hex digits: BLAKE2b of everything that decoding depends on."""
        digest = hashlib.blake2b(digest_size=16, person=b"blendkv profile ")
        parts = [self._json(about=False).encode()]
        for name in sorted(self.tensors):
            tensor = self.tensors[name].contiguous()
            data = tensor.flatten().view(torch.uint8).numpy().data
            parts += [f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), data]
        for part in parts:
            digest.update(
                len(part).to_bytes(8, "little") if isinstance(part, bytes) else part.nbytes.to_bytes(8, "little")
            )
            digest.update(part)
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def require_shapes(self, shapes: tuple[LayerShape, ...]) -> None:
        """Raises `ValueError` unless layers have the shapes of the model that was profiled."""
        if self.shapes != tuple(shapes):
            raise ValueError(
                f"profile {self.hash} is of a model with {len(self.shapes)} layers such as {self.shapes[0]}; the chunk "
                f"has {len(shapes)} such as {shapes[0]}: make a profile of this model with `blendkv profile`"
            )

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One of its tensors, as a codec needs it.

        Raises:
            ValueError: if it is missing, of another shape or dtype, or not finite.
        """
        tensor = self.tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            there = "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"profile {self.hash}: {name} is {there}, and must be {dtype} {shape}")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"profile {self.hash}: {name} holds NaN or Inf")
        return tensor

    def setting(self, name: str, allowed: range) -> int:
        """One of its settings.

        Raises:
            ValueError: if it is missing, or not one of the integers allowed.
        """
        value = self.settings.get(name)
        if not isinstance(value, int) or value not in allowed:
            raise ValueError(f"profile {self.hash}: {name} is {value}, and must be {allowed[0]} to {allowed[-1]}")
        return int(value)

    def save(self, path: str | Path | None = None) -> Path:
        """Writes a safetensors file; by default into the folder where `load_profile` looks for it by its hash."""
        path = profile_folder() / f"{self.hash}.safetensors" if path is None else Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        part.write_bytes(save(tensors, metadata={_KEY: self._json(about=True)}))  # save_file hides it from other users
        part.replace(path)
        return path

    def _json(self, about: bool) -> str:
        said = {
            "version": VERSION,
            "codec": self.codec,
            "shapes": [astuple(shape) for shape in self.shapes],
            "settings": dict(self.settings),
        }
        return json.dumps(said | ({"about": dict(self.about), "hash": self.hash} if about else {}), sort_keys=True)


def profile_folder() -> Path:
    """Where profiles lie by their hash; it may not exist yet."""
    return blendkv_home() / PROFILES


def read_profile(path: str | Path) -> Profile:
    """Reads a profile.

    Raises:
        ValueError: if the file is none.
        OSError: if it cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no profile at {path}: make one with `blendkv profile MODEL --data FILES`")
    try:
        with safe_open(path, "pt") as file:
            said = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a handle, not a mapping
        return _profile(said, tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a profile that can be read: {error}") from error


def _profile(said: Any, tensors: dict[str, Tensor]) -> Profile:
    if said["version"] != VERSION:
        raise ValueError(f"of version {said['version']}; this blendkv reads {VERSION}")
    codec, settings, about = said["codec"], said["settings"], said["about"]
    if not (isinstance(codec, str) and isinstance(settings, dict) and isinstance(about, dict)):
        raise TypeError("its codec, settings or about are of a wrong type")
    shapes = tuple(LayerShape(*shape) for shape in said["shapes"])
    sizes = [size for shape in shapes for size in astuple(shape)]
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(f"the shapes of its layers are {said['shapes']}")
    profile = Profile(codec, shapes, tensors, settings, about)
    if said.get("hash", profile.hash) != profile.hash:  # profiles of the first day have none
        raise ValueError("what is in it is not what was written: copy it again, or make the profile again")
    return profile


def load_profile(name: str | Path) -> Profile | None:
    """The profile in a file or, by its hash of 32 hex digits, in `profile_folder()`; None for an unknown hash.

    Raises:
        ValueError: if the file is no profile, or not the one its name says.
    """
    name = str(name)
    if len(name) != 32 or set(name) - set("0123456789abcdef"):
        return read_profile(name)
    path = profile_folder() / f"{name}.safetensors"
    if not path.is_file():
        return None
    profile = read_profile(path)
    if profile.hash != name:
        raise ValueError(f"{path} holds profile {profile.hash}: delete it, and make the profile again")
    return profile


def profile_in(folder: str | Path, wanted: str) -> Profile | None:
    """The profile of a hash in a folder of profiles; None if it is not there, or damaged."""
    try:
        profile = read_profile(Path(folder) / f"{wanted}.safetensors")
    except (OSError, ValueError):
        return None
    return profile if profile.hash == wanted else None


def profiles_near(folder: str | Path) -> Callable[[str], Profile | None]:
    """Profiles that lie in a folder, as `save_pretrained` puts them, or in `profile_folder()`; each is read once."""
    found: dict[str, Profile] = {}

    def look(wanted: str) -> Profile | None:
        if wanted not in found and (profile := profile_in(Path(folder) / PROFILES, wanted) or load_profile(wanted)):
            found[wanted] = profile
        return found.get(wanted)

    return look


def profile_for(codec: str, given: Profile | str | Path | None) -> Profile:
    """The profile that a codec was given: itself, its file or its hash.

    Raises:
        ValueError: if there is none, or if it is another codec's.
    """
    profile = load_profile(given) if isinstance(given, str | Path) else given
    if profile is not None and not isinstance(profile, Profile):
        raise ValueError(f"profile= takes a profile, its file or its hash; got a {type(profile).__name__}")
    if profile is None:
        lacks = f"finds no profile {given} in {profile_folder()}" if given else "needs a profile of the model"
        raise ValueError(
            f"{codec} {lacks}: `blendkv profile MODEL --data FILES --codec {codec}` makes one; pass its file or its "
            "hash as profile="
        )
    if profile.codec != codec:
        raise ValueError(f"profile {profile.hash} is for codec {profile.codec!r}, not {codec!r}")
    return profile
