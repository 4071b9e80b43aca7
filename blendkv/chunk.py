"""A chunk: a reusable piece of text with the keys and values that one model computed for it."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from blendkv.kernels.table import ALIGN, address

if TYPE_CHECKING:
    from blendkv.levelkeys import LevelId

KEY_VERSION = 1


@dataclass(frozen=True, eq=False)
class ChunkCache:
    """Keys and values of one chunk, computed alone. Never changed after it is made.

    Attributes:
        ids: `[T]` token ids, int64, on the CPU.
        keys: for each layer `[H, T, D]`, **un-rotated** (before RoPE, after any QK-norm), in the model's dtype.
        values: for each layer `[H, T, D]`.
        fingerprint: of the model that computed them (`model_fingerprint`).
        conditioning: ids of the tokens that stood before the chunk when it was computed (a BOS, a system prefix),
            whose own keys and values are not kept.
        tokenizer: digest of the tokenizer that made the ids, or "" if they came from elsewhere.
        namespace: set by the operator of a shared store; part of the key.
        text: the text behind the ids, if known.
        keyed: the key, where a tenant's secret went into it.
        scores: by name `[T]` one number a token, on the CPU, that selectors rank by (`stored-NAME`); in the
            chunk's file, but no part of its key.
        coded: the level of the file that it was read from; None: as it was computed. No part of its key either.
    """

    ids: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    fingerprint: str
    conditioning: tuple[int, ...] = ()
    tokenizer: str = ""
    namespace: str = ""
    text: str | None = field(default=None, repr=False)
    keyed: str = field(default="", repr=False)
    scores: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    coded: LevelId | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Checks that every layer agrees with the ids on the number of tokens."""
        tokens = self.ids.shape[0] if self.ids.ndim == 1 else 0
        if not tokens:
            raise ValueError(f"a chunk needs at least one token; ids have shape {tuple(self.ids.shape)}")
        if len(self.keys) != len(self.values) or not self.keys:
            raise ValueError(f"{len(self.keys)} layers of keys, {len(self.values)} of values: one each per layer")
        for name, scores in self.scores.items():
            if scores.shape != (tokens,):
                raise ValueError(
                    f"scores {name!r} of shape {tuple(scores.shape)}: one number for each of {tokens} tokens"
                )
        for layer, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            a, b = k.shape, v.shape
            if len(a) != 3 or len(b) != 3 or a[:2] != b[:2] or a[1] != tokens:
                raise ValueError(
                    f"layer {layer}: keys {tuple(a)} and values {tuple(b)} are not [heads, {tokens} tokens, head dim]"
                )

    @classmethod
    def unchecked(
        cls, states: Callable[[], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]], **fields: Any
    ) -> ChunkCache:
        """A chunk whose fields are known to agree; `addresses` and `homes` may be among them.

        A GPU decodes a chunk in less time than it takes to make a tensor for every layer, and kernels need none.

        Args:
            states: makes keys and values, when somebody asks for them.
            **fields: all others.
        """
        chunk = cls.__new__(cls)
        chunk.__dict__.update({"scores": {}} | fields, _states=states)
        return chunk

    def __getattr__(self, name: str) -> Any:
        if name in ("keys", "values") and "_states" in self.__dict__:
            self.__dict__["keys"], self.__dict__["values"] = self.__dict__["_states"]()
            return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: a copy has its tensors elsewhere, so `addresses` and `homes` are not those of the copy.

        Layers that share memory, as a GPU decodes them, are cut out: pickle would write all of it for each of them.
        """
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        cut = {name: tuple(map(_cut_out, state[name])) for name in ("keys", "values")}
        return state | cut

    @cached_property
    def key(self) -> str:
        """Content address of this chunk (see `chunk_key`)."""
        return self.keyed or chunk_key(self.ids, self.fingerprint, self.conditioning, self.tokenizer, self.namespace)

    @cached_property
    def addresses(self) -> np.ndarray:
        """Where each layer is: `[L, 2, 2]` int64, for keys and for values the address and the bytes of a token.

        Raises:
            ValueError: for a layer that kernels cannot address (not contiguous, not aligned).
        """
        layers = zip(self.keys, self.values, strict=True)
        return np.array([[(address(t), t.shape[2] * t.element_size()) for t in layer] for layer in layers], np.int64)

    @cached_property
    def homes(self) -> tuple[torch.device | None, ...]:
        """The device of each layer's keys and values; None if they are pinned in host memory, as any GPU can read."""
        return tuple(
            None if k.is_pinned() and v.is_pinned() else k.device for k, v in zip(self.keys, self.values, strict=True)
        )

    @cached_property
    def piece(self) -> Tensor | None:
        """Bytes that hold all layers in order, keys before values, as `pin_memory` lays them; None if nothing does."""
        memory, first = self.keys[0].untyped_storage(), self.addresses[0, 0, 0]
        starts = self.addresses[..., 0].ravel()
        same = {t.untyped_storage().data_ptr() for t in (*self.keys, *self.values)} == {memory.data_ptr()}
        if not same or first != memory.data_ptr() or (np.diff(starts) <= 0).any():
            return None
        return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)

    @cached_property
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """For each layer (KV heads, key dim, value dim)."""
        return tuple((k.shape[0], k.shape[2], v.shape[2]) for k, v in zip(self.keys, self.values, strict=True))

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Element types of keys and values."""
        return frozenset(t.dtype for t in (*self.keys, *self.values))

    def lacks(self, layer: int, reads: np.ndarray | None = None) -> str | None:
        """Why keys and values of a layer will not come; None once they are there. All are, unless they are loaded.

        Args:
            layer: of the model.
            reads: `[T]` True for tokens that are wanted; None: all.
        """
        return None

    @property
    def has_gaps(self) -> bool:
        """Whether some tokens are loaded only if somebody wants them (`lacks`)."""
        return False

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, as far as they are there: NaN for tokens that nobody wanted (`lacks`)."""
        return self.keys[layer], self.values[layer]

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the keys."""
        return self.keys[0].dtype

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    def __repr__(self) -> str:
        """A line for people: no tensors."""
        shape = "x".join(map(str, self.keys[0].shape))
        return (
            f"ChunkCache({len(self)} tokens, {len(self.keys)} layers of {shape}, {self.dtype}, key={self.key[:12]}...)"
        )

    def to(self, device: torch.device | str) -> ChunkCache:
        """This chunk with every layer on one device (itself if it is there already)."""
        if all(t.device == torch.device(device) for t in (*self.keys, *self.values)):
            return self
        keys, values = (tuple(t.to(device) for t in states) for states in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def pin_memory(self) -> ChunkCache:
        """This chunk in page-locked host memory, which a GPU reads directly and fast: all layers in one piece.

        The piece begins with keys and values of the first layer. Its size is a power of two, as torch pins memory.
        """
        states = [t for pair in zip(self.keys, self.values, strict=True) for t in pair]
        starts = list(accumulate((-(-t.nbytes // ALIGN) * ALIGN for t in states), initial=0))
        memory = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        pinned = [
            memory[start : start + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
            for start, t in zip(starts, states, strict=False)
        ]
        return replace(self, keys=tuple(pinned[::2]), values=tuple(pinned[1::2]))


def _cut_out(tensor: Tensor) -> Tensor:
    """A tensor that holds no memory but its own."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@dataclass(frozen=True)
