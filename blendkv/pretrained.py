"""Saving a library, loading it and sharing it, by the names that transformers gives these."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from torch import nn

from blendkv import sharing
from blendkv.codecs import Codec
from blendkv.stores import Pool, Store, TieredStore

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

    from blendkv.library import ChunkLibrary


class PretrainedMixin:
    """What `ChunkLibrary` can do as models can."""

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        documents: Iterable[Any] | None = None,
        system: str | None = None,
        *,
        codec: str | Codec | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> CommitInfo | None:
        """Writes chunks into a folder that `from_pretrained` opens, and `ChunkLibrary(store=...)` too.

        Files come first and `library.json` last, so that what was not finished is not taken for a library. What lies
        in the folder already stays.

        Args:
            save_directory: made if it is not there, for this user only.
            documents: their chunks are saved, and computed where they are missing; None: every chunk of this model,
                tokenizer and namespace that the tiers have.
            system: as in `prefill`.
            codec: of the files; what is kept with another is coded again, lossy or not. None: as they are kept.
            push_to_hub: upload what was saved.
            **kwargs: of `push_to_hub`; `repo_id` is the folder's name unless it is given.

        Returns:
            What `push_to_hub` does, or None.

        Raises:
            StoreError: if the folder cannot be written, whole or in part.
        """
        if kwargs and not push_to_hub:
            raise TypeError(f"{', '.join(kwargs)}: only with push_to_hub=True")
        manifest = sharing.save(cast("ChunkLibrary", self), save_directory, documents, system, codec)
        folder = Path(save_directory).expanduser().resolve()
        repo_id = kwargs.pop("repo_id", folder.name)
        return sharing.push(folder, manifest, repo_id, **kwargs) if push_to_hub else None

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: bool | str | None = None,
        commit_message: str | None = None,
        repo_type: str = "dataset",
        documents: Iterable[Any] | None = None,
        system: str | None = None,
        codec: str | Codec | None = None,
        **kwargs: Any,
    ) -> CommitInfo:
        """Uploads chunks to a repository of the hub, which is made if it is not there.

        Keys and values tell as much as the text: think of `private=True`.

        Args:
            repo_id: of the repository.
            private: whether only its owners see a repository that is made; None: what the hub does by default.
            token: of the user; None: the one that `hf auth login` left.
            commit_message: of the commit.
            repo_type: "dataset" or "model".
            documents: whose chunks are uploaded; None: all (`save_pretrained`).
            system: as in `prefill`.
            codec: of the files (`save_pretrained`).
            **kwargs: `revision`, `commit_description`, `create_pr`, `delete_patterns`, as `upload_folder` takes them.

        Raises:
            OSError: if the hub cannot be reached, or refuses.
        """
        options = {"private": private, "token": token, "commit_message": commit_message, "repo_type": repo_type}
        saving = {"documents": documents, "system": system, "codec": codec}
        return sharing.save_and_push(cast("ChunkLibrary", self), repo_id, saving, **options, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        model: nn.Module,
        tokenizer: Any,
        *,
        store: str | os.PathLike[str] | Store | Pool | TieredStore = "memory://",
        repo_type: str = "dataset",
        revision: str | None = None,
        token: bool | str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        secret: bytes | None = None,
        ignore_mismatch: bool = False,
        **overrides: Any,
    ) -> Self:
        """A library whose chunks and settings somebody saved. They are read, never written; damaged ones are misses.

        Who wrote them decides what the model reads: take libraries from those whom you would take weights from.

        Args:
            name_or_path: a folder that `save_pretrained` wrote, or the id of a repository of the hub.
            model: that the chunks were computed with.
            tokenizer: that cut them.
            store: nearer than what was saved, and where new chunks go; as in the class. Of a `TieredStore` the tiers
                are used: use it no more by itself.
            repo_type: of the repository, "dataset" or "model".
            revision: of the repository: a branch, a tag or a commit.
            token: of the user; None: the one that `hf auth login` left.
            cache_dir: where the hub's files are kept.
            local_files_only: ask no hub for what is not there.
            secret: that the library was sealed with.
            ignore_mismatch: go on with another model, tokenizer or secret, and compute every chunk.
            **overrides: arguments of the class, in place of what was saved.

        Raises:
            StoreError: if there is no such library, or none that this version can read.
            ValueError: if model, tokenizer or secret are not those of the library; the message says which.
        """
        hub = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        hub["repo_type"] = repo_type
        return sharing.load(
            cast(Any, cls), name_or_path, model, tokenizer, store, secret, ignore_mismatch, hub, overrides
        )
