"""A library as a folder that another process, machine or person opens: written, read, and put under other tiers."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from blendkv.attaching import attach, attachment_of
from blendkv.chunk import tokenizer_fingerprint
from blendkv.codecs import Codec, Profile, Profiles, codec_class, dtype_name, get_codec, load_profile
from blendkv.codecs.profile import PROFILES, profile_in
from blendkv.container import ContainerReader
from blendkv.errors import ChunkFileError, StoreError
from blendkv.gathering import Entry, Gatherer, find_profile
from blendkv.hub import located, push
from blendkv.layout import texts_of
from blendkv.manifest import NAME, Manifest, name_of, settings_json, settings_of
from blendkv.stores import DiskStore, Pool, SavedStore, TieredStore, open_chunks
from blendkv.stores.urls import shown

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

    from blendkv.library import ChunkLibrary

Library = TypeVar("Library", bound="ChunkLibrary")
_NO_CAP = 1 << 62
_DOCUMENTS_AT_ONCE = 16


def save(
    library: ChunkLibrary,
    folder: str | os.PathLike[str],
    documents: Iterable[Any] | None = None,
    system: str | None = None,
    codec: str | Codec | None = None,
) -> Manifest:
    """Writes chunks of a library, their profiles, and then `library.json` (`ChunkLibrary.save_pretrained`)."""
    if "://" in os.fspath(folder):
        raise StoreError(
            f"{shown(os.fspath(folder))}: give the path of a folder; push_to_hub takes the id of a repository"
        )
    gatherer = _gatherer(library, None if codec is None else get_codec(codec))
    texts = None if documents is None else list(texts_of(documents))
    target = DiskStore(folder, capacity_bytes=_NO_CAP)
    root, chunks = Path(os.path.expanduser(folder)), {}
    codecs: Counter[tuple[Any, ...]] = Counter()
    library.flush()  # what memory alone has
    entries = gatherer.all() if texts is None else _of_documents(library, gatherer, texts, system)
    try:
        for entry in entries:
            _write(target, root, entry)
            header = entry.header
            codecs[header.codec, header.level, header.profile_hash, header.arrangement.streams] += 1
            chunks[entry.key] = {"tokens": header.tokens, "bytes": len(entry.data)}
        manifest = _manifest(library, gatherer, codecs, chunks)
        manifest.write(root)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{root} cannot be written ({error}): make room, or choose another folder") from error
    if gatherer.refused or gatherer.left_out:
        _tell(root, gatherer)
    return manifest


def save_and_push(library: ChunkLibrary, repo_id: str, saving: dict[str, Any], **options: Any) -> CommitInfo:
    """Saves into a folder that is gone afterwards, and uploads it (`ChunkLibrary.push_to_hub`)."""
    with TemporaryDirectory(prefix="blendkv-save-") as folder:
        return push(Path(folder), save(library, folder, **saving), repo_id, **options)


def load(
    cls: Callable[..., Library],
    name_or_path: str | os.PathLike[str],
    model: Any,
    tokenizer: Any,
    store: Any,
    secret: bytes | None,
    ignore_mismatch: bool,
    hub: dict[str, Any],
    overrides: dict[str, Any],
) -> Library:
    """A library of a folder or a repository, under other tiers (`ChunkLibrary.from_pretrained`)."""
    called = str(name_or_path)
    manifest = Manifest.read(located(name_or_path, wanted=[NAME], **hub), called)
    sealed = secret is not None or getattr(store, "secret", None) is not None
    differs = _differences(manifest, model, tokenizer, sealed)
    if differs and not ignore_mismatch:
        raise ValueError(
            f"{called} does not fit: {'; '.join(differs)}. No chunk could be used: pass what it was made with, or "
            "ignore_mismatch=True to go on and compute all of them"
        )
    folder = located(name_or_path, **hub)  # only now all of it, which may be large
    saved = SavedStore(folder)
    if sealed and not ignore_mismatch:
        _require_secret(called, saved, manifest, getattr(store, "secret", None) if secret is None else secret)
    options = settings_of(manifest, overrides)
    coding = {name: options.pop(name, None) for name in ("capacity_bytes", "codec")}
    tiers = _over(saved, store, secret, _profiles(folder), manifest, **coding)
    return cls(model, tokenizer, store=tiers, **options)


# -- writing ----------------------------------------------------------------------------------------------------------


def _gatherer(library: ChunkLibrary, wanted: Codec | None) -> Gatherer:
    facts = attachment_of(library.model).facts
    if not hasattr(library.pool, "keys"):
        raise ValueError(f"store={library.pool!r} has no keys(): give the library a Pool, a Store or a TieredStore")
    return Gatherer(
        library.pool,
        facts.fingerprint,
        dtype_name(facts.dtype),
        library.tokenizer_digest,
        library.namespace,
        library.secret,
        wanted,
    )


def _of_documents(library: ChunkLibrary, gatherer: Gatherer, texts: list[str], system: str | None) -> Iterator[Entry]:
    """The chunks of documents, each once; a few documents at a time, for chunks are large."""
    done: set[str] = set()
    for start in range(0, len(texts), _DOCUMENTS_AT_ONCE):
        some = texts[start : start + _DOCUMENTS_AT_ONCE]
        for key in dict.fromkeys(library.keys(some, system)):
            if key not in done and (entry := gatherer.find(key)) is not None:
                done.add(key)
                yield entry
        lacking = [text for text in some if not done.issuperset(library.keys([text], system))]
        made = library.prefill(lacking, system) if lacking else []
        for chunk in made:
            if chunk.key not in done:
                done.add(chunk.key)
                if (entry := gatherer.find(chunk.key) or gatherer.encode(chunk)) is not None:
                    yield entry


def _write(target: DiskStore, root: Path, entry: Entry) -> None:
    """The profile of a file, if it has one, then the file."""
    if entry.profile is not None:
        path = root / PROFILES / f"{entry.profile.hash}.safetensors"
        if profile_in(path.parent, entry.profile.hash) is None:
            entry.profile.save(path)
    if not target.put(entry.key, entry.data):
        why = ", ".join(target.stats.faults)
        advice = "delete its folder 'bad'" if why == "quarantined" else "make room, or choose another folder"
        raise StoreError(f"{root}: a chunk could not be written ({why}): {advice}, and save again")


def _manifest(
    library: ChunkLibrary, gatherer: Gatherer, codecs: Counter[tuple[Any, ...]], chunks: dict[str, Any]
) -> Manifest:
    layout = library.layout
    used = [
        {"name": name, "level": level, "profile": profile or None} | ({"streams": streams} if streams > 1 else {})
        for (name, level, profile, streams), _ in codecs.most_common()
    ]
    return Manifest(
        settings_json(library.options, library.condition, layout.chunk_tokens, layout.separator, library.namespace),
        name_of(library.model),
        gatherer.fingerprint,
        gatherer.dtype,
        gatherer.tokenizer,
        gatherer.secret is not None,
        tuple(used),
        chunks,
    )


def _tell(root: Path, gatherer: Gatherer) -> None:
    said = [f"{count} chunks were left out ({why})" for why, count in gatherer.left_out.items()]
    if gatherer.refused:
        said.append(f"the codec refused {gatherer.refused} chunks, which are raw")
    warnings.warn(f"saved to {root}, but {'; '.join(said)}", stacklevel=4)


# -- reading ----------------------------------------------------------------------------------------------------------


def _differences(manifest: Manifest, model: Any, tokenizer: Any, sealed: bool) -> list[str]:
    """What of a saved library does not fit, in words."""
    attach(model)
    facts, said = attachment_of(model).facts, []
    if (dtype := dtype_name(facts.dtype)) != manifest.dtype:
        said.append(f"it was made in {manifest.dtype}, and this model is in {dtype}")
    elif facts.fingerprint != manifest.fingerprint:
        said.append(
            f"it was made with the model {manifest.name_or_path!r} of fingerprint {manifest.fingerprint}, and this one "
            f"({name_of(model)!r}) has {facts.fingerprint}: other weights, another config or an adapter"
        )
    if (digest := tokenizer_fingerprint(tokenizer)) != manifest.tokenizer:
        said.append(f"it was made with the tokenizer of digest {manifest.tokenizer}, and this one has {digest}")
    if manifest.sealed != sealed:
        said.append(
            "it is sealed, and no secret was given" if manifest.sealed else "a secret was given, and it is not sealed"
        )
    return said


def _require_secret(called: str, saved: SavedStore, manifest: Manifest, secret: bytes | None) -> None:
    """Refuses a secret that is not the one; a file that is damaged says nothing of it."""
    for data in filter(None, map(saved.get, manifest.chunks)):
        try:
            ContainerReader(data, secret=secret).close()
        except ChunkFileError as error:
            if error.reason == "authentication":
                raise ValueError(
                    f"{called} was sealed with another secret: give that one, or ignore_mismatch=True to go on and "
                    "compute all chunks"
                ) from error
            continue
        return


def _profiles(folder: Path) -> Callable[[str], Profile | None]:
    """Profiles that were saved along, each read once."""
    return cache(lambda wanted: profile_in(folder / PROFILES, wanted))


def _over(
    saved: SavedStore,
    store: Any,
    secret: bytes | None,
    own: Callable[[str], Profile | None],
    manifest: Manifest,
    capacity_bytes: int | None,
    codec: str | Codec | None,
) -> TieredStore:
    """What a library keeps chunks in, with what was saved below."""
    kept = None if isinstance(store, (Pool, TieredStore)) or codec is not None else _codec(manifest, own)
    near = open_chunks(store, capacity_bytes, codec if store == "memory://" else codec or kept, secret)
    given: Profiles | None = getattr(near, "profiles", None)
    profiles = cache(lambda wanted: find_profile(wanted, [own, given, load_profile]))
    if isinstance(near, TieredStore):
        return near.over(saved, profiles=profiles)
    if not isinstance(near, Pool):
        raise ValueError(f"store={store!r} cannot be put over a saved library: give a URL, Store, Pool or TieredStore")
    return TieredStore(near, saved, codec=kept, secret=secret, profiles=profiles)


def _codec(manifest: Manifest, profiles: Callable[[str], Profile | None]) -> Codec | None:
    """The codec of most of the files, if it can be had here."""
    said = dict(manifest.codecs[0]) if manifest.codecs else {"name": "raw"}
    if said.get("name") == "raw":
        return None
    try:
        wanted = str(said["profile"])
        profile = (
            find_profile(wanted, [profiles, load_profile]) if codec_class(str(said["name"])).needs_profile else None
        )
        streams = {"streams": said["streams"]} if "streams" in said else {}
        return get_codec(str(said["name"]), level=said["level"], profile=profile, **streams)
    except (KeyError, TypeError, ValueError) as error:
        warnings.warn(f"chunks coded with {said.get('name')!r} cannot be read here: {error}", stacklevel=5)
        return None