class MissingChunk:
    """A chunk of the prompt whose keys and values are not to be had; its tokens are computed and counted as missed.

    Attributes:
        ids: `[T]` token ids.
        reason: why ("absent", "fingerprint", "tokenizer", "dtype", ...).
    """

    ids: Tensor = field(repr=False)
    reason: str = "absent"

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)


def framed(fields: Iterable[bytes]) -> bytes:
    """Joins fields so that no two lists of fields give the same bytes: each is preceded by its length."""
    return b"".join(struct.pack("<Q", len(f)) + f for f in fields)


def ids_bytes(ids: Tensor | np.ndarray | Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, whatever integer type or device they came in.

    Raises:
        ValueError: if an id does not fit.
    """
    array = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids)
    if array.size and (array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= 2**32):
        raise ValueError("token ids must be integers in [0, 2**32)")
    return array.astype("<u4").tobytes()


def chunk_key(
    ids: Tensor | np.ndarray | Sequence[int],
    fingerprint: str,
    conditioning: Sequence[int] = (),
    tokenizer: str = "",
    namespace: str = "",
    secret: bytes | None = None,
) -> str:
    """Content address of a chunk: 64 hex digits of SHA-256, or of keyed BLAKE2b with a tenant's `secret`.

    Args:
        ids: token ids of the chunk.
        fingerprint: of the model.
        conditioning: ids that stood before the chunk when it was computed.
        tokenizer: digest of the tokenizer.
        namespace: set by the operator of a shared store.
        secret: at most 64 bytes; without it nobody else can compute the key.
    """
    payload = framed(
        [
            struct.pack("<I", KEY_VERSION),
            namespace.encode(),
            fingerprint.encode(),
            tokenizer.encode(),
            ids_bytes(conditioning),
            ids_bytes(ids),
        ]
    )
    if secret is not None:
        return hashlib.blake2b(payload, key=secret, digest_size=32).hexdigest()
    return hashlib.sha256(payload).hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Digest of a tokenizer: its class, vocabulary, special tokens and how it cuts a probe text."""
    probe = "Hello wörld\n\n  2+2=4 \t🙂 漢字 don't"
    parts = [
        type(tokenizer).__name__,
        json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        json.dumps(tokenizer(probe, add_special_tokens=False)["input_ids"]),
    ]
    return hashlib.sha256(framed(p.encode() for p in parts)).hexdigest()[:32]
