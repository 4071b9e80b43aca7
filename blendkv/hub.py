"""A saved library to the Hugging Face hub, and back."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from blendkv._version import __version__
from blendkv.codecs.profile import PROFILES
from blendkv.errors import StoreError
from blendkv.manifest import NAME, Manifest
from blendkv.stores.keys import place_of

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

_CARD = """---
library_name: blendkv
tags:
- blendkv
- kv-cache
{base_model}---

# Keys and values for blendkv

Chunks of text with the keys and values that {model} computed for them, so that prompts made of them need not compute
them again. With this very model and tokenizer:

```python
from blendkv import ChunkLibrary

kv = ChunkLibrary.from_pretrained("{repo_id}", model, tokenizer{arguments})
model.generate(**kv(documents, question), max_new_tokens=32)
```

Other documents are computed. `{manifest}` says which model, tokenizer and settings the chunks are of.

**Keys and values tell as much as the text they are of.** {sealed}
"""
_OPEN = "Who can read this repository can read the text."
_SEALED = (
    "The files are sealed with a secret, without which the library cannot be loaded; they are not encrypted, so who "
    "can read this repository can read the text."
)


def located(name_or_path: str | os.PathLike[str], wanted: list[str] | None = None, **options: Any) -> Path:
    """The folder of a library: the folder itself, or a snapshot of a repository of the hub.

    Args:
        name_or_path: a folder, or the id of a repository.
        wanted: patterns of the files that are needed; None: those of a library.
        **options: of `huggingface_hub.snapshot_download`.

    Raises:
        StoreError: if there is neither.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    patterns = [NAME, "*.bkv", f"{PROFILES}/*.safetensors"] if wanted is None else wanted
    try:
        options |= {"allow_patterns": patterns, "library_name": "blendkv", "library_version": __version__}
        return Path(snapshot_download(str(name_or_path), **options))
    except Exception as error:  # of the hub's own, of HTTP and of the network: by version
        kind = options.get("repo_type") or "model"
        what = " ".join(str(error).split())[:300]
        raise StoreError(
            f"{str(name_or_path)!r} is no folder, and no {kind} repository of the hub that can be had "
            f"({type(error).__name__}: {what}): look at the name, and for a repository at repo_type=, revision=, "
            "token=, the network and HF_HUB_OFFLINE"
        ) from error


def push(
    folder: Path,
    manifest: Manifest,
    repo_id: str,
    *,
    private: bool | None = None,
    token: bool | str | None = None,
    repo_type: str = "dataset",
    revision: str | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    create_pr: bool = False,
    delete_patterns: list[str] | str | None = None,
) -> CommitInfo:
    """Uploads the files of a saved library, and nothing else that lies in its folder.

    Arguments are those of `ChunkLibrary.push_to_hub`. A README.md that is in the repository stays.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token, library_name="blendkv", library_version=__version__)
    repo_id = api.create_repo(repo_id, private=private, repo_type=repo_type, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, repo_type=repo_type, exist_ok=True)
    with TemporaryDirectory(prefix="blendkv-push-") as stage:
        for name in _files(folder, manifest):
            link = Path(stage, name)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to((folder / name).resolve())
        if not api.file_exists(repo_id, "README.md", repo_type=repo_type, revision=revision):
            Path(stage, "README.md").write_text(card(manifest, repo_id, repo_type), encoding="utf-8")
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=stage,
            repo_type=repo_type,
            revision=revision,
            commit_message=commit_message or "Upload chunk library",
            commit_description=commit_description,
            create_pr=create_pr,
            delete_patterns=delete_patterns,
        )


def card(manifest: Manifest, repo_id: str, repo_type: str) -> str:
    """The README.md of a repository."""
    model, arguments = manifest.name_or_path, ""
    on_hub = "/" in model
    if repo_type != "dataset":
        arguments += f', repo_type="{repo_type}"'
    if manifest.sealed:
        arguments += ", secret=secret"
    return _CARD.format(
        base_model=f"base_model: {model}\n" if on_hub else "",
        model=f"[{model}](https://huggingface.co/{model})" if on_hub else f"the model `{model or 'without a name'}`",
        repo_id=repo_id,
        arguments=arguments,
        manifest=NAME,
        sealed=_SEALED if manifest.sealed else _OPEN,
    )


def _files(folder: Path, manifest: Manifest) -> list[str]:
    hashes = {str(codec["profile"]) for codec in manifest.codecs if codec.get("profile")}
    profiles = [f"{PROFILES}/{wanted}.safetensors" for wanted in sorted(hashes)]
    return [*profiles, *("/".join(place_of(key)) for key in manifest.chunks), NAME]
